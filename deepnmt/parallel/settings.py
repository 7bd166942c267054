"""The DeepSpeed JSON: read, completed from the recipe, and refused where the two disagree.

The recipe owns batch size, accumulation, optimizer, schedule, clipping and loss scale; those stand as "auto" in the
JSON (or equal to the recipe). The JSON owns ZeRO, precision, communication and offload, and every key of it that
changes the mathematics must be written, because DeepSpeed's defaults do change it (clipping at 1.0, ...).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deepnmt.config import Recipe
from deepnmt.errors import UserError

TRIED_DEEPSPEED = ("0.19.8",)  # versions that the canaries passed with

Precision = Literal["fp32", "bf16", "fp16"]

# Keys whose silent default would change the result, and why.
_MUST_BE_WRITTEN = {
    "gradient_clipping": "DeepSpeed clips at 1.0 where it is absent",
    "zero_allow_untested_optimizer": "RAdam is refused without it",
    "communication_data_type": "DeepSpeed would reduce gradients in 16 bits",
    "data_types.grad_accum_dtype": "DeepSpeed would accumulate gradients in 16 bits",
    "zero_optimization.stage": "it decides the layout",
}

# Keys that have no place beside the recipe, or in deepnmt, and what takes theirs.
_OWNED_WHOLE = {
    "optimizer": "the recipe's optimizer section owns it",
    "scheduler": "the recipe's schedule section owns it",
    "fp16.min_loss_scale": "the recipe's loss_scale.floor owns it",
    "fp16.deepnmt_min_loss_scale": "the recipe's loss_scale.floor owns it",
    "activation_checkpointing": "the recipe's parallel.recompute_layers owns it",
    "torch_autocast": "only the sections bf16 and fp16 choose the float type",
    "amp": "only the sections bf16 and fp16 choose the float type",
}

# Keys of what deepnmt does in DeepSpeed's place: the one value they may have, and why.
_SETTLED = {
    "fp16.loss_scale": (0, "the loss scale is dynamic, by the recipe's loss_scale section"),
    "fp16.hysteresis": (1, "every overflow halves the loss scale"),
    "pipeline.activation_checkpoint_interval": (0, "the recipe's parallel.recompute_layers owns it"),
}

_FLOATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class DsConfig:
    """A completed configuration, the file it came from, and what deepnmt needs to know of it."""

    tree: dict[str, Any]
    path: str
    stage: int
    precision: Precision


def load_ds_config(path: str | Path, recipe: Recipe, world: int, micro_batch_note: int = 1) -> DsConfig:
    """Reads `path` and fills its "auto" values.

    deepnmt's batches are counted in tokens and handed over one by one, so DeepSpeed's own count of samples is nominal
    (`micro_batch_note` a micro-batch).

    Raises:
        UserError: unreadable file, a missing key that would change the mathematics, values that contradict the recipe
            (all of them at once).
    """
    tree = _read(Path(path))
    faults = [f"{key} must be written: {why}" for key, why in _MUST_BE_WRITTEN.items() if _get(tree, key) is None]
    _fill_from_recipe(tree, recipe, world, micro_batch_note, faults)
    for key, owner in _OWNED_WHOLE.items():
        if _get(tree, key) is not None:
            faults.append(f"{key} is given, but {owner}; remove it from the JSON")
    for key, (value, why) in _SETTLED.items():
        if _get(tree, key) not in (None, value):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, but {why}; write {value}, or remove it")
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if _get(tree, key) not in (None, *_FLOATS):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, must be one of {', '.join(_FLOATS)}")
    precision, stage = _precision(tree, faults), _stage(tree, faults)
    _check_pipeline(tree, faults)
    if "pipeline" in tree and not recipe.parallel.pipeline_stages:
        faults.append("it is for pipelines (it has a pipeline section), but parallel.pipeline_stages is 0; set "
                      f"parallel.pipeline_stages, or take ds_configs/zero{stage}_{precision}.json")
    if faults:
        raise UserError("\n  ".join([f"{path} does not fit this run:", *faults]))
    return DsConfig(tree, str(path), stage, precision)


def _fill_from_recipe(
    tree: dict[str, Any], recipe: Recipe, world: int, micro_batch_note: int, faults: list[str]
) -> None:
    """Puts the recipe's values where "auto" stands, or nothing, and notes where another value does."""
    owned: dict[str, tuple[str, float]] = {
        "train_micro_batch_size_per_gpu": ("batch", micro_batch_note),
        "gradient_accumulation_steps": ("batch.accumulation", recipe.batch.accumulation),
        "train_batch_size": ("batch", micro_batch_note * recipe.batch.accumulation * world),
        "gradient_clipping": ("train.clip", recipe.train.clip),
        "fp16.initial_scale_power": ("loss_scale.initial_power", recipe.loss_scale.initial_power),
        "fp16.loss_scale_window": ("loss_scale.window", recipe.loss_scale.window),
    }
    for key, (owner, value) in owned.items():
        section, _, name = key.rpartition(".")
        group = _group(tree, section) if section else tree
        found = group.get(name, "auto")
        if found not in ("auto", value):
            faults.append(f'{key} is {json.dumps(found)}, but the recipe\'s {owner} makes it {value}; write "auto"')
        group[name] = value


