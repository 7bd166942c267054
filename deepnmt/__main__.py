"""The console script `deepnmt`, `python -m deepnmt COMMAND` and `python .../deepnmt/__main__.py COMMAND`.

The last form always runs this copy of deepnmt; `-m` would look for one in the current folder first.
"""

import signal
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of the package's own folder


def entry() -> None:
    """Runs the command that the arguments name. Ctrl-C while the commands are imported ends it without a traceback."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deepnmt import cli

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.entry()


if __name__ == "__main__":  # not where another process, which prepares data, imports its parent's program
    entry()
