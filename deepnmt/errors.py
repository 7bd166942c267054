"""The one exception that means "the user can put this right"."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in a recipe, a file or a command line.

    The message is a sentence (or several lines, one a fault) that names the setting or file, the value found, what is
    allowed and the way out. Command-line programs print it without a traceback and end with exit code 2; every other
    exception is deepnmt's own fault and keeps its traceback.

    reported: on one of several processes, whether another has said the same or will; None: all processes of this
    machine come upon it, so that one says it.
    """

    reported: bool | None = None
