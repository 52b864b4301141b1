"""`python -m ultrascale`: the same command line."""

from ultrascale.cli import main

if __name__ == "__main__":
    main()
