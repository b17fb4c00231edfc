"""``python -m numbaflash.bench``: what ``bench.py`` runs, from an installed package."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
