"""The trials as a table and a picture."""

from __future__ import annotations

from pathlib import Path

from deepnmt.extras.tune.trials import Record, Trials
from deepnmt.plots import COLOURS, GREY, LEGEND, panels, save

STAGES = {"search": "search", "longer": "longer", "seeds": "other seeds", "deep": "deep model"}
MARKERS = {"search": "o", "longer": "s", "seeds": "^", "deep": "D"}


def rows_of(trials: Trials) -> list[list[str]]:
    """A table with its header: a row a trial, stage by stage and the best first."""
    sides = [side for side in ("encoder", "decoder") if side in trials.done[0]["point"]]
    source = ["source's worth", "one vector"] if trials.by_source else []
    rows = [["stage", "layers", "updates", "seed", "rate", *sides, "warm-up", *source, "loss", ""]]
    for stage, name in STAGES.items():
        records = [record for record in trials.done if record["stage"] == stage]
        for record in sorted(records, key=lambda record: trials.worth([record]), reverse=True):
            point = record["point"]
            figures = [f"{record['source_gain']:+.3f}", f"{record['encoder_common']:.2f}"] if source and \
                not record["diverged"] else ["" for _ in source]
            loss = "" if record["diverged"] else f"{record['loss']:.3f}"
            note = "diverged" if record["diverged"] else "collapsed" if record["collapsed"] else ""
            rows.append([name, record["model"], f"{record['updates']:,}", str(record["seed"]), f"{point['lr']:.2g}",
                         *(f"{point[side]:.2g}" for side in sides), f"{100 * point['warmup']:.2g} %", *figures, loss,
                         note])
    return rows


def plot_trials(trials: Trials, path: Path, run: str) -> None:
    """Plots what the source is worth, or the loss, against the rate; crosses have diverged or collapsed."""
    quantity = "source's worth, nats a token" if trials.by_source else "loss, nats a token"
    figure, [axes] = panels([f"Run {run}: trials by learning rate"], "peak learning rate", quantity)

    def height(record: Record) -> float:
        value = record["source_gain"] if trials.by_source else record["loss"]
        return float(value) if value is not None else 0.0

    for number, (stage, name) in enumerate(STAGES.items()):
        records = [record for record in trials.done if record["stage"] == stage]
        good = [record for record in records if trials.worth([record])[0]]
        bad = [record for record in records if not trials.worth([record])[0] and (
            trials.by_source or not record["diverged"])]
        axes.scatter([r["point"]["lr"] for r in good], [height(r) for r in good], color=COLOURS[number], s=28,
                     marker=MARKERS[stage], label=name)
        axes.scatter([r["point"]["lr"] for r in bad], [height(r) for r in bad], color=GREY, s=28, marker="x")
    axes.set_xscale("log")
    figure.legend(loc="outside lower center", ncols=4, **LEGEND)
    save(figure, path)
