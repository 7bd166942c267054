"""The training job, in order: open the data, resume or begin, update, validate, save, end."""

from __future__ import annotations

import errno
import json
import math
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from deepnmt.checkpoint.checkpoint import list_checkpoints, moments_in, weights_in
from deepnmt.checkpoint.retention import check_average_last, make_room, prune
from deepnmt.checkpoint.saving import Saver, in_shards
from deepnmt.config import Change, Fact, Recipe, Train, dump_recipe
from deepnmt.device import describe, deterministic
from deepnmt.errors import UserError, enough_memory
from deepnmt.files import read_log, reporting, write_text
from deepnmt.folders import FolderWriteError
from deepnmt.model.loss import perplexity
from deepnmt.optim.schedules import warmup_note
from deepnmt.parallel.ds_config import check_with_deepspeed, layout_of, untested_deepspeed
from deepnmt.parallel.engine import Engine
from deepnmt.processes import heartbeat
from deepnmt.processes.agreement import agree_on_contents, agree_on_recipe
from deepnmt.processes.launcher import lost_launcher
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import output_may_be_lost
from deepnmt.training.divergence import diverged
from deepnmt.training.dry_run import disk_note
from deepnmt.training.log import Monitor
from deepnmt.training.resume import agree_on_checkpoint, read_state, run_lock, telling_refusal
from deepnmt.training.stages import end_stages, resume_stages
from deepnmt.training.state import Interval, TrainState
from deepnmt.training.status import FINISHED, PREEMPTED, SIGNALS
from deepnmt.training.task import Figures, Task, Validation, find_task
from deepnmt.training.updates import FinishedUpdate, UpdateHook, updates
from deepnmt.training.verification import AT_ONCE, Verification
from deepnmt.visitors import find, require_visitors, visitor_modules

_TOO_LARGE = ("set parallel.recompute_layers, or let ZeRO share more, and the same command resumes from the newest "
              "checkpoint; or lower batch.tokens, in another run")

# What ends a run, by the setting: from the settings and the state, whether the run has ended. Every process evaluates
# them after every update, so they may only use what is the same on all. To add one: a row here, a setting in
# `config.Train`.
STOP_CONDITIONS: dict[str, Callable[[Train, TrainState], bool]] = {
    "updates": lambda train, state: state.update >= train.updates,
    "epochs": lambda train, state: train.epochs is not None and state.position.epoch >= train.epochs,
    "max_seconds": lambda train, state: state.out_of_time,
    "patience": lambda train, state: train.patience > 0 and state.best.get("waited", 0) >= train.patience,
}


