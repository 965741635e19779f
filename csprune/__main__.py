"""`python -m csprune` is the command line."""

from csprune.cli import main

if __name__ == "__main__":
    main()
