"""One command line for every measurement of numbaflash: ``python bench.py --help``.

What it runs is in the package ``numbaflash.bench``, a file for each subcommand.
"""

import sys

from numbaflash.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
