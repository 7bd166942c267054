"""The doctor's pictures. Each function writes one PNG from numbers of the JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from deepnmt.extras.doctor.measures import HALF_MAX, Growth
from deepnmt.plots import COLOURS, DASHES, GREY, LEGEND, panels, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tree = Mapping[str, Any]
Squares = Mapping[str, Sequence[Sequence[float]]]
_FLOOR = 1e-12  # the least value on a logarithmic axis
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.03), **LEGEND}  # at the right of a panel


def plot_trial(courses: Mapping[str, Tree], path: Path) -> None:
    """What trials came to over their updates: what each does with its source, and its training loss.

    Args:
        courses: `verdict.Trial` by the name of the recipe, as mappings.
    """
    titles = {"encoder_common": "encoder: share of the common vector",
              "cross_attention_entropy": "cross-attention: entropy over its maximum",
              "source_gain": "worth of the source, nats a token", "loss": "training loss, nats a token"}
    figure, row = panels(list(titles.values()), "update of the trial", [""] * len(titles),
                         "What the encoder says, whether the decoder looks, and what it gains", share=False, columns=2)
    for number, (name, trial) in enumerate(courses.items()):
        for axes, kind in zip(row, titles, strict=True):
            if kind == "loss":
                points = list(enumerate(trial["losses"], 1))
            else:
                points = [(point["update"], point[kind]) for point in trial["source"]]
            updates, values = [], []
            for update, value in points:
                if math.isfinite(value):
                    updates.append(update)
                    values.append(value)
            axes.plot(updates, values, **style(number, len(values)), label=fill(name, 60))
    for axes in row[:2]:
        axes.set_ylim(0, 1.05)
    figure.legend(*row[-1].get_legend_handles_labels(), loc="outside lower center", **LEGEND)
    save(figure, path)


def plot_dependency(betas: Squares, path: Path) -> None:
    """β_ij of each stack as a heat map: row i is the input of branch i + 1, column j the branch it comes from."""
    _plot_squares({f"{side}, {len(rows) - 1} sub-layers": rows for side, rows in betas.items()}, path,
                  "β: how much of each branch's input comes from earlier branches", "β, a share",
                  "branch j (0: the stack's input)", "input of branch i + 1", first=0)


def plot_similarity(cosines: Squares, path: Path) -> None:
    """Mean cosines between layers' outputs, as a heat map."""
    _plot_squares({f"{side}, {len(rows)} layers": rows for side, rows in cosines.items()}, path,
                  "Similarity of the outputs of each two layers", "mean cosine", "layer", "layer", first=1)


def _plot_squares(
    tables: Squares, path: Path, title: str, scale: str, xlabel: str, ylabel: str, first: int,
) -> None:
    """A heat map for each table, NaN where its rows are shorter, with a common colour scale (viridis, also
    readable in print and for colour-blind readers); rows and columns are counted from `first`."""
    from matplotlib.ticker import MaxNLocator

    figure, row = panels(list(tables), xlabel, ylabel, title, share=False, columns=2)
    lowest = 0.0  # a cosine may be below
    for rows in tables.values():
        for values in rows:
            lowest = min(lowest, *values)
    for axes, rows in zip(row, tables.values(), strict=True):
        square = np.full((len(rows), len(rows)), np.nan)
        for index, values in enumerate(rows):
            square[index, : len(values)] = values
        low, high = first - 0.5, first - 0.5 + len(rows)
        image = axes.imshow(square, cmap="viridis", vmin=lowest, vmax=1, interpolation="nearest",
                            extent=(low, high, high, low))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    figure.colorbar(image, ax=row, shrink=0.7, label=scale).ax.tick_params(labelsize="small")
    save(figure, path)


def plot_growth(growths: Mapping[str, Mapping[str, Growth]], path: Path, title: str) -> None:
    """Output changes against depth: a panel for each kind of change, a line for each name, with the better fit.

    Args:
        growths: by kind of change ("noise", ...), then by the line's name.
        title: of the picture.
    """
    figure, column = panels(list(growths), "layers N", "share of the output's variance", title, share=False)
    for axes, lines in zip(column, growths.values(), strict=True):
        for number, (name, growth) in enumerate(lines.items()):
            look = style(number, len(growth.depths))
            span = np.linspace(min(growth.depths), max(growth.depths), 100)
            fit, term, words = growth.linear, span, "N"
            if growth.linear.r2 < growth.logarithmic.r2:
                fit, term, words = growth.logarithmic, np.log(span), "log N"
            if math.isfinite(fit.r2):
                axes.plot(span, fit.slope * term + fit.offset, **style(number))
                look["linestyle"] = "none"
                name += f": like {words}, R² {fit.r2:.3f}"
            axes.plot(growth.depths, growth.changes, **look, label=name)
        axes.set_ylim(0, (1.1 + 0.07 * len(lines)) * axes.get_ylim()[1])  # room for the names
        axes.legend(loc="upper left", **LEGEND)
    save(figure, path)


