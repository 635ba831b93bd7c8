"""The command line, for `python -m fewbit`."""

from fewbit.cli import main

if __name__ == "__main__":
    main()
