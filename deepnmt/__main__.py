"""`python -m deepnmt COMMAND`."""

from deepnmt.cli import entry

entry()
