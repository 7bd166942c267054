"""`deepnmt diagnose`: measures a model before training, or at a checkpoint, and predicts whether it will train.

The measurements use one batch of the prepared data, on the available device, in fp32 and without dropout. There are
two exceptions: updates use dropout as training does, and the share of zeros among fp16 gradients needs an fp16 copy.
The prediction needs a short training trial (`verdict.py`). At a checkpoint the outcome is measured instead.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import (
    find_checkpoint,
    has_moments,
    list_checkpoints,
    load_model,
    load_state,
    load_weights,
    model_in,
    moments_in,
    update_of,
)
from deepnmt.config import Recipe, with_settings
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.data.batching import Position
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import checkpoint_parts
from deepnmt.extras.doctor.faults import wrong_outputs, wrong_sizes, wrong_training, wrong_wiring
from deepnmt.extras.doctor.measures import (
    Changes,
    Gradients,
    Growth,
    HalfZeros,
    dependency,
    displacement,
    gradients,
    half_zeros,
    layer_similarity,
    noise_change,
    ranges,
    restored,
    update_change,
)
from deepnmt.extras.doctor.outcome import Outcome, frequencies, measure_outcome
from deepnmt.extras.doctor.page import summary, write_page
from deepnmt.extras.doctor.probes import plain_loss
from deepnmt.extras.doctor.variants import BF16, alternatives, fresh_model
from deepnmt.extras.doctor.verdict import (
    SHIPPED,
    TRIAL,
    Trial,
    VerdictRule,
    cut_batch,
    expected_rank,
    features,
    run_trial,
)
from deepnmt.files import make_run_folder, reporting, write_json
from deepnmt.folders import DamagedFolder, locate, original_name
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.blocks import SIDES, set_clock
from deepnmt.model.init import fill
from deepnmt.model.loss import CrossEntropy
from deepnmt.model.transformer import Transformer
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status, show_progress
from deepnmt.tasks.translation.collapse import collapse_note
from deepnmt.tasks.translation.source_use import SENTENCES, SourceUse, measure_validation_text, rows_of_corpora
from deepnmt.training.fine_tuning import check_parts
from deepnmt.training.profile import profile_for

OF_CHECKPOINT = ("run", "seed", "data", "batch", "parallel", "loss_scale")  # that a trained model may be looked at with
MAX_LOST = 0.5  # of a layer's gradients; fp16 is predicted to fail above it; chosen by hand, not fitted
LOSS_SCALE = 128.0  # of the fp16 measurement, where the layout is not fp16
_DEPTHS = (1, 2, 4, 8, 16, 32, 64)  # of the models built for growth against depth
_LONGER = (3, 10)  # times the updates, also rated where the model is not predicted to translate


@dataclass(frozen=True)
class Subject:
    """The model under examination with its recipe and a batch.

    Attributes:
        checkpoint: where the weights come from; None: a fresh model.
        profile: of a fresh model with Admin stacks.
        passes: epochs that the checkpoint's run had done, where its schedule counts them.
        scale: the loss scale that the checkpoint's run had reached in fp16.
    """

    recipe: Recipe
    data: PreparedData
    model: Transformer
    batch: Batch
    vocabs: tuple[int, int]
    checkpoint: Path | None
    profile: AdminProfile | None = None
    passes: float = 0.0
    scale: float | None = None

    @property
    def trained(self) -> Path | None:
        """The checkpoint, if it has the optimizer's moments."""
        if self.checkpoint is not None and has_moments(self.checkpoint):
            return self.checkpoint
        return None


@dataclass
class Clock:
    """Says what an examination does, and since when it has run.

    Attributes:
        seconds: after which it starts no further trial.
    """

    seconds: float = math.inf
    parts: int = 7
    begun: float = field(default_factory=time.monotonic)
    part: int = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def show(self, what: str) -> None:
        """Prints that the next part begins."""
        self.part += 1
        print_status(f"{self.part} of {self.parts}, after {self.elapsed:.0f} s: {what}")


