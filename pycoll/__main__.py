"""`python -m pycoll` is the `pycoll` command."""

import sys

from pycoll.cli import main

if __name__ == "__main__":
    sys.exit(main())
