"""Predicts whether a model will train: features measured before training, and a rule that was fitted on runs.

The rule is a small JSON file that `studies/verdict_fit.py` writes and that comes with deepnmt: a logistic regression on
some of the features below and their squares (too small can be as bad as too large), or a small decision tree. It also
records the ranges of the runs it was fitted on, to report where a model is unlike them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from deepnmt.batch import Batch
from deepnmt.config import Precision, Recipe, with_settings
from deepnmt.doctor.measures import change, gradients, noise_change, restored, token_similarity, update_change
from deepnmt.doctor.probes import evaluating, outputs_of, plain_loss
from deepnmt.doctor.variants import initialisation
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.local import LocalEngine
from deepnmt.tokens import PAD

SHIPPED = Path(__file__).with_name("verdict.json")
TRIAL = 40  # updates on one batch
_TRIAL_WARMUP = 20  # at most so many of them for the warm-up
_REASONS = 6  # of a verdict: the features with the largest contributions
_FORMAT, _VERSION = "deepnmt-verdict", 3

# What each feature is, in words. "Change": see `measures.py`; all logarithms are to base 10.
FEATURES: dict[str, str] = {
    "noise_encoder": "log change of the encoder's output under 1 % noise on the matrices",
    "noise_decoder": "log change of the decoder's output under 1 % noise on the matrices",
    "update_encoder": "log change of the encoder's output after one optimizer update at the peak rate",
    "update_decoder": "log change of the decoder's output after one optimizer update at the peak rate",
    "update_loss": "change of the batch's loss by that update, nats a token",
    "trial_loss": "loss at the end of 40 updates on this one batch, above the entropy of its tokens",
    "trial_fall": "how far that loss fell over the last 15 of them, nats a token",
    "trial_source": "rise of the loss after these 40 updates if every sentence gets another source, nats a token",
    "gradient_encoder": "log gradient norm of the encoder's lowest output over its highest",
    "gradient_decoder": "log gradient norm of the decoder's lowest output over its highest",
    "gradient_source": "log gradient norm of the encoder's top over the decoder's top",
    "alike_encoder": "cosine between the encoder's outputs at different positions",
    "alike_decoder": "cosine between the decoder's outputs at different positions",
    "source_signal": "log change of the decoder's output when every sentence gets another source",
    "layers": "log layers of both stacks",
    "rate": "log peak learning rate",
    "warmup": "1 with a warm-up, 0 without",
    "tokens": "log target tokens of an update",
    "bf16": "1 in bf16, 0 otherwise",
    "fp16": "1 in fp16, 0 otherwise",
}
_LOGARITHMS = ("layers", "rate", "tokens")  # shown to a reader without the log
# Settings that all runs had in common, by their name among the rule's facts.
_SETTINGS = {
    "schedule": "schedule.name", "dropout": "model.dropout", "attention_dropout": "model.attention_dropout",
    "activation_dropout": "model.activation_dropout", "weight_decay": "optimizer.weight_decay", "clip": "train.clip",
    "label_smoothing": "train.label_smoothing",
}


def describe(name: str) -> str:
    """A feature in words, for a reader."""
    return FEATURES[name].removeprefix("log ") if name in _LOGARITHMS else FEATURES[name]


def format_value(name: str, value: float) -> str:
    """A feature's value, for a reader."""
    if name not in _LOGARITHMS:
        return f"{value:.3g}"
    return f"{10**value:.2g}" if name == "rate" else f"{10**value:,.0f}"


def features(model: Transformer, batch: Batch, recipe: Recipe, tokens: int) -> dict[str, float]:
    """All `FEATURES` of a recipe's model before training, on one batch; its weights are restored.

    Args:
        tokens: target tokens of an update.
    """
    with restored(model):
        losses = trial(model, recipe, batch)
    return {**static_features(model, batch), **update_features(model, batch, recipe), **trial_features(losses, batch),
            "rate": math.log10(recipe.optimizer.lr), "warmup": float(recipe.schedule.warmup > 0),
            "tokens": math.log10(tokens), **precision_features(recipe.parallel.precision)}


