"""`python -m jaxprtool`: the command line."""

import sys

from jaxprtool.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
