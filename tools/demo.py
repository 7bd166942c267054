"""`deepnmt demo`: the whole path, from a corpus made here to a score."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepnmt.cli import entry

if __name__ == "__main__":
    entry("demo")
