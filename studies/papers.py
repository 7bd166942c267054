"""The papers' analyses at a small size, written as JSON and a picture.

Those of initial weights use one batch of random tokens, those that train use the toy task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from deepnmt.batch import Batch
from deepnmt.config import Model, Optimizer, Schedule
from deepnmt.errors import UserError
from deepnmt.extras.doctor.measures import (
    Gradients,
    Growth,
    displacement,
    fit_line,
    gradients,
    layer_similarity,
    noise_change,
)
from deepnmt.extras.doctor.plots import plot_growth, plot_lines, plot_similarity
from deepnmt.extras.doctor.variants import fresh_model
from deepnmt.files import make_run_folder, write_json
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.transformer import Transformer
from deepnmt.optim.schedules import learning_rate
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from studies.benchmarks.gpu_measure import random_batch
from studies.plots import plot_cells
from studies.side_by_side import train_side_by_side
from studies.toy_task import ToyTask

_VOCAB = 1000
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 18, 25, 36, 50, 70, 100)
_PRE_LN_PAPER = (2, 4, 6, 8, 10, 12, 14, 18, 24, 36)
_RATES, _BETAS = (1e-3, 3e-3, 1e-2), (0.9, 0.95, 0.98, 0.99, 0.999)  # of `optimizers`: 15 settings, as in the paper
_WARMUPS = (0, 10, 25, 50, 100)  # of `warmup`
_UPDATES = 200  # of a training
_EPOCHS, _EPOCH = 16, 25  # of `unbalanced`: epochs, and updates in each


@dataclass(frozen=True)
class Small:
    """The size: model width (with 4 heads, and an FFN twice as wide), sentences of 20 tokens in the batch, number of
    seeds, and most layers."""

    width: int = 64
    sentences: int = 16
    trials: int = 5
    deepest: int = 100

    def models(
        self, block: str, encoder: int, decoder: int, init: str = "auto"
    ) -> Iterator[tuple[Transformer, Batch]]:
        """For each seed a fresh model with one block, without dropout, and a batch of random tokens: 19 and eos per
        sentence and side."""
        shape = self.shape(block, encoder, decoder, init)
        for seed in range(1, self.trials + 1):
            batch = random_batch(self.sentences, 20, _VOCAB, seed, Ranks.alone())
            yield fresh_model(shape, _VOCAB, _VOCAB, seed, [batch]), batch

    def shape(self, block: str, encoder: int, decoder: int, init: str = "auto") -> Model:
        """A model of this size without dropout."""
        return Model.model_validate({
            "width": self.width, "heads": 4, "ffn": 2 * self.width, "dropout": 0.0, "max_length": 32,
            **{side: {"block": block, "layers": layers, "init": init}
               for side, layers in (("encoder", encoder), ("decoder", decoder))}})

    def toy_models(self, task: ToyTask, block: str, layers: int) -> list[Transformer]:
        """For each seed a fresh model for the toy task."""
        size, first = task.vocabulary, task.batch(0, self.sentences)
        return [fresh_model(self.shape(block, layers, layers), size, size, seed, [first])
                for seed in range(1, self.trials + 1)]


def reproduce(name: str, folder: Path, small: Small) -> str:
    """Runs one experiment, writes `folder/NAME.json` and `.png`, and returns the results as lines of text.

    Raises:
        UserError: an unknown experiment, a width that is no multiple of the heads, too few layers, or a folder that
            cannot be written.
    """
    if name not in EXPERIMENTS:
        raise UserError(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    if small.width % 4:
        raise UserError(f"--width is {small.width}, must be a multiple of 4, the number of heads, for example 64")
    if small.deepest < MIN_LAYERS[name]:
        raise UserError(f"--deepest is {small.deepest}, must be {MIN_LAYERS[name]} or more for {name}")
    make_run_folder(folder, "--output")
    results, lines = EXPERIMENTS[name](small, folder / f"{name}.png")
    write_json(folder / f"{name}.json", {"experiment": name, "settings": vars(small), **results})
    return "\n".join([*lines, str(folder / f"{name}.png")])


def corollaries(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Output change of encoders of 1 to 100 layers under noise of 1 % (Admin, corollaries 1 and 2, figure 4 left).

    Medians over seeds, because in deep Post-LN models a few seeds lie far above the others.
    """
    depths = [depth for depth in _DEPTHS if depth <= small.deepest]
    growths: dict[str, Growth] = {}
    by_seed: dict[str, list[list[float]]] = {}
    for block in ("post_ln", "pre_ln", "admin"):
        by_seed[block] = []
        for depth in depths:
            changes = [noise_change(*fresh, trials=1)["encoder"][0] for fresh in small.models(block, depth, 1)]
            by_seed[block].append(changes)
            print_status(f"{block} {depth}L: {median(changes):.3g} ({min(changes):.3g} to {max(changes):.3g})")
        growths[block] = Growth.of(depths, list(map(median, by_seed[block])))
    plot_growth({"encoders of N layers, noise of 1 % on every matrix": growths}, picture,
                "Change of the output under noise, against depth")
    lines = [f"{block}: R² to N {growth.linear.r2:.3f}, to log N {growth.logarithmic.r2:.3f}; change "
             f"{growth.changes[0]:.2g} at {depths[0]}L, {growth.changes[-1]:.2g} at {depths[-1]}L"
             for block, growth in growths.items()]
    return {"growth": {block: asdict(growth) for block, growth in growths.items()}, "by_seed": by_seed}, lines


