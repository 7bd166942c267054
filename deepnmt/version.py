"""The version of deepnmt, and the folder that it runs from."""

from pathlib import Path

__version__ = "0.2.0"
PACKAGE = Path(__file__).parent
