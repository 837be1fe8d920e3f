"""``python -m covpool`` is ``covpool``."""

import sys

from covpool.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
