"""Modules whose weights `init.fill` sets later."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import skip_init

Made = TypeVar("Made", bound=nn.Module)


def unfilled(kind: type[Made], *arguments: Any) -> Made:
    """A module with uninitialised weights; under `torch.device("meta")` they take no memory."""
    if torch.get_default_device().type == "meta":
        return kind(*arguments)
    return skip_init(kind, *arguments)
