"""The doctor's pictures: one function a picture, each writes one PNG from the numbers that the JSON file holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepnmt.doctor.measures import HALF_MAX, Growth
from deepnmt.plots import COLOURS, GREY, HEIGHT, panels, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Tree = Mapping[str, Any]
Squares = Mapping[str, Sequence[Sequence[float]]]
_FLOOR = 1e-12  # the least value on a logarithmic axis
_NAMES_A_ROW = 4  # of a legend below its panel


def plot_dependency(betas: Squares, path: Path) -> None:
    """β_ij of each stack as a picture of squares: row i what enters branch i + 1, column j where it comes from."""
    _plot_squares({f"{side}: β of {len(rows) - 1} sub-layers": rows for side, rows in betas.items()}, path,
                  "branch j (0: the stack's input)", "input of branch i + 1", "viridis", first=0)


def plot_similarity(cosines: Squares, path: Path) -> None:
    """Mean cosines between layers' outputs."""
    _plot_squares({f"{side}: cosine of layers' outputs": rows for side, rows in cosines.items()}, path, "layer",
                  "layer", "magma", first=1)


def _plot_squares(tables: Squares, path: Path, xlabel: str, ylabel: str, colours: str, first: int) -> None:
    """A square for each table, NaN where its rows are shorter; rows and columns are counted from `first`."""
    from matplotlib.ticker import MaxNLocator

    figure, row = panels(list(tables), xlabel, ylabel, share=False)
    for axes, rows in zip(row, tables.values(), strict=True):
        square = np.full((len(rows), len(rows)), np.nan)
        for index, values in enumerate(rows):
            square[index, : len(values)] = values
        low, high = first - 0.5, first - 0.5 + len(rows)
        least = min(0.0, float(np.nanmin(square)))  # cosines may be negative, shares are not
        image = axes.imshow(square, cmap=colours, vmin=least, vmax=1, interpolation="nearest", aspect="auto",
                            extent=(low, high, high, low))
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False)
    save(figure, path)


def plot_growth(growths: Mapping[str, Mapping[str, Growth]], path: Path, title: str) -> None:
    """Output changes against depth: a panel for each kind of change, a line for each name, with the better fit.

    Args:
        growths: by kind of change ("noise", ...), then by the line's name.
        title: over the picture.
    """
    figure, row = panels(list(growths), "layers N", "change of the output, share of its variance", title, share=False)
    for axes, lines in zip(row, growths.values(), strict=True):
        for number, (name, growth) in enumerate(lines.items()):
            look = style(number)
            linear = not growth.linear.r2 < growth.logarithmic.r2
            fit = growth.linear if linear else growth.logarithmic
            axes.plot(growth.depths, growth.changes, "o", color=look["color"], markersize=4)
            if math.isfinite(fit.r2):
                span = np.linspace(min(growth.depths), max(growth.depths), 100)
                axes.plot(span, fit.slope * (span if linear else np.log(span)) + fit.offset, **look,
                          label=f"{name}, fit to {'N' if linear else 'log N'}: R² {fit.r2:.3f}")
            else:
                axes.plot(growth.depths, growth.changes, color=look["color"], label=name)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    save(figure, path)


def plot_lines(
    lines: Mapping[str, Mapping[str, Sequence[float]]], path: Path, *, title: str, xlabel: str, ylabel: str,
    bound: tuple[float, str] | None = None, xs: Sequence[float] | None = None,
) -> None:
    """Lines on a logarithmic axis of a decade or more, a panel for each group, its lines' names below it.

    Args:
        lines: values by the panel's title, then by the line's name; values of zero are drawn at 1e-12.
        title, xlabel, ylabel: of the picture.
        bound: a value to draw across, and what it is.
        xs: where the values stand; counted from 1 if not given.
    """
    alone = len(lines) == 1
    figure, row = panels([title] if alone else list(lines), xlabel, ylabel, "" if alone else title)
    names = max((len(group) + (bound is not None) for group in lines.values()), default=0)
    figure.set_figheight(HEIGHT + 0.22 * math.ceil(names / _NAMES_A_ROW))
    for axes, group in zip(row, lines.values(), strict=True):
        for number, (name, values) in enumerate(group.items()):
            axes.plot(xs if xs is not None else range(1, len(values) + 1), [max(value, _FLOOR) for value in values],
                      **style(number), marker="o", markersize=3, label=name)
        axes.set_yscale("log")
        if bound is not None:
            axes.axhline(bound[0], color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, label=bound[1])
        if len(group) > 1:
            axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13),
                        ncols=_NAMES_A_ROW)
    _decades(row)
    save(figure, path)


