"""Compares the losses of several runs in one picture and one table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from deepnmt.errors import UserError
from deepnmt.files import read_numbered_log, table
from studies.plots import plot_comparison, plot_source_use

SHOWN = ("loss", "source_gain", "encoder_common")  # of how a run uses its source


def compare_runs(runs: dict[str, Path], picture: Path, title: str, valid: bool = False) -> str:
    """Plots the loss of every run against updates, by the names they are given, and returns a table of it at about six
    updates.

    Args:
        valid: the plain loss of the validation text, instead of the label-smoothed one of training.

    Raises:
        UserError: a folder has no log, no line of training in it, or a log of another kind; the runs have no logged
            update in common; the picture cannot be written.
    """
    curves = {name: _losses(run, valid) for name, run in runs.items()}
    shared = sorted(set.intersection(*(set(points) for points in curves.values())))
    if not shared:
        raise UserError("the runs have no logged update in common; train them with the same "
                        f"train.{'validate_every' if valid else 'log_every'}")
    try:
        plot_comparison(curves, picture, title, f"{'plain validation' if valid else 'label-smoothed training'} loss,\n"
                        "nats per target token")
    except OSError as error:
        raise UserError(f"picture {picture} cannot be written: {error.strerror or error}; "
                        "set --output to another file") from None
    chosen = sorted({shared[round(i * (len(shared) - 1) / 5)] for i in range(6)})
    rows = [[name, *(f"{points[update]:.3f}" for update in chosen)] for name, points in curves.items()]
    return f"{table([['update', *map(str, chosen)], *rows])}\n{picture}"


def compare_source_use(runs: dict[str, Path], picture: Path, title: str) -> str:
    """Plots validation loss, the source's gain and the encoder's common vector of runs, by the names they are given;
    returns the last figures of each.

    Raises:
        UserError: a folder has no log, or one without these figures.
    """
    validations: dict[str, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        log = run / "log.jsonl"
        if not log.is_file():
            raise UserError(f"{run} has no log.jsonl; give the folder of a run that was started")
        validations[name] = []
        for _, record in read_numbered_log(log):
            if record.get("type") in ("valid", "look") and "source_gain" in record:
                figures = {key: float(record[key]) for key in SHOWN if key in record}  # one that diverged has "nan"
                validations[name].append({"update": record["update"], **figures})
        if not validations[name]:
            raise UserError(f"{log} does not say how the source is used; train the run again with this version")
    plot_source_use(validations, picture, title)
    rows = [["run", "update", "gain", "common"]]
    for name, records in validations.items():
        last = records[-1]
        rows.append([name, str(last["update"]), f"{last['source_gain']:.2f}", f"{last['encoder_common']:.2f}"])
    return f"{table(rows)}\n{picture}"


def _losses(run: Path, valid: bool) -> dict[int, float]:
    log = run / "log.jsonl"
    if not log.is_file():
        raise UserError(f"{run} has no log.jsonl; give the folder of a run that was started")
    losses = {}
    for number, record in read_numbered_log(log):
        try:
            if record["type"] == ("valid" if valid else "train"):
                losses[int(record["update"])] = (math.log(float(record["perplexity"])) if valid
                                                 else float(record["loss"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(f"{log}, line {number}, is not from the log of a training, which has type and update, and "
                            "loss if the type is train; give a run folder that deepnmt train wrote") from None
    if not losses:
        raise UserError(f"{log} has no line of {'validation' if valid else 'training'} yet")
    return losses
