"""``python -m hwrl``: the command ``hwrl``, also where the environment's scripts are not on the PATH."""

import sys

from hwrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
