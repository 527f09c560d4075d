"""`python -m corefed` is `corefed`."""

from corefed.commands.cli import main

if __name__ == "__main__":
    main()
