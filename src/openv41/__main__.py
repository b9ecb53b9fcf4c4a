"""python -m openv41"""

import sys

from openv41.cli import main

if __name__ == "__main__":
    sys.exit(main())