def _decades(row: Sequence[Axes]) -> None:
    """A decade at least of the logarithmic axis that the panels share, lest small differences look large, and plain
    numbers beside it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = row[0].get_ylim()
    missing = max(1.0, math.sqrt(10 * low / high))
    row[0].set_ylim(low / missing, high * missing)
    axis = row[0].yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def plot_ranges(ranges: Mapping[str, Tree], path: Path) -> None:
    """Variance of every layer's output, and the largest magnitude in the layer, with the end of fp16."""
    groups: dict[str, dict[str, list[float]]] = {}
    for side in ("encoder", "decoder"):
        own = [record for name, record in ranges.items() if name.startswith(f"{side}.")]
        groups[side] = {"variance of the output": [record["variance"] for record in own],
                        "largest magnitude": [record["largest"] for record in own]}
    plot_lines(groups, path, title="Activations", xlabel="layer", ylabel="variance, magnitude",
               bound=(HALF_MAX, "end of fp16"))


def plot_half(half: Tree, path: Path) -> None:
    """The share of exact zeros among fp16 gradients of each part, beside that of fp32."""
    names = list(half["shares"])
    figure, [axes] = panels([f"Exact zeros of fp16 gradients at loss scale {half['scale']:g}"], "", "share of elements")
    positions = np.arange(len(names))
    axes.bar(positions - 0.2, [*half["shares"].values()], 0.4, color=COLOURS[1], label="fp16")
    axes.bar(positions + 0.2, [half["shares_fp32"][name] for name in names], 0.4, color=COLOURS[5], label="fp32")
    shown = range(0, len(names), max(1, len(names) // 12))
    labels = []
    for side, layers, index in (names[position].partition(".layers.") for position in shown):
        labels.append(f"{side} {int(index) + 1}" if layers else side)  # counted from 1, as in all pictures
    axes.set_xticks(list(shown), labels, rotation=45, ha="right")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    save(figure, path)


def plot_displacements(pairs: Sequence[Tree], path: Path) -> None:
    """Relative norms of gradient and of update of each attention matrix, a line of checkpoints for each.

    The colour is the matrix (query, key, value, output), the dashes are the attention it belongs to.
    """
    kinds = ("gradients", "updates")
    figure, row = panels(kinds, "update of the run", "norm, share of the largest matrix's",
                         "Attention matrices over checkpoints")
    colours = dict(zip(("q", "k", "v", "out"), COLOURS, strict=False))
    dashes = {"encoder self_attn": "-", "decoder self_attn": "--", "decoder cross_attn": ":"}
    for axes, kind in zip(row, kinds, strict=True):
        for name in pairs[0][kind]:
            side, _, _, attention, matrix = name.split(".")
            axes.plot([pair["update"] for pair in pairs], [max(pair[kind][name], _FLOOR) for pair in pairs],
                      color=colours[matrix], linestyle=dashes[f"{side} {attention}"], alpha=0.6, linewidth=1,
                      marker="." if len(pairs) < 3 else None)
        axes.set_yscale("log")
    _decades(row)
    for matrix, colour in colours.items():
        row[0].plot([], [], color=colour, label=matrix)
    for attention, dash in dashes.items():
        row[0].plot([], [], color=GREY, linestyle=dash, label=attention)
    figure.legend(loc="outside lower center", ncols=len(colours) + len(dashes), frameon=False, fontsize="small")
    save(figure, path)
