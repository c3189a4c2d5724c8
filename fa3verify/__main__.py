"""``python -m fa3verify``."""

from fa3verify.cli import main

if __name__ == "__main__":
    main()
