"""The pictures of studies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepnmt.config import Precision
from deepnmt.plots import COLOURS, GREY, HEIGHT, dress, marker, panels, save, style

_WIDTH, _HEIGHT = 7.2, 6.4  # inches of a panel
_COLUMNS = 2
_LABEL = 7.5  # points
_ROOM = 0.62  # of the curves' width, kept at their right for names
_LINES_BELOW = 0.35  # nats below the lowest end
_BROADEST = 40  # columns of a grid's panels side by side


@dataclass(frozen=True)
class Panel:
    """Curves of points (update, loss) by name, the word that each came to, and losses to draw across."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    words: Mapping[str, str]
    marks: Mapping[str, float]  # the highest first


def plot_study(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Panels in rows of two, one loss axis for all; a name has the same colour and dashes everywhere.

    The axis ends just above the highest mark: what lies above is cut, and the name of a curve that ends there stands at
    the upper edge.
    """
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    columns = min(_COLUMNS, max(1, len(panels)))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    names = dict.fromkeys(name for panel in panels for name in panel.curves)
    styles = {name: style(number) for number, name in enumerate(names)}
    ends = [points[-1][1] for panel in panels for points in panel.curves.values() if points]
    marks = [mark for panel in panels for mark in panel.marks.values()]
    high = 1.03 * max(marks, default=10.0)
    low = max(0.0, min([*ends, *marks, high]) - _LINES_BELOW)
    for axes, panel in zip(grid, panels, strict=False):
        dress(axes, "Update", "Training loss, nats a target token")
        axes.set_ylim(low, high)
        axes.set_title(panel.title, loc="left")
        _plot_panel(axes, panel, styles, low, high)
    for axes in grid[len(panels):]:
        axes.set_visible(False)
    save(figure, path)


def _plot_panel(axes: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]], low: float, high: float) -> None:
    last = max((points[-1][0] for points in panel.curves.values() if points), default=1)
    for number, (name, mark) in enumerate(panel.marks.items()):
        axes.plot([0, last], [mark, mark], color=GREY, linestyle=(0, (2, 2)), linewidth=1)
        side = "left" if number else "right"  # curves fall through the highest at the left
        axes.annotate(name, (0 if number else last, mark), (0, 2), textcoords="offset points", ha=side, color=GREY,
                      fontsize=_LABEL)
    for name, points in panel.curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), **styles[name], linewidth=1.3)
    ends = [min(points[-1][1], high) if points else high for points in panel.curves.values()]
    gap = (high - low) * 1.35 * _LABEL / 72 / (0.84 * _HEIGHT)
    heights = spread(ends, gap, low + gap, high - gap / 2)
    for (name, points), end, height in zip(panel.curves.items(), ends, heights, strict=True):
        start = points[-1][0] if points and points[-1][1] <= high else last
        axes.plot([start, last * 1.05, last * 1.1], [end, height, height], **styles[name], linewidth=0.6, clip_on=False)
        value = f"{points[-1][1]:.2f}" if points and points[-1][1] < 100 else "beyond"
        axes.text(last * 1.115, height, f"{name}  {value}  {panel.words[name]}", color=styles[name]["color"],
                  fontsize=_LABEL, va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})
    axes.set_xlim(0, last * (1 + _ROOM))
    axes.set_xticks([round(last * part / 6) for part in range(7)] if last >= 6 else [0, last])
    axes.grid(visible=False, axis="x")


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for names: as near to the values as can be with at least `gap` between two, in the same order, within
    (low, high) where there is room.

    With the gaps taken out, the heights must only not fall: an isotonic regression.
    """
    from sklearn.isotonic import IsotonicRegression  # of the extra `studies`; other pictures do without

    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    levels = IsotonicRegression().fit_transform(np.arange(len(values)), np.take(values, order) - steps)
    heights = np.empty(len(values))
    heights[order] = levels.clip(max=high - gap * (len(values) - 1)).clip(low) + steps
    return heights.tolist()


def plot_idle_time(rows: Sequence[Mapping[str, Any]], stages: int, path: str | Path) -> None:
    """Idle share of a pipeline's stages against the micro-batches of an update, beside the formula's.

    Args:
        rows: with `micro_batches`, `idle` (a share for each stage), `mean`, `formula`, `expected`.
        stages: P.
        path: the PNG to write.
    """
    figure, [axes] = panels([f"Idle time of a pipeline of {stages} stages"], "Micro-batches an update",
                            "Idle share of the time, per cent")
    counts = [row["micro_batches"] for row in rows]

    def plot(shares: Sequence[float], label: str, **look: Any) -> None:
        axes.plot(counts, [100 * share for share in shares], label=label, **look)

    plot([row["formula"] for row in rows], "(P − 1) / (M + P − 1), equal stages", color=GREY, linestyle="--")
    plot([row["expected"] for row in rows], "expected of these cuts", color=GREY, linestyle=":")
    for stage in range(stages):
        plot([row["idle"][stage] for row in rows], f"stage {stage}", color=COLOURS[stage % len(COLOURS)], linewidth=1,
             alpha=0.6)
    plot([row["mean"] for row in rows], "mean, measured", color=COLOURS[0], marker="o", linewidth=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(counts)
    axes.legend(frameon=False)
    save(figure, path)


def plot_comparison(curves: Mapping[str, Mapping[int, float]], path: Path, title: str, ylabel: str) -> None:
    """Several runs in one picture.

    Args:
        curves: values by update, by the run's name; those that are not finite are left out.
        path: the PNG to write.
        title, ylabel: what is compared, and the name of the values with their unit.
    """
    figure, [axes] = panels([title], "Update", ylabel)
    figure.set_figheight(HEIGHT + 0.25 * math.ceil(len(curves) / 2))  # room for the legend's rows
    for number, (name, points) in enumerate(curves.items()):
        finite = {update: value for update, value in points.items() if math.isfinite(value)}
        values = list(finite.values())
        axes.plot(list(finite), values, **style(number), marker=marker(values), markersize=4,
                  label=f"{name} ({values[-1]:.2f})" if finite else f"{name} (nothing finite)")
    axes.set_xlim(left=0)
    if curves:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, title="run (last value)")
    save(figure, path)


Column = tuple[bool, int, float]  # without warm-up, layers, rate
Cells = dict[tuple[str, Column], list[float]]  # by block and column, what its runs ended at


def plot_grid(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The runs of a verdict's grid: a row for each block, a column for each depth and rate, with and without warm-up; a
    panel for each precision, batch size and initialisation.

    The colour is the final loss as a share of the mark that a run must come under: blue below, red above; the mean over
    seeds.
    """
    found: dict[tuple[str, int, str], Cells] = defaultdict(lambda: defaultdict(list))
    for record in records:
        point = record["point"]
        name = point["encoder"] if point["encoder"] == point["decoder"] else f"{point['encoder']} / {point['decoder']}"
        kind = point.get("precision", "fp32"), point.get("sentences", 0), point.get("init", "auto")
        column = not point["warmup"], point["layers"], point["rate"]
        found[kind][name, column].append(min(record["final"] / record["bar"], 2.0))
    rows = sorted({name for cells in found.values() for name, _ in cells})
    names = get_args(Precision)
    bands: list[list[tuple[str, Cells]]] = []  # panels side by side, each with its title
    for kind in sorted(found, key=lambda kind: (names.index(kind[0]), kind[2] != "auto", -len(found[kind]), kind[1:])):
        precision, size, init = kind
        words = [precision, f"{size} sentences a batch" if size else "", f"init: {init}" if init != "auto" else ""]
        panel = ", ".join(filter(None, words)), found[kind]
        if bands and sum(_breadths([*bands[-1], panel])) <= _BROADEST:
            bands[-1].append(panel)
        else:
            bands.append([panel])
    figure = Figure(figsize=(max(8.0, 0.36 * max(sum(_breadths(band)) for band in bands) + 3),
                             (0.36 * len(rows) + 2.2) * len(bands) + 0.4), layout="constrained")
    figure.suptitle(f"{len(records)} runs: blue learned, red did not ('none': no warm-up)", x=0.01, ha="left")
    for part, band in zip(figure.subfigures(len(bands), 1, squeeze=False)[:, 0], bands, strict=True):
        row = part.subplots(1, len(band), sharey=True, squeeze=False, width_ratios=_breadths(band))[0]
        for axes, (title, cells) in zip(row, band, strict=True):
            columns = sorted({column for _, column in cells})
            table = np.full((len(rows), len(columns)), np.nan)
            for (name, column), values in cells.items():
                table[rows.index(name), columns.index(column)] = np.mean(values)
            image = axes.imshow(table, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
            axes.set_yticks(range(len(rows)), rows)
            axes.set_xticks(range(len(columns)), [f"{layers}L {rate:g}{' none' if bare else ''}"
                                                  for bare, layers, rate in columns], rotation=90, fontsize="small")
            axes.set_title(title, loc="left", fontsize="medium")
        part.colorbar(image, ax=list(row), label="final loss / mark")
    save(figure, path)


def _breadths(band: Sequence[tuple[str, Cells]]) -> list[int]:
    """Columns of each panel."""
    return [len({column for _, column in cells}) for _, cells in band]