def plot_lines(
    lines: Mapping[str, Mapping[str, Sequence[float]]], path: Path, *, title: str, xlabel: str, ylabel: str,
    bound: tuple[float, str] | None = None, xs: Sequence[float] | None = None,
) -> None:
    """Lines on a logarithmic axis of at least one decade, a panel for each group, with the legend to its right.

    Args:
        lines: values by the panel's title, then by the line's name; zeros are plotted at 1e-12. A name has the same
            colour, dashes and marker in every panel.
        title, xlabel, ylabel: of the picture.
        bound: the height and name of a horizontal line.
        xs: the values' positions; 1, 2, … if not given.
    """
    figure, column = panels(list(lines), xlabel, ylabel, title)
    numbers: dict[str, int] = {}  # of each name's style
    for group in lines.values():
        for name in group:
            numbers.setdefault(name, len(numbers))
    for axes, group in zip(column, lines.values(), strict=True):
        for name, values in group.items():
            positions = range(1, len(values) + 1) if xs is None else xs
            axes.plot(positions, [max(value, _FLOOR) for value in values], **style(numbers[name], len(values)),
                      linewidth=1.2, label=name)
        axes.set_yscale("log")
        if bound is not None:
            axes.axhline(bound[0], color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, label=bound[1])
        if len(group) > 1 or bound is not None:
            axes.legend(**_BESIDE)
    mark_decades(column)
    save(figure, path)


def mark_decades(row: Sequence[Axes]) -> None:
    """Widens the shared logarithmic axis to at least one decade, so that small differences do not look large; labels it
    with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = row[0].get_ylim()
    missing = max(1.0, math.sqrt(10 * low / high))
    row[0].set_ylim(low / missing, high * missing)
    axis = row[0].yaxis
    marks = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_ranges(ranges: Mapping[str, Tree], path: Path) -> None:
    """Variance of every layer's output, and the largest magnitude in the layer, with the largest number of fp16."""
    groups: dict[str, dict[str, list[float]]] = {}
    for side in ("encoder", "decoder"):
        layers = [record for name, record in ranges.items() if name.startswith(f"{side}.")]
        groups[side] = {"variance of\nthe output": [layer["variance"] for layer in layers],
                        "largest\nmagnitude": [layer["largest"] for layer in layers]}
    plot_lines(groups, path, title="Size of every layer's activations, and the limit of fp16", xlabel="layer",
               ylabel="variance, magnitude", bound=(HALF_MAX, "largest number\nof fp16"))


def plot_half(half: Tree, path: Path) -> None:
    """The share of exact zeros among the gradients of each part, in fp16 and in fp32."""
    names = list(half["shares"])
    title = f"Gradients that are exactly zero in fp16, at loss scale {half['scale']:g}, and in fp32"
    figure, [axes] = panels([title], "", "share of gradients, %")
    positions = np.arange(len(names))
    for side, kind, shares, hatch, colour in ((-0.2, "fp16", half["shares"], "", COLOURS[0]),
                                              (0.2, "fp32", half["shares_fp32"], "////", "white")):
        axes.bar(positions + side, [100 * shares[name] for name in names], 0.4, label=kind, hatch=hatch, color=colour,
                 edgecolor=COLOURS[0], linewidth=0.6)
    axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))  # at least 1 %, so that noise does not fill the picture
    shown = range(0, len(names), max(1, len(names) // 12))
    labels = []
    for position in shown:
        label, layers, index = names[position].partition(".layers.")
        if layers:
            label += f" {int(index) + 1}"  # layers are counted from 1 in all pictures
        labels.append(label)
    axes.set_xticks(list(shown), labels, rotation=45, ha="right")
    figure.legend(loc="outside lower center", ncols=2, **LEGEND)
    save(figure, path)


def plot_displacements(pairs: Sequence[Tree], path: Path) -> None:
    """Relative norms of the gradient and the update of each attention matrix, a line over checkpoints for each.

    The colour shows the matrix (query, key, value, output), the dashes its attention.
    """
    titles = {"gradients": "gradient", "updates": "change from this checkpoint to the next"}
    figure, column = panels(list(titles.values()), "checkpoint, in updates of the run", "norm over the largest one",
                            "How unequal the gradients and changes of the attention matrices are")
    colours = dict(zip(("q", "k", "v", "out"), COLOURS, strict=False))
    dashes = dict(zip(("encoder self_attn", "decoder self_attn", "decoder cross_attn"), DASHES, strict=False))
    updates = [pair["update"] for pair in pairs]
    marker = "." if len(pairs) < 3 else None
    for axes, kind in zip(column, titles, strict=True):
        for name in pairs[0][kind]:
            side, _, _, attention, matrix = name.split(".")
            axes.plot(updates, [max(pair[kind][name], _FLOOR) for pair in pairs], color=colours[matrix],
                      linestyle=dashes[f"{side} {attention}"], alpha=0.6, linewidth=1, marker=marker)
        axes.set_yscale("log")
    mark_decades(column)
    for matrix, colour in colours.items():
        column[0].plot([], [], color=colour, label=matrix)
    for attention, dash in dashes.items():
        column[0].plot([], [], color=GREY, linestyle=dash, label=attention.replace(" ", "\n"))
    column[0].legend(**_BESIDE)
    save(figure, path)


def plot_coordinates(values: Tree, sizes: Mapping[str, Sequence[int]], path: Path) -> None:
    """What the updates changed of every quantity, over widths and depths, as a multiple of that of the smallest model.

    Args:
        values: by axis, rule, kind and quantity; see `coordinates.check_coordinates`.
        sizes: the points of each axis.
    """
    shown, titles = [], []
    for axis in values:
        for rule in values[axis]:
            shown.append((axis, rule))
            titles.append(f"{axis}, with tuned_at" if rule == "carried" else f"{axis}, without tuned_at")
    figure, row = panels(titles, "width or layers of a stack", "change, smallest model = 1",
                         "Change of each quantity after the updates", columns=2)
    for axes, (axis, rule) in zip(row, shown, strict=True):
        for number, (name, line) in enumerate(values[axis][rule]["change"].items()):
            axes.plot(sizes[axis], [value / max(line[0], _FLOOR) for value in line], **style(number, len(line)),
                      label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, **LEGEND)
    save(figure, path)
