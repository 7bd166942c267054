"""The training job, readable top to bottom: open, resume or begin, update, validate, save, end."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepnmt.checkpoint.average import check_average_last
from deepnmt.checkpoint.checkpoint import (
    CheckpointWriteError,
    Contents,
    list_checkpoints,
    load_state,
    moments_in,
    newest_checkpoint,
    prune,
    save_checkpoint,
    weights_in,
)
from deepnmt.config import Recipe, Train, dump_recipe
from deepnmt.errors import UserError
from deepnmt.files import read_log, write_text
from deepnmt.optim import warmup_note
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import check_with_deepspeed, layout_of, untested_deepspeed
from deepnmt.ranks import Ranks
from deepnmt.train.divergence import Explain, diverged
from deepnmt.train.log import Monitor
from deepnmt.train.resume import changes_since, run_lock
from deepnmt.train.state import Interval, TrainState
from deepnmt.train.task import TRANSLATION, Task
from deepnmt.train.updates import Around, Finished, updates

FINISHED, PREEMPTED = 0, 75  # exit codes; 75 is "try again" in sysexits

# What ends a run, by the setting that asks for it: whether a run that stands so is at its end. Asked on every process
# after every update, so only of what is the same on all. To add one: a row here, its setting in `config.Train`.
ENDS: dict[str, Callable[[Train, TrainState], bool]] = {
    "updates": lambda train, state: state.update >= train.updates,
    "epochs": lambda train, state: train.epochs is not None and state.position.epoch >= train.epochs,
    "max_seconds": lambda train, state: state.out_of_time,
    "patience": lambda train, state: train.patience > 0 and state.best.get("waited", 0) >= train.patience,
}


class Trainer:
    """One run in one run folder. Every method is collective.

    Args:
        watch: makes, of a run's recipe and engine, the hook around its updates; what that sees is logged.
        explain: says of a run that cannot go on where it broke.
    """

    def __init__(
        self, recipe: Recipe, ranks: Ranks, task: Task = TRANSLATION,
        watch: Callable[[Recipe, Engine, Ranks], Around] | None = None, explain: Explain | None = None,
    ) -> None:
        self.recipe, self.ranks, self.task, self.explain = recipe, ranks, task, explain
        self.run = Path(recipe.run)
        self.checkpoints = self.run / "checkpoints"
        check_average_last(recipe)
        layout = layout_of(recipe, ranks.world)
        check_with_deepspeed(layout)
        task.check(recipe)
        begun = bool(list_checkpoints(self.checkpoints))
        self.data = ranks.raise_everywhere(lambda: task.open(recipe, not begun, ranks.first))
        self.stream = task.stream(recipe, self.data)
        self.state = TrainState(data_fingerprint=self.data.fingerprint, processes=ranks.world)
        self.stop_signal = 0
        self._saved = -1
        with ExitStack() as held:  # let go of if anything here fails, else by `close`
            held.enter_context(run_lock(self.run, ranks))
            checkpoint = self._agree_on_checkpoint()
            changes: list[str] = []
            if checkpoint:
                changes = changes_since(checkpoint, recipe, self.data.fingerprint, ranks.world)
                self.state = replace(TrainState.of(load_state(checkpoint)), processes=ranks.world)
            update = self.state.update
            self.monitor = Monitor(self.run, ranks.first, update, recipe.train.updates)
            self.engine = task.start(recipe, layout, self.data, ranks, checkpoint is None)
            if checkpoint:
                self._resume(checkpoint)
                self.monitor.event(update, f"resuming from {checkpoint}" + "".join(f"\n  now {c}" for c in changes))
            else:
                count = self.engine.parameters
                self.monitor.event(0, f"training {count:,} parameters on {ranks.world} process(es) from scratch",
                                   parameters=count, processes=ranks.world)
                if note := warmup_note(recipe):
                    self.monitor.event(0, note)
            if layout.config is not None and (note := untested_deepspeed()):
                self.monitor.event(update, note)
            self.around: Around = watch(recipe, self.engine, ranks) if watch else lambda number: nullcontext()
            if ranks.first:
                write_text(self.run / "recipe.yaml", dump_recipe(recipe))
            self._held = held.pop_all()

    def _agree_on_checkpoint(self) -> Path | None:
        """Rank 0 looks for the newest whole checkpoint and tells the others.

        Raises `UserError` where there are checkpoints but none is whole: a new beginning would write over them.
        """
        name = b""
        if self.ranks.first:
            newest = newest_checkpoint(self.checkpoints, on_skip=lambda why: print(f"skipped: {why}", flush=True))
            name = newest.name.encode() if newest else b""
        name = self.ranks.broadcast_bytes(name)
        if not name and list_checkpoints(self.checkpoints):
            raise UserError(f"{self.checkpoints} holds no checkpoint that is whole, so the run cannot go on; put a "
                            "good copy there, train into another folder with run=FOLDER, or delete them to begin anew")
        return self.checkpoints / name.decode() if name else None

    def _resume(self, checkpoint: Path) -> None:
        state = self.state
        self.engine.fill(weights_in(checkpoint), moments_in(checkpoint), state.optimizer_step)
        if state.loss_scale is not None:
            self.engine.restore_scaler(state.loss_scale)
        self._saved = state.update
        limit = self.recipe.train.max_seconds
        state.out_of_time = limit is not None and state.seconds >= limit

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run_to_end(self) -> int:
        """Trains until the recipe's end, early stopping or a signal; returns the process's exit code."""
        settings, state = self.recipe.train, self.state
        if threading.current_thread() is threading.main_thread():  # no other may
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.signal(number, self._note_signal)
        self.monitor.status("running", state.update)
        if self._validation_due():  # the run was stopped in this update, before its validation
            self._validate()
            self._saved = -1  # the checkpoint is to know of it
            self._save(last=self._ended())
        if self._ended():
            return self._finish()
        for done in updates(self.engine, self.stream, self.recipe, state, self.ranks, self.around,
                            lambda: self.stop_signal != 0):
            if done.seen:
                self.monitor.probe(done.number, done.seen)
            if not done.stats.applied:
                self._dropped(done)
            if state.interval.applied and (state.update % settings.log_every == 0 or state.update == settings.updates):
                self._report(state.interval)
                state.interval = Interval()
            improved = not done.stop and self._validation_due() and self._validate()
            ended = self._ended() and not self._validation_due()
            if state.update % settings.save_every == 0 or improved or ended or done.stop:
                self._save(last=ended or done.stop)
            if ended:
                return self._finish()
            if done.stop:
                break
        name = signal.Signals(self.stop_signal or signal.SIGTERM).name  # of another process it is not known
        self.monitor.event(state.update, f"stopped by {name} and saved; the same command resumes from here")
        self.monitor.status("preempted", state.update, seconds=round(state.seconds, 1), signal=name)
        return PREEMPTED

    def _note_signal(self, number: int, _frame: Any) -> None:
        self.stop_signal = number

    def _dropped(self, done: Finished) -> None:
        """Raises `Diverged` where it was one too many."""
        scale = done.stats.loss_scale
        self.monitor.event(self.state.update, f"skipped update {done.number}: its gradient is not finite "
                           f"(loss scale {scale:g})", loss=str(done.loss))
        if done.hopeless:
            raise diverged(self.recipe, self.engine, self.ranks, done.update.batches,
                           self.engine.data_world / done.update.tokens, scale, self.explain)

    def _ended(self) -> bool:
        return any(at_end(self.recipe.train, self.state) for at_end in ENDS.values())

    def _report(self, interval: Interval) -> None:
        state = self.state
        self.monitor.status("running", state.update)
        self.monitor.train(state.update, {
            "epoch": state.position.epoch + 1,
            "loss": interval.loss / interval.tokens,
            "perplexity": math.exp(min(interval.nll / interval.tokens, 50.0)),
            "learning_rate": interval.rate,
            "gradient_norm": interval.gradient_norm / interval.applied,
            "loss_scale": interval.loss_scale,
            "target_tokens_per_second": interval.tokens / interval.seconds,
            "target_tokens": state.target_tokens,
            "skipped_updates": state.skipped,
            "padding_waste": self.stream.waste(state.position.epoch),
            "training_seconds": state.seconds,
        }, *self._to_go())

    def _to_go(self) -> tuple[int, float]:
        """Updates, and seconds of updates, until the run's end; patience may end it before."""
        settings, state = self.recipe.train, self.state
        left = settings.updates - state.update
        if settings.epochs is not None:  # later epochs may differ by a few micro-batches
            epoch, index = state.position.epoch, state.position.index
            micro_batches = (settings.epochs - epoch) * self.stream.epoch_size(epoch) - index
            left = min(left, -(-micro_batches // (self.engine.data_world * self.recipe.batch.accumulation)))
        limit = math.inf if settings.max_seconds is None else settings.max_seconds
        return max(0, left), max(0.0, limit - state.seconds)

    def _validation_due(self) -> bool:
        """Whether this update is to be validated, and was not yet."""
        update, done = self.state.update, self.state.validations
        if not update or (done and done[-1]["update"] == update):
            return False
        return update % self.recipe.train.validate_every == 0 or self._ended()

    def _validate(self) -> bool:
        """Returns whether this is the best validation so far."""
        state, result = self.state, self.task.validate(self.recipe, self.data, self.engine, self.ranks)
        value = -(result.bleu or 0.0) if self.recipe.train.best_by == "bleu" else result.loss
        best = state.best
        improved = not best or value < best["value"]
        if improved:
            state.best = {"value": value, "update": state.update, "waited": 0}
        else:
            state.best = {**best, "waited": best["waited"] + 1}
        record = {"loss": result.loss, "perplexity": result.perplexity, "best": improved}
        if result.bleu is not None:
            record |= {"bleu": result.bleu, "signature": result.signature}
        state.validations.append({"update": state.update, "value": value, **record})
        self.monitor.valid(state.update, {**record, "training_seconds": state.seconds})
        return improved

    # -- saving and ending -------------------------------------------------------------------------------------------

    def _save(self, last: bool) -> None:
        """Writes a checkpoint unless there is one of this update.

        Raises `CheckpointWriteError`, on every process, where it cannot be written and is the `last` of this attempt;
        after another one training goes on.
        """
        state, settings = self.state, self.recipe.train
        if self._saved == state.update:
            return
        state.optimizer_step = self.engine.optimizer_step
        state.loss_scale = self.engine.scaler_state() or state.loss_scale  # handed on by layouts that use none
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for parameter in self.engine.export_state():
            if self.ranks.first:
                weights[parameter.name] = parameter.weight
                moments |= parameter.moments

        def write() -> None:
            if self.ranks.first:
                save_checkpoint(self.checkpoints, Contents(weights, moments, state.saved(), dump_recipe(self.recipe),
                                                           self.task.files(self.data)))
                scores = {v["update"]: v["value"] for v in state.validations}
                prune(self.checkpoints, settings.keep_last, settings.keep_best, scores)

        try:
            self.ranks.raise_everywhere(write)
        except UserError as fault:
            if last:
                raise CheckpointWriteError(f"{fault}; the same command then resumes from the newest of them") from None
            self.monitor.event(state.update, f"checkpoint not written, training continues: {fault}")
        else:
            self._saved = state.update

    def _finish(self) -> int:
        state = self.state
        self.monitor.event(state.update, f"finished after {state.update} updates, {state.position.epoch} epochs, "
                           f"{state.target_tokens:,} target tokens in {state.seconds:.0f} s of updates")
        self.monitor.status("finished", state.update, seconds=round(state.seconds, 1))
        if self.ranks.first:
            from deepnmt.plots import plot_learning_curve  # importing matplotlib takes a second

            plot_learning_curve(read_log(self.run / "log.jsonl"), self.run / "curve.png", self.run.name)
        return FINISHED

    def close(self) -> None:
        self.engine.close()
        self.monitor.close()
        self._held.close()


def train(
    recipe: Recipe, ranks: Ranks, task: Task = TRANSLATION,
    watch: Callable[[Recipe, Engine, Ranks], Around] | None = None, explain: Explain | None = None,
) -> int:
    """Trains the recipe into its run folder, going on where an earlier attempt stopped; returns the exit code. For the
    hooks see `Trainer`.

    Raises:
        UserError: the run cannot begin or go on, or its gradients stay non-finite (`Diverged`).
    """
    trainer = Trainer(recipe, ranks, task, watch, explain)
    try:
        return trainer.run_to_end()
    except Exception as error:
        trainer.monitor.status("failed", trainer.state.update, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        trainer.close()