class Trainer:
    """One run in one run folder. Every method is collective.

    Args:
        task: None: the recipe's.
        watch: makes the hook around the run's updates; the figures that the hook measures are logged. None: a
            visitor's, if there is one.
    """

    def __init__(
        self, recipe: Recipe, ranks: Ranks, task: Task | None = None,
        watch: Callable[[Recipe, Engine, Ranks], UpdateHook] | None = None,
    ) -> None:
        task = task or find_task(recipe.task)
        self.recipe, self.ranks, self.task = recipe, ranks, task
        self.run = Path(recipe.run)
        self.checkpoints = self.run / "checkpoints"
        check_average_last(recipe)
        agree_on_recipe(recipe, ranks)
        layout = ranks.raise_everywhere(lambda: layout_of(recipe, ranks.world))
        check_with_deepspeed(layout)
        task.check(recipe)
        begun = bool(list_checkpoints(self.checkpoints))
        self.data = ranks.raise_everywhere(lambda: task.open(recipe, not begun))
        # each machine checks what it reads; what takes longer goes on beside the first updates
        self.verification = Verification(lambda: task.verify(self.data) if ranks.local_rank == 0 else None)
        ranks.raise_everywhere(lambda: self.verification.wait(AT_ONCE))
        agree_on_contents(recipe, layout.config, self.data.fingerprint, task.files(self.data), ranks)
        self.stream = task.stream(recipe, self.data)
        self.state = TrainState(data_fingerprint=self.data.fingerprint, processes=ranks.world)
        self.stop_signal = 0
        self._saved = -1
        self._failed_saves = 0
        self._not_deleted: FolderWriteError | None = None
        with ExitStack() as held, self.verification.explaining():  # released if anything here fails, else by `close`
            held.enter_context(run_lock(self.run, ranks))
            changes: list[Change] = []
            with telling_refusal(self.run, ranks):
                checkpoint = agree_on_checkpoint(self.checkpoints, ranks)
                if checkpoint:
                    fingerprints = [self.data.fingerprint, *getattr(self.data, "former_fingerprints", ())]
                    changes, self.state = read_state(checkpoint, recipe, fingerprints, ranks)
                    # of this rank: the paths of another machine may differ
                    other_text = any(change.key.startswith(("data.train", "data.valid")) and
                                     recipe.is_marked(change.key, Fact.PATH) for change in changes)
                    ranks.raise_everywhere(lambda: task.open(recipe, True) if other_text else None)
                    resume_stages(self.stream, self.state)
                update = self.state.update
                self.monitor = Monitor(self.run, ranks.first, update, recipe.train.updates, task.describe)
            held.push(lambda kind, error, trace: self.report_failure(error))
            if self.state.validations:  # what the last one showed is still so
                last = self.state.validations[-1]
                self.monitor.warning = task.warn(recipe, last["update"], last)
            self.monitor.status("running", update)
            ranks.raise_everywhere(self._add_reporters)
            on = describe(ranks.device, ranks.world, ranks.local_world, layout.precision)
            self.monitor.event(update, "; ".join(on.values()), **on)
            self.engine = task.start(recipe, layout, self.data, ranks, checkpoint is None)
            if checkpoint:
                self._resume(checkpoint)
                self.monitor.event(update, f"resuming from {checkpoint}" + "".join(f"\n  now {c}" for c in changes))
                if update > recipe.train.updates:
                    self.monitor.event(update, f"train.updates is {recipe.train.updates}, and this run is past it; "
                                       "for a model of so few, train into another folder with run=FOLDER")
            else:
                count, old = self.engine.parameters, recipe.train.init_from
                begin = f"beginning with the weights of {old}" if old else "from scratch"
                self.monitor.event(0, f"training {count:,} parameters on {ranks.world} process(es) {begin}",
                                   parameters=count, processes=ranks.world)
                if note := warmup_note(recipe):
                    self.monitor.event(0, note)
            if ranks.first:
                self.monitor.event(update, disk_note(recipe, self.engine.parameters))
            if layout.config is not None and (note := untested_deepspeed()):
                self.monitor.event(update, note)
            self.saver = Saver(self.checkpoints, ranks, self.engine.owned(),
                               in_shards(recipe, self.engine.parameters, ranks.world))
            watch = watch or find("training", "watch")
            self.hook: UpdateHook = watch(recipe, self.engine, ranks) if watch else lambda number: nullcontext()
            ranks.raise_everywhere(self._write_recipe)
            if heartbeat.current is not None:
                heartbeat.current.on_lost = self._report_loss
            self._lock = held.pop_all()

    def _add_reporters(self) -> None:
        """Adds those of visitors. Raises `UserError` if one that the recipe names is not there, or cannot begin."""
        require_visitors(self.recipe.train, "train")
        if self.ranks.first:
            for visitor in visitor_modules("reporters"):
                self.monitor.reporters += visitor.reporters(self.recipe, self.monitor.print_line)

    def _report_loss(self, sentence: str) -> None:
        self.monitor.status("lost", self.state.update, error=sentence)

    def _write_recipe(self) -> None:
        if self.ranks.first:
            with reporting(f"{self.run / 'recipe.yaml'}", "free disk space, or set run to another folder"):
                write_text(self.run / "recipe.yaml", dump_recipe(self.recipe))

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
            for number in SIGNALS:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                # by nohup, and by a shell whose background job this is
                if not (ignored and number in (signal.SIGHUP, signal.SIGINT)):
                    signal.signal(number, self._on_signal)
        if self._validation_due():  # the run was stopped after this update, before its validation
            self._validate()
            self._end_stages()
            self._save(last=self._ended())
        if self._ended():
            return self._finish()
        heartbeat.begin(heartbeat.UPDATE)
        self.monitor.begin()
        for done in updates(self.engine, self.stream, self.recipe, state, self.ranks, self.hook,
                            lambda: self.stop_signal != 0):
            if done.measured:
                self.monitor.probe(done.number, done.measured)
            if not done.stats.applied:
                self._report_dropped(done)
            if state.interval.applied and (state.update % settings.log_every == 0 or state.update == settings.updates):
                self._report(state.interval)
                state.interval = Interval()
                if self._look_due():
                    self._look()
            self._end_stages()
            improved = not done.stop and self._validation_due() and self._validate()
            self._end_stages()  # by its patience
            ended = self._ended() and not self._validation_due()
            due = state.update > 0 and state.update % settings.save_every == 0  # the first update may be dropped
            if self.saver.done():  # after the reports of this update, with which it may be saved
                self._settle()
            if due or improved or ended or done.stop:
                self._save(last=ended or done.stop)
            if ended:
                return self._finish()
            if done.stop:
                break
            heartbeat.begin(heartbeat.UPDATE)
        name, cause = self._stop_cause()
        self.monitor.status("preempted", state.update, seconds=round(state.seconds, 1), signal=name, cause=cause)
        self.monitor.event(state.update, f"stopped {cause} and saved; the same command resumes from here")
        self.ranks.barrier()  # launchers kill the others when the first process has ended
        return PREEMPTED

    def _end_stages(self) -> None:
        for note in end_stages(self.recipe, self.stream, self.state):
            self.monitor.event(self.state.update, note)

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.stop_signal = number

    def report_failure(self, error: BaseException | None) -> None:
        """Says in STATUS.json that the run has failed, unless it was interrupted or `error` is None."""
        if isinstance(error, Exception):
            self.monitor.status("failed", self.state.update, error=f"{type(error).__name__}: {error}")

    def _stop_cause(self) -> tuple[str, str]:
        """The signal at which the run stops, and why it was sent, on rank 0."""
        own = b""
        if self.stop_signal:
            name = signal.Signals(self.stop_signal).name
            where = f" to rank {self.ranks.rank} on {socket.gethostname()}" if self.ranks.world > 1 else ""
            cause = f"because {lost_launcher()}" if lost_launcher() else f"by {name}{where}"
            own = json.dumps([name, cause]).encode()
        causes = self.ranks.gather_bytes(own) or [own]
        name, cause = json.loads(next(filter(None, causes), b'["SIGTERM", "by a signal"]'))
        return name, cause

    def _report_dropped(self, done: FinishedUpdate) -> None:
        """Reports a dropped update; raises `Diverged` if it was one too many."""
        scale = done.stats.loss_scale
        ends = done.stop or self._ended()  # then what is saved is behind this update, which is not repeated
        self.monitor.event(self.state.update if ends else done.number,
                           f"skipped update {done.number}: its gradient is not finite (loss scale {scale:g})",
                           loss=str(done.stats.loss))
        if done.give_up:
            heartbeat.begin("")  # to be explained
            before = self.task.explain(self.state.validations[-1]) if self.state.validations else []
            raise diverged(self.recipe, self.engine, self.ranks, done.update.batches,
                           self.engine.data_world / done.update.tokens, scale, find("training", "explain"), before)

    def _ended(self) -> bool:
        return any(at_end(self.recipe.train, self.state) for at_end in STOP_CONDITIONS.values())

    def _report(self, interval: Interval) -> None:
        state = self.state
        self.monitor.train(state.update, {
            "epoch": state.position.epoch + 1,
            "loss": interval.loss / interval.tokens,
            "perplexity": perplexity(interval.nll, interval.tokens),
            "learning_rate": interval.rate,
            "gradient_norm": interval.gradient_norm / interval.applied,
            "loss_scale": interval.loss_scale,
            "target_tokens_per_second": interval.tokens / interval.seconds,
            "target_tokens": state.target_tokens,
            "skipped_updates": state.skipped,
            "padding_waste": self.stream.waste(state.position.epoch),
            "training_seconds": state.seconds,
            **{name: value / interval.tokens for name, value in interval.figures.items()},
        }, *self._remaining())

    def _remaining(self) -> tuple[int, float]:
        """Updates, and seconds of updates, that are left at most."""
        settings, state = self.recipe.train, self.state
        left = settings.updates - state.update
        if settings.epochs is not None:  # later epochs may differ by a few entries
            size = self.stream.epoch_size(state.position.epoch)
            entries = round((settings.epochs - self.stream.passes(state.position)) * size)
            left = min(left, -(-entries // self.recipe.batch.entries(self.engine.data_world)))
        limit = math.inf if settings.max_seconds is None else settings.max_seconds
        return max(0, left), max(0.0, limit - state.seconds)

    def _validation_due(self) -> bool:
        """Whether the present update needs a validation and has had none yet."""
        update, done = self.state.update, self.state.validations
        if not update or (done and done[-1]["update"] == update):
            return False
        return update % self.recipe.train.validate_every == 0 or self._ended()

    def _validate(self) -> bool:
        """Validates; returns whether this is the best validation so far."""
        heartbeat.begin(heartbeat.VALIDATION)
        state, result = self.state, self._measure()
        best, value = state.best, result.value
        if math.isnan(value):  # fp16 may overflow in a sentence; any number is better
            value = math.inf
        improved = not best or value < best["value"]
        if improved:
            state.best = {"value": value, "update": state.update, "waited": 0}
        else:
            state.best = {**best, "waited": best["waited"] + 1}
        record = {"loss": result.loss, "perplexity": result.perplexity, "best": improved, **result.figures}
        for name, one in result.corpora.items():
            for figure, number in {"loss": one.loss, "perplexity": one.perplexity, **one.figures}.items():
                if not isinstance(number, str):
                    record[f"{name}/{figure}"] = number
        state.validations.append({"update": state.update, "value": value, **record})
        self._saved = -1  # so that a checkpoint of this update that is there is written again, with the validation
        self.monitor.valid(state.update, {**record, "training_seconds": state.seconds})
        self._warn(result.figures)
        return improved

    def _measure(self) -> Validation:
        """The figures of the weights, or of their running average."""
        averaged = self.recipe.train.ema is not None
        if averaged:
            self.engine.swap_average()
        result = self.task.validate(self.recipe, self.data, self.engine, self.ranks)
        if averaged:
            self.engine.swap_average()
        return result

    def _look_due(self) -> bool:
        """Whether this is the first progress line at which the task's look says something, and no validation was
        before."""
        if self.task.look is None or self.state.validations or self._validation_due():
            return False
        update, begin = self.state.update, self.task.look.due(self.recipe)
        return update - self.recipe.train.log_every < begin <= update

    def _look(self) -> None:
        assert self.task.look is not None
        if figures := self.task.look.measure(self.recipe, self.data, self.engine, self.ranks):
            self.monitor.look(self.state.update, figures)
            self._warn(figures)

    def _warn(self, figures: Figures) -> None:
        """Says the task's warning once; STATUS.json has it as long as it is so."""
        note = self.task.warn(self.recipe, self.state.update, figures)
        self.monitor.warning = note
        if note and not self.state.warned:
            self.state.warned = True
            self.monitor.event(self.state.update, note)
        self.monitor.status("running", self.state.update)

    # -- saving and ending -------------------------------------------------------------------------------------------

    def _save(self, last: bool) -> None:
        """Copies a checkpoint of this update, unless it has one, to be written while training continues.

        If it is the `last` before this process ends, it is on the disk when this returns, or `FolderWriteError` is
        raised on every process.
        """
        self._settle()
        state = self.state
        if self._saved != state.update:
            self.ranks.raise_everywhere(self.verification.wait)  # nothing that damaged data gave is kept
            state.optimizer_step = self.engine.optimizer_step
            state.loss_scale = self.engine.scaler_state() or state.loss_scale  # a layout without one keeps the last
            scores = self._scores()
            self.saver.save(self.engine.owned(), state.to_saved(), dump_recipe(self.recipe),
                            self.task.files(self.data), lambda: self._prune(scores))
            self._saved = state.update
        if last:
            self._settle(last)

    def _settle(self, last: bool = False) -> None:
        """Waits for the checkpoint that is being written and reports it. If it could not be written, training
        continues, unless it is the `last` or one too many; see `_save_failed`."""
        heartbeat.begin(heartbeat.SAVE)
        try:
            saved = self.saver.wait()
        except UserError as fault:
            self._saved = -1
            self._save_failed(fault, last)
        else:
            if saved:
                self._failed_saves = 0
                heartbeat.took(heartbeat.SAVE, saved.seconds)
                self.monitor.saved(self.state.update, saved)
        if self._not_deleted:
            self.monitor.event(self.state.update, f"an old checkpoint was not deleted: {self._not_deleted}")
            self._not_deleted = None

    def _save_failed(self, fault: UserError, last: bool) -> None:
        """Makes room on a full disk and saves again; else reports the fault that every process has, or raises
        `FolderWriteError` if it is time to end."""
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            freed = None
            if self.ranks.first:
                freed = make_room(self.checkpoints, self.recipe.train, self._scores(), self.state.update)
            if name := self.ranks.broadcast_bytes(freed.name.encode() if freed else b"").decode():
                self.monitor.event(self.state.update, f"the disk is full; {name} was deleted to make room for a newer "
                                   "checkpoint")
                self._save(last)
                return
        self._failed_saves += 1
        most = self.recipe.train.max_failed_saves
        if self._failed_saves >= most and not last:
            fault = UserError(f"{fault}; train.max_failed_saves is {most}, and so many in a row failed")
        if last or self._failed_saves >= most:
            goes_on = "resumes from the newest of them" if list_checkpoints(self.checkpoints) else "begins anew"
            raise FolderWriteError(f"{fault}; the same command then {goes_on}") from None
        self.monitor.event(self.state.update, f"checkpoint not written, training continues ({self._failed_saves} of "
                           f"{most} in a row, then the run ends): {fault}")

    def _scores(self) -> dict[int, float]:
        return {v["update"]: v["value"] for v in self.state.validations}

    def _prune(self, scores: dict[int, float]) -> None:
        """Deletes checkpoints that are not kept, in the thread that writes; the next save tries again what fails."""
        try:
            prune(self.checkpoints, self.recipe.train, scores)
        except FolderWriteError as fault:
            self._not_deleted = fault

    def _finish(self) -> int:
        state = self.state
        self.monitor.status("finished", state.update, seconds=round(state.seconds, 1))
        self.monitor.event(state.update, f"finished after {state.update} updates, {state.position.epoch} epochs, "
                           f"{state.target_tokens:,} target tokens in {state.seconds:.0f} s of updates")
        if self.ranks.first:
            from deepnmt.plots import plot_learning_curve  # importing matplotlib takes a second

            try:
                plot_learning_curve(read_log(self.run / "log.jsonl"), self.run / "curve.png", self.run.name)
            except Exception as error:  # a log with damaged figures, a full disk: the run is finished all the same
                self.monitor.event(state.update, f"curve.png was not drawn: {error}")
        return FINISHED

    def close(self) -> None:
        self.saver.close()
        self.engine.close()
        self.monitor.close()
        self._lock.close()


def train(
    recipe: Recipe, ranks: Ranks, task: Task | None = None,
    watch: Callable[[Recipe, Engine, Ranks], UpdateHook] | None = None,
) -> int:
    """Trains the recipe into its run folder, resuming if that holds a checkpoint; returns the exit code. For `watch`
    see `Trainer`.

    Raises:
        UserError: the run cannot begin or resume, or its gradients stay non-finite (`Diverged`).
    """
    with deterministic(recipe.train.deterministic), output_may_be_lost():
        trainer = Trainer(recipe, ranks, task, watch)
        try:
            with trainer.verification.explaining(), enough_memory(_TOO_LARGE):
                return trainer.run_to_end()
        except Exception as error:
            trainer.report_failure(error)
            raise
        finally:
            trainer.close()
