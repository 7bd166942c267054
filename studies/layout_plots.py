"""The picture of a pipeline's idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepnmt.plots import COLOURS, GREY, panels, save


def draw_idle_time(rows: Sequence[Mapping[str, Any]], stages: int, path: str | Path) -> None:
    """Idle share of a pipeline's stages against the micro-batches of an update, beside the formula's.

    Args:
        rows: with `micro_batches`, `idle` (a share for each stage), `mean`, `formula`, `expected`.
        stages: P.
        path: the PNG to write.
    """
    figure, [axes] = panels([f"Idle time of a pipeline of {stages} stages"], "Micro-batches an update",
                            "Idle share of the time, per cent")
    counts = [row["micro_batches"] for row in rows]
    axes.plot(
        counts,
        [100 * row["formula"] for row in rows],
        color=GREY,
        linestyle="--",
        label="(P − 1) / (M + P − 1), equal stages",
    )
    axes.plot(
        counts, [100 * row["expected"] for row in rows], color=GREY, linestyle=":", label="expected of these cuts"
    )
    for stage in range(stages):
        axes.plot(
            counts,
            [100 * row["idle"][stage] for row in rows],
            color=COLOURS[stage % len(COLOURS)],
            linewidth=1,
            alpha=0.6,
            label=f"stage {stage}",
        )
    axes.plot(
        counts, [100 * row["mean"] for row in rows], color=COLOURS[0], marker="o", linewidth=2, label="mean, measured"
    )
    axes.set_ylim(bottom=0)
    axes.set_xticks(counts)
    axes.legend(frameon=False)
    save(figure, path)
