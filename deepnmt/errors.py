"""The one exception that means "the user can put this right", and the word that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a recipe, a file or a command line.

    The message is a sentence (or several lines, one a fault) that names the setting or file, the value found, what is
    allowed and the way out. Command-line programs print it without a traceback and end with exit code 2; every other
    exception is deepnmt's own fault and keeps its traceback.

    reported: on one of several processes, whether another has said the same or will; None: all processes of this
    machine come upon it, so that one says it.
    """

    reported: bool | None = None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one most likely stands for, or None: capitals, `-` and `_` do not count, and the
    beginning of a word is enough."""
    names = {name.lower().replace("_", "-"): name for name in known}
    typed = word.lower().replace("_", "-")
    begun = [name for name in names if len(typed) > 1 and name.startswith(typed)]
    # a lower cutoff would take "export" for "gpu-report"
    near = begun[:1] or difflib.get_close_matches(typed, names, n=1, cutoff=0.65)
    return names[near[0]] if near else None
