"""`deepnmt diagnose`: what a model looks like from inside before training, or at a checkpoint, and if it will train.

One batch of the prepared data, on whatever device there is. All measurements but one are made in fp32, and without
dropout but for updates, which are training's; the share of zeros among fp16 gradients is made on an fp16 copy.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
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
    load_moments,
    load_state,
    load_weights,
    update_of,
)
from deepnmt.config import Recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.doctor.activations import likeness, ranges
from deepnmt.doctor.change import Growth, layer_changes, random_change
from deepnmt.doctor.dependency import dependency
from deepnmt.doctor.fresh import with_depth
from deepnmt.doctor.gradient_probe import HalfZeros, gradients, half_zeros
from deepnmt.doctor.page import summary, write_page
from deepnmt.doctor.patient import Patient, first_batch, fresh, patient_of
from deepnmt.doctor.probes import plain_loss
from deepnmt.doctor.update_probe import moved
from deepnmt.doctor.variants import alternatives
from deepnmt.doctor.verdict import (
    SHIPPED,
    VerdictRule,
    change_by,
    features,
    layer_changes_by,
    other_sources,
    precision_features,
    trial_rates,
)
from deepnmt.errors import UserError
from deepnmt.files import make_run_folder, write_json
from deepnmt.folders import DamagedCheckpoint, own_name
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.transformer import Transformer
from deepnmt.optim import learning_rate
from deepnmt.parallel.local import LocalEngine

AT_CHECKPOINT = ("run", "seed", "data", "batch", "parallel", "loss_scale")  # what a checkpoint's recipe does not settle
LOST = 0.5  # of a layer's gradients, above which fp16 is said to fail; thought of, not learned
LOSS_SCALE = 128.0  # of the fp16 measurement, where the recipe's layout names none
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 18, 25, 36, 50, 70, 100)  # of the models built for growth against depth
_TRIALS = 3  # draws of noise


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
    patient = patient_of(recipe, data, batch, checkpoint)
    option = "run" if output is None else "--output"
    if output is None:
        name = f"diagnosis-{own_name(patient.checkpoint)}" if patient.checkpoint else "diagnosis"
        output = Path(recipe.run) / name
    make_run_folder(output, option)
    findings = examine(patient, known, max(1, processes // stages))
    write_json(output / "diagnosis.json", _plain(findings))
    page = write_page(findings, output)
    return f"{summary(findings)}\n{page}"


def examine(patient: Patient, rule: VerdictRule | None, data_world: int = 1) -> dict[str, Any]:
    """All measurements, in the order of the page; fresh models get growth against depth and the rule's verdict, which
    is told that an update is of `data_world` processes' micro-batches."""
    recipe, model, batch = patient.recipe, patient.model, patient.batch
    found: dict[str, Any] = {"about": _about(patient)}
    _say("layer dependency and likeness of layers")
    found["dependency"] = {side: dependency(model, batch, side) for side in SIDES}
    found["likeness"] = {side: likeness(model, batch, side) for side in SIDES}
    _say("gradients")
    found["gradients"] = gradients(model, batch).as_dict()
    found["ranges"] = {name: each.as_dict() for name, each in ranges(model, batch).items()}
    first = half_zeros(model, batch, _loss_scale(patient), recipe.batch.accumulation)
    half = working_scale(patient, first) if recipe.parallel.precision == "fp16" else first
    found["half"] = {"scale": half.scale, "asked": first.scale, "finite": half.finite, "shares": half.shares,
                     "shares_fp32": half.shares_fp32, "lost": half.lost}
    _say("output change")
    rate = recipe.optimizer.lr
    if patient.checkpoint is None:
        found["growth"], found["last_ffn"] = growth(patient, rate)
        found["verdict"] = judge(patient, rule, half, data_world) if rule is not None else None
    else:
        found["growth"] = _growth_inside(patient)
        found["moved"] = [pair.as_dict() for pair in between_checkpoints(patient)]
    found["change"] = {"noise": random_change(model, batch, trials=_TRIALS)}
    changes, loss = change_by(model, batch, lambda: _update(patient))
    found["change"]["update"] = {**changes, "rate": due_rate(patient), "loss_before": plain_loss(model, batch),
                                 "loss_after": loss}
    return found


def _about(patient: Patient) -> dict[str, Any]:
    recipe, model = patient.recipe, patient.recipe.model
    return {
        "checkpoint": str(patient.checkpoint) if patient.checkpoint else None,
        "encoder": f"{model.encoder.layers} layers, {model.encoder.block}",
        "decoder": f"{model.decoder.layers} layers, {model.decoder.block}",
        "width": model.width, "ffn": model.ffn, "parameters": sum(p.numel() for p in patient.model.parameters()),
        "learning rate": recipe.optimizer.lr, "schedule": recipe.schedule.name, "warm-up": recipe.schedule.warmup,
        "sentences": len(patient.batch.tensors[0]), "target tokens": patient.tokens,
        "device": str(patient.batch.device),
    }


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def _loss_scale(patient: Patient) -> float:
    """The loss scale that a checkpoint's run had reached, else the recipe's own first one where its layout is fp16."""
    if patient.scale is not None:
        return patient.scale
    return 2.0**patient.recipe.loss_scale.initial_power if patient.recipe.parallel.precision == "fp16" else LOSS_SCALE


