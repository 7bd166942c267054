"""The studies' pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from deepnmt.plots import GREY, HEIGHT, LEGEND, panels, save, style

_LABEL = 8.0  # points
_NAMES_WIDTH = 0.62  # of the curves' width: the space for names to their right
_MARGIN_BELOW = 0.35  # nats below the lowest end of a curve


@dataclass(frozen=True)
class Panel:
    """Curves of points (update, loss) and their outcomes by name, and baselines to plot as horizontal lines."""

    title: str
    curves: Mapping[str, Sequence[tuple[int, float]]]
    outcomes: Mapping[str, str]
    marks: Mapping[str, float]  # the highest first


def plot_study(studies: Sequence[Panel], path: Path, title: str) -> None:
    """Panels below each other with a common loss axis; a name has the same colour and dashes in all of them.

    The axis ends just above the highest baseline. Curves are clipped there, and the name of a curve that ends higher is
    at the upper edge.
    """
    most = max((len(study.curves) for study in studies), default=0)
    height = max(HEIGHT, 1.6 + 1.35 * _LABEL / 72 * most)
    figure, column = panels([study.title for study in studies], "update", "training loss, nats per target token", title,
                            heights=[height] * len(studies))
    names = dict.fromkeys(name for study in studies for name in study.curves)
    styles = {name: style(number) for number, name in enumerate(names)}
    ends = [points[-1][1] for study in studies for points in study.curves.values() if points]
    marks = [mark for study in studies for mark in study.marks.values()]
    high = 1.03 * max(marks, default=10.0)
    low = max(0.0, min([*ends, *marks, high]) - _MARGIN_BELOW)
    for axes, study in zip(column, studies, strict=True):
        axes.set_ylim(low, high)
        _plot_panel(axes, study, styles, low, high, (high - low) * 1.35 * _LABEL / 72 / (height - 0.8))
    save(figure, path)


def _plot_panel(
    axes: Axes, panel: Panel, styles: Mapping[str, Mapping[str, Any]], low: float, high: float, gap: float
) -> None:
    """Plots one panel; `gap`: nats between two names."""
    last = max((points[-1][0] for points in panel.curves.values() if points), default=1)
    for mark in panel.marks.values():
        axes.plot([0, last], [mark, mark], color=GREY, linestyle=(0, (2, 2)), linewidth=1)
    for name, points in panel.curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), **styles[name], linewidth=1.3)
    for number, (name, mark) in enumerate(panel.marks.items()):
        side = "left" if number else "right"  # at the left, curves cross the highest one
        axes.annotate(name, (0 if number else last, mark), (2, 3), textcoords="offset points", ha=side, color=GREY,
                      fontsize=_LABEL, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8})
    ends = [min(points[-1][1], high) if points else high for points in panel.curves.values()]
    heights = spread(ends, gap, low + gap, high - gap / 2)
    for (name, points), end, height in zip(panel.curves.items(), ends, heights, strict=True):
        start = points[-1][0] if points and points[-1][1] <= high else last
        axes.plot([start, last * 1.03, last * 1.06], [end, height, height], color=styles[name]["color"], linewidth=0.6,
                  clip_on=False)
        axes.plot([last * 1.06, last * 1.15], [height, height], **styles[name], linewidth=1.3, clip_on=False)
        value = f"{points[-1][1]:.2f}" if points and points[-1][1] < 100 else "beyond"
        axes.text(last * 1.17, height, f"{name}  {value}  {panel.outcomes[name]}", fontsize=_LABEL, va="center")
    axes.set_xlim(0, last * (1 + _NAMES_WIDTH))
    axes.set_xticks([round(last * part / 6) for part in range(7)] if last >= 6 else [0, last])
    axes.grid(visible=False, axis="x")


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for names: as near to the values as possible with at least `gap` between two, in the same order, within
    (low, high) if they fit.

    Once the gaps are subtracted, the heights need only be non-decreasing, which is an isotonic regression.
    """
    from sklearn.isotonic import IsotonicRegression  # in the extra `studies`; other pictures do not need it

    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    levels = IsotonicRegression().fit_transform(np.arange(len(values)), np.take(values, order) - steps)
    heights = np.empty(len(values))
    heights[order] = levels.clip(max=high - gap * (len(values) - 1)).clip(low) + steps
    return heights.tolist()


