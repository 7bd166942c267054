"""`deepnmt diagnose my.yaml --coordinates`: do activations and their changes keep their size over widths and depths?

The coordinate check of Yang et al. 2022 (Tensor Programs V, appendix D.1), here of `model.tuned_at`: models of several
widths and depths take the same few updates, once with the rule of the smallest one carried over and once as they are.
Where a rate carries over, every quantity is about as large at any shape, and so is what the updates have changed of it.

Quantities, each the mean of the absolute values at real positions: a stack's input; what its attentions and FFNs put
out, averaged over the layers, without the factor 1/depth that carrying over has; its last layer; log-probabilities of
the reference's tokens; the logits of all tokens, which are not judged.

What is not flat though the rule is right, measured in studies/results/papers.md:
- A few seeds: at width 32 chance moves a quantity by up to 1.8, at 256 by 1.1. So several models are averaged.
- Stacks of 2 layers: layer i of L meets i/L of what the layers below it have changed, on the average (L - 1) / 2L. That
  is half of its limit in 2 layers and three quarters in 4, so the smallest depth is 4 by default.
- Logits of all tokens: a change Δh of the hidden states meets the initial rows E of tokens that it has nothing to do
  with as one random vector meets another, so E·Δh falls with 1/√width. What the table learns, ΔE·h, and what
  updates aim at, the log-probabilities of references, are flat.
- The first updates: what initial weights pass on is random, too, and falls with 1/√depth as with 1/√width. What is
  learned outgrows it within ten updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Recipe, check_recipe
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.prepared import open_prepared
from deepnmt.extras.doctor.plots import plot_coordinates
from deepnmt.extras.doctor.probes import real_positions
from deepnmt.extras.doctor.verdict import cut_batch
from deepnmt.files import make_run_folder, reporting, write_json
from deepnmt.model.blocks import SIDES, SUBLAYERS, Side
from deepnmt.model.dropout import evaluating
from deepnmt.model.hooks import hooks
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.engine import LocalEngine
from deepnmt.progress import show_progress
from deepnmt.training.fine_tuning import check_parts

LOG_PROBABILITIES = "log-probabilities"
ALL_LOGITS = "logits of all tokens"  # not judged, see above
FLAT = 1.5  # largest over smallest value up to which a quantity counts as flat
RULES = ("carried", "plain")  # with and without `model.tuned_at`
TOKENS = 256  # of a batch, on the target side
_PARTS = {"self_attn": "self-attention", "cross_attn": "cross-attention", "ffn": "FFN"}
_DROPOUTS = {"model.dropout": 0.0, "model.attention_dropout": 0.0, "model.activation_dropout": 0.0}


class Size(NamedTuple):
    """A model's width, and the layers of each stack."""

    width: int
    encoder_layers: int
    decoder_layers: int


