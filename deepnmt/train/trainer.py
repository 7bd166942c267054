"""The training job, readable top to bottom: open, resume or begin, update, validate, save, end."""

from __future__ import annotations

import math
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from deepnmt.checkpoint.average import check_average_last
from deepnmt.checkpoint.checkpoint import (
    CheckpointWriteError,
    TrainingState,
    list_checkpoints,
    load_moments,
    load_state,
    load_weights,
    newest_checkpoint,
    prune,
    save_checkpoint,
)
from deepnmt.config import Recipe, dump_recipe
from deepnmt.data.batching import Position, Stream
from deepnmt.data.prepared import open_prepared
from deepnmt.doctor.training_probe import TrainingProbe
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import scorers
from deepnmt.files import read_log, write_text
from deepnmt.model.admin import AdminProfile
from deepnmt.optim import ScalerState, learning_rate, warmup_note
from deepnmt.parallel.build import partition_of, start_engine
from deepnmt.parallel.engine import Engine
from deepnmt.parallel.settings import check_by_deepspeed, layout_of, untried_deepspeed
from deepnmt.plots import draw_admin_profile, draw_learning_curve
from deepnmt.ranks import Ranks
from deepnmt.train.divergence import Drops, diverged
from deepnmt.train.log import Monitor
from deepnmt.train.profile import profile_for
from deepnmt.train.resume import changes_since, only_trainer
from deepnmt.train.state import Interval, Progress
from deepnmt.train.validate import validate

FINISHED, PREEMPTED = 0, 75  # exit codes; 75 is "try again" in sysexits


