"""The progress of a run, which its checkpoints keep in state.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from deepnmt.checkpoint.checkpoint import TrainingState
from deepnmt.data.batching import START, Position
from deepnmt.optim.scaler import ScalerState
from deepnmt.visitors import visitor_modules


@dataclass
class Interval:
    """Sums over all processes since the last progress line, `figures` those of the objective; `rate` and `loss_scale`
    are those of the last update."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    gradient_norm: float = 0.0
    seconds: float = 0.0
    applied: int = 0
    rate: float = 0.0
    loss_scale: float = 1.0
    figures: dict[str, float] = field(default_factory=dict)

    def to_saved(self) -> dict[str, float]:
        """The form in which state.json holds it: all numbers by name."""
        numbers = asdict(self)
        return numbers | numbers.pop("figures")

    @classmethod
    def from_saved(cls, numbers: Mapping[str, float]) -> Interval:
        """From the numbers of a checkpoint."""
        own = {one.name for one in fields(cls)}
        former: dict[str, str] = {}
        for visitor in visitor_modules("objective"):
            former |= getattr(visitor, "FORMER_FIGURES", {})
        interval = cls(**{name: value for name, value in numbers.items() if name in own})  # type: ignore[arg-type]
        for name, value in numbers.items():
            if name not in own and value and name != "updates":  # which older checkpoints count
                interval.figures[former.get(name, name)] = value
        return interval


@dataclass
class TrainState:
    """The progress of a run.

    Attributes:
        update: updates applied.
        position: of the next micro-batch.
        optimizer_step: updates as the optimizer counts them.
        loss_scale: the fp16 loss scale, the last one if the run has left fp16, None if it never used fp16.
        best: the best validation: its value, its update, and how many validations since were no better (`waited`).
        skipped: updates dropped because a gradient was not finite.
        target_tokens: trained on so far.
        seconds: spent on updates.
        validations: the figures of each, with `update` and `value`, where lower is better.
        interval: sums since the last progress line.
        data_fingerprint: of the prepared data.
        processes: their number.
        stages: of the second and later stages that have begun, the first epoch, and the update before.
        warned: whether it was said that the encoder has collapsed.
        out_of_time: whether `train.max_seconds` had passed before the last update, on any process; not saved.
    """

    update: int = 0
    position: Position = START
    optimizer_step: int = 0
    loss_scale: ScalerState | None = None
    best: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)
    interval: Interval = field(default_factory=Interval)
    data_fingerprint: str = ""
    processes: int = 1
    stages: list[tuple[int, int]] = field(default_factory=list)
    warned: bool = False
    out_of_time: bool = False

    def to_saved(self) -> TrainingState:
        """The form in which state.json holds it."""
        names = ("skipped", "target_tokens", "seconds", "validations", "interval", "data_fingerprint", "processes",
                 "warned", *(["stages"] if self.stages else []))
        own = asdict(self) | {"interval": self.interval.to_saved()}
        return TrainingState(self.update, self.position.epoch, self.position.index, self.optimizer_step,
                             own["loss_scale"], self.best, {name: own[name] for name in names})

    @classmethod
    def from_saved(cls, saved: TrainingState) -> TrainState:
        """From the state.json of a run's checkpoint (not of an average)."""
        extra = saved.extra
        scale = saved.loss_scale
        return cls(saved.update, Position(saved.epoch, saved.micro_batch), saved.optimizer_step,
                   {"scale": float(scale["scale"]), "clean": int(scale["clean"])} if scale else None, saved.best,
                   extra["skipped"], extra["target_tokens"], extra["seconds"], extra["validations"],
                   Interval.from_saved(extra.get("interval", {})), extra["data_fingerprint"], extra["processes"],
                   [(epoch, update) for epoch, update in extra.get("stages", [])], extra.get("warned", False))