def at_size(recipe: Recipe, size: Size, tuned: Size | None) -> Recipe:
    """The recipe for a model of this size, without dropout and ramp, tuned at another or not: the FFN is as many times
    as wide, and the heads of all models are as many as fit into the smallest. Raises `UserError` if it cannot carry
    over."""
    model, smallest = recipe.model, tuned or size
    heads = max(1, min(model.heads, smallest.width // 8))
    while smallest.width % heads:
        heads -= 1
    times = model.ffn / model.width
    settings: dict[str, Any] = {**_DROPOUTS, "model.width": size.width, "model.heads": heads,
                                "model.ffn": 2 * round(size.width * times / 2)}
    for side, layers in (("encoder", size.encoder_layers), ("decoder", size.decoder_layers)):
        settings |= {f"model.{side}.layers": layers, f"model.{side}.layer_drop": 0.0, f"model.{side}.word_dropout": 0.0,
                     f"model.{side}.ramp": 0, f"model.{side}.width": None, f"model.{side}.heads": None,
                     f"model.{side}.ffn": None}
    for name in type(model.tuned_at).model_fields:
        settings[f"model.tuned_at.{name}"] = None
    if tuned is not None:
        settings |= {"model.tuned_at.width": tuned.width, "model.tuned_at.heads": heads,
                     "model.tuned_at.ffn": 2 * round(tuned.width * times / 2),
                     "model.tuned_at.encoder_layers": tuned.encoder_layers,
                     "model.tuned_at.decoder_layers": tuned.decoder_layers}
    tree = recipe.model_dump()
    for key, value in settings.items():
        *groups, name = key.split(".")
        reduce(getitem, groups, tree)[name] = value
    return check_recipe(tree, f"the recipe at width {size.width}")


def points(recipe: Recipe) -> dict[str, tuple[str, float]]:
    """The modules whose outputs are measured, each with the quantity that it belongs to and a factor."""
    model = recipe.model
    modules: dict[str, tuple[str, float]] = {}
    tuned = {"encoder": model.tuned_at.encoder_layers, "decoder": model.tuned_at.decoder_layers}
    for side in SIDES:
        stack = model.stack(side)
        factor = stack.layers / (tuned[side] or stack.layers)
        end = "out_norms" if "out_norms" in stack.facts.branch_ends else "adds"
        modules[f"{side}.input"] = f"{side}: input", 1.0
        for index in range(stack.layers):
            for number, part in enumerate(SUBLAYERS[side]):
                modules[f"{side}.layers.{index}.rule.{end}.{number}"] = f"{side}: {_PARTS[part]}", factor
        modules[f"{side}.layers.{stack.layers - 1}"] = f"{side}: last layer", 1.0
    return modules


@torch.no_grad()
def quantities(model: Transformer, recipe: Recipe, batch: Batch) -> dict[str, list[Tensor]]:
    """What is measured of a batch, by name: the values at real positions, of each layer where there are several."""
    real = real_positions(batch)
    values: dict[str, list[Tensor]] = {}
    with hooks() as handles, evaluating(model):
        for point, (name, factor) in points(recipe).items():
            def observe(_module: Any, _inputs: Any, x: Tensor, name: str = name, factor: float = factor) -> None:
                side: Side = "encoder" if name.startswith("encoder") else "decoder"
                values.setdefault(name, []).append(factor * x[real[side]])

            handles.append(model.get_submodule(point).register_forward_hook(observe))
        memory = model.encode(batch["src"], batch["src_lengths"], batch.key)
        hidden = model.decode(batch["trg_in"], memory, batch["src_lengths"], batch.key)[real["decoder"]]
    logits = hidden @ model.output_weight.t()
    references = batch["trg_out"][real["decoder"]][:, None]
    values[LOG_PROBABILITIES] = [logits.log_softmax(1).gather(1, references)]
    values[ALL_LOGITS] = [logits]
    return values


class Measured(NamedTuple):
    """A model after its updates: of each quantity the mean size, and the mean size of what the updates changed."""

    size: dict[str, float]
    change: dict[str, float]


def measure(recipe: Recipe, vocabs: tuple[int, int], batches: Sequence[Batch], seeds: int = 1) -> Measured:
    """Trains fresh models by an update on each batch, at the recipe's peak rate, and looks at the first batch. The mean
    over `seeds` models."""
    size: dict[str, list[float]] = {}  # of each model
    change: dict[str, list[float]] = {}
    for seed in range(recipe.seed, recipe.seed + seeds):
        model = new_model(recipe.model, *vocabs, seed, recipe.train.label_smoothing).to(batches[0].device)
        before = quantities(model, recipe, batches[0])
        engine = LocalEngine(model, recipe, batches[0].device)
        for batch in batches:
            engine.train_step([batch], batch.tokens, recipe.optimizer.lr)
        after = quantities(model, recipe, batches[0])
        for name, layers in after.items():
            differences = [x - y for x, y in zip(layers, before[name], strict=True)]
            size.setdefault(name, []).append(_magnitude(layers))
            change.setdefault(name, []).append(_magnitude(differences))
    return Measured({name: fmean(values) for name, values in size.items()},
                    {name: fmean(values) for name, values in change.items()})


def _magnitude(layers: Sequence[Tensor]) -> float:
    """The mean of the absolute values, averaged over the layers."""
    return fmean(float(x.abs().mean()) for x in layers)


def spread(values: Sequence[float]) -> float:
    """The largest over the smallest value; infinite if one is not finite or is zero."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return math.inf
    return max(values) / min(values)


def check_coordinates(
    recipe: Recipe, device: torch.device, widths: Sequence[int], depths: Sequence[int], updates: int, seeds: int,
    output: Path | None,
) -> str:
    """Measures all widths at the smallest depth and all depths at the smallest width, with and without `tuned_at`;
    writes `coordinates.json` and `coordinates.png`, and returns a table.

    Raises:
        UserError: the block, optimizer or another setting cannot carry over; the prepared data, or a part that the
            recipe names, are missing.
    """
    widths, depths = sorted(set(widths)), sorted(set(depths))
    smallest = Size(widths[0], depths[0], depths[0])
    sizes = {"width": [Size(width, depths[0], depths[0]) for width in widths],
             "depth": [Size(widths[0], depth, depth) for depth in depths]}
    check_parts(recipe)
    at_size(recipe, smallest, smallest)  # refuses early
    data = open_prepared(recipe)
    source, target = data.vocabs()
    stream = training_stream(recipe, data, stream_kind(recipe, data))
    batches = [cut_batch(stream, number % len(stream.plan(0)), TOKENS, number, device) for number in range(updates)]
    output = output or Path(recipe.run) / "coordinates"
    make_run_folder(output, "--output")
    work = {size: size.width**2 * (size.encoder_layers + 1) for size in sizes["width"] + sizes["depth"]}
    measured: dict[tuple[str, Size], Measured] = {}
    share = 100 / sum(work.values()) / len(RULES)
    with show_progress("coordinates: {:,} % measured", total=100, unit="%", desc="coordinates") as progress:
        done = 0.0
        for size in sorted(work):
            for rule in RULES:
                tried = at_size(recipe, size, smallest if rule == "carried" else None)
                measured[rule, size] = measure(tried, (source.size, target.size), batches, seeds)
                done += share * work[size]
                progress(round(done))
    ranges: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}  # by axis, rule, kind and quantity
    for axis, group in sizes.items():
        ranges[axis] = {}
        for rule in RULES:
            models = [measured[rule, size] for size in group]
            ranges[axis][rule] = {
                "size": {name: [model.size[name] for model in models] for name in models[0].size},
                "change": {name: [model.change[name] for model in models] for name in models[0].change}}
    with reporting(str(output), "free disk space, or name another folder with --output"):
        write_json(output / "coordinates.json", {
            "updates": updates, "rate": recipe.optimizer.lr, "seeds": seeds, "widths": widths, "depths": depths,
            "values": ranges})
        plot_coordinates(ranges, {"width": widths, "depth": depths}, output / "coordinates.png")
    return f"{table(ranges)}\n{output / 'coordinates.png'}"


def table(ranges: Mapping[str, Any]) -> str:
    """The spreads as text, those of the rule as it is in brackets, and which quantities are not flat; of axes with
    several sizes."""
    names = list(ranges["width"]["carried"]["size"])
    axes = [(axis, kind) for axis in ranges for kind in Measured._fields
            if len(ranges[axis]["carried"][kind][names[0]]) > 1]  # one size is neither flat nor not
    lines = ["largest over smallest value, with tuned_at (and without):", "",
             f"{'':<24}" + "".join(f"{f'{kind} by {axis}':>18}" for axis, kind in axes)]
    uneven = []
    for name in names:
        cells = []
        for axis, kind in axes:
            carried = spread(ranges[axis]["carried"][kind][name])
            plain = spread(ranges[axis]["plain"][kind][name])
            cells.append(f"{f'{carried:.2f} ({plain:.2f})':>18}")
            if carried > FLAT and name != ALL_LOGITS:
                uneven.append(f"{name} ({kind} by {axis})")
        lines.append(f"{name:<24}" + "".join(cells))
    result = "all flat"
    if uneven:
        result = "not flat: " + ", ".join(uneven)
    return "\n".join([*lines, "", f"within {FLAT:g}: {result}; {ALL_LOGITS} are not judged: what is random in them "
                      "falls with 1/√width"])
