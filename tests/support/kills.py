"""kill -9 of a process just before it changes a file, by its own hand: Python tells of every such call beforehand, so
that the package need not know. tests/support/faults.c does it for single writes."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
_WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


def kill_before(number: int, under: object, kind: str = "") -> None:
    """From here on this process is killed before its `number`-th change of a file or folder whose path contains
    `under`; of one of CHANGES, if `kind` is given."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in CHANGES or kind not in ("", event) or (event == "open" and not arguments[2] & _WRITING):
            return
        if any(isinstance(path, (str, os.PathLike)) and str(under) in str(path) for path in arguments[:2]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # for good, so this is for processes that were forked
