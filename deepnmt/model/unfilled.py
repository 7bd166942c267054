"""Modules whose weights `init.fill` sets later."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Made = TypeVar("Made", bound=nn.Module)


def unfilled(kind: type[Made], *arguments: Any) -> Made:
    """A module with uninitialised weights; under `torch.device("meta")` they take no memory.

    `nn.utils.skip_init` would draw them on that device, for which PyTorch imports its compiler: 1.4 s of every start.
    """
    bare = type(kind.__name__, (kind,), {"reset_parameters": lambda self: None})
    made: Made = bare(*arguments)
    made.__class__ = kind
    return made
