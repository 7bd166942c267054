"""The layout: where and in what float type a run computes. Read from the recipe and its DeepSpeed JSON once, checked,
and carried as one value.

The recipe owns precision, pipeline, batch size, accumulation, optimizer, schedule, clipping and loss scale; those stand
as "auto" in the JSON (or equal to the recipe). The JSON owns ZeRO, communication and offload, and every key of it that
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
from typing import Any, get_args

from pydantic import ValidationError

from deepnmt.config import Precision, Recipe
from deepnmt.errors import UserError
from deepnmt.parallel.pipeline.partition import check_stages

TRIED_DEEPSPEED = ("0.19.8",)  # versions that the canaries passed with

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
    "torch_autocast": "the recipe's parallel.precision chooses the float type",
    "amp": "the recipe's parallel.precision chooses the float type",
}

# Keys of what deepnmt does in DeepSpeed's place: the one value they may have, and why.
_SETTLED = {
    "fp16.loss_scale": (0, "the loss scale is dynamic, by the recipe's loss_scale section"),
    "fp16.hysteresis": (1, "every overflow halves the loss scale"),
    "pipeline.activation_checkpoint_interval": (0, "the recipe's parallel.recompute_layers owns it"),
}


@dataclass(frozen=True)
class Layout:
    """Where and in what a run computes.

    Attributes:
        stage: of ZeRO, 0 to 3.
        stages: of the pipeline; 0: none.
        data_ranks: see the function of that name.
        config: the completed DeepSpeed configuration; None: the local engine, which is plain PyTorch.
        path: of the JSON that it came from.
    """

    stage: int = 0
    precision: Precision = "fp32"
    stages: int = 0
    data_ranks: int = 1
    config: dict[str, Any] | None = None
    path: str = ""


def layout_of(recipe: Recipe, world: int) -> Layout:
    """The recipe's layout on `world` processes, its DeepSpeed JSON's "auto" values filled.

    deepnmt's batches are counted in tokens and handed over one by one, so DeepSpeed's own count of samples is nominal,
    1 a micro-batch.

    Raises:
        UserError: several processes without DeepSpeed, a pipeline that cannot be, an unreadable JSON, or one that
            misses a key that would change the mathematics or contradicts the recipe (all such faults at once).
    """
    path, stages, precision = recipe.parallel.ds_config, recipe.parallel.pipeline_stages, recipe.parallel.precision
    if path is None:
        if stages:
            raise UserError(
                f"parallel.pipeline_stages is {stages}, but parallel.ds_config is null, which is the engine of one "
                "whole model; set parallel.ds_config=ds_configs/zero1.json"
            )
        if world > 1:
            raise UserError(
                f"parallel.ds_config is null, which is the engine of one process, but {world} were "
                "started; set parallel.ds_config=ds_configs/zero1.json or start one process"
            )
        return Layout()
    check_stages(stages, recipe.model.encoder.layers, recipe.model.decoder.layers)
    if stages and world % stages:
        near = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but {world} process{'es' if world > 1 else ''} cannot be shared "
            f"among {stages} stages evenly; start a multiple of {stages}, or set it to one of {near}"
        )
    chains = data_ranks(recipe, world)
    tree = _read(Path(path))
    faults = [f"{key} must be written: {why}" for key, why in _MUST_BE_WRITTEN.items() if _get(tree, key) is None]
    _choose_precision(tree, precision, faults)
    owned: dict[str, tuple[str, float]] = {
        "train_micro_batch_size_per_gpu": ("batch", 1),
        "gradient_accumulation_steps": ("batch.accumulation", recipe.batch.accumulation),
        "train_batch_size": ("batch", recipe.batch.accumulation * chains),
        "gradient_clipping": ("train.clip", recipe.train.clip),
        "fp16.initial_scale_power": ("loss_scale.initial_power", recipe.loss_scale.initial_power),
        "fp16.loss_scale_window": ("loss_scale.window", recipe.loss_scale.window),
    }
    for key, (owner, wanted) in owned.items():
        section, _, name = key.rpartition(".")
        group = _group(tree, section) if section else tree
        written = group.get(name, "auto")
        if written not in ("auto", wanted):
            faults.append(f'{key} is {json.dumps(written)}, but the recipe\'s {owner} makes it {wanted}; write "auto"')
        group[name] = wanted
    for key, owner in _OWNED_WHOLE.items():
        if _get(tree, key) is not None:
            faults.append(f"{key} is given, but {owner}; remove it from the JSON")
    for key, (value, why) in _SETTLED.items():
        if _get(tree, key) not in (None, value):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, but {why}; write {value}, or remove it")
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if _get(tree, key) not in (None, *get_args(Precision)):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, must be one of {', '.join(get_args(Precision))}")
    stage = _get(tree, "zero_optimization.stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        faults.append(f"zero_optimization.stage is {json.dumps(stage)}, must be 0, 1, 2 or 3")
    # DeepSpeed reads the section, and deepnmt's stages do not go by it
    if not isinstance(tree.get("pipeline", {}), dict):
        faults.append(f"pipeline is {json.dumps(tree['pipeline'])}, must be an object, for example {{}}")
    for key in sorted(_group(tree, "pipeline").keys() - {"activation_checkpoint_interval"}):
        faults.append(f"pipeline.{key} is given, but has no effect here: the recipe's parallel.pipeline_stages owns "
                      "the number of stages, and deepnmt makes the cuts; remove it from the JSON")
    if "pipeline" in tree and not stages:
        faults.append("it is for pipelines (it has a pipeline section), but parallel.pipeline_stages is 0; set "
                      "parallel.pipeline_stages, or remove the section from the JSON")
    if faults:
        raise UserError("\n  ".join([f"{path} does not fit this run:", *faults]))
    if stages and stage > 1:
        raise UserError(
            f"parallel.pipeline_stages is {stages} and {path} has ZeRO stage {stage}, but pipelines keep whole "
            "gradients and weights on each stage, so they take ZeRO 0 or 1; set "
            "parallel.ds_config=ds_configs/zero1.json"
        )
    return Layout(stage, precision, stages, chains, tree, path)


def data_ranks(recipe: Recipe, world: int) -> int:
    """Processes that compute on different micro-batches: all of them, in a pipeline one for each chain of stages."""
    return world // (recipe.parallel.pipeline_stages or 1)


def _choose_precision(tree: dict[str, Any], precision: Precision, faults: list[str]) -> None:
    """Leaves of the sections bf16 and fp16, where their `enabled` is "auto" or they are not there, the one that
    `precision` asks for; notes what contradicts it."""
    kinds = ("bf16", "fp16")
    if all(_get(tree, f"{kind}.enabled") is True for kind in kinds):
        faults.append("bf16 and fp16 are both enabled; keep one")
        return
    for kind in kinds:
        section, wanted = tree.get(kind), kind == precision
        if section is not None and not isinstance(section, dict):
            faults.append(f'{kind} is {json.dumps(section)}, must be an object, for example {{"enabled": "auto"}}')
        elif not section or section.get("enabled") == "auto":
            tree.pop(kind, None)
            if wanted:
                tree[kind] = {**(section or {}), "enabled": True}
        elif not isinstance(enabled := section.get("enabled"), bool):
            faults.append(f'{kind}.enabled must be written, true, false or "auto"')
        elif enabled != wanted:
            way = f"parallel.precision={kind}" if enabled else "parallel.precision=fp32"
            faults.append(f"{kind}.enabled is {json.dumps(enabled)}, but the recipe's parallel.precision is "
                          f'{precision}; write "auto", or set {way}')


def untried_deepspeed() -> str | None:
    """A sentence where the installed DeepSpeed is none that the canaries (tests/parallel/) passed with."""
    installed = version("deepspeed")
    if installed in TRIED_DEEPSPEED:
        return None
    return (f"DeepSpeed {installed} is installed, with which deepnmt was not tried; it was with "
            f"{', '.join(TRIED_DEEPSPEED)}")


def check_by_deepspeed(layout: Layout) -> None:
    """Lets DeepSpeed read a configuration, where there is one. Imports it, so it is for those who go on to use it.

    Raises:
        UserError: keys that DeepSpeed does not know, or values it does not take.
    """
    if layout.config is None:
        return
    from deepspeed.runtime.config import DeepSpeedConfig

    tree = copy.deepcopy(layout.config)
    del tree["train_batch_size"]  # else it must fit the processes that are there now
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            DeepSpeedConfig(tree)
        return
    except ValidationError as error:
        faults = []
        for fault in error.errors():  # whose place DeepSpeed tells from the section on that it is in
            where = fault["loc"]
            sections = [key for key, group in layout.config.items()
                        if isinstance(group, dict) and where and where[0] in group]
            faults.append(f"{'.'.join(map(str, (*sections[:1], *where)))}: {fault['msg']}")
    except Exception as error:  # DeepSpeed raises whatever comes
        faults = [" ".join(str(error).split())]
    raise UserError("\n  ".join([f"{layout.path} is refused by DeepSpeed:", *faults]))


def _read(path: Path) -> dict[str, Any]:
    """The JSON at `path`, or, where there is none, the one of that name that comes with deepnmt."""
    homes = (Path(__file__).resolve().parents[2], Path(sys.prefix, "share", "deepnmt"))
    file = next((p for p in (path, *(home / path for home in homes)) if p.is_file()), None)
    if file is None:
        raise UserError(f"parallel.ds_config: there is no file {path}; ds_configs/ holds those that come with deepnmt")
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"parallel.ds_config: {file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"parallel.ds_config: {file} must hold one JSON object")
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
