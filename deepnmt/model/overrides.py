"""Other operations in the place of the model's own: `parallel.overrides`.

They are modules of deepnmt/extras/kernels, imported by name and only if a recipe lists them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from deepnmt.errors import UserError

_ROOM = "deepnmt.extras.kernels"

_plain: list[tuple[Any, str, Any]] = []  # owner, attribute and value of what was replaced


def known_sets(names: Sequence[str]) -> dict[str, str]:
    """From a name to the module of its operations. Raises `UserError` if there is none for one of `names`."""
    if not names:
        return {}
    try:
        known = dict(importlib.import_module(_ROOM).SETS)
    except ModuleNotFoundError:  # the folder was deleted
        known = {}
    for name in names:
        if name not in known:
            way = f"set it to {' or '.join(known)}, or" if known else f"{_ROOM} is not installed;"
            raise UserError(f"parallel.overrides lists {name}, but there are no operations of that name; {way} leave "
                            "it out to compute by PyTorch's own")
    return known


def use(names: Sequence[str], device: torch.device) -> None:
    """Puts the operations of these names in the place of the plain ones in this process, and restores all others.

    Raises:
        UserError: there are no such operations, or this machine cannot run them.
    """
    restore()
    known = known_sets(names)
    for name in names:
        kernels = importlib.import_module(f"{_ROOM}.{known[name]}")
        kernels.check(device)
        for owner, attribute, make in kernels.REPLACEMENTS:
            plain = getattr(owner, attribute)
            _plain.append((owner, attribute, plain))
            setattr(owner, attribute, make(plain))


def restore() -> None:
    """Computes by the plain operations again."""
    while _plain:
        setattr(*_plain.pop())
