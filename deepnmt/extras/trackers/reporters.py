"""Weights & Biases and MLflow: they get the figures that TensorBoard gets, under the same names.

What they need to know beyond the recipe they read from their own environment variables (WANDB_PROJECT, WANDB_MODE,
MLFLOW_TRACKING_URI, ...). `RUN/trackers.json` keeps the name that each gave the run, so that a resumed run continues
it. Updates that a killed attempt logged and the next one repeats are logged twice, with the same numbers.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from deepnmt.config import Recipe, flatten
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, write_json
from deepnmt.training.reporters import Reporter, figures_of

CLOSING = 60.0  # seconds that a run waits at its end for a tracker that is slow

Figures = Mapping[str, float]


class Tracker(Protocol):
    """A run of one tracker. `identity` is what continues it; methods may raise anything."""

    identity: str

    def log(self, update: int, figures: Figures) -> None: ...
    def close(self, status: str) -> None: ...


class _Wandb:
    def __init__(self, run: Path, recipe: Recipe, identity: str | None) -> None:
        import wandb

        self._run = wandb.init(
            dir=run, id=identity or secrets.token_hex(4), resume="allow", name=run.name, config=recipe.model_dump(),
            project=os.environ.get("WANDB_PROJECT", "deepnmt"), settings=wandb.Settings(console="off"))
        self._run.define_metric("*", step_metric="update")  # its own steps could not go back to an older checkpoint
        self.identity = self._run.id

    def log(self, update: int, figures: Figures) -> None:
        self._run.log({"update": update, **figures})

    def close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("finished", "preempted") else 1)


class _MLflow:
    def __init__(self, run: Path, recipe: Recipe, identity: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        if "MLFLOW_TRACKING_URI" not in os.environ:
            raise ValueError("the environment variable MLFLOW_TRACKING_URI does not say where its server is")
        self._client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        if identity is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "deepnmt")
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            identity = self._client.create_run(experiment, run_name=run.name).info.run_id
            parameters = [Param(key, str(value)[:500]) for key, value in flatten(recipe.model_dump()).items()]
            for first in range(0, len(parameters), 100):  # it takes a hundred at once
                self._client.log_batch(identity, params=parameters[first : first + 100])
        else:
            self._client.update_run(identity, status="RUNNING")
        self.identity = identity

    def log(self, update: int, figures: Figures) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, update) for name, value in figures.items()]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self.identity, metrics=metrics[first : first + 1000])

    def close(self, status: str) -> None:
        ends = {"finished": "FINISHED", "preempted": "KILLED"}
        self._client.set_terminated(self.identity, ends.get(status, "FAILED"))


TRACKERS: dict[str, tuple[type[_Wandb] | type[_MLflow], str]] = {
    "wandb": (_Wandb, "run wandb login, or set WANDB_MODE=offline and upload RUN/wandb later with wandb sync"),
    "mlflow": (_MLflow, "set MLFLOW_TRACKING_URI to the address of a server, such as http://127.0.0.1:5000"),
}  # with the way out where one cannot begin


class Tracking(Reporter):
    """The trackers of a run, which get what TensorBoard gets. They are fed by a thread: training waits for none, and
    none can end it.

    Args:
        recipe: its `train.trackers` name them.
        say: prints a line.

    Raises:
        UserError: a tracker is not installed, or cannot begin.
    """

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        run, self._say = Path(recipe.run), say
        make_run_folder(run)
        known = _identities(run)
        self._trackers: dict[str, Tracker] = {}
        for name in recipe.train.trackers:
            begin, remedy = TRACKERS[name]
            try:
                import_module(name)
            except ModuleNotFoundError:
                package = "mlflow-skinny" if name == "mlflow" else name
                raise UserError(f"train.trackers names {name}, which is not installed; run pip install {package}, or "
                                "remove it") from None
            try:
                self._trackers[name] = begin(run, recipe, known.get(name))
            except Exception as error:
                raise UserError(f"{name}, of train.trackers, cannot begin ({str(error)[:300]}); {remedy}") from None
        write_json(run / "trackers.json", {**known, **{name: one.identity for name, one in self._trackers.items()}})
        self._failing: set[str] = set()
        self._figures: queue.SimpleQueue[tuple[int, Figures] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name="trackers", daemon=True)
        self._thread.start()

    def record(self, kind: str, update: int, record: Mapping[str, Any]) -> None:
        """Passes figures on, and returns at once."""
        figures = figures_of(kind, record)
        if figures:
            self._figures.put((update, figures))

    def close(self, status: str) -> None:
        """Ends the trackers' runs; `status` as in STATUS.json. Waits until they have everything, `CLOSING` at most."""
        self._status = status
        self._figures.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self._say(f"{', '.join(self._trackers)} did not take the last figures in {CLOSING:.0f} s; log.jsonl has "
                      "them all")

    def _feed(self) -> None:
        while (item := self._figures.get()) is not None:
            for name, tracker in self._trackers.items():
                self._attempt(name, lambda: tracker.log(*item))  # noqa: B023 (called here only)
        for name, tracker in self._trackers.items():
            self._attempt(name, lambda: tracker.close(self._status))  # noqa: B023

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if name not in self._failing:
                self._say(f"{name} did not take figures ({str(error)[:300]}); training continues, and it is tried "
                          "again with the next")
            self._failing.add(name)
        else:
            self._failing.discard(name)


def reporters(recipe: Recipe, print_line: Callable[[str], None]) -> list[Reporter]:
    """What reports to the trackers that a recipe names. Raises `UserError` if one cannot begin."""
    return [Tracking(recipe, print_line)] if recipe.train.trackers else []


def _identities(run: Path) -> dict[str, str]:
    try:
        known = json.loads((run / "trackers.json").read_bytes())
        return {name: value for name, value in known.items() if isinstance(value, str)}
    except (OSError, ValueError, AttributeError):
        return {}