def vanishing(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Gradients of sub-layers' outputs at 18L-18L, medians over seeds (Admin, figure 3; B2T, figures 3 and 4)."""
    layers = min(18, small.deepest)
    norms: dict[str, list[Gradients]] = {}
    for name in ("post_ln", "pre_ln", "b2t, xavier", "b2t, depth_scaled", "admin"):
        block, _, init = name.partition(", ")
        norms[name] = [gradients(*fresh) for fresh in small.models(block, layers, layers, init or "auto")]
        print_status(f"{name}: {small.trials} seeds")

    def medians(name: str, side: str, part: str) -> list[float]:
        return [median(values) for values in zip(*(_tops(each, side, part) for each in norms[name]), strict=True)]

    panels: dict[str, Mapping[str, Sequence[float]]] = {
        **{side: {name: medians(name, side, "ffn") for name in norms} for side in SIDES},
        "Post-LN decoder, by sub-layer": {part: medians("post_ln", "decoder", part)
                                          for part in ("self_attn", "cross_attn", "ffn")}}
    plot_lines(panels, picture, title=f"Gradient of every layer's output before training, {layers}L-{layers}L",
               xlabel="layer", ylabel="gradient norm")
    ratios: dict[str, dict[str, float]] = {}
    for name, seeds in norms.items():
        tops = {side: [_tops(each, side, "ffn") for each in seeds] for side in SIDES}
        ratios[name] = {side: median(each[0] / each[-1] for each in tops[side]) for side in SIDES}
    lines = [f"{name}: lowest over highest layer's gradient, encoder {ratio['encoder']:.3g}, decoder "
             f"{ratio['decoder']:.3g}" for name, ratio in ratios.items()]
    lines.append("Post-LN decoder, factors on the gradient on its way down, geometric means over layers:")
    by_seed = [gradient_factors(each) for each in norms["post_ln"]]
    factors = {}
    for name in by_seed[0]:
        values = [each[name] for each in by_seed]
        factors[name] = median(values)
        lines.append(f"  {name} {factors[name]:.3f} ({min(values):.3f} to {max(values):.3f})")
    return {"gradients": {name: list(map(asdict, seeds)) for name, seeds in norms.items()},
            "lowest_over_highest": ratios, "factors": factors}, lines


def gradient_factors(norms: Gradients) -> dict[str, float]:
    """The factors on the gradient's norm on its way down a Post-LN decoder, geometric means over the layers.

    First those of whole sub-layers, from one output to the one below (Admin, figure 3), then those of the six steps of
    a layer, three norms and three residual sums (B2T, figure 4, whose points (1) to (5) are the inner ones).
    """
    tops = _tops(norms, "decoder", "ffn")
    # For each layer from the top down: its output, points (5) to (1), and the output of the layer below, if any.
    chains = [[tops[index], *reversed(inner), *tops[index - 1 : index]]
              for index, inner in enumerate(norms.places.values())]
    pairs = {
        "output of the FFN to that of cross-attention": (0, 2),
        "output of cross-attention to that of self-attention": (2, 4),
        "output of self-attention to that of the FFN below": (4, 6),
        "norm after the FFN": (0, 1), "FFN": (1, 2), "norm after cross-attention": (2, 3), "cross-attention": (3, 4),
        "norm after self-attention": (4, 5), "self-attention": (5, 6),
    }
    return {name: math.exp(fmean(math.log(chain[low] / chain[high]) for chain in chains if low < len(chain)))
            for name, (high, low) in pairs.items()}


def places(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Gradient norms at the five points of Post-LN decoder layers at 18L-18L, medians over seeds (B2T, figures 4, 7).

    (1) and (2) are the sum before and the output of the norm after self-attention, (3) and (4) after cross-attention,
    (5) is the sum before the last norm.
    """
    layers = min(18, small.deepest)
    shown = dict.fromkeys((1, (layers + 1) // 2, layers))
    by_seed = [gradients(*fresh).places for fresh in small.models("post_ln", layers, layers)]
    norms = {f"decoder layer {number}": [median(values) for values in zip(
        *(seed[f"decoder.layers.{number - 1}"] for seed in by_seed), strict=True)] for number in shown}
    plot_lines({"": norms}, picture, xs=range(1, 6), xlabel="point of the layer, from its bottom",
               ylabel="gradient norm",
               title=f"Gradients inside Post-LN decoder layers before training, {layers}L-{layers}L")
    lines = [f"{name}: " + ", ".join(f"({place}) {value:.3g}" for place, value in enumerate(values, 1))
             for name, values in norms.items()]
    return {"norms": norms}, lines


def similarity(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Cosines between the outputs of the layers of trained 6L-6L models (B2T, figure 5).

    The toy task, Adam with a peak rate of 1e-3 and a warm-up of 50 updates. Means over seeds.
    """
    import torch

    task, layers = ToyTask(), min(6, small.deepest)
    schedule, probe = Schedule(name="linear", warmup=min(50, _UPDATES // 2)), task.batch(0, 8 * small.sentences)
    squares: dict[str, list[list[float]]] = {}
    lines = []
    for block in ("post_ln", "pre_ln", "b2t"):
        cosines: dict[Side, list[list[list[float]]]] = {side: [] for side in SIDES}
        losses = []
        for model in small.toy_models(task, block, layers):
            adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
            for update in range(1, _UPDATES + 1):
                batch = task.batch(update, small.sentences)
                adam.param_groups[0]["lr"] = learning_rate(1e-3, schedule, update, _UPDATES)
                adam.zero_grad()
                (model(batch).loss / batch.tokens).backward()
                adam.step()
            losses.append(float(model(probe).loss.detach() / probe.tokens))
            for side in SIDES:
                cosines[side].append(layer_similarity(model, probe, side))
        print_status(f"{block}: {small.trials} seeds")
        for side in SIDES:
            squares[f"{block} {side}"] = [[fmean(values) for values in zip(*rows, strict=True)]
                                          for rows in zip(*cosines[side], strict=True)]
        lines.append(f"{block}: loss {median(losses):.2f}; cosine of first and last layer, "
                     + ", ".join(f"{side} {squares[f'{block} {side}'][-1][0]:.2f}" for side in SIDES))
    plot_similarity(squares, picture)
    return {"cosines": squares}, lines


def _tops(norms: Gradients, side: str, part: str) -> list[float]:
    """Gradient norms of the outputs of one kind of sub-layer, from the bottom."""
    return [value for name, value in norms.outputs.items() if name.startswith(f"{side}.") and name.endswith(part)]


def last_ffn(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Gradient norm of the decoder's last fc2 against depth (Xiong et al. 2020, theorem 1 and figure 3 c, d)."""
    depths = [depth for depth in _PRE_LN_PAPER if depth <= small.deepest]
    norms: dict[str, list[float]] = {"post_ln": [], "pre_ln": []}
    for block, values in norms.items():
        for depth in depths:
            values.append(fmean(gradients(*fresh).last_ffn for fresh in small.models(block, depth, depth)))
            print_status(f"{block} {depth}L-{depth}L: {values[-1]:.4g}")
    plot_lines({"": norms}, picture, xs=depths, xlabel="layers of each stack", ylabel="gradient norm",
               title="Gradient of the decoder's last FFN matrix (fc2) before training, against depth")
    slopes = {block: fit_line([*map(math.log, depths)], [*map(math.log, values)]) for block, values in norms.items()}
    lines = [f"{block}: {values[0]:.3g} at {depths[0]}L, {values[-1]:.3g} at {depths[-1]}L, about "
             f"L^{slopes[block].slope:.2f} (R² {slopes[block].r2:.2f})" for block, values in norms.items()]
    return {"depths": depths, "norms": norms, "power": {block: fit.slope for block, fit in slopes.items()}}, lines


def optimizers(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Final losses on the toy task without a warm-up, over Adam's β2 and the peak rate (Admin, figure 10)."""
    columns = {f"{beta:g}": (Optimizer(betas=[0.9, beta]), Schedule(name="linear", warmup=0)) for beta in _BETAS}
    return _final_losses(small, picture, ("post_ln", "pre_ln", "admin"), columns, "Adam's β2", "without a warm-up")


def warmup(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Final losses on the toy task over the length of the warm-up and the peak rate (Xiong et al. 2020, figure 2)."""
    columns = {str(length): (Optimizer(betas=[0.9, 0.98]), Schedule(name="linear", warmup=length))
               for length in _WARMUPS}
    return _final_losses(small, picture, ("post_ln", "pre_ln"), columns, "updates of warm-up", "against the warm-up")


def _final_losses(
    small: Small, picture: Path, blocks: Sequence[str], columns: Mapping[str, tuple[Optimizer, Schedule]],
    xlabel: str, what: str,
) -> tuple[dict[str, Any], list[str]]:
    """Losses after 200 updates of the toy task with linear decay, by block, peak rate and column.

    A final loss is the mean of the last 20 updates, medians over seeds.
    """
    task, layers, updates = ToyTask(), min(6, small.deepest), range(1, _UPDATES + 1)
    bar = task.target_only
    finals: dict[str, list[list[list[float]]]] = {}  # by block, rate, column and seed
    for block in blocks:
        models = small.toy_models(task, block, layers)
        runs = []
        for name, (optimizer, schedule) in columns.items():
            rates = [rate for rate in _RATES for _ in models]
            losses = [*train_side_by_side(
                models * len(_RATES), (task.batch(update, small.sentences) for update in updates),
                ([learning_rate(rate, schedule, update, _UPDATES) for rate in rates] for update in updates),
                optimizer)]
            last = [fmean(run) for run in zip(*losses[-20:], strict=True)]
            runs.append([last[start : start + len(models)] for start in range(0, len(last), len(models))])
            print_status(f"{block}, {xlabel} {name}: {[round(median(seeds), 2) for seeds in runs[-1]]}")
        finals[block] = [list(row) for row in zip(*runs, strict=True)]
    cells = {block: [[median(seeds) for seeds in row] for row in rows] for block, rows in finals.items()}
    plot_cells(cells, picture, [f"{rate:g}" for rate in _RATES], list(columns), bar,
               title=f"Final loss {what}, {layers}L-{layers}L; bold: does not use the source",
               xlabel=xlabel, ylabel="peak rate", scale="nats per target token")
    lines = []
    for name, rows in cells.items():
        flat = [value for row in rows for value in row]
        other = [value for row in cells["pre_ln"] for value in row]
        better = sum(value < min(beside, bar) for value, beside in zip(flat, other, strict=True))
        lines.append(f"{name}: {sum(value < bar for value in flat)} of {len(flat)} settings learned, best "
                     f"{min(flat):.2f}" + (f", {better} of these lower than pre_ln" if name != "pre_ln" else ""))
    return {"rates": _RATES, "columns": list(columns), "bar": bar, "finals": finals}, lines


def unbalanced(small: Small, picture: Path) -> tuple[dict[str, Any], list[str]]:
    """Gradients and changes of self-attention's matrices in a Pre-LN encoder, epoch by epoch (Admin, figures 5 and 11).

    The toy task, Adam at 1e-3, one seed. Norms are relative to the largest attention matrix's of the network, geometric
    means over the layers.
    """
    import torch

    task, layers = ToyTask(), min(18, small.deepest)
    model = small.toy_models(task, "pre_ln", layers)[0].train()
    adam = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.98), eps=1e-9)
    pairs: list[dict[str, dict[str, float]]] = []
    for epoch in range(_EPOCHS):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norms = gradients(model, task.batch(0, 8 * small.sentences)).matrices
        for update in range(epoch * _EPOCH + 1, (epoch + 1) * _EPOCH + 1):
            batch = task.batch(update, small.sentences)
            adam.zero_grad()
            (model(batch).loss / batch.tokens).backward()
            adam.step()
        pairs.append(displacement(before, {name: p.detach() for name, p in model.named_parameters()}, norms))
        print_status(f"epoch {epoch + 1} of {_EPOCHS}")

    def means(kind: str, attention: str, matrix: str) -> list[float]:
        side, part = attention.split()
        return [math.exp(fmean(math.log(max(value, 1e-12)) for name, value in pair[kind].items()
                               if name.startswith(side) and name.endswith(f"{part}.{matrix}"))) for pair in pairs]

    lines = []
    for attention in ("encoder self_attn", "decoder self_attn", "decoder cross_attn"):
        found = [{matrix: math.exp(fmean(map(math.log, means(kind, attention, matrix))))
                  for matrix in ("q", "k", "v", "out")} for kind in ("gradients", "updates")]
        lines.append(f"{attention}: " + "; ".join(
            f"{kind} " + ", ".join(f"{matrix} {value:.3f}" for matrix, value in by.items())
            + f" (largest {max(by.values()) / min(by.values()):.1f} × smallest)"
            for kind, by in zip(("gradients", "changes"), found, strict=True)))
    plot_lines({title: {matrix: means(kind, "encoder self_attn", matrix) for matrix in ("q", "k", "v", "out")}
                for kind, title in (("gradients", "gradient"), ("updates", "change until the next epoch"))},
               picture, title=f"Self-attention's matrices in a Pre-LN encoder of {layers} layers, while it trains",
               xlabel=f"epoch of {_EPOCH} updates", ylabel="norm over the largest one")
    return {"pairs": pairs}, lines


Experiment = Callable[[Small, Path], tuple[dict[str, Any], list[str]]]
EXPERIMENTS: dict[str, Experiment] = {"corollaries": corollaries, "vanishing": vanishing, "last_ffn": last_ffn,
                                      "places": places,
                                      "optimizers": optimizers, "warmup": warmup, "unbalanced": unbalanced,
                                      "similarity": similarity}
MIN_LAYERS = {"corollaries": 3, "vanishing": 2, "last_ffn": 6, "places": 1, "optimizers": 1, "warmup": 1,
              "unbalanced": 1, "similarity": 2}  # fits need three
