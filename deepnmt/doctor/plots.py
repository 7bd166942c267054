"""The doctor's pictures: one function a picture, each writes one PNG from the numbers that the JSON file holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from deepnmt.doctor.activations import HALF_MAX
from deepnmt.doctor.change import Growth
from deepnmt.doctor.many import DTYPES
from deepnmt.plots import COLOURS, DASHES, GREY, HEIGHT, dress, save

Tree = Mapping[str, Any]
_FLOOR = 1e-12  # the least value drawn on a logarithmic axis
_NAMES_A_ROW = 4  # of a legend below its panel
_BROADEST = 40  # columns of a grid's panels side by side

Column = tuple[bool, int, float]  # of a grid: without warm-up, layers, rate
Panel = dict[tuple[str, Column], list[float]]  # by block and column, what its runs ended at
Band = list[tuple[str, Panel]]  # panels side by side, each with its title


def panels(titles: Sequence[str], xlabel: str, ylabel: str, *, share: bool = True) -> tuple[Figure, list[Axes]]:
    """Pictures side by side, one for each title."""
    figure = Figure(figsize=(max(8.0, 5.5 * len(titles)), HEIGHT), layout="constrained")
    made = figure.subplots(1, len(titles), sharey=share, squeeze=False)[0]
    for axes, title in zip(made, titles, strict=True):
        dress(axes, xlabel, ylabel)
        axes.set_title(title, loc="left")
    return figure, list(made)


def draw_dependency(betas: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """β_ij of each stack as a picture of squares: row i what enters branch i + 1, column j where it comes from."""
    figure, made = _squares({f"{side}: β of {len(rows) - 1} sub-layers": _lower(rows) for side, rows in betas.items()},
                            "branch j (0: the stack's input)", "input of branch i + 1", "viridis")
    for axes in made:
        axes.grid(visible=False)
    save(figure, path)


def draw_likeness(cosines: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Mean cosines between layers' outputs."""
    figure, made = _squares({f"{side}: cosine of layers' outputs": np.array(rows) for side, rows in cosines.items()},
                            "layer", "layer", "magma", first=1)
    for axes in made:
        axes.grid(visible=False)
    save(figure, path)


