"""The layout of a run (ZeRO stage, precision, offload, pipeline stages), read from the recipe and its DeepSpeed JSON
once, and checked.

The recipe sets precision, pipeline, batch size, accumulation, optimizer, schedule, clipping and loss scale; in the JSON
those are "auto", or equal to the recipe. The JSON sets ZeRO, communication and offload. Keys of it that change the
result must be written out, because DeepSpeed's defaults would change it silently (clipping at 1.0, ...).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, get_args

from pydantic import ValidationError

from deepnmt.config import Model, Precision, Recipe
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.errors import UserError, nearest
from deepnmt.model.blocks import LayerPosition, Side
from deepnmt.model.overrides import known_sets
from deepnmt.parallel.pipeline.partition import check_stages
from deepnmt.shipped import find_shipped

TESTED_DEEPSPEED = ("0.19.8",)  # versions that passed the canary tests

# Keys whose silent default would change the result, and why.
_REQUIRED = {
    "gradient_clipping": "DeepSpeed clips at 1.0 where it is absent",
    "zero_allow_untested_optimizer": "DeepSpeed rejects RAdam without it",
    "communication_data_type": "DeepSpeed would reduce gradients in 16 bits",
    "data_types.grad_accum_dtype": "DeepSpeed would accumulate gradients in 16 bits",
    "zero_optimization.stage": "it decides the layout",
}

# Keys that the JSON must not have, and what sets them instead.
_OWNED_BY_RECIPE = {
    "optimizer": "the recipe's optimizer section owns it",
    "scheduler": "the recipe's schedule section owns it",
    "fp16.min_loss_scale": "the recipe's loss_scale.floor owns it",
    "fp16.deepnmt_min_loss_scale": "the recipe's loss_scale.floor owns it",
    "activation_checkpointing": "the recipe's parallel.recompute_layers owns it",
    "torch_autocast": "the recipe's parallel.precision chooses the float type",
    "amp": "the recipe's parallel.precision chooses the float type",
    "tensor_parallel": "deepnmt divides a model by ZeRO, or into the stages of a pipeline",
    "data_efficiency": "deepnmt reads the text by itself",
}

# Keys of features that deepnmt implements itself: the only value they may have, and why.
_FIXED_VALUES = {
    "fp16.loss_scale": (0, "the loss scale is dynamic, by the recipe's loss_scale section"),
    "fp16.hysteresis": (1, "every overflow halves the loss scale"),
    "pipeline.activation_checkpoint_interval": (0, "the recipe's parallel.recompute_layers owns it"),
    "zero_allow_untested_optimizer": (True, "the recipe chooses the optimizer"),
    "zero_force_ds_cpu_optimizer": (False, "every optimizer is PyTorch's"),
    "zero_optimization.zero_hpz_partition_size": (1, "weights have no second partition"),
    "zero_optimization.compute_grad_norm": (True, "every update is measured"),
    "bf16.check_grad_overflow": (True, "an update that is not finite is dropped"),
    "bf16.bf16_master_weights_and_grads": (False, "weights and sums of gradients are fp32"),
    "bf16.bf16_optimizer_states": (False, "moments are fp32"),
    "fp16.fp16_master_weights_and_grads": (False, "weights and sums of gradients are fp32"),
}


# ZeRO-3 gathers what has more elements than this for each use.
_PERSISTENCE = "zero_optimization.stage3_param_persistence_threshold"


@dataclass(frozen=True)
class Layout:
    """What a run computes on.

    Attributes:
        stage: the ZeRO stage, 0 to 3.
        precision: of weights and activations.
        stages: the number of pipeline stages; 0: no pipeline.
        data_ranks: see the function of that name.
        config: the completed DeepSpeed configuration; None: the local engine, which is plain PyTorch.
        path: the JSON file that `config` was read from.
    """

    stage: int = 0
    precision: Precision = "fp32"
    stages: int = 0
    data_ranks: int = 1
    config: dict[str, Any] | None = None
    path: str = ""

    def offloads(self, what: Literal["optimizer", "param"]) -> bool:
        """Whether the optimizer, or the weights, are in the machine's memory instead of a GPU's."""
        return _get(self.config or {}, f"zero_optimization.offload_{what}.device") == "cpu"


def layout_of(recipe: Recipe, world: int) -> Layout:
    """The recipe's layout on `world` processes, with the "auto" values of its DeepSpeed JSON filled in.

    deepnmt sizes batches in tokens and passes micro-batches one by one, so DeepSpeed's batch size in samples is
    nominal: 1 a micro-batch.

    Raises:
        UserError: operations that there are not, several processes without DeepSpeed, an impossible pipeline, an
            unreadable JSON, or one that lacks a required key or contradicts the recipe (all such faults at once).
    """
    path = recipe.parallel.ds_config
    stages = recipe.parallel.pipeline_stages
    known_sets(recipe.parallel.overrides)
    for side in recipe.model.sides:
        stack = recipe.model.stack(side)
        if recipe.parallel.compile and _grows(recipe.model, side):
            raise UserError(f"parallel.compile is true, but each layer of {stack.block} has another number of inputs, "
                            "so each would be compiled by itself; set parallel.compile=false, or choose another block")
    if path is None:
        if stages:
            raise UserError(
                f"parallel.pipeline_stages is {stages}, but parallel.ds_config is null, and only DeepSpeed runs "
                "pipelines; set parallel.ds_config=ds_configs/zero1.json"
            )
        if world > 1:
            raise UserError(
                f"parallel.ds_config is null, which trains on one process, but {world} were "
                "started; set parallel.ds_config=ds_configs/zero1.json or start one process"
            )
        return Layout()
    check_stages(stages, recipe.model.encoder.layers, recipe.model.decoder.layers)
    if stages and world % stages:
        divisors = [str(n) for n in range(1, world + 1) if world % n == 0]
        processes = f"{world} processes" if world > 1 else f"{world} process"
        raise UserError(
            f"parallel.pipeline_stages is {stages}, but {processes} cannot be divided evenly among {stages} stages; "
            f"start a multiple of {stages}, or set it to one of {', '.join(divisors)}"
        )
    data_parallel = data_ranks(recipe, world)
    tree = _read(path)
    faults = []
    for key, why in _REQUIRED.items():
        if _get(tree, key) is None:
            faults.append(f"{key} must be written: {why}")
    faults += _choose_precision(tree, recipe.parallel.precision)
    faults += _fill_in(tree, recipe, data_parallel)
    faults += _foreign_keys(tree)
    faults += _choose_zero(tree, recipe.model)
    faults += _pipeline_section(tree, stages)
    if faults:
        raise UserError("\n  ".join([f"{path} does not fit this run:", *faults]))
    stage = _get(tree, "zero_optimization.stage")
    if recipe.parallel.compile and stage == 3:
        raise UserError(f"parallel.compile is true, but {path} has ZeRO stage 3, which gathers the weights of every "
                        "part of a layer while that is computed; set parallel.ds_config=ds_configs/zero1.json, or "
                        "parallel.compile=false")
    if OPTIMIZERS[recipe.optimizer.name].whole_matrices and stage:
        raise UserError(
            f"optimizer.name is {recipe.optimizer.name}, which needs whole matrices, but {path} has ZeRO stage "
            f"{stage}, which splits them; set parallel.ds_config=ds_configs/zero0.json, or another optimizer"
        )
    if stages and stage > 1:
        raise UserError(
            f"parallel.pipeline_stages is {stages} and {path} has ZeRO stage {stage}, but a pipeline keeps all "
            "gradients and weights of a stage on its process, so it needs ZeRO 0 or 1; set "
            "parallel.ds_config=ds_configs/zero1.json"
        )
    return Layout(stage, recipe.parallel.precision, stages, data_parallel, tree, path)


def _grows(model: Model, side: Side) -> bool:
    """Whether the stream of a stack has more tensors above than at its start."""
    first = LayerPosition.of(model, side, 0)
    top = LayerPosition.of(model, side, model.stack(side).layers)
    return first.block.carried(first) != top.block.carried(top)


def data_ranks(recipe: Recipe, world: int) -> int:
    """The number of data-parallel ranks: all processes, or in a pipeline processes / stages."""
    return world // (recipe.parallel.pipeline_stages or 1)


# -- the parts of the JSON: each is completed in place, and its faults are returned ------------------------------------


def _fill_in(tree: dict[str, Any], recipe: Recipe, data_parallel: int) -> list[str]:
    """Gives the keys that are "auto" or missing the values that follow from the recipe."""
    accumulation = recipe.batch.accumulation
    if recipe.batch.update_tokens is not None:
        # an update of a fixed size has each time as many as it needs; DeepSpeed only asks whether there may be several
        accumulation = 2
    faults = []
    owned: dict[str, tuple[str, float]] = {
        "train_micro_batch_size_per_gpu": ("batch", 1),
        "gradient_accumulation_steps": ("batch.accumulation", accumulation),
        "train_batch_size": ("batch", accumulation * data_parallel),
        "gradient_clipping": ("train.clip", recipe.train.clip),
        "fp16.initial_scale_power": ("loss_scale.initial_power", recipe.loss_scale.initial_power),
        "fp16.loss_scale_window": ("loss_scale.window", recipe.loss_scale.window),
    }
    for key, (owner, expected) in owned.items():
        section, _, name = key.rpartition(".")
        group = tree
        if section:
            group = _group(tree, section)
        written = group.get(name, "auto")
        if written not in ("auto", expected):
            faults.append(f'{key} is {json.dumps(written)}, but the recipe\'s {owner} makes it {expected}; write '
                          '"auto"')
        group[name] = expected
    return faults


def _foreign_keys(tree: dict[str, Any]) -> list[str]:
    """Keys that the recipe or deepnmt itself decides."""
    faults = []
    for key, owner in _OWNED_BY_RECIPE.items():
        if _get(tree, key) is not None:
            faults.append(f"{key} is given, but {owner}; remove it from the JSON")
    for key, (value, why) in _FIXED_VALUES.items():
        if _get(tree, key) not in (None, value):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, but {why}; write {json.dumps(value)}")
    for key in ("communication_data_type", "data_types.grad_accum_dtype"):
        if _get(tree, key) not in (None, *get_args(Precision)):
            faults.append(f"{key} is {json.dumps(_get(tree, key))}, must be one of {', '.join(get_args(Precision))}")
    return faults


def _choose_zero(tree: dict[str, Any], model: Model) -> list[str]:
    """Checks the ZeRO stage and what depends on it, and sets the size from which ZeRO-3 gathers weights."""
    faults = []
    tree.setdefault("zero_force_ds_cpu_optimizer", False)  # else offload takes no optimizer of PyTorch's
    stage = _get(tree, "zero_optimization.stage")
    if _get(tree, _PERSISTENCE) == "auto":  # biases, norms and other vectors stay whole: fewer and larger gathers
        _, _, name = _PERSISTENCE.partition(".")
        rows = model.ffn_matrices - 1  # of the first, a gate's included
        tree["zero_optimization"][name] = max(
            max(3 * width, rows * ffn) for width, _, ffn in map(model.shape, model.sides))
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        faults.append(f"zero_optimization.stage is {json.dumps(stage)}, must be 0, 1, 2 or 3")
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = _get(tree, f"zero_optimization.{key}.device")
        if device not in (None, "none", "cpu"):
            faults.append(f'zero_optimization.{key}.device is {json.dumps(device)}, must be "cpu" or "none"')
        elif device == "cpu" and stage in (0, 1, 2, 3) and stage < least:
            faults.append(f"zero_optimization.{key} is given, but has no effect below stage {least}; remove it")
    return faults


def _pipeline_section(tree: dict[str, Any], stages: int) -> list[str]:
    """Checks the section of pipelines."""
    faults = []
    # DeepSpeed reads this section, but deepnmt sets the stages without it
    if not isinstance(tree.get("pipeline", {}), dict):
        faults.append(f"pipeline is {json.dumps(tree['pipeline'])}, must be an object, for example {{}}")
    for key in sorted(_group(tree, "pipeline").keys() - {"activation_checkpoint_interval"}):
        faults.append(f"pipeline.{key} is given, but has no effect here: the recipe's parallel.pipeline_stages owns "
                      "the number of stages, and deepnmt partitions the model; remove it from the JSON")
    if "pipeline" in tree and not stages:
        faults.append("it is for pipelines (it has a pipeline section), but parallel.pipeline_stages is 0; set "
                      "parallel.pipeline_stages, or remove the section from the JSON")
    return faults


def _choose_precision(tree: dict[str, Any], precision: Precision) -> list[str]:
    """Enables the section, bf16 or fp16, that `precision` needs, and removes the other, where they are "auto" or
    missing."""
    if _get(tree, "bf16.enabled") is True and _get(tree, "fp16.enabled") is True:
        return ["bf16 and fp16 are both enabled; keep one"]
    faults = []
    for kind in ("bf16", "fp16"):
        section = tree.get(kind)
        needed = kind == precision
        if section is not None and not isinstance(section, dict):
            faults.append(f'{kind} is {json.dumps(section)}, must be an object, for example {{"enabled": "auto"}}')
        elif not section or section.get("enabled") == "auto":
            tree.pop(kind, None)
            if needed:
                tree[kind] = {**(section or {}), "enabled": True}
        elif not isinstance(section.get("enabled"), bool):
            faults.append(f'{kind}.enabled must be written, true, false or "auto"')
        elif section["enabled"] != needed:
            way = f"parallel.precision={kind}" if section["enabled"] else "parallel.precision=fp32"
            faults.append(f"{kind}.enabled is {json.dumps(section['enabled'])}, but the recipe's parallel.precision is "
                          f'{precision}; write "auto", or set {way}')
    return faults


def untested_deepspeed() -> str | None:
    """A warning if the installed DeepSpeed is not a version that passed the canary tests (tests/parallel/)."""
    installed = version("deepspeed")
    if installed in TESTED_DEEPSPEED:
        return None
    return f"DeepSpeed {installed} is installed, but deepnmt was tested with {', '.join(TESTED_DEEPSPEED)} only"


def check_with_deepspeed(layout: Layout) -> None:
    """Has DeepSpeed itself check the layout's configuration, if it has one. Imports DeepSpeed, which takes seconds.

    Raises:
        UserError: keys that DeepSpeed does not know, or values it does not accept.
    """
    if layout.config is None:
        return
    idle = "mlflow" not in sys.modules
    if idle:  # only DeepSpeed's autotuner would use it: a second of every start, where it is installed
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
    finally:
        if idle:
            del sys.modules["mlflow"]

    tree = _Asked(copy.deepcopy(layout.config))
    del tree["train_batch_size"]  # else DeepSpeed compares it with the processes running now
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            DeepSpeedConfig(tree)
        faults = []
        for key in sorted(tree.keys() - tree.asked):
            near = nearest(key, tree.asked)
            hint = f"; did you mean {near}?" if near else ""
            faults.append(f"{key} is no key of it{hint}")
        if not faults:
            return
    except ValidationError as error:
        faults = []
        for fault in error.errors():  # DeepSpeed's `loc` leaves out the section, which is added here
            where = list(fault["loc"])
            for section, group in layout.config.items():
                if isinstance(group, dict) and where and where[0] in group:
                    where.insert(0, section)
                    break
            faults.append(f"{'.'.join(map(str, where))}: {fault['msg']}")
    except Exception as error:  # DeepSpeed raises many types
        faults = [" ".join(str(error).split())]
    raise UserError("\n  ".join([f"{layout.path} is rejected by DeepSpeed:", *faults]))


class _Asked(dict[str, Any]):
    """A configuration that notes which of its keys DeepSpeed asks for: all that it knows, but it rejects no others."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__(tree)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return _AskedKeys(self)

    def __deepcopy__(self, _memo: object) -> _Asked:
        return self


class _AskedKeys(KeysView[str]):
    """`key in tree.keys()` asks the tree."""


def _read(path: str) -> dict[str, Any]:
    """The JSON object at `path`, or, if there is no such file, the one of that name that comes with deepnmt."""
    file = find_shipped(path)
    if not file.is_file():
        raise UserError(f"parallel.ds_config: there is no file {path}; ds_configs/zero0.json, zero1.json, zero2.json, "
                        "zero3.json and zero3_offload.json come with deepnmt")
    try:
        tree = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"parallel.ds_config: {file} is not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"parallel.ds_config: {file} must hold one JSON object")
    return tree


def _get(tree: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key such as "fp16.enabled", None if it is missing."""
    for name in dotted.split("."):
        if not isinstance(tree, dict) or name not in tree:
            return None
        tree = tree[name]
    return tree


def _group(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key, or an empty one if there is none."""
    return tree[key] if isinstance(tree.get(key), dict) else {}
