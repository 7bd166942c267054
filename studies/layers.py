"""What each layer of a trained model passes on, and what it is worth.

The variance of its output, the norm of its gradient, and how much the validation loss rises when the layer is left out,
as in Sun et al. 2025, The Curse of Depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from torch import nn

from deepnmt.batch import Batch
from deepnmt.extras.doctor.measures import gradients, ranges
from deepnmt.extras.doctor.probes import block_of, layers_of, plain_loss
from deepnmt.files import markdown_table
from deepnmt.model.blocks import SIDES
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.plots import LEGEND, panels, save, style
from studies.runs import Record
from studies.variants import Variant

SIDE_FIGURES = ("variance", "gradient", "worth")
IDLE = 0.01  # nats a target token


def profile(model: Transformer, batches: Sequence[Batch]) -> dict[str, dict[str, list[float]]]:
    """For each side a list over its layers of each of `SIDE_FIGURES`. Variance and gradient are those of the middle
    batch; `worth` is what the loss rises by without the layer, nats a target token."""
    middle, whole = batches[len(batches) // 2], loss_of(model, batches)
    sizes, slopes = ranges(model, middle), gradients(model, middle).outputs
    found: dict[str, dict[str, list[float]]] = {}
    for side in SIDES:
        layers = layers_of(model, side)
        names = [f"{side}.layers.{index}" for index in range(len(layers))]
        found[side] = {"variance": [sizes[name]["variance"] for name in names],
                       "gradient": [slopes[f"{name}.ffn"] for name in names],
                       "worth": [loss_without(layer, model, batches) - whole for layer in layers]}
    return found


def loss_of(model: Transformer, batches: Sequence[Batch]) -> float:
    """The plain loss in nats a target token."""
    return sum(plain_loss(model, batch) * batch.tokens for batch in batches) / sum(batch.tokens for batch in batches)


def loss_without(layer: nn.Module, model: Transformer, batches: Sequence[Batch]) -> float:
    """The loss when the stream passes a layer by, as with LayerDrop."""
    with hooks() as handles:
        handles.append(layer.register_forward_hook(
            lambda module, inputs, output: block_of(module).skip(inputs[0], output)))
        return loss_of(model, batches)


def table(runs: Sequence[Record]) -> str:
    """A row for each block, depth and side, the means of its seeds: variance of the last layer's output over that of
    the first, gradient of the first over that of the last; the median worth of a layer, the largest, and the share of
    layers worth less than IDLE nats."""
    rows = [("block", "layers", "side", "runs", "variance, last / first", "gradient, first / last", "median worth",
             "largest", f"below {IDLE}")]
    groups: dict[tuple[str, int], list[Record]] = {}
    for run in runs:
        variant = Variant(**run["system"])
        groups.setdefault((variant.word, variant.layers), []).append(run["layers"])
    for (word, layers), own in groups.items():
        for side in SIDES:
            variances, gradients, worths = ([run[side][name] for run in own] for name in SIDE_FIGURES)
            rows.append((word, f"{layers}L-{layers}L", side, str(len(own)),
                         f"{fmean(_ratio(each[-1], each[0]) for each in variances):.2g}",
                         f"{fmean(_ratio(each[0], each[-1]) for each in gradients):.2g}",
                         f"{fmean(map(median, worths)):+.3f}", f"{fmean(map(max, worths)):+.2f}",
                         f"{100 * fmean(fmean(value < IDLE for value in worth) for worth in worths):.0f} %"))
    return markdown_table(rows)


def plot(runs: Sequence[Record], path: Path) -> None:
    """What each layer is worth, by block and side; the means of seeds. The runs have one depth."""
    worths: dict[str, list[Record]] = {}
    for run in runs:
        worths.setdefault(Variant(**run["system"]).word, []).append(run["layers"])
    figure, grid = panels(SIDES, "layer that is left out", "rise of the loss, nats a target token", columns=2)
    for axes, side in zip(grid, SIDES, strict=True):
        for number, (word, own) in enumerate(worths.items()):
            means = [fmean(values) for values in zip(*(run[side]["worth"] for run in own), strict=True)]
            axes.plot(range(1, 1 + len(means)), means, **style(number), linewidth=1.3, label=word)
        axes.set_yscale("symlog", linthresh=IDLE)
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    save(figure, path)


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.inf
