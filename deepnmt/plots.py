"""Pictures of a run: ω against depth, learning curves, and several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deepnmt.model.admin import AdminProfile

# Okabe and Ito's palette: told apart in every form of colour blindness. Dashes tell its second round from the first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")
GREY = "#767676"
HEIGHT = 4.5  # inches
_RESOLUTION = 120  # dots an inch


def draw_admin_profile(profile: AdminProfile, path: str | Path) -> None:
    """ω against the sub-layer's number in its stack, with the growth published for a d 512, 100L-100L model."""
    figure, axes = canvas("Sub-layer, counted from the bottom of its stack", "ω")
    stacks = [("encoder", profile.encoder), ("decoder", profile.decoder)]
    deepest = max(len(values) for _, values in stacks)
    depths = range(1, deepest + 1)
    for (name, values), colour in zip(stacks, COLOURS, strict=False):
        if values:
            axes.plot(range(1, len(values) + 1), values, color=colour, label=f"{name}, {len(values)} sub-layers",
                      marker=_marker(values), markersize=3)
    axes.plot(depths, [math.sqrt(1 + 0.39 * (k - 1)) for k in depths], color=GREY, linestyle=(0, (2, 2)),
              linewidth=1.2, label="√(1 + 0.39 (k − 1)), about as published for width 512")
    axes.set_title("Admin: initial shortcut weight ω", loc="left")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def draw_learning_curve(records: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Training and validation loss against updates, and the validations' BLEU on an axis at the right.

    Args:
        records: those of a run's `log.jsonl`; types other than "train" and "valid" are passed over.
        path: the PNG to write.
    """
    figure, axes = canvas("Update", "Loss, nats a target token")
    for kind, label, colour in (("train", "training loss", COLOURS[5]), ("valid", "validation loss", COLOURS[0])):
        points = _points(records, kind, "loss")
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=_marker(points), markersize=4, label=label)
    lines = list(axes.get_lines())
    bleu = _points(records, "valid", "bleu")
    if bleu:
        right = axes.twinx()
        lines += right.plot(*zip(*bleu, strict=True), color=COLOURS[1], linestyle="--", marker="s", markersize=4,
                            label="validation BLEU")
        right.set_ylabel("BLEU", color=COLOURS[1])
        right.tick_params(axis="y", colors=COLOURS[1])
        right.spines["top"].set_visible(False)
        right.set_ylim(bottom=0)
    axes.set_title("Learning curve", loc="left")
    axes.set_xlim(left=0)
    if lines:
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    save(figure, path)


def draw_comparison(
    curves: Mapping[str, Sequence[tuple[int, float]]], path: str | Path, title: str, ylabel: str
) -> None:
    """Several runs in one picture.

    Args:
        curves: points (update, value) by the run's name; values that are not finite are left out.
        path: the PNG to write.
        title, ylabel: what is compared, and the name of the values with their unit.
    """
    figure, axes = canvas("Update", ylabel)
    figure.set_figheight(HEIGHT + 0.25 * math.ceil(len(curves) / 2))  # room for the legend's rows
    for number, (name, points) in enumerate(curves.items()):
        finite = [(update, value) for update, value in points if math.isfinite(value)]
        updates, values = zip(*finite, strict=True) if finite else ((), ())
        axes.plot(updates, values, color=COLOURS[number % len(COLOURS)], marker=_marker(values), markersize=4,
                  linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
                  label=f"{name} ({values[-1]:.2f})" if finite else f"{name} (nothing finite)")
    axes.set_title(title, loc="left")
    axes.set_xlim(left=0)
    if curves:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, title="run (last value)")
    save(figure, path)


def _points(records: Sequence[Mapping[str, Any]], kind: str, key: str) -> list[tuple[int, float]]:
    """(update, value) of the records of this type that hold a finite value; logs write NaN and infinity as text."""
    found = [(int(r["update"]), float(r[key])) for r in records if r["type"] == kind and r.get(key) is not None]
    return [(update, value) for update, value in found if math.isfinite(value)]


def _marker(points: Sequence[Any]) -> str | None:
    """Few points are marked, so that one alone is seen at all; many would hide the line."""
    return "o" if len(points) <= 40 else None


def canvas(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    dress(axes, xlabel, ylabel)
    return figure, axes


def dress(axes: Axes, xlabel: str, ylabel: str) -> None:
    """What all pictures look like."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def save(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_RESOLUTION, format="png")
