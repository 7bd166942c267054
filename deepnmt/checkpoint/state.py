"""The progress of a run as state.json of a checkpoint holds it, and its types: the file may come from anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

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


class _Best(_Types):
    """Empty before the first validation."""

    value: float = 0.0
    update: _Natural = 0
    waited: _Natural = 0


class _LossScale(_Types):
    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    clean: _Natural


class _StateTypes(BaseModel, strict=True, extra="forbid"):
    """Of `SavedState`."""

    update: _Natural
    epoch: Annotated[int, Field(ge=0, lt=2**30)]  # with the number of a micro-batch it makes a key of 63 bits
    micro_batch: Annotated[int, Field(ge=0, lt=2**32)]
    optimizer_step: _Natural
    loss_scale: _LossScale | None
    best: _Best
    extra: _Extra = _Extra()


@dataclass(frozen=True)
class SavedState:
    """The progress of a run, as state.json holds it.

    Attributes:
        update: updates applied.
        epoch, micro_batch: position in the batch plan.
        optimizer_step: updates as the optimizer counts them.
        loss_scale: the fp16 loss scale, the last one if the run has left fp16, None if it never used fp16.
        best: the best validation.
        extra: anything JSON can hold. `validations`, if present, is a list of objects with `update` and `value`, where
            a lower value is a better model.
    """

    update: int
    epoch: int
    micro_batch: int
    optimizer_step: int
    loss_scale: dict[str, float | int] | None
    best: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Any) -> SavedState:
        """From what state.json holds. Raises pydantic's `ValidationError` if that is none."""
        _StateTypes.model_validate(content)
        return cls(**content)
