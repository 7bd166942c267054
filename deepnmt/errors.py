"""The exception for mistakes that the user can correct, and suggestions for mistyped words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in a recipe, a file or a command line.

    The message is one sentence, or one line for each fault. It names the setting or file, its value, what is allowed
    and how to correct it. Command-line programs print it without a traceback and exit with code 2. Any other exception
    is a bug in deepnmt and keeps its traceback.

    Attributes:
        reported: with several processes, whether another one reports this error. None: all processes of this machine
            raise it, and the first of them prints it.
    """

    reported: bool | None = None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one most likely stands for, or None. Case, `-` and `_` are ignored, and the
    beginning of a word is enough."""
    names = {name.lower().replace("_", "-"): name for name in known}
    typed = word.lower().replace("_", "-")
    completions = [name for name in names if len(typed) > 1 and name.startswith(typed)]
    # a lower cutoff would take "export" for "gpu-report"
    near = completions[:1] or difflib.get_close_matches(typed, names, n=1, cutoff=0.65)
    return names[near[0]] if near else None
