"""Reads the files of a run, for tests that compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from deepnmt.files import read_log


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in the log."""
    return [record for record in read_log(run / "log.jsonl") if record["type"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Training loss by update."""
    return {record["update"]: record["loss"] for record in records(run, "train")}


def tensors(run: Path, update: int, name: str) -> dict[str, Tensor]:
    """The `weights` or the `moments` of a checkpoint."""
    return load_file(run / "checkpoints" / f"update-{update:08d}" / f"{name}.safetensors")


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's values by name and update."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