def precision_features(precision: Precision) -> dict[str, float]:
    """The features that encode a precision."""
    return {name: float(precision == name) for name in ("bf16", "fp16")}


def static_features(model: Transformer, batch: Batch) -> dict[str, float]:
    """The features that do not depend on the learning rate."""
    norms, noise = gradients(model, batch), noise_change(model, batch)
    with evaluating(model):
        before, after = outputs_of(model, batch), outputs_of(model, other_sources(batch))
    (encoder_low, *_, encoder_top), (decoder_low, *_, decoder_top) = (
        [_log(norm) for norm in norms.of_stack(side)] for side in ("encoder", "decoder"))
    return {
        "noise_encoder": _log(noise["encoder"][0]),
        "noise_decoder": _log(noise["decoder"][0]),
        "gradient_encoder": encoder_low - encoder_top,
        "gradient_decoder": decoder_low - decoder_top,
        "gradient_source": encoder_top - decoder_top,
        "alike_encoder": token_similarity(before["encoder"][0]),
        "alike_decoder": token_similarity(before["decoder"][0]),
        "source_signal": _log(change(before["decoder"][0], after["decoder"][0])),
        "layers": math.log10(len(model.encoder.layers) + len(model.decoder.layers)),
    }


def update_features(model: Transformer, batch: Batch, recipe: Recipe) -> dict[str, float]:
    """The features of one update."""
    loss = plain_loss(model, batch)
    changes, after = update_change(model, batch, partial(one_update, model, recipe, batch))
    return {
        "update_encoder": _log(changes["encoder"][0]),
        "update_decoder": _log(changes["decoder"][0]),
        "update_loss": _clamped(after - loss) if math.isfinite(after) else 10.0,
    }


def one_update(model: Transformer, recipe: Recipe, batch: Batch) -> None:
    """The first update of a fresh model, in place, but at the peak rate, and by Adam instead of RAdam, whose first five
    updates are plain momentum or none (Liu et al. 2020, On the Variance of the Adaptive Learning Rate)."""
    _fresh_engine(model, recipe, batch).train_step([batch], batch.tokens, recipe.optimizer.lr)


def _fresh_engine(model: Transformer, recipe: Recipe, batch: Batch) -> LocalEngine:
    """An engine for the model, with Adam instead of RAdam."""
    if recipe.optimizer.name.startswith("radam"):
        recipe = with_settings(recipe, {"optimizer.name": recipe.optimizer.name[1:],
                                        "optimizer.unrectified": "momentum"})
    return LocalEngine(model, recipe, batch.device)


def trial(model: Transformer, recipe: Recipe, batch: Batch) -> list[float]:
    """Updates a fresh model on one batch, in place, and returns the plain losses that `trial_features` takes. As in
    training, every update has its own dropout masks; as in `one_update`, Adam replaces RAdam."""
    engine = _fresh_engine(model, recipe, batch)
    losses = [engine.train_step([replace(batch, key=batch.key + number)], batch.tokens, rate).nll / batch.tokens
              for number, rate in enumerate(trial_rates(recipe.optimizer.lr, recipe.schedule.warmup))]
    return [*losses, *(plain_loss(model, each) for each in (batch, other_sources(batch)))]


def trial_rates(rate: float, warmup: int) -> list[float]:
    """The `TRIAL` learning rates of a trial: the peak, after the recipe's warm-up shortened to at most 20 updates."""
    shortened = min(warmup, _TRIAL_WARMUP)
    return [rate * min(1.0, update / (shortened + 1)) for update in range(1, TRIAL + 1)]


def trial_features(losses: Sequence[float], batch: Batch) -> dict[str, float]:
    """The features of a trial. A model that is stuck learns no more than the frequencies of the batch's tokens.

    Args:
        losses: plain losses in nats a target token: at each of `TRIAL` updates, and after them on the batch and on
            its `other_sources`.
    """
    *during, own, other = losses
    end, middle = fmean(during[-5:]), fmean(during[-20:-15])
    if not math.isfinite(end):
        return {"trial_loss": 10.0, "trial_fall": -10.0, "trial_source": 0.0}
    targets = batch.tensors[3]
    counts = targets[targets != PAD].unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    entropy = float(-(shares * shares.log()).sum())  # of the target tokens by their frequencies in the batch
    return {"trial_loss": _clamped(end - entropy), "trial_fall": _clamped(middle - end),
            "trial_source": _clamped(other - own)}


