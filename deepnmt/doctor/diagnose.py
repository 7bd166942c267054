"""`deepnmt diagnose`: what a model looks like from inside before training, or at a checkpoint, and if it will train.

One batch of the prepared data, on whatever device there is. All measurements but one are made in fp32, and without
dropout but for updates, which are training's; the share of zeros among fp16 gradients is made on an fp16 copy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import (
    MOMENTS,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_state,
    load_weights,
    moments_in,
    update_of,
    weights_in,
)
from deepnmt.config import Recipe, with_settings
from deepnmt.data.batching import Stream, collate
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.doctor.measures import (
    Growth,
    HalfZeros,
    dependency,
    displacement,
    gradients,
    half_zeros,
    layer_similarity,
    noise_change,
    ranges,
    update_change,
)
from deepnmt.doctor.page import summary, write_page
from deepnmt.doctor.probes import plain_loss
from deepnmt.doctor.variants import alternatives, fresh_model
from deepnmt.doctor.verdict import (
    SHIPPED,
    VerdictRule,
    features,
    one_update,
    precision_features,
)
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, write_json
from deepnmt.folders import DamagedCheckpoint, original_name
from deepnmt.model.admin import AdminProfile
from deepnmt.model.blocks import SIDES
from deepnmt.model.init import fill
from deepnmt.model.transformer import Transformer
from deepnmt.optim import learning_rate
from deepnmt.parallel.local import LocalEngine
from deepnmt.progress import print_status
from deepnmt.ranks import Ranks
from deepnmt.train.profile import profile_for

AT_CHECKPOINT = ("run", "seed", "data", "batch", "parallel", "loss_scale")  # what a checkpoint's recipe does not settle
LOST = 0.5  # of a layer's gradients, above which fp16 is said to fail; chosen by hand, not fitted
LOSS_SCALE = 128.0  # of the fp16 measurement, where the recipe's layout names none
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 18, 25, 36, 50, 70, 100)  # of the models built for growth against depth


@dataclass(frozen=True)
class Subject:
    """The model under examination with its recipe and a batch, and what it came from: a checkpoint with how often its
    run had seen the training text and the loss scale that it had reached in fp16, or, of a fresh model, the mean target
    tokens of its run's micro-batches and, with Admin stacks, the profile."""

    recipe: Recipe
    model: Transformer
    batch: Batch
    vocabs: tuple[int, int]
    checkpoint: Path | None
    profile: AdminProfile | None = None
    passes: float = 0.0
    scale: float | None = None
    micro_batch: float = 0.0

    @property
    def trained(self) -> Path | None:
        """The checkpoint, where it has moments to go on from."""
        return self.checkpoint if self.checkpoint is not None and (self.checkpoint / MOMENTS).exists() else None


