"""``python -m covpool`` is ``covpool``."""

import sys

from covpool.cli.main import main

sys.exit(main())