class Trainer:
    """One run in one run folder. Every method is collective."""

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.run = Path(recipe.run)
        check_average_last(recipe)
        self.layout = layout_of(recipe, ranks.world)
        check_by_deepspeed(self.layout)
        if recipe.train.valid_bleu:
            scorers(recipe.data.trg_lang)  # better refused now than at the first validation
        begun = bool(list_checkpoints(self.run / "checkpoints"))
        self.data = ranks.together(partial(open_prepared, recipe, texts=not begun, verify=ranks.first))
        self.vocabs = self.data.vocabs()
        self.stream = Stream(self.data.split("train"), recipe.batch.tokens, recipe.seed)
        self.progress = Progress()
        self.interval = Interval()  # since the last progress line
        self.drops = Drops()
        self.stop_signal = 0
        self.loss_scale: ScalerState | None = None  # of the checkpoint; handed on by layouts that use none
        self.out_of_time = False  # train.max_seconds has passed; the same on every process
        self._saved = -1
        with ExitStack() as held:  # let go of if anything here fails, else by `close`
            held.enter_context(only_trainer(self.run, ranks))
            checkpoint = self._agree_on_checkpoint()
            changes = changes_since(checkpoint, recipe, self.data.fingerprint, ranks.world) if checkpoint else []
            self.monitor = Monitor(self.run, ranks.first, self._update_of(checkpoint), recipe.train.updates)
            self.engine = self._resume(checkpoint, changes) if checkpoint else self._begin()
            if self.layout.config is not None and (note := untried_deepspeed()):
                self.monitor.event(self.progress.update, note)
            self.probe = TrainingProbe(self.engine.module, recipe.model, recipe.train.probe_every)
            if ranks.first:
                write_text(self.run / "recipe.yaml", dump_recipe(recipe))
            self._held = held.pop_all()

    # -- beginning ---------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def _agree_on_checkpoint(self) -> Path | None:
        """Rank 0 looks for the newest whole checkpoint and tells the others.

        Raises `UserError` where there are checkpoints but none is whole: a new beginning would write over them.
        """
        name = b""
        if self.ranks.first:
            found = newest_checkpoint(self.checkpoints, on_skip=lambda why: print(f"passed over: {why}", flush=True))
            name = found.name.encode() if found else b""
        name = self.ranks.broadcast_bytes(name)
        if not name and list_checkpoints(self.checkpoints):
            raise UserError(f"{self.checkpoints} holds no checkpoint that is whole, so the run cannot go on; put a "
                            "good copy there, train into another folder with run=FOLDER, or delete them to begin anew")
        return self.checkpoints / name.decode() if name else None

    def _update_of(self, checkpoint: Path | None) -> int:
        return load_state(checkpoint).update if checkpoint else 0

    def _engine(self, profile: AdminProfile | None) -> Engine:
        """The model, as drawn, under its engine; a pipeline's stages are told of."""
        source, target = self.vocabs
        ratio = self.data.split("train").source_per_target
        if self.layout.stages and self.ranks.first:
            stages = partition_of(self.recipe, source.size, target.size, ratio)
            print(stages.table(self.recipe.batch.accumulation), flush=True)
        return start_engine(self.recipe, self.layout, (source.size, target.size), self.ranks, profile, ratio)

    def _begin(self) -> Engine:
        profile = profile_for(self.recipe, self.data, self.ranks)
        if profile is not None and self.ranks.first:
            profile.save(self.run / "admin_profile.json")
            draw_admin_profile(profile, self.run / "admin_profile.png")
        engine = self._engine(profile)
        count, world = engine.parameters, self.ranks.world
        self.monitor.event(0, f"training {count:,} parameters on {world} process(es) from scratch", parameters=count,
                           processes=world)
        if note := warmup_note(self.recipe):
            self.monitor.event(0, note)
        return engine

    def _resume(self, checkpoint: Path, changes: list[str]) -> Engine:
        """Takes up a checkpoint."""
        state = load_state(checkpoint)
        engine = self._engine(None)
        engine.import_state(load_weights(checkpoint, verify=False), load_moments(checkpoint), state.optimizer_step)
        if state.loss_scale is not None:
            self.loss_scale = {"scale": float(state.loss_scale["scale"]), "clean": int(state.loss_scale["clean"])}
            engine.restore_scaler(self.loss_scale)
        self.progress = Progress(state.update, Position(state.epoch, state.micro_batch), state.extra["skipped"],
                                 state.extra["target_tokens"], state.extra["seconds"], state.best,
                                 state.extra["validations"])
        self.interval = Interval(**state.extra.get("interval", {}))
        self._saved = state.update
        self.out_of_time = self._late()
        self.monitor.event(state.update, f"going on from {checkpoint}" + "".join(f"\n  now {c}" for c in changes))
        return engine

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run_to_end(self) -> int:
        """Trains until the recipe's end, early stopping or a signal; returns the process's exit code."""
        settings, progress = self.recipe.train, self.progress
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note_signal)
        self.monitor.status("running", progress.update)
        if self._validation_due():  # the run was stopped in this update, before its validation
            self._validate()
            self._saved = -1  # the checkpoint is to know of it
            self._save(last=self._ended())
        ended, stopping = self._ended(), False
        while not ended and not stopping:
            stopping = self._update(self.interval)
            due = progress.update % settings.log_every == 0 or progress.update == settings.updates
            if self.interval.applied and due:
                self._report(self.interval)
                self.interval = Interval()
            improved = not stopping and self._validation_due() and self._validate()
            ended = self._ended() and not self._validation_due()
            if progress.update % settings.save_every == 0 or improved or ended or stopping:
                self._save(last=ended or stopping)
        return self._finish(ended, stopping)

    def _note_signal(self, number: int, _frame: Any) -> None:
        self.stop_signal = number

    def _update(self, interval: Interval) -> bool:
        """One update; returns whether any process was told to stop."""
        started = time.monotonic()
        progress, ranks = self.progress, self.ranks
        per_rank = self.recipe.batch.accumulation
        engine = self.engine
        due = self.stream.update(progress.position, engine.data_world * per_rank, engine.data_rank, engine.data_world,
                                 ranks.device)
        tokens = due.tokens
        rate = learning_rate(self.recipe.optimizer.lr, self.recipe.schedule, progress.update + 1,
                             self.recipe.train.updates, due.passes)
        with self.probe.watching(probed := self.probe.due(progress.update + 1)):
            stats = engine.train_step(due.batches, tokens, rate)
        if probed and stats.applied:
            scale = stats.loss_scale * engine.data_world  # what engines multiply the loss by
            self.monitor.probe(progress.update + 1, self.probe.read(scale, ranks.sum, ranks.largest))
        loss, nll, told, late = ranks.sum([stats.loss, stats.nll, float(self.stop_signal != 0), float(self._late())])
        self.out_of_time = late > 0
        progress.position = due.next
        if stats.applied:
            progress.update += 1
            progress.target_tokens += tokens
            interval.add(loss, nll, tokens, stats.grad_norm)
            self.drops.clear()
        else:
            progress.skipped += 1
            self.monitor.event(progress.update, f"a non-finite gradient at update {progress.update + 1}: dropped "
                               f"(loss scale {stats.loss_scale:g})", loss=str(loss))
            if self.drops.add(stats.loss_scale):
                source, target = self.vocabs
                raise diverged(self.recipe, (source.size, target.size), engine, ranks, due.batches,
                               engine.data_world / tokens, stats.loss_scale)
        seconds = time.monotonic() - started
        interval.updates += 1
        interval.seconds += seconds
        interval.rate, interval.loss_scale = rate, stats.loss_scale
        progress.seconds += seconds
        return told > 0

    def _late(self) -> bool:
        limit = self.recipe.train.max_seconds
        return limit is not None and self.progress.seconds >= limit

    def _ended(self) -> bool:
        settings, progress = self.recipe.train, self.progress
        waited = progress.best.get("waited", 0)
        return (progress.update >= settings.updates
                or self.out_of_time
                or (settings.epochs is not None and progress.position.epoch >= settings.epochs)
                or (settings.patience > 0 and waited >= settings.patience))

    def _report(self, interval: Interval) -> None:
        progress = self.progress
        self.monitor.status("running", progress.update)
        self.monitor.train(progress.update, {
            "epoch": progress.position.epoch + 1,
            "loss": interval.loss / interval.tokens,
            "perplexity": math.exp(min(interval.nll / interval.tokens, 50.0)),
            "learning_rate": interval.rate,
            "gradient_norm": interval.gradient_norm / interval.applied,
            "loss_scale": interval.loss_scale,
            "target_tokens_per_second": interval.tokens / interval.seconds,
            "target_tokens": progress.target_tokens,
            "skipped_updates": progress.skipped,
            "padding_waste": self.stream.waste(progress.position.epoch),
            "training_seconds": progress.seconds,
        }, *self._to_go())

    def _to_go(self) -> tuple[int, float]:
        """Updates, and seconds of updates, until the run's end; patience may end it before."""
        settings, progress = self.recipe.train, self.progress
        updates = settings.updates - progress.update
        if settings.epochs is not None:  # later epochs may differ by a few micro-batches
            epoch, index = progress.position.epoch, progress.position.index
            micro_batches = (settings.epochs - epoch) * self.stream.epoch_size(epoch) - index
            updates = min(updates, -(-micro_batches // (self.engine.data_world * self.recipe.batch.accumulation)))
        limit = math.inf if settings.max_seconds is None else settings.max_seconds
        return max(0, updates), max(0.0, limit - progress.seconds)

    def _validation_due(self) -> bool:
        """Whether this update is to be validated, and was not yet."""
        update, done = self.progress.update, self.progress.validations
        if not update or (done and done[-1]["update"] == update):
            return False
        return update % self.recipe.train.validate_every == 0 or self._ended()

    def _validate(self) -> bool:
        """Returns whether this is the best validation so far."""
        result = validate(self.recipe, self.data, self.engine, self.ranks)
        by_bleu = self.recipe.train.best_by == "bleu"
        value = -(result.bleu or 0.0) if by_bleu else result.loss
        best = self.progress.best
        improved = not best or value < best["value"]
        if improved:
            self.progress.best = {"value": value, "update": self.progress.update, "waited": 0}
        else:
            self.progress.best = {**best, "waited": best["waited"] + 1}
        record = {"loss": result.loss, "perplexity": result.perplexity, "best": improved}
        if result.bleu is not None:
            record |= {"bleu": result.bleu, "signature": result.signature}
        self.progress.validations.append({"update": self.progress.update, "value": value, **record})
        self.monitor.valid(self.progress.update, {**record, "training_seconds": self.progress.seconds})
        return improved

    # -- saving and ending -------------------------------------------------------------------------------------------

    def _save(self, last: bool) -> None:
        """Writes a checkpoint unless there is one of this update.

        Raises `CheckpointWriteError`, on every process, where it cannot be written and is the `last` of this attempt;
        after another one training goes on.
        """
        progress = self.progress
        if self._saved == progress.update:
            return
        weights: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for state in self.engine.export_state():
            if self.ranks.first:
                weights[state.name] = state.weight
                moments |= state.moments
        fault = ""
        if self.ranks.first:
            try:
                self._write(weights, moments)
            except CheckpointWriteError as error:
                fault = str(error)
        fault = self.ranks.broadcast_bytes(fault.encode()).decode()
        if fault and last:
            raise CheckpointWriteError(f"{fault}; the same command then goes on from the newest of them")
        if fault:
            self.monitor.event(progress.update, f"checkpoint not written, training goes on: {fault}")
        else:
            self._saved = progress.update

    def _write(self, weights: dict[str, Any], moments: dict[str, Any]) -> None:
        progress = self.progress
        scaler = self.engine.scaler_state() or self.loss_scale
        state = TrainingState(
            update=progress.update, epoch=progress.position.epoch, micro_batch=progress.position.index,
            optimizer_step=self.engine.optimizer_step, best=progress.best,
            loss_scale={"scale": scaler["scale"], "clean": scaler["clean"]} if scaler else None,
            extra={"skipped": progress.skipped, "target_tokens": progress.target_tokens, "seconds": progress.seconds,
                   "validations": progress.validations, "interval": asdict(self.interval),
                   "data_fingerprint": self.data.fingerprint, "processes": self.ranks.world})
        source, target = self.vocabs
        save_checkpoint(self.checkpoints, progress.update, weights, moments, state, dump_recipe(self.recipe),
                        source.bytes, target.bytes)
        scores = {v["update"]: v["value"] for v in progress.validations}
        prune(self.checkpoints, self.recipe.train.keep_last, self.recipe.train.keep_best, scores, lower_is_better=True)

    def _finish(self, ended: bool, stopping: bool) -> int:
        progress = self.progress
        if stopping and not ended:
            self.monitor.event(progress.update, f"stopped by {signal.Signals(self.stop_signal or 15).name}; the same "
                               "command goes on from here")
            self.monitor.status("preempted", progress.update, seconds=round(progress.seconds, 1))
            return PREEMPTED
        self.monitor.event(progress.update, f"finished after {progress.update} updates, {progress.position.epoch} "
                           f"epochs, {progress.target_tokens:,} target tokens in {progress.seconds:.0f} s of updates")
        self.monitor.status("finished", progress.update, seconds=round(progress.seconds, 1))
        if self.ranks.first:
            draw_learning_curve(read_log(self.run / "log.jsonl"), self.run / "curve.png")
        return FINISHED

    def close(self) -> None:
        self.engine.close()
        self.monitor.close()
        self._held.close()


def train(recipe: Recipe, ranks: Ranks) -> int:
    """Trains the recipe into its run folder, going on where an earlier attempt stopped; returns the exit code.

    Raises:
        UserError: the run cannot begin or go on, or its gradients stay non-finite (`Diverged`).
    """
    trainer = Trainer(recipe, ranks)
    try:
        return trainer.run_to_end()
    except Exception as error:
        trainer.monitor.status("failed", trainer.progress.update, error=f"{type(error).__name__}: {error}")
        raise
    finally:
        trainer.close()