def plot_idle_time(rows: Sequence[Mapping[str, Any]], stages: int, path: str | Path) -> None:
    """Idle share of a pipeline's stages against the micro-batches of an update, measured and by formula.

    Args:
        rows: with `micro_batches`, `idle` (a share for each stage), `mean`, `formula`, `expected`.
        stages: P.
        path: the PNG to write.
    """
    figure, [axes] = panels([f"Idle time of a pipeline of {stages} stages against micro-batches per update"],
                            "micro-batches per update, M", "idle share of the time, %")
    counts = [row["micro_batches"] for row in rows]

    def plot(shares: Sequence[float], label: str, **line: Any) -> None:
        axes.plot(counts, [100 * share for share in shares], label=label, **line)

    plot([row["formula"] for row in rows], f"(P − 1) / (M + P − 1), P = {stages} equal stages", color=GREY,
         linestyle="--")
    plot([row["expected"] for row in rows], "expected for these stages", color=GREY, linestyle=":")
    for stage in range(stages):
        plot([row["idle"][stage] for row in rows], f"stage {stage}, measured",
             **{**style(stage + 1, len(rows)), "linestyle": "none"})
    plot([row["mean"] for row in rows], "mean, measured", **style(0, len(rows)), linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(counts, [f"{count}" for count in counts])
    axes.legend(**LEGEND)
    save(figure, path)


def plot_comparison(curves: Mapping[str, Mapping[int, float]], path: Path, title: str, ylabel: str,
                    logarithmic: bool = False) -> None:
    """Several runs in one picture.

    Args:
        curves: values by run and update; values that are not finite are left out.
        path: the PNG to write.
        title, ylabel: of the picture; `ylabel` names the values and their unit.
        logarithmic: the axis of the values.
    """
    figure, [axes] = panels([title], "update", ylabel, heights=[HEIGHT + 0.2 * math.ceil(len(curves) / 2)])
    for number, (name, points) in enumerate(curves.items()):
        finite = {update: value for update, value in points.items() if math.isfinite(value)}
        values = list(finite.values())
        axes.plot(list(finite), values, **style(number, len(values)), linewidth=1.3,
                  label=f"{name} ({values[-1]:.2f})" if finite else f"{name} (no finite value)")
    axes.set_xlim(left=0)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    if curves:
        figure.legend(loc="outside lower center", ncols=2, title="run (last value)", title_fontsize="small", **LEGEND)
    save(figure, path)


def plot_source_use(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str) -> None:
    """How several runs use their source, in three panels: validation loss, the source's gain, the common vector.

    Args:
        runs: the validations in each run's log, by the run's name.
    """
    keys = {"validation loss,\nnats per target token": "loss", "source's gain, nats": "source_gain",
            "one vector's share of\nthe encoder's output": "encoder_common"}
    heights = [0.6 * HEIGHT] * len(keys)
    figure, column = panels([""] * len(keys), "update", list(keys), title, share=False, heights=heights)
    for axes, key in zip(column, keys.values(), strict=True):
        for number, (name, validations) in enumerate(runs.items()):
            points = [(record["update"], record[key]) for record in validations if key in record]
            axes.plot(*zip(*points, strict=True), **style(number, len(points)), linewidth=1.3, label=name)
        axes.set_xlim(left=0)
    handles, names = column[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=1, **LEGEND)
    save(figure, path)


def plot_cells(
    cells: Mapping[str, Sequence[Sequence[float]]], path: Path, rows: Sequence[str], columns: Sequence[str], bar: float,
    *, title: str, xlabel: str, ylabel: str, scale: str,
) -> None:
    """A table of numbers for each name, coloured by value; those above `bar` are bold."""
    figure, grid = panels(list(cells), xlabel, ylabel, title, heights=[0.33 * len(rows) + 0.5] * len(cells))
    most = max(2 * bar, 0.1)
    for axes, values in zip(grid, cells.values(), strict=True):
        image = axes.imshow(np.clip(values, 0, most), cmap="RdBu_r", vmin=0, vmax=most, aspect="auto")
        for (row, column), value in np.ndenumerate(np.asarray(values)):
            light = abs(min(value, most) / most - 0.5) < 0.35
            axes.text(column, row, f"{value:.2f}" if value < 100 else "beyond", ha="center", va="center",
                      fontsize=_LABEL, weight="bold" if value > bar else "normal", color="black" if light else "white")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks(range(len(columns)), columns)
        axes.grid(visible=False)
    figure.colorbar(image, ax=grid, label=scale, shrink=0.7).ax.tick_params(labelsize="small")
    save(figure, path)


def plot_reliability(pairs: Sequence[tuple[float, bool]], path: Path, bins: int) -> None:
    """How often predictions are right, against how probable they were said to be, with the number of runs in each bin.

    Args:
        pairs: the probability of the predicted outcome, and whether it came.
        path: the PNG to write.
        bins: of equal width, from 0 to 1.
    """
    figure, [axes] = panels([f"How often the verdict is right on {len(pairs)} runs, by the probability it states"],
                            "probability of the predicted outcome", "share of right predictions")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", label="as often as it says")
    sure = np.array([probability for probability, _ in pairs])
    right = np.array([float(came) for _, came in pairs])
    places = np.minimum((sure * bins).astype(int), bins - 1)
    points = [(sure[places == number].mean(), right[places == number].mean(), int((places == number).sum()))
              for number in range(bins) if (places == number).any()]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], label="the verdict", **style(0, 1))
    for x, y, count in points:
        axes.annotate(f"{count} runs", (x, y), (0, 8), textcoords="offset points", ha="center", fontsize=_LABEL)
    axes.set_xlim(0.3, 1.02)
    axes.xaxis.set_major_formatter("{x:.1f}")  # `panels` has whole numbers
    axes.set_ylim(0.0, 1.05)
    axes.legend(**LEGEND)
    save(figure, path)