def diagnose(
    recipe: Recipe, device: torch.device, *, checkpoint: Path | None = None, output: Path | None = None,
    tokens: int = 256, rule: Path | None = None, processes: int = 1, updates: int | None = None,
    seconds: float = math.inf,
) -> str:
    """Examines a recipe's model before training, or a checkpoint, and writes JSON, pictures and a page.

    Args:
        checkpoint: a checkpoint, or the folder of a run (its newest one); None: the model as training would begin.
        output: the folder to write (default: RUN/diagnosis, or RUN/diagnosis-NAME for a checkpoint).
        tokens: approximate number of target tokens in the batch.
        rule: a verdict rule other than the one that comes with deepnmt. There is no verdict without a rule, nor at a
            checkpoint.
        processes: how many training will use; the verdict depends on the target tokens of an update over all of them.
        updates: the verdict is about the model after so many (None: the recipe's).
        seconds: after so many, no other recipe is tried any more.

    Returns:
        The table for the terminal.

    Raises:
        UserError: the prepared data, the checkpoint, the rule or a part that the recipe names is missing, or the folder
            cannot be written.
    """
    verdict_rule = None
    if checkpoint is None and (rule is not None or SHIPPED.is_file()):
        verdict_rule = VerdictRule.load(rule or SHIPPED)
    stages = recipe.parallel.pipeline_stages or 1
    if processes > 1 and processes % stages:
        raise UserError(f"--processes is {processes}, must be a multiple of parallel.pipeline_stages ({stages})")
    trained = recipe.train.init_from
    if checkpoint is None and trained:
        raise UserError(f"train.init_from is {trained}, so the run does not begin with fresh weights; diagnose that "
                        f"model with --checkpoint {trained}, or a fresh one with train.init_from=null train.grow=null")
    if checkpoint is None:
        check_parts(recipe)
    clock = Clock(seconds)
    data = open_prepared(recipe, texts=checkpoint is None)
    if all(len(rows) < 2 for rows in rows_of_corpora(data).values()):
        raise UserError(f"the validation text in {recipe.data.folder} has only one sentence, or one of each corpus, "
                        "but diagnose measures what a source is worth beside another sentence's; name a longer text as "
                        "data.valid, and prepare it")
    if output is not None:
        make_run_folder(output, "--output")
    clock.show("the first batch and the initial weights" if checkpoint is None else "the weights")
    data.verify()
    batch = first_batch(recipe, data, tokens, device)
    subject = subject_of(recipe, data, batch, checkpoint)
    if output is None:
        output = default_output(recipe, subject.checkpoint)
        make_run_folder(output)
    findings = examine(subject, verdict_rule, max(1, processes // stages), updates, clock)
    with reporting(str(output), "free disk space, or name another folder with --output"):
        write_json(output / "diagnosis.json", _json_ready(findings))
        page = write_page(findings, output)
    return f"{summary(findings)}\n{page}"


def first_batch(recipe: Recipe, data: PreparedData, tokens: int, device: torch.device) -> Batch:
    """The run's first micro-batch, truncated to about `tokens` target tokens, but to no fewer than two sentences.

    Raises:
        UserError: it has only one sentence, or a visitor that reads the text has not what it needs.
    """
    stream = training_stream(recipe, data, stream_kind(recipe, data))
    if len(stream.plan(0)[0]) < 2:
        raise UserError(f"batch.tokens is {recipe.batch.tokens}, so the first micro-batch has only one sentence, but "
                        "diagnose compares sentences with each other; set it higher, for example "
                        f"batch.tokens={2 * recipe.batch.tokens}")
    return cut_batch(stream, 0, tokens, 0, device)


def subject_of(recipe: Recipe, data: PreparedData, batch: Batch, checkpoint: Path | None) -> Subject:
    """The fresh model of a recipe, or that of a checkpoint or run, whose own recipe then replaces all but
    `OF_CHECKPOINT`.

    Raises:
        UserError: the checkpoint is missing, or the sizes of its vocabularies differ from the data's.
    """
    source, target = data.vocabs()
    vocabs = (source.size, target.size)
    device = batch.device
    if checkpoint is None:
        profile = profile_for(recipe, data, Ranks(0, 1, 0, 1, device))
        return Subject(recipe, data, _fresh(recipe, vocabs, batch, profile), batch, vocabs, None, profile)
    loaded = load_model(checkpoint)
    if (loaded.src_vocab.size, loaded.trg_vocab.size) != vocabs:
        raise UserError(f"{loaded.folder} was trained with vocabularies of {loaded.src_vocab.size} and "
                        f"{loaded.trg_vocab.size} pieces, but {recipe.data.folder} has {vocabs[0]} and {vocabs[1]}; "
                        "give a recipe with the data it was trained on")
    model, trained, state = loaded.model.to(device), loaded.recipe, loaded.state
    model.objective = CrossEntropy(trained.train.label_smoothing)
    passes = 0.0
    if trained.schedule.step_epoch is not None:  # only then, because it takes a plan
        stream = training_stream(trained, data, stream_kind(trained, data))
        passes = stream.passes(Position(state.epoch, state.micro_batch))
    scale = None
    if state.loss_scale and recipe.loss_scale == trained.loss_scale:
        scale = float(state.loss_scale["scale"])
    overridden = {name: getattr(recipe, name) for name in OF_CHECKPOINT}
    return Subject(trained.model_copy(update=overridden), data, model, batch, vocabs, loaded.folder, passes=passes,
                   scale=scale)


def _fresh(
    recipe: Recipe, vocabs: tuple[int, int], batch: Batch, profile: AdminProfile | None = None
) -> Transformer:
    """The model with its initial weights; Admin stacks are profiled on the batch if no profile is given."""
    return fresh_model(recipe.model, *vocabs, recipe.seed, [batch], label_smoothing=recipe.train.label_smoothing,
                       admin=recipe.admin, profile=profile)


def examine(
    subject: Subject, rule: VerdictRule | None, data_world: int = 1, updates: int | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """All measurements, in the order of the page; a fresh model also gets its growth against depth and the verdict, a
    checkpoint its outcome.

    Args:
        data_world: data-parallel ranks whose micro-batches go into one update; the verdict and what fp16 loses depend
            on it.
        updates: the verdict is about the model after so many (None: the recipe's).
    """
    clock = clock or Clock()
    recipe, model, batch, shape = subject.recipe, subject.model, subject.batch, subject.recipe.model
    about = {
        "checkpoint": None,
        "encoder": f"{shape.encoder.layers} layers, {shape.encoder.block}",
        "decoder": f"{shape.decoder.layers} layers, {shape.decoder.block}",
        "width": shape.width, "ffn": shape.ffn, "parameters": sum(p.numel() for p in model.parameters()),
        "learning rate": recipe.optimizer.lr, "schedule": recipe.schedule.name, "warm-up": recipe.schedule.warmup,
        "sentences": len(batch["src"]), "target tokens": batch.tokens, "device": str(batch.device),
    }
    if subject.checkpoint:
        about["checkpoint"] = str(subject.checkpoint)
    findings: dict[str, Any] = {"about": about}
    clock.show("layer dependency and similarity")
    findings["dependency"] = {side: dependency(model, batch, side) for side in SIDES}
    findings["likeness"] = {side: layer_similarity(model, batch, side) for side in SIDES}
    findings["faults"] = wrong_wiring(model, batch)
    clock.show("gradients and activations")
    findings["gradients"] = gradients(model, batch)
    findings["ranges"] = ranges(model, batch)
    clock.show("gradients in fp16")
    accumulation = recipe.batch.per_rank(data_world)
    half = half_zeros(model, batch, loss_scale(subject), accumulation)
    asked = half.scale
    if recipe.parallel.precision == "fp16":
        half = working_scale(subject, half, accumulation)
    findings["half"] = {**asdict(half), "asked": asked, "lost": half.lost}
    clock.show("the next update")
    rate = update_rate(subject)
    update = partial(take_update, subject)
    noise = noise_change(model, batch)
    changes, loss = update_change(model, batch, update)
    findings["change"] = {
        "noise": {"encoder": noise["encoder"][0], "decoder": noise["decoder"][0]},
        "update": {"encoder": changes["encoder"][0], "decoder": changes["decoder"][0], "rate": rate,
                   "loss_before": plain_loss(model, batch), "loss_after": loss}}
    clock.show("output change against depth")
    if subject.checkpoint is None:
        findings["faults"] += wrong_sizes(model, batch, findings["dependency"])
        findings["growth"], findings["last_ffn"] = growth(subject, noise, changes, findings["gradients"])
        clock.show(f"a trial of {TRIAL} updates")
        findings["verdict"] = None
        if rule is not None:
            findings["verdict"] = judge(subject, rule, half, clock, data_world, updates)
            findings["faults"] += findings["verdict"]["faults"]
    else:
        kinds = {"1 % noise on the matrices": noise_change(model, batch, layers=True),
                 f"one update at rate {rate:g}": update_change(model, batch, update, layers=True)[0]}
        findings["growth"] = {}
        for kind, changes in kinds.items():
            lines = findings["growth"][f"{kind}, layer by layer"] = {}
            for side, values in changes.items():
                lines[side] = Growth.of(range(1, len(values) + 1), values)
        findings["moved"] = checkpoint_displacements(subject)
        clock.show("what the model does with its source")
        findings["outcome"] = outcome_of(subject)
        findings["faults"] += wrong_outputs(model, batch)
        note = findings["outcome"]["collapse"]
        reported = any(fault.startswith("collapse") for fault in findings["faults"])
        if note and not reported:
            findings["faults"].append(f"collapse: {note}")
    return findings


# -- changes -----------------------------------------------------------------------------------------------------------


def one_update(model: Transformer, recipe: Recipe, batch: Batch, done: int = 0) -> None:
    """The first update of a fresh model, or of one that has had `done` updates but has no moments, in place. It is at
    the peak rate, and by Adam instead of RAdam, whose first five updates are plain momentum or none (Liu et al. 2020,
    On the Variance of the Adaptive Learning Rate)."""
    plain = OPTIMIZERS[recipe.optimizer.name].plain
    if plain:
        recipe = with_settings(recipe, {"optimizer.name": plain, "optimizer.unrectified": "momentum"})
    engine = LocalEngine(model, recipe, batch.device)
    engine._applied = done  # by which layers and factors rise
    engine.train_step([batch], batch.tokens, recipe.optimizer.lr)


def take_update(subject: Subject) -> None:
    """The next update of a checkpoint's run, if the checkpoint has the moments; otherwise `one_update`. In place, and
    with `train.ema` of the average, which is the model that is examined."""
    recipe, model, batch = subject.recipe, subject.model, subject.batch
    checkpoint = subject.trained
    if checkpoint is None:
        one_update(model, recipe, batch, load_state(subject.checkpoint).update if subject.checkpoint else 0)
        return
    engine = LocalEngine(model, recipe, batch.device)
    engine.fill(model_in(checkpoint), moments_in(checkpoint), load_state(checkpoint).optimizer_step)
    engine.train_step([batch], batch.tokens, update_rate(subject))


def update_rate(subject: Subject) -> float:
    """The learning rate of `take_update`: the schedule's at a checkpoint with moments, unless it has fallen to 0, where
    an update would change nothing; otherwise the peak."""
    recipe = subject.recipe
    if subject.trained is None:
        return recipe.optimizer.lr
    state = load_state(subject.trained)
    validations = [validation["value"] for validation in state.extra["validations"]]
    rate = learning_rate(recipe.optimizer.lr, recipe.schedule, state.update + 1, recipe.train.updates, subject.passes,
                         validations)
    return rate or recipe.optimizer.lr


def growth(
    subject: Subject, noise: Changes, changes: Changes, whole: Gradients
) -> tuple[dict[str, dict[str, Growth]], dict[str, list[float]]]:
    """Output changes of models of increasing depth, and the gradient norm of the last FFN by decoder depth.

    The models have from 1 layer up to the recipe's depth, with its ratio of encoder to decoder layers. Where several
    models give the shallower stack the same depth, only the deepest of them counts for that stack.

    Args:
        noise, changes, whole: of the recipe's own model: the change by noise, by an update, and the gradients.
    """
    recipe, batch = subject.recipe, subject.batch
    encoder, decoder = recipe.model.encoder.layers, recipe.model.decoder.layers
    deepest = max(encoder, decoder)
    by_noise: dict[str, dict[int, float]] = {"encoder": {}, "decoder": {}}  # changes by depth
    by_update: dict[str, dict[int, float]] = {"encoder": {}, "decoder": {}}
    last: dict[int, float] = {}
    models = [depth for depth in _DEPTHS if depth < deepest] + [deepest]
    with show_progress("models of {:,} depths", total=len(models), unit=" depths", leave=False) as progress:
        for number, depth in enumerate(models, 1):
            depths = {"encoder": max(1, round(depth * encoder / deepest)),
                      "decoder": max(1, round(depth * decoder / deepest))}
            if depth < deepest:
                shape = with_settings(recipe.model, {f"{side}.layers": depths[side] for side in SIDES})
                shallower = recipe.model_copy(update={"model": shape})  # what names a layer may name none of these
                model = _fresh(shallower, subject.vocabs, batch)
                moved_by_noise = noise_change(model, batch)
                moved_by_update, _ = update_change(model, batch, partial(one_update, model, shallower, batch))
                last_ffn = gradients(model, batch).last_ffn
            else:
                moved_by_noise, moved_by_update, last_ffn = noise, changes, whole.last_ffn
            for side in SIDES:
                by_noise[side][depths[side]] = moved_by_noise[side][0]
                by_update[side][depths[side]] = moved_by_update[side][0]
            last[depths["decoder"]] = last_ffn
            progress(number)
    curves: dict[str, dict[str, Growth]] = {}
    for kind, by_depth in (("1 % noise on the matrices", by_noise),
                           (f"one update at the peak rate {recipe.optimizer.lr:g}", by_update)):
        curves[kind] = {side: Growth.of(list(moved), list(moved.values())) for side, moved in by_depth.items()}
    return curves, {"depths": [float(depth) for depth in last], "norms": list(last.values())}


def checkpoint_displacements(subject: Subject) -> list[dict[str, Any]]:
    """`displacement` of the attention matrices between successive checkpoints of the run."""
    assert subject.checkpoint is not None
    parent = subject.checkpoint.parent
    if original_name(subject.checkpoint) == "averaged":
        parent /= "checkpoints"
    pairs: list[dict[str, Any]] = []
    first: tuple[Path, dict[str, Tensor]] | None = None
    for folder in list_checkpoints(parent):
        try:
            after = load_weights(folder)
        except DamagedFolder as fault:  # also raised if the run has deleted it since
            print_status(f"skipped: {fault}")
            continue
        if first is not None:
            model = Transformer(subject.recipe.model, *subject.vocabs, subject.recipe.seed, subject.model.objective)
            fill(model, first[1].__getitem__)
            set_clock(model, update_of(first[0]))
            norms = gradients(model.to(subject.batch.device), subject.batch).matrices
            pairs.append({"update": update_of(first[0]), "until": update_of(folder),
                          **displacement(first[1], after, norms)})
        first = folder, after
    return pairs


# -- the verdict -------------------------------------------------------------------------------------------------------


def outcome_of(subject: Subject) -> dict[str, Any]:
    """The measured outcome of a checkpoint."""
    recipe, data = subject.recipe, subject.data
    valid = data.split("valid").truncated(recipe.model.max_length)
    device = subject.batch.device
    engine = LocalEngine(subject.model, recipe, device)
    measured = measure_outcome(engine.evaluate, valid, rows_of_corpora(data).values(),
                               frequencies(data.split("train"), subject.vocabs[1]), device)
    use = SourceUse.mean(measure_validation_text(recipe, data, engine, Ranks.alone(device), SENTENCES).values())
    assert use is not None  # diagnose refuses a text whose corpora all have one sentence
    return {**asdict(measured), "gain": measured.gain, "outcome": measured.outcome, "source": asdict(use),
            "collapse": collapse_note(recipe, recipe.train.updates, use)}  # asked for, so no update is too early


def judge(
    subject: Subject, rule: VerdictRule, half: HalfZeros, clock: Clock, data_world: int = 1, updates: int | None = None
) -> dict[str, Any]:
    """The rule's verdict and, unless it is that the model translates, its probabilities for other rates, blocks and so
    on, as far as the clock allows.

    In fp16 the measurements on an fp16 copy (`half`) can predict failure, too.
    """
    recipe, begun = subject.recipe, clock.elapsed
    precision = recipe.parallel.precision
    after = updates or recipe.train.updates
    with restored(subject.model) as before:
        trial = _trial(subject, recipe, subject.model)
        faults = wrong_training(subject.model, before, trial.losses, trial.norms)
        faults += wrong_outputs(subject.model, subject.batch)
    needed = 1.1 * (clock.elapsed - begun)  # a tenth for another model's weights, and for the page at the end
    values = features(trial, recipe, after, data_world)
    verdict = rule.judge(values)
    earlier: dict[int, dict[Outcome, float]] = {}
    for number in course(after):
        reached = features(trial, recipe, number, data_world)
        if number == after or rule.reaches(reached):
            earlier[number] = rule.probabilities(reached)
    fp16 = None
    if precision == "fp16":
        fp16 = fp16_fault(subject, half)
    instead: dict[str, dict[Outcome, float]] = {}
    others: dict[str, Trial] = {}
    left_out: list[str] = []
    also = ""
    if fp16 is not None:
        instead[BF16] = verdict.probabilities
        also = f"{BF16} "  # trials are in fp32, and say nothing of another change in fp16
    if verdict.outcome != "translates":
        for factor in _LONGER:
            longer = factor * after
            with suppress(ValueError, UserError):  # with few --updates it may end before the recipe's warm-up does
                later = features(trial, with_settings(recipe, {"train.updates": longer}), longer, data_world)
                if rule.reaches(later):
                    instead[f"{also}train.updates={longer}"] = rule.probabilities(later)
        for change, other in alternatives(recipe).items():
            name = also + change
            if clock.elapsed + needed > clock.seconds:
                left_out.append(name)
                continue
            print_status(f"a trial with {name} instead, after {clock.elapsed:.0f} s")
            profile = None
            if other.model == recipe.model:
                profile = subject.profile
            others[name] = _trial(subject, other, _fresh(other, subject.vocabs, subject.batch, profile))
            instead[name] = rule.probabilities(features(others[name], other, after, data_world))
    best = {}
    if others:
        name = max(others, key=lambda name: expected_rank(instead[name]))
        if expected_rank(instead[name]) > expected_rank(verdict.probabilities):
            best[name] = asdict(others[name])
    return {
        "outcome": "stuck" if fp16 else verdict.outcome, "probabilities": verdict.probabilities,
        "updates": after, "reasons": verdict.reasons, "fp16": fp16, "features": values, "trial": asdict(trial),
        "course": earlier, "outside": rule.unseen(recipe, precision) + verdict.outside, "rule": rule.facts,
        "instead": instead, "best": best, "left out": left_out, "faults": faults,
    }


def course(updates: int) -> list[int]:
    """The numbers of updates for which the verdict is given: from a hundredth, but more than the trial's, up to all."""
    numbers = {updates}
    for share in (0.01, 0.03, 0.1, 0.3):
        if updates * share > TRIAL:
            numbers.add(round(updates * share))
    return sorted(numbers)


def _trial(subject: Subject, recipe: Recipe, model: Transformer) -> Trial:
    with show_progress("trial: {:,} updates", total=TRIAL, unit=" updates", leave=False) as progress:
        return run_trial(model, recipe, subject.data, subject.batch.device, progress)


def loss_scale(subject: Subject) -> float:
    """The loss scale that a checkpoint's run had reached, or else the recipe's initial one in fp16, or `LOSS_SCALE`."""
    if subject.scale is not None:
        return subject.scale
    if subject.recipe.parallel.precision == "fp16":
        return 2.0**subject.recipe.loss_scale.initial_power
    return LOSS_SCALE


def working_scale(subject: Subject, half: HalfZeros, accumulation: int) -> HalfZeros:
    """The measurement at the largest tried scale without overflow: that of `half`, a quarter of it and so on, down to
    the recipe's floor, much as a run halves its loss scale after each overflow.

    Args:
        accumulation: micro-batches of a rank that share the scale of an update.
    """
    floor = subject.recipe.loss_scale.floor
    while not half.finite and half.scale > floor:
        half = half_zeros(subject.model, subject.batch, max(half.scale / 4, floor), accumulation)
    return half


def fp16_fault(subject: Subject, half: HalfZeros) -> str | None:
    """Why the first gradients, measured at `working_scale`, predict failure in fp16; None if they do not."""
    if not half.finite:
        return f"gradients overflow in fp16 at every loss scale down to {subject.recipe.loss_scale.floor:g}"
    if half.lost > MAX_LOST:
        return f"{100 * half.lost:.0f} % of a layer's gradients are lost to fp16 at loss scale {half.scale:g}"
    return None


def _json_ready(value: Any) -> Any:
    """The value with dataclasses as dictionaries and NaN and infinity, which JSON lacks, as text."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _json_ready(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def default_output(recipe: Recipe, checkpoint: Path | None) -> Path:
    """The folder of a diagnosis in the run's, named after the checkpoint, and for another run's after that, too."""
    names = ["diagnosis"]
    if checkpoint is not None:
        place = checkpoint.with_name(original_name(checkpoint)).resolve()
        names += checkpoint_parts(place, Path(recipe.run).resolve())
    return Path(recipe.run) / "-".join(names)


def default_checkpoint(recipe: Recipe, name: str | None, is_run: bool) -> Path | None:
    """The checkpoint named on the command line, otherwise a run's newest, or its average if that is all it has, as an
    imported model; otherwise None (a fresh model)."""
    if name is not None:
        return find_checkpoint(Path(name), "newest")
    run = Path(recipe.run)
    if is_run and list_checkpoints(run / "checkpoints"):
        return find_checkpoint(run, "newest")
    if is_run and locate(run / "averaged").is_dir():
        return find_checkpoint(run, "averaged")
    return None
