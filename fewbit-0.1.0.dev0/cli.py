"""The command line from a checkout: ``python cli.py solve gelu --bits 3``."""

from fewbit.cli import main

if __name__ == "__main__":
    main()
