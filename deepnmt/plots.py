"""What all pictures look like, and those of a run: ω against depth and its learning curve.

Matplotlib is imported when a picture is made, so that nothing else waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deepnmt.model.admin import AdminProfile

# Okabe and Ito's palette: told apart in every form of colour blindness. Dashes and markers tell lines apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dv*Px"
GREY = "#666666"
WIDTH, HEIGHT = 6.25, 3.4  # inches of a picture and of one panel; shown 600 pixels wide, a point is 4/3 of a pixel
LEGEND: dict[str, Any] = {"frameon": False, "fontsize": "small"}
_RESOLUTION = 160  # dots an inch: 1,000 pixels, for sharp text on screens of today
_TITLE = 11  # points
_MARKS = 8  # on a line with more points than `marker` marks


def plot_admin_profile(profile: AdminProfile, path: str | Path) -> None:
    """ω against the sub-layer's number in its stack, with the growth published for a d 512, 100L-100L model."""
    figure, [axes] = panels(["Admin's initial shortcut weight ω of every sub-layer"],
                            "sub-layer k, counted from the bottom of its stack", "ω, a factor")
    stacks = {"encoder": profile.encoder, "decoder": profile.decoder}
    for number, (name, values) in enumerate(stacks.items()):
        if values:
            axes.plot(range(1, len(values) + 1), values, **style(number, len(values)),
                      label=f"{name}, {len(values)} sub-layers")
    depths = range(1, max(map(len, stacks.values())) + 1)
    axes.plot(depths, [math.sqrt(1 + 0.39 * (k - 1)) for k in depths], color=GREY, linestyle=":",
              label="√(1 + 0.39 (k − 1)): about what was published for width 512")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, **LEGEND)
    save(figure, path)


def plot_learning_curve(records: Sequence[Mapping[str, Any]], path: str | Path, run: str) -> None:
    """Loss, validation BLEU where there is any, and the learning rate against updates, one below the other.

    Args:
        records: those of a run's `log.jsonl`; types other than "train" and "valid" are passed over.
        path: the PNG to write.
        run: its name, for the title.
    """
    def points(kind: str, key: str) -> list[tuple[int, float]]:
        """(update, value) of the records that hold a finite value; logs write NaN and infinity as text."""
        values = [(int(r["update"]), float(r[key])) for r in records if r["type"] == kind and r.get(key) is not None]
        return [(update, value) for update, value in values if math.isfinite(value)]

    # label of the axis: the lines' names and points
    lines = {
        "loss, nats per target token": {"training": points("train", "loss"), "validation": points("valid", "loss")},
        "validation BLEU": {"": points("valid", "bleu")},
        "learning rate": {"": points("train", "learning_rate")},
    }
    lines = {label: named for number, (label, named) in enumerate(lines.items()) if not number or any(named.values())}
    named = [label.partition(",")[0] for label in lines]
    title = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    figure, column = panels([""] * len(lines), "update", list(lines), f"Run {run}: {title} over its updates",
                            heights=[2.6, 1.5, 1.2][: len(lines)], share=False)
    for axes, group in zip(column, lines.values(), strict=True):
        for number, (name, values) in enumerate(group.items()):
            if values:
                axes.plot(*zip(*values, strict=True), **style(number, len(values)), label=name)
        axes.sharex(column[0])
        axes.tick_params(labelbottom=axes is column[-1])
        if axes is not column[0]:
            axes.set_ylim(bottom=0)
    column[0].set_xlim(left=0)
    if column[0].get_lines():
        column[0].legend(loc="upper right", **LEGEND)
    save(figure, path)


def style(number: int, points: int = 0) -> dict[str, Any]:
    """Colour, dashes and marker of the line of this number, from 0; `points`: how many it has, all of them marked
    where they are few, so that one alone is seen at all."""
    look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
    if points:
        apart = max(1, points // _MARKS) if points > 40 else 1
        look |= {"marker": MARKERS[number % len(MARKERS)], "markersize": 3.5 if points <= 40 else 4.5,
                 "markevery": (number % apart, apart)}
    return look


def panels(
    titles: Sequence[str], xlabel: str, ylabel: str | Sequence[str], title: str = "", *, share: bool = True,
    columns: int = 1, heights: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Axes for each of `titles`, row by row, and a title over all.

    Args:
        ylabel: one for all, or one for each.
        share: the y axis.
        columns: axes side by side.
        heights: of the rows, in inches; all the same where there are none.
    """
    from matplotlib.figure import Figure

    if len(titles) == 1 and not title:
        titles, title = [""], titles[0]
    rows = math.ceil(len(titles) / columns)
    heights = heights or [HEIGHT if rows == 1 else 0.8 * HEIGHT] * rows
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    grid = list(figure.subplots(rows, columns, sharey=share, squeeze=False, height_ratios=heights).flatten())
    for axes in grid[len(titles):]:
        axes.set_visible(False)
    labels = [ylabel] * len(titles) if isinstance(ylabel, str) else ylabel
    together = ylabel if isinstance(ylabel, str) and rows > 1 else ""
    for number, (axes, own, label) in enumerate(zip(grid, titles, labels, strict=False)):
        last = number + columns >= len(titles)  # of its column
        dress(axes, xlabel if last else "", "" if together or number % columns else label)
        axes.set_title(own, loc="left", fontsize="medium" if columns == 1 else "small")
    if together:
        figure.supylabel(together, fontsize="medium")
    figure.suptitle(fill(title, 74), x=0.01, ha="left", fontsize=_TITLE)
    return figure, grid[: len(titles)]


def dress(axes: Axes, xlabel: str, ylabel: str) -> None:
    """What all pictures look like."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_RESOLUTION, format="png")
