"""What each layer of a trained model passes on, and what it is worth.

The variance of its output, the norm of its gradient, and how much the validation loss rises when the layer is left out,
as in Sun et al. 2025, The Curse of Depth; by how much it turns a token's vector; and what several layers are worth
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from deepnmt.batch import Batch
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import Split
from deepnmt.extras.doctor.measures import gradients, ranges
from deepnmt.extras.doctor.probes import block_of, layers_of, plain_loss, real_positions, watching
from deepnmt.files import markdown_table
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.plots import LEGEND, panels, save, style

SIDE_FIGURES = ("variance", "gradient", "worth")
IDLE, LITTLE = 0.01, 0.1  # nats a target token: of one layer, and of several together
BATCHES = 8  # of validation text, or up to 15

Figures = dict[str, dict[str, list[float]]]  # by side and by name, one for each layer
Groups = Mapping[str, Sequence[Figures]]  # by model, one for each seed


def measure(model: Transformer, valid: Split, tokens: int, device: torch.device) -> Figures:
    """`profile` on some batches, of so many tokens, of the validation text; nothing if a figure is not finite."""
    plan = plan_eval(valid.src_lengths, valid.trg_lengths, tokens)
    numbers = range(0, len(plan), max(1, len(plan) // BATCHES))
    found = profile(model, [collate(valid, plan[number], 0, device) for number in numbers])
    values = [value for side in found.values() for figures in side.values() for value in figures]
    return found if all(map(math.isfinite, values)) else {}


def profile(model: Transformer, batches: Sequence[Batch]) -> Figures:
    """For each side a list over its layers of each of `SIDE_FIGURES`, `turn` and `together`.

    Variance, gradient and turn are those of the middle batch; `worth` is what the loss rises by without the layer, and
    entry k of `together` what it rises by without the k + 1 layers of least worth, both in nats a target token.
    """
    middle, whole = batches[len(batches) // 2], loss_of(model, batches)
    sizes, slopes, angles = ranges(model, middle), gradients(model, middle).outputs, turns(model, middle)
    found: Figures = {}
    for side in SIDES:
        layers = layers_of(model, side)
        names = [f"{side}.layers.{index}" for index in range(len(layers))]
        worth = [loss_without([layer], model, batches) - whole for layer in layers]
        least = [layers[index] for index in sorted(range(len(layers)), key=worth.__getitem__)]
        found[side] = {"variance": [sizes[name]["variance"] for name in names],
                       "gradient": [slopes[f"{name}.ffn"] for name in names],
                       "worth": worth,
                       "turn": angles[side],
                       "together": [loss_without(least[:count], model, batches) - whole
                                    for count in range(1, 1 + len(least))]}
    return found


def turns(model: Transformer, batch: Batch) -> dict[Side, list[float]]:
    """The angle in degrees between what a layer takes and what it returns, the mean over the tokens of a batch."""
    points: dict[str, Tensor] = {}
    with watching(model, points.__setitem__):
        plain_loss(model, batch)
    found = {}
    for side, real in real_positions(batch).items():
        names = [f"{side}.input", *(f"{side}.layers.{index}.ffn" for index in range(len(layers_of(model, side))))]
        passed = pairwise(points[name][real] for name in names)
        found[side] = [math.degrees(cosine_similarity(*pair, dim=-1).clamp(-1, 1).acos().mean()) for pair in passed]
    return found


def loss_of(model: Transformer, batches: Sequence[Batch]) -> float:
    """The plain loss in nats a target token."""
    return sum(plain_loss(model, batch) * batch.tokens for batch in batches) / sum(batch.tokens for batch in batches)


def loss_without(left_out: Sequence[nn.Module], model: Transformer, batches: Sequence[Batch]) -> float:
    """The loss when the stream passes these layers by, as with LayerDrop."""
    with hooks() as handles:
        for layer in left_out:
            handles.append(layer.register_forward_hook(
                lambda module, inputs, output: block_of(module).skip(inputs[0], output)))
        return loss_of(model, batches)


def table(measured: Groups) -> str:
    """A row for each model and side, the means of its seeds: variance of the last layer's output over that of the
    first, gradient of the first over that of the last; the median angle by which a layer turns a vector; the median
    worth of a layer, the largest, the share of layers worth less than IDLE nats, and how many can be left out together
    for less than LITTLE nats."""
    rows = [("model", "side", "runs", "variance, last / first", "gradient, first / last", "median turn", "median worth",
             "largest", f"below {IDLE}", f"together below {LITTLE}")]
    for model, own in measured.items():
        for side in SIDES:
            variances, gradients, worths = ([run[side][name] for run in own] for name in SIDE_FIGURES)
            angles = [median(run[side]["turn"]) for run in own if "turn" in run[side]]
            together = [_most(run[side]["together"]) for run in own if "together" in run[side]]
            rows.append((model, side, str(len(own)),
                         f"{fmean(_ratio(each[-1], each[0]) for each in variances):.2g}",
                         f"{fmean(_ratio(each[0], each[-1]) for each in gradients):.2g}",
                         f"{fmean(angles):.1f}°" if angles else "not measured",
                         f"{fmean(map(median, worths)):+.3f}", f"{fmean(map(max, worths)):+.2f}",
                         f"{100 * fmean(fmean(value < IDLE for value in worth) for worth in worths):.0f} %",
                         f"{fmean(together):.1f} of {len(worths[0])}" if together else "not measured"))
    return markdown_table(rows)


def _most(together: Sequence[float]) -> int:
    """How many layers can be left out for less than LITTLE nats."""
    return next((count for count, rise in enumerate(together) if rise >= LITTLE), len(together))


def plot(measured: Groups, path: Path) -> None:
    """What each layer is worth and what several are together, by model and side; the means of seeds."""
    figure, grid = panels([*SIDES, "", ""], "number left out together, least first",
                          "rise of the loss, nats a target token", columns=2)
    for index, axes in enumerate(grid):
        side, name = SIDES[index % 2], ("worth", "together")[index // 2]
        for number, (model, own) in enumerate(measured.items()):
            curves = [run[side][name] for run in own if name in run[side]]
            means = [fmean(values) for values in zip(*curves, strict=True)]
            axes.plot(range(1, 1 + len(means)), means, **style(number), linewidth=1.3, label=model)
        axes.set_yscale("symlog", linthresh=IDLE)
        axes.yaxis.set_major_formatter("{x:g}")
        if name == "worth":
            axes.set_xlabel("layer that is left out")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
    save(figure, path)


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.inf
