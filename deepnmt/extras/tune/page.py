"""The trials as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepnmt.extras.tune.trials import Record, Trials
from deepnmt.plots import COLOURS, GREY, LEGEND, panels, save

STAGES = {"search": "search", "longer": "longer", "seeds": "other seeds", "deep": "deep model"}
MARKERS = {"search": "o", "longer": "s", "seeds": "^", "deep": "D"}


def rows_of(trials: Trials) -> list[list[str]]:
    """A table with its header: a row a trial, stage by stage and the best first."""
    sides = [side for side in ("encoder", "decoder") if side in trials.done[0]["point"]]
    source = []
    if trials.by_source:
        source = ["source's worth", "one vector"]
    rows = [["stage", "layers", "updates", "seed", "rate", *sides, "warm-up", *source, "loss", ""]]
    for stage, name in STAGES.items():
        records = [record for record in trials.done if record["stage"] == stage]
        for record in sorted(records, key=lambda record: trials.worth([record]), reverse=True):
            point = record["point"]
            row = [name, record["model"], f"{record['updates']:,}", str(record["seed"]), f"{point['lr']:.2g}"]
            row += [f"{point[side]:.2g}" for side in sides]
            row.append(f"{100 * point['warmup']:.2g} %")
            if record["diverged"]:
                row += [""] * len(source)
                row += ["", "diverged"]
            else:
                if source:
                    row += [f"{record['source_gain']:+.3f}", f"{record['encoder_common']:.2f}"]
                row += [f"{record['loss']:.3f}", "collapsed" if record["collapsed"] else ""]
            rows.append(row)
    return rows


def plot_trials(trials: Trials, path: Path, run: str) -> None:
    """Plots what the source is worth, or the loss, against the rate; crosses have diverged or collapsed."""
    key, quantity = "loss", "loss, nats a token"
    if trials.by_source:
        key, quantity = "source_gain", "source's worth, nats a token"
    figure, [axes] = panels([f"Run {run}: trials by learning rate"], "peak learning rate", quantity)

    def scatter(records: Sequence[Record], **look: Any) -> None:
        rates = [record["point"]["lr"] for record in records]
        heights = [record[key] or 0.0 for record in records]  # None: it has diverged
        axes.scatter(rates, heights, s=28, **look)

    for number, (stage, name) in enumerate(STAGES.items()):
        good, bad = [], []
        for record in trials.done:
            if record["stage"] != stage:
                continue
            if trials.worth([record])[0]:
                good.append(record)
            elif trials.by_source or not record["diverged"]:
                bad.append(record)
        scatter(good, color=COLOURS[number], marker=MARKERS[stage], label=name)
        scatter(bad, color=GREY, marker="x")
    axes.set_xscale("log")
    figure.legend(loc="outside lower center", ncols=4, **LEGEND)
    save(figure, path)
