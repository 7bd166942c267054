"""The exception for mistakes that the user can correct, and suggestions for mistyped words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LONGEST = 4000  # characters of a line


class UserError(Exception):
    """A mistake in a recipe, a file or a command line.

    The message is one sentence, or one line for each fault. It names the setting or file, its value, what is allowed
    and how to correct it. Command-line programs print it without a traceback and exit with code 2. Any other exception
    is a bug in deepnmt and keeps its traceback.

    Attributes:
        errno: of the error of the system that caused it, None if none did.
        reported: with several processes, whether another one reports this error. None: all processes of this machine
            raise it, and the first of them prints it.
    """

    reported: bool | None = None

    def __init__(self, message: str = "", errno: int | None = None) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.errno = errno

    def to_json(self) -> str:
        """This error for another process, which makes it again by `error_from_json`."""
        return json.dumps({"kind": type(self).__name__, "errno": self.errno, "text": str(self)})


def error_from_json(content: str | bytes) -> UserError:
    """The error that `UserError.to_json` of another process has written: of the same class, with the same message."""
    fault = json.loads(content)
    kinds, known = [UserError], {}
    while kinds:
        kind = kinds.pop()
        known[kind.__name__] = kind
        kinds += kind.__subclasses__()
    kind = known.get(fault["kind"], UserError)
    error = kind.__new__(kind)  # its own constructor may take other arguments than a message
    UserError.__init__(error, fault["text"], fault["errno"])
    return error


@contextmanager
def enough_memory(remedy: str = "end other programs, or use a machine with more") -> Iterator[None]:
    """Turns what Python, a CPU or a GPU says of too little memory into a `UserError` that names the remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
                or "DefaultCPUAllocator" in str(error)):
            raise
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"there is not enough memory ({cause}); {remedy}") from None


@contextmanager
def enough_threads() -> Iterator[None]:
    """Turns what Python or a library says where the system starts no more threads or processes into a `UserError`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "can't start new thread" not in str(error) and "Resource temporarily unavailable" not in str(error):
            raise
        raise UserError("the system starts no more threads or processes: a limit is reached, of this user (ulimit -u) "
                        "or of the container; end other programs, or set parallel.threads or data.workers lower"
                        ) from None


def printable(line: str) -> str:
    """A line with escapes for control characters, which could rewrite a terminal, and the middle of a very long one
    left out: messages quote names and values from files that may come from anywhere."""
    if not line.isprintable():
        characters = []
        for character in line:
            if not character.isprintable():
                character = character.encode("unicode_escape").decode()
            characters.append(character)
        line = "".join(characters)
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST // 2]} ... {line[-_LONGEST // 2:]}"
    return line


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one most likely stands for, or None. Case, `-` and `_` are ignored, and the
    beginning of a word is enough."""
    names = {name.lower().replace("_", "-"): name for name in known}
    typed = word.lower().replace("_", "-")
    if len(typed) > 1:
        for name in names:
            if name.startswith(typed):
                return names[name]
    # a lower cutoff would take words for each other that only share an ending
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.65)
    return names[near[0]] if near else None
