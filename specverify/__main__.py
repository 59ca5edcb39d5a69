"""`python -m specverify`."""

from __future__ import annotations

import sys

from specverify.cli import main

if __name__ == "__main__":
    sys.exit(main())