def _squares(
    tables: Mapping[str, np.ndarray[Any, Any]], xlabel: str, ylabel: str, colours: str, first: int = 0
) -> tuple[Figure, list[Axes]]:
    """A picture of squares for each table; its rows and columns are counted from `first`."""
    figure, made = panels(list(tables), xlabel, ylabel, share=False)
    for axes, table in zip(made, tables.values(), strict=True):
        low, right, bottom = first - 0.5, first - 0.5 + table.shape[1], first - 0.5 + table.shape[0]
        least = min(0.0, float(np.nanmin(table)))  # cosines may be negative, shares are not
        drawn = axes.imshow(table, cmap=colours, vmin=least, vmax=1, interpolation="nearest", aspect="auto",
                            extent=(low, right, bottom, low))
        figure.colorbar(drawn, ax=axes, shrink=0.8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, made


def _lower(rows: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """A triangle of rows as a square, NaN above it."""
    square = np.full((len(rows), len(rows)), np.nan)
    for index, row in enumerate(rows):
        square[index, : len(row)] = row
    return square


def draw_growth(growths: Mapping[str, Mapping[str, Growth]], path: Path, title: str) -> None:
    """Output changes against depth: a panel for each kind of change, a line for each name, with the better fit.

    Args:
        growths: by kind of change ("noise", ...), then by the line's name.
        title: over the picture.
    """
    figure, made = panels(list(growths), "layers N", "change of the output, share of its variance", share=False)
    figure.suptitle(title, x=0.01, ha="left")
    for axes, lines in zip(made, growths.values(), strict=True):
        for number, (name, growth) in enumerate(lines.items()):
            colour = COLOURS[number % len(COLOURS)]
            linear = _better_linear(growth)
            best = growth.linear if linear else growth.logarithmic
            fit = f"{name}, fit to {'N' if linear else 'log N'}: R² {best.r2:.3f}"
            label = fit if math.isfinite(best.r2) else name
            axes.plot(growth.depths, growth.changes, "o", color=colour, markersize=4)
            span = np.linspace(min(growth.depths), max(growth.depths), 100)
            term = span if linear else np.log(span)
            if math.isfinite(best.r2):
                axes.plot(span, best.slope * term + best.offset, color=colour, linestyle=DASHES[number // len(COLOURS)],
                          label=label)
            else:
                axes.plot(growth.depths, growth.changes, color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    save(figure, path)


def _better_linear(growth: Growth) -> bool:
    return not growth.linear.r2 < growth.logarithmic.r2


def draw_lines(
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
    figure, made = panels(list(lines) if len(lines) > 1 else [title], xlabel, ylabel)
    if len(lines) > 1:
        figure.suptitle(title, x=0.01, ha="left")
    names = max((len(group) + (bound is not None) for group in lines.values()), default=0)
    figure.set_figheight(HEIGHT + 0.22 * math.ceil(names / _NAMES_A_ROW))
    for axes, group in zip(made, lines.values(), strict=True):
        for number, (name, values) in enumerate(group.items()):
            places = xs if xs is not None else range(1, len(values) + 1)
            axes.plot(places, [max(value, _FLOOR) for value in values], color=COLOURS[number % len(COLOURS)],
                      linestyle=DASHES[number // len(COLOURS) % len(DASHES)], marker="o", markersize=3, label=name)
        axes.set_yscale("log")
        if bound is not None:
            axes.axhline(bound[0], color=GREY, linestyle=(0, (2, 2)), linewidth=1.2, label=bound[1])
        if len(group) > 1:
            axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13),
                        ncols=_NAMES_A_ROW)
    for axes in made[:1]:  # all panels share the axis
        _decades(axes)
    save(figure, path)


def _decades(axes: Axes) -> None:
    """A decade at least, lest small differences look large, and plain numbers beside it."""
    low, high = axes.get_ylim()
    missing = max(1.0, math.sqrt(10 * low / high))
    axes.set_ylim(low / missing, high * missing)
    subs = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_ranges(ranges: Mapping[str, Tree], path: Path) -> None:
    """Variance of every layer's output, and the largest magnitude in the layer, with the end of fp16."""
    groups: dict[str, dict[str, list[float]]] = {}
    for side in ("encoder", "decoder"):
        own = [record for name, record in ranges.items() if name.startswith(f"{side}.")]
        groups[side] = {"variance of the output": [record["variance"] for record in own],
                        "largest magnitude": [record["largest"] for record in own]}
    draw_lines(groups, path, title="Activations", xlabel="layer", ylabel="variance, magnitude",
               bound=(HALF_MAX, "end of fp16"))


def draw_half(half: Tree, path: Path) -> None:
    """The share of exact zeros among fp16 gradients of each part, beside that of fp32."""
    names = list(half["shares"])
    figure, [axes] = panels([f"Exact zeros of fp16 gradients at loss scale {half['scale']:g}"], "", "share of elements")
    places = np.arange(len(names))
    axes.bar(places - 0.2, [half["shares"][name] for name in names], 0.4, color=COLOURS[1], label="fp16")
    axes.bar(places + 0.2, [half["shares_fp32"][name] for name in names], 0.4, color=COLOURS[5], label="fp32")
    shown = range(0, len(names), max(1, len(names) // 12))
    axes.set_xticks(list(shown), [_counted(names[place]) for place in shown], rotation=45, ha="right")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    save(figure, path)


def _counted(name: str) -> str:
    """A layer's name with its number from 1, as all pictures count: `encoder.layers.3` is `encoder 4`."""
    side, layers, index = name.partition(".layers.")
    return f"{side} {int(index) + 1}" if layers else name


def draw_moved(moved: Sequence[Tree], path: Path) -> None:
    """Relative norms of gradient and of update of each attention matrix, a line of checkpoints for each.

    The colour is the matrix (query, key, value, output), the dashes are the attention it belongs to.
    """
    figure, made = panels(["gradients", "updates"], "update of the run", "norm, share of the largest matrix's")
    figure.suptitle("Attention matrices over checkpoints", x=0.01, ha="left")
    colours = dict(zip(("q", "k", "v", "out"), COLOURS, strict=False))
    dashes = {"encoder self_attn": "-", "decoder self_attn": "--", "decoder cross_attn": ":"}
    for axes, key in zip(made, ("gradients", "updates"), strict=True):
        for name in moved[0][key]:
            side, _, _, attention, matrix = name.split(".")
            axes.plot([pair["update"] for pair in moved], [max(pair[key][name], _FLOOR) for pair in moved],
                      color=colours[matrix], linestyle=dashes[f"{side} {attention}"], alpha=0.6, linewidth=1,
                      marker="." if len(moved) < 3 else None)
        axes.set_yscale("log")
    _decades(made[0])
    for matrix, colour in colours.items():
        made[0].plot([], [], color=colour, label=matrix)
    for attention, style in dashes.items():
        made[0].plot([], [], color=GREY, linestyle=style, label=attention)
    figure.legend(loc="outside lower center", ncols=len(colours) + len(dashes), frameon=False, fontsize="small")
    save(figure, path)


def draw_grid(records: Sequence[Tree], path: Path) -> None:
    """The runs of a grid: a row for each block, a column for each depth and rate, with and without warm-up; a panel for
    each precision, batch size and initialisation.

    The colour is the final loss as a share of the mark that a run must come under: blue below, red above; the mean over
    seeds.
    """
    cells: dict[tuple[str, int, str], Panel] = {}
    for record in records:
        point = record["point"]
        name = str(point["encoder"] if point["encoder"] == point["decoder"]
                   else f"{point['encoder']} / {point['decoder']}")
        kind = point.get("precision", "fp32"), point.get("sentences", 0), point.get("init", "auto")
        panel = cells.setdefault(kind, {})
        column = (not point["warmup"], point["layers"], point["rate"])
        panel.setdefault((name, column), []).append(min(record["final"] / record["bar"], 2.0))
    rows = sorted({name for panel in cells.values() for name, _ in panel})
    names = [str(name) for name in DTYPES]
    order = sorted(cells, key=lambda kind: (names.index(kind[0]), kind[2] != "auto", -len(cells[kind]), kind[1:]))
    bands = _bands([(_title(*kind), cells[kind]) for kind in order])
    figure = Figure(figsize=(max(8.0, 0.36 * max(_breadth(band) for band in bands) + 3),
                             (0.36 * len(rows) + 2.2) * len(bands) + 0.4), layout="constrained")
    figure.suptitle(f"{len(records)} runs: blue learned, red did not ('none': no warm-up)", x=0.01, ha="left")
    for part, band in zip(figure.subfigures(len(bands), 1, squeeze=False)[:, 0], bands, strict=True):
        made = part.subplots(1, len(band), sharey=True, squeeze=False,
                             width_ratios=[_breadth([panel]) for panel in band])[0]
        for axes, (title, panel) in zip(made, band, strict=True):
            drawn = _draw_panel(axes, title, rows, panel)
        part.colorbar(drawn, ax=list(made), label="final loss / mark")
    save(figure, path)


def _title(precision: str, size: int, init: str) -> str:
    """Of a panel."""
    words = [precision, f"{size} sentences a batch" if size else "", f"init: {init}" if init != "auto" else ""]
    return ", ".join(filter(None, words))


def _breadth(band: Band) -> int:
    """Columns of panels side by side."""
    return sum(len({column for _, column in panel}) for _, panel in band)


def _bands(panels: Band) -> list[Band]:
    """The panels in rows of at most `_BROADEST` columns, or one panel."""
    found: list[Band] = []
    for panel in panels:
        if found and _breadth([*found[-1], panel]) <= _BROADEST:
            found[-1].append(panel)
        else:
            found.append([panel])
    return found


def _draw_panel(axes: Axes, title: str, rows: Sequence[str], panel: Panel) -> AxesImage:
    columns = sorted({column for _, column in panel})
    table = np.full((len(rows), len(columns)), np.nan)
    for (name, column), values in panel.items():
        table[rows.index(name), columns.index(column)] = np.mean(values)
    drawn = axes.imshow(table, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), [f"{layers}L {rate:g}{' none' if bare else ''}" for bare, layers, rate in
                                          columns], rotation=90, fontsize="small")
    axes.set_title(title, loc="left", fontsize="medium")
    return drawn
