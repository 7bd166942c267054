"""The DeepSpeed JSON: read, completed from the recipe, and refused where the two disagree.

The recipe owns batch size, accumulation, optimizer, schedule and clipping; those stand as "auto" in the JSON (or equal
to the recipe). The JSON owns ZeRO, precision, communication and offload, and every key of it that changes the
mathematics must be written, because DeepSpeed's defaults do change it (clipping at 1.0, bf16 accumulation, ...).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deepnmt.config import Recipe
from deepnmt.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]

# Keys whose silent default would change the result, and why.
_MUST_BE_WRITTEN = {
    "gradient_clipping": "DeepSpeed clips at 1.0 where it is absent",
    "zero_allow_untested_optimizer": "RAdam is refused without it",
    "communication_data_type": "DeepSpeed would reduce gradients in 16 bits",
    "data_types.grad_accum_dtype": "DeepSpeed would accumulate gradients in 16 bits",
    "zero_optimization.stage": "it decides the layout",
}

# The fp16 section's loss scaling: 2 ** power at first, clean updates before it doubles, and its floor.
_SCALING = {"initial_scale_power": 7.0, "loss_scale_window": 256.0, "deepnmt_min_loss_scale": 0.03125}


@dataclass(frozen=True)
class DsConfig:
    """A completed configuration and what deepnmt needs to know of it."""

    tree: dict[str, Any]
    stage: int
    precision: Precision
    initial_scale: float
    window: int
    floor: float


def load_ds_config(path: str | Path, recipe: Recipe, world: int, micro_batch_note: int = 1) -> DsConfig:
    """Reads `path` and fills its "auto" values.

    deepnmt's batches are counted in tokens and handed over one by one, so DeepSpeed's own count of samples is nominal
    (`micro_batch_note` a micro-batch).

    Raises:
        UserError: unreadable file, a missing key that would change the mathematics, values that contradict the recipe
            (all of them at once), or a combination that DeepSpeed computes wrongly.
    """
    tree = _read(Path(path))
    faults = [f"{key} must be written: {why}" for key, why in _MUST_BE_WRITTEN.items() if _get(tree, key) is None]
    owned = {
        "train_micro_batch_size_per_gpu": micro_batch_note,
        "gradient_accumulation_steps": recipe.batch.accumulation,
        "train_batch_size": micro_batch_note * recipe.batch.accumulation * world,
        "gradient_clipping": recipe.train.clip,
    }
    setting = {"gradient_clipping": "train.clip", "gradient_accumulation_steps": "batch.accumulation"}
    for key, value in owned.items():
        found = tree.get(key, "auto")
        if found not in ("auto", value):
            owner = setting.get(key, "batch")
            faults.append(f'{key} is {found}, but the recipe\'s {owner} makes it {value}; write "auto"')
        tree[key] = value
    for key in ("optimizer", "scheduler"):
        if key in tree:
            faults.append(f"{key} is given, but the recipe's {key.replace('scheduler', 'schedule')} section owns it; "
                          "remove it from the JSON")
    precision, stage = _precision(tree, faults), _stage(tree, faults)
    if stage == 0 and precision != "fp32":
        faults.append(f"{precision} with ZeRO stage 0 is computed wrongly by DeepSpeed (unscaled loss, a step during "
                      "initialisation, 16-bit sums of gradients); use a ZeRO-1 configuration, which on one process "
                      "costs nothing more")
    fp16 = _group(tree, "fp16")
    power, window, floor = (_number(fp16, key, default, faults) for key, default in _SCALING.items())
    if fp16:
        tree["fp16"] = {key: value for key, value in fp16.items() if key != "deepnmt_min_loss_scale"}
    if faults:
        raise UserError("\n  ".join([f"{path} does not fit this run:", *faults]))
    return DsConfig(tree, stage, precision, 2.0 ** power, int(window), floor)


def shipped(path: Path) -> Path:
    """`path`, or, where there is no such file, the one of that name that comes with deepnmt."""
    places = (Path(__file__).resolve().parents[2], Path(sys.prefix, "share", "deepnmt"))
    return next((p for p in (path, *(place / path for place in places)) if p.is_file()), path)


def _read(path: Path) -> dict[str, Any]:
    path = shipped(path)
    if not path.is_file():
        raise UserError(f"parallel.ds_config: there is no file {path}; ds_configs/ holds those that come with deepnmt")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"parallel.ds_config: {path} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"parallel.ds_config: {path} must hold one JSON object")
    return tree


def _get(tree: dict[str, Any], dotted: str) -> Any:
    for name in dotted.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _group(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The settings under a key, none where it is no object."""
    return tree[key] if isinstance(tree.get(key), dict) else {}


def _number(group: dict[str, Any], key: str, default: float, faults: list[str]) -> float:
    value = group.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        faults.append(f"fp16.{key} is {json.dumps(value)}, must be a number above 0, for example {default:g}")
        return default
    return value


def _stage(tree: dict[str, Any], faults: list[str]) -> int:
    stage = _get(tree, "zero_optimization.stage")
    if stage is None:
        return 0  # told of among the keys that must be written
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        faults.append(f"zero_optimization.stage is {json.dumps(stage)}, must be 0, 1, 2 or 3")
        return 1
    return int(stage)


def _precision(tree: dict[str, Any], faults: list[str]) -> Precision:
    kinds: tuple[Precision, ...] = ("bf16", "fp16")
    faults += [f'{kind} is {json.dumps(tree[kind])}, must be an object, for example {{"enabled": true}}'
               for kind in kinds if kind in tree and not isinstance(tree[kind], dict)]
    on = [kind for kind in kinds if _group(tree, kind).get("enabled")]
    if len(on) > 1:
        faults.append("bf16 and fp16 are both enabled; keep one")
    return on[0] if on else "fp32"
