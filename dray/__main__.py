"""`python -m dray` is `drayd`."""

import sys

from dray.cli import main

if __name__ == "__main__":
    sys.exit(main())
