"""``python -m fa3verify``."""

from fa3verify.cli.main import main

if __name__ == "__main__":
    main()