# -- changes -----------------------------------------------------------------------------------------------------------


def one_update(model: Transformer, recipe: Recipe, batch: Batch) -> None:
    """The first update of a fresh model, in place, but at the peak rate, and Adam's where the optimizer is RAdam, whose
    first five updates are plain momentum (Liu et al. 2020, On the Variance of the Adaptive Learning Rate)."""
    engine = LocalEngine(model, _adaptive(recipe), batch.device)
    engine.train_step([batch], batch.tokens, recipe.optimizer.lr)


def _adaptive(recipe: Recipe) -> Recipe:
    """The recipe with Adam in the place of RAdam."""
    name = {"radam": "adam", "radamw": "adamw"}.get(recipe.optimizer.name, recipe.optimizer.name)
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"name": name})})


def trial(model: Transformer, recipe: Recipe, batch: Batch) -> list[float]:
    """Updates of a fresh model on one batch, in place, and the plain losses that `trial_features` asks for; each with
    dropout masks of its own, as training has, and Adam's where the optimizer is RAdam, as in `one_update`."""
    engine = LocalEngine(model, _adaptive(recipe), batch.device)
    tokens = batch.tokens
    rates = trial_rates(recipe.optimizer.lr, recipe.schedule.warmup)
    during = [engine.train_step([replace(batch, key=batch.key + number)], tokens, rate).nll / tokens
              for number, rate in enumerate(rates)]
    model.eval()
    with torch.no_grad():
        after = [model(*each.tensors, each.key).nll / tokens for each in (batch, other_sources(batch))]
    return [*during, *map(float, after)]


def _update(patient: Patient) -> None:
    """One update: of a checkpoint with its moments at the rate that is due, where it has moments; else `one_update`."""
    recipe, model, batch, checkpoint = patient.recipe, patient.model, patient.batch, patient.checkpoint
    if checkpoint is None or not (checkpoint / MOMENTS).exists():
        one_update(model, recipe, batch)
        return
    engine = LocalEngine(model, recipe, batch.device)
    engine.import_state(load_weights(checkpoint), load_moments(checkpoint), load_state(checkpoint).optimizer_step)
    engine.train_step([batch], patient.tokens, due_rate(patient))


def due_rate(patient: Patient) -> float:
    """The learning rate of `_update`: the one that is due at a checkpoint with moments, else the peak."""
    recipe, checkpoint = patient.recipe, patient.checkpoint
    if checkpoint is None or not (checkpoint / MOMENTS).exists():
        return recipe.optimizer.lr
    return learning_rate(recipe.optimizer.lr, recipe.schedule, load_state(checkpoint).update + 1,
                         recipe.train.updates, patient.passes)


def growth(patient: Patient, rate: float) -> tuple[dict[str, dict[str, Growth]], dict[str, list[float]]]:
    """Changes of models of the recipe's kind against depth, and the last FFN's gradient norm.

    Models of 1 layer up to the recipe's depth are built; the shallower stack keeps its proportion to the deeper, and
    where several models share a depth of it, the deepest of them counts. The last FFN stands against decoder depth.
    """
    model = patient.recipe.model
    deep = max(model.encoder.layers, model.decoder.layers)
    depths: dict[Side, list[int]] = {"encoder": [], "decoder": []}
    noise: list[dict[Any, float]] = []
    update: list[dict[Any, float]] = []
    last: list[float] = []
    for depth in [*(depth for depth in _DEPTHS if depth < deep), deep]:
        layers = [max(1, round(depth * stack.layers / deep)) for stack in (model.encoder, model.decoder)]
        for side, count in zip(SIDES, layers, strict=True):
            depths[side].append(count)
        recipe = patient.recipe.model_copy(update={"model": with_depth(model, *layers)})
        built = patient.model if depth == deep else fresh(recipe, patient.vocabs, patient.batch)
        noise.append(random_change(built, patient.batch, trials=_TRIALS))
        update.append(change_by(built, patient.batch, partial(one_update, built, recipe, patient.batch))[0])
        last.append(gradients(built, patient.batch).last_ffn)
    changes = {"1 % noise on the matrices": noise, f"one update at the peak rate {rate:g}": update}
    by_depth = dict(zip(depths["decoder"], last, strict=True))
    return ({kind: {side: _growth_of(depths[side], [each[side] for each in found]) for side in SIDES}
             for kind, found in changes.items()},
            {"depths": [float(depth) for depth in by_depth], "norms": list(by_depth.values())})


def _growth_of(depths: list[int], changes: list[float]) -> Growth:
    """The last change at each depth, against depth."""
    last = dict(zip(depths, changes, strict=True))
    return Growth.of(list(last), list(last.values()))


