"""`python -m corefed` is `corefed`."""

from corefed.cli import main

if __name__ == "__main__":
    main()