def diagnose(
    recipe: Recipe, device: torch.device, *, checkpoint: Path | None = None, output: Path | None = None,
    tokens: int = 1024, rule: Path | None = None, processes: int = 1,
) -> str:
    """Examines a recipe's model before training, or a checkpoint, and writes JSON, pictures and a page.

    Args:
        checkpoint: a checkpoint, or the folder of a run (its newest one); None: the model as training would begin.
        output: the folder to write (default: RUN/diagnosis, or RUN/diagnosis-NAME for a checkpoint).
        tokens: target tokens of the batch, about.
        rule: a verdict rule other than the one that comes with deepnmt; where neither is, and at a checkpoint, there
            is no verdict.
        processes: that training will run on; a verdict is told the target tokens of an update over all of them.

    Returns:
        The table for the terminal.

    Raises:
        UserError: no prepared data, no such checkpoint or rule, or a folder that cannot be written.
    """
    wanted = checkpoint is None and (rule is not None or SHIPPED.is_file())
    known = VerdictRule.load(rule or SHIPPED) if wanted else None
    if processes % (stages := recipe.parallel.pipeline_stages or 1) and processes > 1:
        raise UserError(f"--processes is {processes}, must be a multiple of parallel.pipeline_stages ({stages})")
    data = open_prepared(recipe, texts=checkpoint is None)
    batch = first_batch(recipe, data, tokens, device)
    subject = subject_of(recipe, data, batch, checkpoint)
    option = "run" if output is None else "--output"
    if output is None:
        name = f"diagnosis-{original_name(subject.checkpoint)}" if subject.checkpoint else "diagnosis"
        output = Path(recipe.run) / name
    make_run_folder(output, option)
    findings = examine(subject, known, max(1, processes // stages))
    write_json(output / "diagnosis.json", _plain(findings))
    page = write_page(findings, output)
    return f"{summary(findings)}\n{page}"


def first_batch(recipe: Recipe, data: PreparedData, tokens: int, device: torch.device) -> Batch:
    """The run's first micro-batch, truncated to as many sentences as have about so many target tokens, at least two.

    Raises:
        UserError: it has but one sentence.
    """
    stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
    split, indices = stream.split(0), stream.plan(0)[0]
    if len(indices) < 2:
        raise UserError(f"batch.tokens is {recipe.batch.tokens}, so that the first micro-batch has one sentence, but "
                        "sentences are compared with one another; give more, as in "
                        f"batch.tokens={2 * recipe.batch.tokens}")
    reached = split.trg_lengths[indices].cumsum()
    count = max(2, int((reached <= tokens).sum()))
    return collate(split, indices[:count], 0, device)


def subject_of(recipe: Recipe, data: PreparedData, batch: Batch, checkpoint: Path | None) -> Subject:
    """The fresh model of a recipe, or the one of a checkpoint (or run) under its own recipe, but for what a checkpoint
    does not settle.

    Raises:
        UserError: no such checkpoint, or one whose vocabularies are of other sizes than the data's.
    """
    source, target = data.vocabs()
    vocabs = (source.size, target.size)
    device = batch.device
    if checkpoint is None:
        profile = profile_for(recipe, data, Ranks(0, 1, 0, 1, device))
        stream = Stream(data.split("train"), recipe.batch.tokens, recipe.seed)
        mean = float(stream.split(0).trg_lengths.sum()) / stream.epoch_size(0)
        return Subject(recipe, _fresh(recipe, vocabs, batch, profile), batch, vocabs, None, profile, micro_batch=mean)
    loaded = load_model(checkpoint)
    if (loaded.src_vocab.size, loaded.trg_vocab.size) != vocabs:
        raise UserError(f"{loaded.folder} was trained with vocabularies of {loaded.src_vocab.size} and "
                        f"{loaded.trg_vocab.size} pieces, but {recipe.data.folder} has {vocabs[0]} and {vocabs[1]}; "
                        "give the recipe whose data it was trained on")
    model, own, state = loaded.model.to(device), loaded.recipe, loaded.state
    model.label_smoothing = own.train.label_smoothing
    passes = 0.0
    if own.schedule.step_epoch is not None:  # an epoch is planned for it
        stream = Stream(data.split("train"), own.batch.tokens, own.seed)
        passes = state.epoch + state.micro_batch / stream.epoch_size(state.epoch)
    reached = state.loss_scale if recipe.loss_scale == own.loss_scale else None
    return Subject(own.model_copy(update={name: getattr(recipe, name) for name in AT_CHECKPOINT}), model, batch, vocabs,
                   loaded.folder, passes=passes, scale=float(reached["scale"]) if reached else None)


def _fresh(
    recipe: Recipe, vocabs: tuple[int, int], batch: Batch, profile: AdminProfile | None = None
) -> Transformer:
    """The model as training would begin with it; Admin stacks are profiled on the batch where no profile is given."""
    return fresh_model(recipe.model, *vocabs, recipe.seed, [batch], label_smoothing=recipe.train.label_smoothing,
                       input_variance=recipe.admin.input_variance, profile=profile)


def examine(subject: Subject, rule: VerdictRule | None, data_world: int = 1) -> dict[str, Any]:
    """All measurements, in the order of the page; fresh models get growth against depth and the rule's verdict, which
    is told that an update is of `data_world` processes' micro-batches."""
    recipe, model, batch, shape = subject.recipe, subject.model, subject.batch, subject.recipe.model
    findings: dict[str, Any] = {"about": {
        "checkpoint": str(subject.checkpoint) if subject.checkpoint else None,
        "encoder": f"{shape.encoder.layers} layers, {shape.encoder.block}",
        "decoder": f"{shape.decoder.layers} layers, {shape.decoder.block}",
        "width": shape.width, "ffn": shape.ffn, "parameters": sum(p.numel() for p in model.parameters()),
        "learning rate": recipe.optimizer.lr, "schedule": recipe.schedule.name, "warm-up": recipe.schedule.warmup,
        "sentences": len(batch.tensors[0]), "target tokens": batch.tokens, "device": str(batch.device),
    }}
    print_status("measuring: layer dependency and likeness of layers")
    findings["dependency"] = {side: dependency(model, batch, side) for side in SIDES}
    findings["likeness"] = {side: layer_similarity(model, batch, side) for side in SIDES}
    print_status("measuring: gradients")
    findings["gradients"] = gradients(model, batch)
    findings["ranges"] = ranges(model, batch)
    first = half_zeros(model, batch, loss_scale(subject), recipe.batch.accumulation)
    half = working_scale(subject, first) if recipe.parallel.precision == "fp16" else first
    findings["half"] = {**asdict(half), "asked": first.scale, "lost": half.lost}
    print_status("measuring: output change")
    rate = due_rate(subject)
    update = partial(take_update, subject)
    if subject.checkpoint is None:
        findings["growth"], findings["last_ffn"] = growth(subject)
        findings["verdict"] = judge(subject, rule, half, data_world) if rule is not None else None
    else:
        kinds = {"1 % noise on the matrices": noise_change(model, batch, layers=True),
                 f"one update at rate {rate:g}": update_change(model, batch, update, layers=True)[0]}
        findings["growth"] = {f"{kind}, layer by layer": {
            side: Growth.of(range(1, len(values) + 1), values) for side, values in changes.items()}
            for kind, changes in kinds.items()}
        findings["moved"] = between_checkpoints(subject)
    noise = noise_change(model, batch)
    changes, loss = update_change(model, batch, update)
    findings["change"] = {
        "noise": {side: noise[side][0] for side in SIDES},
        "update": {**{side: changes[side][0] for side in SIDES}, "rate": rate, "loss_before": plain_loss(model, batch),
                   "loss_after": loss}}
    return findings


# -- changes -----------------------------------------------------------------------------------------------------------


def take_update(subject: Subject) -> None:
    """One update: of a checkpoint with its moments at the rate that is due, where it has moments; else `one_update`."""
    recipe, model, batch = subject.recipe, subject.model, subject.batch
    if (checkpoint := subject.trained) is None:
        one_update(model, recipe, batch)
        return
    engine = LocalEngine(model, recipe, batch.device)
    engine.fill(weights_in(checkpoint), moments_in(checkpoint), load_state(checkpoint).optimizer_step)
    engine.train_step([batch], batch.tokens, due_rate(subject))


def due_rate(subject: Subject) -> float:
    """The learning rate of `take_update`: the one that is due at a checkpoint with moments, else the peak."""
    recipe = subject.recipe
    if subject.trained is None:
        return recipe.optimizer.lr
    return learning_rate(recipe.optimizer.lr, recipe.schedule, load_state(subject.trained).update + 1,
                         recipe.train.updates, subject.passes)


def growth(subject: Subject) -> tuple[dict[str, dict[str, Growth]], dict[str, list[float]]]:
    """Changes of models of the recipe's kind against depth, and the last FFN's gradient norm.

    Models of 1 layer up to the recipe's depth are built; the shallower stack keeps its proportion to the deeper, and
    where several models share a depth of it, the deepest of them counts. The last FFN stands against decoder depth.
    """
    recipe, batch = subject.recipe, subject.batch
    layers = {side: getattr(recipe.model, side).layers for side in SIDES}
    deep = max(layers.values())
    kinds = ("1 % noise on the matrices", f"one update at the peak rate {recipe.optimizer.lr:g}")
    by_depth: dict[str, dict[str, dict[int, float]]] = {kind: {side: {} for side in SIDES} for kind in kinds}
    last: dict[int, float] = {}
    for depth in [*(depth for depth in _DEPTHS if depth < deep), deep]:
        depths = {side: max(1, round(depth * layers[side] / deep)) for side in SIDES}
        other = with_settings(recipe, {f"model.{side}.layers": depths[side] for side in SIDES})
        model = subject.model if depth == deep else _fresh(other, subject.vocabs, batch)
        update = partial(one_update, model, other, batch)
        for kind, changes in zip(kinds, (noise_change(model, batch), update_change(model, batch, update)[0]),
                                 strict=True):
            for side in SIDES:
                by_depth[kind][side][depths[side]] = changes[side][0]
        last[depths["decoder"]] = gradients(model, batch).last_ffn
    return ({kind: {side: Growth.of([*changes], [*changes.values()]) for side, changes in sides.items()}
             for kind, sides in by_depth.items()},
            {"depths": [float(depth) for depth in last], "norms": [*last.values()]})


def between_checkpoints(subject: Subject) -> list[dict[str, Any]]:
    """How the attention matrices moved between the run's checkpoints, and their gradients on the batch at each; see
    `displacement`."""
    assert subject.checkpoint is not None
    beside = subject.checkpoint.parent
    folders = list_checkpoints(beside / "checkpoints" if original_name(subject.checkpoint) == "averaged" else beside)
    pairs: list[dict[str, Any]] = []
    first: tuple[Path, dict[str, Tensor]] | None = None
    for folder in folders:
        try:
            after = load_weights(folder)
        except DamagedCheckpoint as fault:  # or one that the run has deleted since
            print_status(f"skipped: {fault}")
            continue
        if first is not None:
            model = Transformer(subject.recipe.model, *subject.vocabs, subject.recipe.seed,
                                subject.model.label_smoothing)
            fill(model, first[1].__getitem__)
            norms = gradients(model.to(subject.batch.device), subject.batch).matrices
            pairs.append({"update": update_of(first[0]), "until": update_of(folder),
                          **displacement(first[1], after, norms)})
        first = folder, after
    return pairs


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(subject: Subject, rule: VerdictRule, half: HalfZeros, data_world: int = 1) -> dict[str, Any]:
    """The rule's answer and, where it is no, its answers for other rates, a warm-up and other blocks.

    Where the layout is fp16, what was measured on an fp16 copy (`half`) can make it a no, too.
    """
    recipe = subject.recipe
    precision = recipe.parallel.precision
    values = _features(recipe, subject.model, subject, data_world)
    verdict = rule.judge(values)
    fp16 = fp16_fault(subject, half) if precision == "fp16" else None
    instead: dict[str, float] = {}
    if fp16 is not None:
        instead["parallel.precision=bf16"] = rule.probability({**values, **precision_features("bf16")})
    if not verdict.trains:
        largest = rule.spans.get("tokens", (0.0, 0.0))[1]  # beyond it more is the same to the rule
        for name, other in alternatives(recipe, knows_batches=values["tokens"] < largest).items():
            profile = subject.profile if other.model == recipe.model else None
            model = _fresh(other, subject.vocabs, subject.batch, profile)
            instead[name] = rule.probability(_features(other, model, subject, data_world))
    facts = {name: fact for name, fact in rule.facts.items() if name != "fitted_points"}  # hundreds, for no reader
    return {
        "trains": verdict.trains and fp16 is None, "probability": verdict.probability, "reasons": verdict.reasons,
        "fp16": fp16, "features": values, "outside": rule.unseen(recipe, precision) + verdict.outside,
        "rule": {**facts, "kind": rule.kind, "unvaried": rule.unvaried}, "instead": instead,
    }


def loss_scale(subject: Subject) -> float:
    """The loss scale that a checkpoint's run had reached, else the recipe's own first one where its layout is fp16."""
    if subject.scale is not None:
        return subject.scale
    return 2.0**subject.recipe.loss_scale.initial_power if subject.recipe.parallel.precision == "fp16" else LOSS_SCALE


def working_scale(subject: Subject, half: HalfZeros) -> HalfZeros:
    """The measurement at the largest scale without overflow: that of `half`, or a quarter of it and so on down to the
    recipe's floor, as a run's loss scale halves until there is none."""
    floor, accumulation = subject.recipe.loss_scale.floor, subject.recipe.batch.accumulation
    while not half.finite and half.scale > floor:
        half = half_zeros(subject.model, subject.batch, max(half.scale / 4, floor), accumulation)
    return half


def fp16_fault(subject: Subject, half: HalfZeros) -> str | None:
    """Why the model cannot be trained in fp16 by what its first gradients are at a scale that works (`working_scale`);
    None where it can."""
    if not half.finite:
        return f"gradients overflow in fp16 at every loss scale down to {subject.recipe.loss_scale.floor:g}"
    if half.lost > LOST:
        return f"{100 * half.lost:.0f} % of a layer's gradients are lost to fp16 at loss scale {half.scale:g}"
    return None


def _features(recipe: Recipe, model: Transformer, subject: Subject, data_world: int) -> dict[str, float]:
    tokens = max(1, round(subject.micro_batch * recipe.batch.accumulation * data_world))
    return features(model, subject.batch, recipe, tokens)


def _plain(value: Any) -> Any:
    """For JSON, which has no word for some numbers: NaN and infinity become text."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def default_checkpoint(recipe: Recipe, given: str | None, is_run: bool) -> Path | None:
    """The checkpoint that a command line means: the one given, else a run's newest, else none (a fresh model)."""
    if given is not None:
        return find_checkpoint(Path(given), "newest")
    if is_run and list_checkpoints(Path(recipe.run) / "checkpoints"):
        return find_checkpoint(Path(recipe.run), "newest")
    return None
