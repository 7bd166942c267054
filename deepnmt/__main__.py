"""`python -m deepnmt COMMAND`, and `python .../deepnmt/__main__.py COMMAND`.

The second form always runs this copy of deepnmt; `-m` would look for one in the current folder first.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of the package's own folder

from deepnmt.cli import entry

if __name__ == "__main__":  # not where another process, which prepares data, imports its parent's program
    entry()