def _growth_inside(patient: Patient) -> dict[str, dict[str, Growth]]:
    """Changes of each layer's output in the one model there is, against the layer's number."""
    model, batch = patient.model, patient.batch
    kinds = {"1 % noise on the matrices, layer by layer": layer_changes(model, batch, trials=_TRIALS),
             f"one update at rate {due_rate(patient):g}, layer by layer": layer_changes_by(
                 model, batch, lambda: _update(patient))}
    return {kind: {side: Growth.of(range(1, len(values) + 1), values) for side, values in found.items()}
            for kind, found in kinds.items()}


def between_checkpoints(patient: Patient) -> list[Any]:
    """How the attention matrices moved between the run's checkpoints, and their gradients on the batch at each."""
    assert patient.checkpoint is not None
    beside = patient.checkpoint.parent
    folders = list_checkpoints(beside / "checkpoints" if own_name(patient.checkpoint) == "averaged" else beside)
    pairs = []
    first: tuple[Path, dict[str, Tensor]] | None = None
    for folder in folders:
        try:
            after = load_weights(folder)
        except DamagedCheckpoint as fault:  # or one that the run has deleted since
            print(f"passed over: {fault}", file=sys.stderr)
            continue
        if first is not None:
            before = first[1]
            model = Transformer(patient.recipe.model, *patient.vocabs, patient.recipe.seed,
                                patient.model.label_smoothing)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(before[name])
            norms = gradients(model.to(patient.batch.device), patient.batch).matrices
            pairs.append(moved(update_of(first[0]), update_of(folder), before, after, norms))
        first = folder, after
    return pairs


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(patient: Patient, rule: VerdictRule, half: HalfZeros, data_world: int = 1) -> dict[str, Any]:
    """The rule's answer and, where it is no, its answers for other rates, a warm-up and other blocks.

    Where the layout is fp16, what was measured on an fp16 copy (`half`) can make it a no, too.
    """
    values = _features(patient.recipe, patient.model, patient, data_world)
    verdict = rule.judge(values)
    fp16 = fp16_fault(patient, half) if patient.recipe.parallel.precision == "fp16" else None
    answer: dict[str, Any] = {
        "trains": verdict.trains and fp16 is None, "probability": verdict.probability, "reasons": verdict.reasons,
        "fp16": fp16, "features": values,
        "outside": rule.unseen(patient.recipe, patient.recipe.parallel.precision) + verdict.outside,
        "rule": {**rule.facts, "kind": rule.kind, "unvaried": rule.unvaried}, "instead": {},
    }
    answer["rule"].pop("fitted_points", None)  # hundreds, of no use to a reader
    if fp16 is not None:
        answer["instead"]["parallel.precision=bf16"] = rule.probability({**values, **precision_features("bf16")})
    if not verdict.trains:
        largest = rule.spans.get("tokens", (0.0, 0.0))[1]  # beyond it more is the same to the rule
        for name, recipe in alternatives(patient.recipe, knows_batches=values["tokens"] < largest).items():
            profile = patient.profile if recipe.model == patient.recipe.model else None
            model = fresh(recipe, patient.vocabs, patient.batch, profile)
            answer["instead"][name] = rule.probability(_features(recipe, model, patient, data_world))
    return answer


def fp16_fault(patient: Patient, half: HalfZeros) -> str | None:
    """Why the model cannot be trained in fp16 by what its first gradients are at a scale that works (`working_scale`);
    None where it can."""
    if not half.finite:
        return f"gradients overflow in fp16 at every loss scale down to {patient.recipe.loss_scale.floor:g}"
    if half.lost > LOST:
        return f"{100 * half.lost:.0f} % of a layer's gradients are lost to fp16 at loss scale {half.scale:g}"
    return None


def working_scale(patient: Patient, half: HalfZeros) -> HalfZeros:
    """The measurement at the largest scale without overflow: that of `half`, or a quarter of it and so on down to the
    recipe's floor, as a run's loss scale halves until there is none."""
    floor, accumulation = patient.recipe.loss_scale.floor, patient.recipe.batch.accumulation
    while not half.finite and half.scale > floor:
        half = half_zeros(patient.model, patient.batch, max(half.scale / 4, floor), accumulation)
    return half


def _features(recipe: Recipe, model: Transformer, patient: Patient, data_world: int) -> dict[str, float]:
    return features(model, patient.batch, partial(one_update, model, recipe, patient.batch),
                    partial(trial, model, recipe, patient.batch), rate=recipe.optimizer.lr,
                    warmup=recipe.schedule.warmup,
                    tokens=max(1, round(patient.micro_batch * recipe.batch.accumulation * data_world)),
                    precision=recipe.parallel.precision)


def _plain(findings: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has no word for (NaN, infinity) become text."""
    def plain(value: Any) -> Any:
        if isinstance(value, Growth):
            return plain(value.as_dict())
        if isinstance(value, dict):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    return dict(json.loads(json.dumps(plain(findings))))


def default_checkpoint(recipe: Recipe, given: str | None, is_run: bool) -> Path | None:
    """The checkpoint that a command line means: the one given, else a run's newest, else none (a fresh model)."""
    if given is not None:
        return find_checkpoint(Path(given), "newest")
    if is_run and list_checkpoints(Path(recipe.run) / "checkpoints"):
        return find_checkpoint(Path(recipe.run), "newest")
    return None
