"""``python -m allfold.cli``."""

from allfold.cli import main

if __name__ == "__main__":
    main()
