"""The picture of a study of residual systems: loss curves side by side, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepnmt.plots import COLOURS, DASHES, GREY, dress, save

_WIDTH, _HEIGHT = 7.2, 6.4  # inches of a panel
_COLUMNS = 2
_LABEL = 7.5  # points
_ROOM = 0.62  # of the curves' width, kept at their right for names
_LINES_BELOW = 0.35  # nats below the lowest end


@dataclass(frozen=True)
class Panel:
    """Curves of points (update, loss) by name, the word that each came to, and losses to draw across."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    words: Mapping[str, str]
    marks: Mapping[str, float]  # the highest first


def draw_study(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Panels in rows of two, one loss axis for all; a name has the same colour and dashes everywhere.

    The axis ends just above the highest mark: what lies above is cut, and the name of a curve that ends there stands at
    the upper edge.
    """
    rows = max(1, math.ceil(len(panels) / _COLUMNS))
    columns = min(_COLUMNS, max(1, len(panels)))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    styles = {name: (COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)])
              for place, name in enumerate(names)}
    low, high = _span(panels)
    for axes, panel in zip(grid, panels, strict=False):
        dress(axes, "Update", "Training loss, nats a target token")
        axes.set_ylim(low, high)
        axes.set_title(panel.title, loc="left")
        _draw(axes, panel, styles)
    for axes in grid[len(panels):]:
        axes.set_visible(False)
    save(figure, path)


def _span(panels: Sequence[Panel]) -> tuple[float, float]:
    """The ends of the loss axis."""
    ends = [points[-1][1] for panel in panels for points in panel.curves.values() if points]
    marks = [mark for panel in panels for mark in panel.marks.values()]
    high = 1.03 * max(marks, default=10.0)
    return max(0.0, min([*ends, *marks, high], default=0.0) - _LINES_BELOW), high


def _draw(axes: Axes, panel: Panel, styles: Mapping[str, tuple[str, str]]) -> None:
    last = max((points[-1][0] for points in panel.curves.values() if points), default=1)
    low, high = axes.get_ylim()
    for number, (name, mark) in enumerate(panel.marks.items()):
        axes.plot([0, last], [mark, mark], color=GREY, linestyle=(0, (2, 2)), linewidth=1)
        side = "left" if number else "right"  # curves fall through the highest at the left
        axes.annotate(name, (0 if number else last, mark), (0, 2), textcoords="offset points", ha=side, color=GREY,
                      fontsize=_LABEL)
    ends = {}
    for name, points in panel.curves.items():
        colour, dashes = styles[name]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.3)
        ends[name] = min(points[-1][1], high) if points else high
    gap = (high - low) * 1.35 * _LABEL / 72 / (0.84 * _HEIGHT)
    places = spread(list(ends.values()), gap, low + gap, high - gap / 2)
    for (name, end), place in zip(ends.items(), places, strict=True):
        colour, dashes = styles[name]
        points = panel.curves[name]
        start = points[-1][0] if points and points[-1][1] <= high else last
        axes.plot([start, last * 1.05, last * 1.1], [end, place, place], color=colour, linestyle=dashes, linewidth=0.6,
                  clip_on=False)
        value = f"{points[-1][1]:.2f}" if points and points[-1][1] < 100 else "beyond"
        axes.text(last * 1.115, place, f"{name}  {value}  {panel.words[name]}", color=colour, fontsize=_LABEL,
                  va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})
    axes.set_xlim(0, last * (1 + _ROOM))
    axes.set_xticks([round(last * part / 6) for part in range(7)] if last >= 6 else [0, last])
    axes.grid(visible=False, axis="x")


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for names: as near to the values as can be with at least `gap` between two, in the same order, within
    (low, high) where there is room.

    Neighbours that stand too close form a block around the mean of their values, and blocks that meet become one.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    blocks: list[list[int]] = []
    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and _start(blocks[-1], values, gap, low, high) < (
                _start(blocks[-2], values, gap, low, high) + gap * len(blocks[-2])):
            last = blocks.pop()
            blocks[-1] += last
    places = [0.0] * len(values)
    for block in blocks:
        start = _start(block, values, gap, low, high)
        for step, index in enumerate(block):
            places[index] = start + gap * step
    return places


def _start(block: Sequence[int], values: Sequence[float], gap: float, low: float, high: float) -> float:
    """Where the lowest name of a block stands."""
    length = gap * (len(block) - 1)
    middle = sum(values[index] for index in block) / len(block)
    return max(low, min(middle - length / 2, high - length))