def _clamped(value: float) -> float:
    """The value clipped to [-10, 10] nats; 0 for NaN."""
    return min(max(value, -10.0), 10.0) if not math.isnan(value) else 0.0


def other_sources(batch: Batch) -> Batch:
    """The batch with every target paired with the source of the sentence before it."""
    src, lengths, *target = batch.tensors
    return replace(batch, tensors=(src.roll(1, 0), lengths.roll(1, 0), *target))


def _log(value: float) -> float:
    """log10 clipped to [-8, 6], so that zero and overflow give finite numbers."""
    if math.isnan(value):
        return 6.0
    return min(max(math.log10(value), -8.0), 6.0) if value > 0 else -8.0


# -- the rule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The rule's prediction for one model.

    Attributes:
        trains: whether it is predicted to train.
        probability: of training.
        reasons: the features with the largest contributions, the largest first, in words.
        outside: features beyond the range of the runs that the rule was fitted on, in words.
    """

    trains: bool
    probability: float
    reasons: list[str]
    outside: list[str]


@dataclass(frozen=True)
class VerdictRule:
    """A rule that predicts from features whether a model trains, fitted on runs.

    Attributes:
        kind: logistic: probability = 1 / (1 + exp(-(bias + Σ weights · z + squares · z² + by_rate · z · z_rate))), z =
            (x - centre) / scale; tree: nested thresholds.
        names: the features it uses.
        body: logistic: centre, scale, weights, squares, by_rate (lists in the order of `names`), bias; tree: nodes of
            feature, threshold, low and high, and leaves of probability and runs.
        spans: by feature, its smallest and largest value among the runs. The logistic rule clips values to it, because
            squares do not extrapolate.
        facts: the runs it was fitted on, and its accuracy on held-out runs.

    If all runs had the same value of a feature, the rule knows nothing about that feature, and other values of it are
    not reported as outside.
    """

    kind: Literal["logistic", "tree"]
    names: list[str]
    body: dict[str, Any]
    spans: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)

    def probability(self, values: Mapping[str, float]) -> float:
        """The probability that a model with these features trains."""
        if self.kind == "logistic":
            score = self.body["bias"] + sum(self._contributions(values).values())
            return 1 / (1 + math.exp(-min(max(score, -500.0), 500.0)))
        return float(self._leaf(values)[0]["probability"])

    def judge(self, values: Mapping[str, float]) -> Verdict:
        """The verdict with its reasons."""
        reasons = self._leaf(values)[1] if self.kind == "tree" else []
        if self.kind == "logistic":
            largest_first = sorted(self._contributions(values).items(), key=lambda item: -abs(item[1]))
            for name, contribution in largest_first[:_REASONS]:
                value, clipped = values[name], self._clipped(name, values)
                note = (f" (clipped to {format_value(name, clipped)}, the nearest value among the rule's runs)"
                        if abs(clipped - value) >= 1e-9 else "")
                reasons.append(f"{describe(name)}: {format_value(name, value)}{note} counts "
                               f"{'for' if contribution > 0 else 'against'} training ({contribution:+.2f})")
        outside = [f"{describe(name)} is {format_value(name, values[name])}; the runs had {format_value(name, low)} to "
                   f"{format_value(name, high)}" for name, (low, high) in self.spans.items()
                   if low < high and not low - 1e-9 <= values[name] <= high + 1e-9]
        probability = self.probability(values)
        return Verdict(probability >= 0.5, probability, reasons, outside)

    @property
    def unvaried(self) -> dict[str, float]:
        """The features that were the same in all runs, and their values."""
        return {name: low for name, (low, high) in self.spans.items() if low == high}

    def unseen(self, recipe: Recipe, precision: Precision = "fp32") -> list[str]:
        """What a recipe has that none of the runs had, in words: blocks, initialisation, optimizer, schedule, dropout,
        label smoothing, weight decay, clipping and precision. Settings missing from the rule's facts are not checked.
        """
        facts, stacks, unseen = self.facts, (recipe.model.encoder, recipe.model.decoder), []
        blocks = "/".join(stack.block for stack in stacks)
        known = facts.get("accuracy_on_a_block_left_out", {})
        if known and blocks not in known:
            unseen.append(f"no run had the blocks {blocks}; on pairs of blocks left out of its fit, the rule was right "
                          f"on {100 * min(known.values()):.0f} to {100 * max(known.values()):.0f} % of the runs")
        optimizer = recipe.optimizer.name
        if facts.get("optimizer", optimizer) != optimizer:
            unseen.append(f"optimizer.name is {optimizer}; all runs had {facts['optimizer']}")
        ours, theirs = ("/".join(initialisation(stack.block, init or stack.init) for stack in stacks)
                        for init in (None, facts.get("init")))
        # A rule that does not list its runs' initialisations was fitted on runs with one `init`.
        inits = facts.get("inits", {}).get(blocks, [theirs if blocks in known else ours])
        if ours not in inits:
            unseen.append(f"the initialisation is {ours} (encoder/decoder); runs of these blocks had "
                          f"{' or '.join(inits)}")
        unseen += [f"{setting} is {value}; all runs had {facts[fact]}" for fact, setting in _SETTINGS.items()
                   if fact in facts and (value := attrgetter(setting)(recipe)) != facts[fact]]
        if precision not in facts.get("precisions", [precision]):
            unseen.append(f"the precision is {precision}; the runs had {' or '.join(facts['precisions'])}")
        return unseen

    def _clipped(self, name: str, values: Mapping[str, float]) -> float:
        """A feature's value, clipped to the range of the runs."""
        low, high = self.spans[name]
        return min(max(values[name], low), high)

    def _contributions(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each feature's term of the logistic score."""
        body = self.body
        z = {name: (self._clipped(name, values) - centre) / scale
             for name, centre, scale in zip(self.names, body["centre"], body["scale"], strict=True)}
        columns = zip(self.names, body["weights"], body["squares"], body["by_rate"], strict=True)
        return {name: (weight + by_rate * z.get("rate", 0.0)) * z[name] + square * z[name]**2
                for name, weight, square, by_rate in columns}

    def _leaf(self, values: Mapping[str, float]) -> tuple[dict[str, Any], list[str]]:
        """The leaf of a decision tree, and the comparisons on the way to it, in words."""
        node, path = self.body, []
        while "feature" in node:
            name, low = node["feature"], values[node["feature"]] <= node["threshold"]
            path.append(f"{FEATURES[name]}: {values[name]:.3g} {'≤' if low else '>'} {node['threshold']:.3g}")
            node = node["low"] if low else node["high"]
        return node, path

    def save(self, path: Path) -> None:
        """Writes JSON. Raises `UserError` if it cannot."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        try:
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            way = "remove --ship" if path == SHIPPED else "put the runs into a folder that you can write to"
            raise UserError(f"verdict rule {path} cannot be written ({error.strerror}); {way}") from None

    @classmethod
    def load(cls, path: Path = SHIPPED) -> VerdictRule:
        """Reads a rule.

        Raises:
            UserError: the file is missing, or it is not a rule of this version.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT or content.pop("version") != _VERSION:
                raise KeyError
            rule = cls(**content)
            needed = ("centre", "scale", "weights", "squares", "by_rate", "bias") if rule.kind == "logistic" else ()
            if not all(name in rule.body for name in needed) or not set(rule.names) <= set(rule.spans):
                raise KeyError
        except OSError as error:
            raise UserError(f"verdict rule {path} cannot be read ({error.strerror}); fit one with "
                            "python -m studies verdict-grid fit") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is not a verdict rule of version {_VERSION}; fit one with python -m studies "
                            "verdict-grid fit") from None
        if unknown := [name for name in rule.names if name not in FEATURES]:
            raise UserError(f"{path} has unknown features: {', '.join(unknown)}; known: {', '.join(FEATURES)}; fit a "
                            "new rule with python -m studies verdict-grid fit")
        return rule
