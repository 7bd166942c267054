"""Other operations in the place of the model's own: `parallel.overrides`.

A visitor's module `overrides` has `SETS`, from a name to another module of its folder, which is imported only if a
recipe lists the name. That has `REPLACEMENTS`, rows (owner, attribute, make): `make(plain)` returns what takes the
place of the owner's attribute, and computes the same. Its `check(device)` raises `UserError` if this machine cannot run
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from deepnmt.errors import UserError
from deepnmt.visitors import visitor_modules

_plain: list[tuple[Any, str, Any]] = []  # owner, attribute and value of what was replaced


def known_sets(names: Sequence[str]) -> dict[str, str]:
    """From a name to the module of its operations. Raises `UserError` if there is none for one of `names`."""
    if not names:
        return {}
    known: dict[str, str] = {}
    for visitor in visitor_modules("overrides"):
        for name, module in visitor.SETS.items():
            known[name] = f"{visitor.__package__}.{module}"
    for name in names:
        if name not in known:
            way = f"set it to {' or '.join(known)}, or" if known else "no set is installed;"
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
        operations = importlib.import_module(known[name])
        operations.check(device)
        for owner, attribute, make in operations.REPLACEMENTS:
            plain = getattr(owner, attribute)
            _plain.append((owner, attribute, plain))
            setattr(owner, attribute, make(plain))


def restore() -> None:
    """Computes by the plain operations again."""
    while _plain:
        setattr(*_plain.pop())
