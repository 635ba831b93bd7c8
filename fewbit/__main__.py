"""`python -m fewbit`: the command line."""

from fewbit.cli import main

if __name__ == "__main__":
    main()
