"""The types of state.json, which may come from anywhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

_Natural = Annotated[int, Field(ge=0, lt=2**53)]
_Seconds = Annotated[float, Field(ge=0.0)]


class _Types(BaseModel, strict=True, extra="allow"):
    """Other entries may be anything."""


class _Validation(_Types):
    update: _Natural
    value: float


class _Extra(_Types):
    """What is read of `extra`; a run has more of it than an average, see `training/state.py`."""

    skipped: _Natural = 0
    target_tokens: _Natural = 0
    seconds: _Seconds = 0.0
    validations: list[_Validation] = []
    interval: dict[str, float] = {}
    data_fingerprint: str = ""
    processes: Annotated[int, Field(ge=1, lt=2**20)] = 1
    averaged: list[str] = []
    averaged_updates: list[_Natural] = []
    updates_beside: list[_Natural] = []
    weights_beside: list[str] = []
    stages: list[Annotated[list[_Natural], Field(min_length=2, max_length=2)]] = []
    warned: bool = False


class _Best(_Types):
    """Empty before the first validation."""

    value: float = 0.0
    update: _Natural = 0
    waited: _Natural = 0


class _LossScale(_Types):
    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    clean: _Natural


class StateTypes(BaseModel, strict=True, extra="forbid"):
    """Of `checkpoint.TrainingState`."""

    update: _Natural
    epoch: Annotated[int, Field(ge=0, lt=2**30)]  # with the number of a micro-batch it makes a key of 63 bits
    micro_batch: Annotated[int, Field(ge=0, lt=2**32)]
    optimizer_step: _Natural
    loss_scale: _LossScale | None
    best: _Best
    extra: _Extra = _Extra()