def untried_deepspeed() -> str | None:
    """A sentence where the installed DeepSpeed is none that the canaries (tests/parallel/) passed with."""
    installed = version("deepspeed")
    if installed in TRIED_DEEPSPEED:
        return None
    return (f"DeepSpeed {installed} is installed, with which deepnmt was not tried; it was with "
            f"{', '.join(TRIED_DEEPSPEED)}")


def check_by_deepspeed(settings: DsConfig) -> None:
    """Lets DeepSpeed read a configuration. Imports DeepSpeed, so it is for those who go on to use it.

    Raises:
        UserError: keys that DeepSpeed does not know, or values it does not take.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    tree = copy.deepcopy(settings.tree)
    del tree["train_batch_size"]  # else it must fit the processes that are there now
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            DeepSpeedConfig(tree)
        return
    except ValidationError as error:
        faults = [f"{_where(settings.tree, e['loc'])}: {e['msg']}" for e in error.errors()]
    except Exception as error:  # DeepSpeed raises whatever comes
        faults = [" ".join(str(error).split())]
    raise UserError("\n  ".join([f"{settings.path} is refused by DeepSpeed:", *faults]))


def _where(tree: dict[str, Any], place: tuple[int | str, ...]) -> str:
    """The dotted key of a fault, whose place DeepSpeed tells from the section on that it is in."""
    sections = [key for key, group in tree.items() if isinstance(group, dict) and place and place[0] in group]
    return ".".join(map(str, (*sections[:1], *place)))


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


def _check_pipeline(tree: dict[str, Any], faults: list[str]) -> None:
    """Refuses what DeepSpeed passes over in silence: it reads the section, and deepnmt's stages do not go by it."""
    if not isinstance(tree.get("pipeline", {}), dict):
        faults.append(f"pipeline is {json.dumps(tree['pipeline'])}, must be an object, for example {{}}")
    for key in sorted(_group(tree, "pipeline").keys() - {"activation_checkpoint_interval"}):
        faults.append(f"pipeline.{key} is given, but has no say here: the recipe's parallel.pipeline_stages owns the "
                      "number of stages, and deepnmt makes the cuts; remove it from the JSON")


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
    faults += [f"{kind}.enabled must be written, true or false" for kind in kinds
               if _group(tree, kind) and not isinstance(tree[kind].get("enabled"), bool)]
    on = [kind for kind in kinds if _group(tree, kind).get("enabled")]
    if len(on) > 1:
        faults.append("bf16 and fp16 are both enabled; keep one")
    return on[0] if on else "fp32"
