"""`deepnmt translate`, for the `deepspeed` launcher and for a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepnmt.cli import entry

if __name__ == "__main__":
    entry("translate")
