"""Predicts what a recipe's model will do after a number of updates: features of a short training trial, and a rule.

The trial makes `TRIAL` updates of the recipe on its own text, at its own peak rate. The rule is a small JSON file that
`studies/verdict_fit.py` writes and that comes with deepnmt: two logistic regressions, one after the other. The first
gives the probability that the model learns anything at all, the second the probability that a model that does so reads
its source. It was fitted on runs whose outcome was measured (`outcome.py`), and records what these runs were like, to
report where a recipe is unlike them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepnmt.batch import Batch
from deepnmt.config import Precision, Recipe
from deepnmt.data.batching import Stream, collate
from deepnmt.data.prepared import PreparedData
from deepnmt.doctor.outcome import OUTCOMES, Outcome, frequencies_loss, measure_outcome
from deepnmt.doctor.variants import initialisation
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer
from deepnmt.optim import learning_rate
from deepnmt.parallel.local import LocalEngine
from deepnmt.progress import Progress, no_progress

SHIPPED = Path(__file__).with_name("verdict.json")
TRIAL = 40  # updates
TOKENS = 256  # target tokens of each of them, at most
_WARMUP = 20  # at most so many of them for the warm-up
_END = 5  # updates averaged at the trial's end
_LEAST = 1e-5  # nats; a smaller gain counts as this
_FORMAT, _VERSION = "deepnmt-verdict", 4
_STAGES = ("learns", "translates")

# What each feature is, in words. All logarithms are to base 10.
FEATURES: dict[str, str] = {
    "trial_loss": "validation loss at the end of the trial below that of the tokens' frequencies, nats a token",
    "trial_fall": "how far the training loss fell over the second half of the trial, nats a token",
    "trial_gain": "log gain of the source at the end of the trial, nats a token",
    "budget": "log learning rates of all updates, summed, over those of the trial",
    "tokens": "log target tokens of all updates",
    "length": "log target tokens of a sentence",
    "layers": "log layers of both stacks",
}
_LOGARITHMS = ("trial_gain", "budget", "tokens", "length", "layers")  # shown to a reader without the log
# Settings of which the rule's facts list the values that its runs had.
_SETTINGS = ("optimizer.name", "schedule.name", "optimizer.weight_decay", "model.attention_dropout",
             "model.activation_dropout")


def describe(name: str) -> str:
    """A feature in words, for a reader."""
    return FEATURES[name].removeprefix("log ")


def format_value(name: str, value: float) -> str:
    """A feature's value, for a reader."""
    return f"{10**value:.2g}" if name in _LOGARITHMS else f"{value:.2f}"


# -- the trial ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A short training of a recipe's model on the recipe's text.

    Attributes:
        losses: plain training losses of its updates, nats a target token; not finite after a divergence.
        norms: the gradient's norms.
        own, shuffled, frequencies: of the validation text after it, see `outcome.Measured`.
        rates: its learning rates, summed.
        length: mean target tokens of a sentence of the training text.
        micro_batch: mean target tokens of a micro-batch of the recipe, which in the trial is cut to `TOKENS`.
        epoch: target tokens of the training text.
    """

    losses: list[float]
    norms: list[float]
    own: float
    shuffled: float
    frequencies: float
    rates: float
    length: float
    micro_batch: float
    epoch: float


def run_trial(
    model: Transformer, recipe: Recipe, data: PreparedData, device: torch.device, progress: Progress = no_progress
) -> Trial:
    """Trains a fresh model for `TRIAL` updates, in place, in fp32, on the first micro-batches of the recipe's own
    training, each cut to about `TOKENS` target tokens.

    The rate is the peak after a warm-up of the recipe's length, but of at most half the trial.
    """
    engine = LocalEngine(model, recipe, device)
    train, valid = data.split("train"), data.split("valid").truncated(recipe.model.max_length)
    stream = Stream(train, recipe.batch.tokens, recipe.seed)
    rates = trial_rates(recipe)
    losses, norms = [], []
    for number, rate in enumerate(rates):
        batch = cut_batch(stream, number % stream.epoch_size(0), TOKENS, number, device)
        stats = engine.train_step([batch], batch.tokens, rate)
        losses.append(stats.nll / batch.tokens)
        norms.append(stats.grad_norm)
        progress(number + 1)
    epoch = float(stream.split(0).trg_lengths.sum())
    measured = measure_outcome(engine.evaluate, valid, frequencies_loss(train, valid, model.output_weight.size(0)),
                               device)
    return Trial(losses, norms, measured.own, measured.shuffled, measured.frequencies, sum(rates),
                 float(train.trg_lengths.mean()), epoch / stream.epoch_size(0), epoch)


def cut_batch(stream: Stream, number: int, tokens: int, key: int, device: torch.device) -> Batch:
    """A micro-batch of the first epoch, truncated to about `tokens` target tokens, but to no fewer than two
    sentences."""
    split, indices = stream.split(0), stream.plan(0)[number]
    reached = split.trg_lengths[indices].cumsum()
    return collate(split, indices[:max(2, int((reached <= tokens).sum()))], key, device)


def trial_rates(recipe: Recipe) -> list[float]:
    """The learning rates of a trial."""
    warmup = min(recipe.schedule.warmup, _WARMUP)
    return [recipe.optimizer.lr * min(1.0, update / (warmup + 1)) for update in range(1, TRIAL + 1)]


def features(trial: Trial, recipe: Recipe, updates: int, data_world: int = 1) -> dict[str, float]:
    """All `FEATURES` of a recipe after a number of updates.

    Args:
        data_world: data-parallel ranks whose micro-batches go into one update.
    """
    end, middle = fmean(trial.losses[-_END:]), fmean(trial.losses[TRIAL // 2:TRIAL // 2 + _END])
    finite = math.isfinite(trial.own) and math.isfinite(end)
    tokens = trial.micro_batch * recipe.batch.accumulation * data_world  # of an update
    rates = sum(learning_rate(recipe.optimizer.lr, recipe.schedule, number, recipe.train.updates,
                              (number - 1) * tokens / trial.epoch) for number in range(1, updates + 1))
    return {
        "trial_loss": _clamped(trial.frequencies - trial.own) if finite else -10.0,
        "trial_fall": _clamped(middle - end) if finite else -10.0,
        "trial_gain": math.log10(max(trial.shuffled - trial.own, _LEAST)) if finite else math.log10(_LEAST),
        "budget": math.log10(max(rates / trial.rates, 1e-6)),
        "tokens": math.log10(updates * tokens),
        "length": math.log10(trial.length),
        "layers": math.log10(recipe.model.encoder.layers + recipe.model.decoder.layers),
    }


def _clamped(value: float) -> float:
    """The value clipped to [-10, 10] nats."""
    return min(max(value, -10.0), 10.0)


# -- the rule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The rule's prediction for one model and number of updates.

    Attributes:
        outcome: the most probable one.
        probabilities: of each outcome.
        reasons: the features by the size of their contributions, the largest first, in words.
        outside: features beyond the range of the runs that the rule was fitted on, in words.
    """

    outcome: Outcome
    probabilities: dict[Outcome, float]
    reasons: list[str]
    outside: list[str]


@dataclass(frozen=True)
class VerdictRule:
    """A rule that predicts an outcome from features, fitted on runs.

    With z = (x - centre) / scale, each stage has p = 1 / (1 + exp(-(bias + Σ weight · z))). P(stuck) = 1 - p(learns),
    P(translates) = p(learns) · p(translates), and P(target only) is the rest.

    Attributes:
        names: the features it uses.
        centre, scale: of each.
        learns, translates: the stages, each a weight by feature and a `bias`.
        spans: by feature, its smallest and largest value among the runs. Values are clipped to it.
        facts: the runs it was fitted on, and how right it was on runs that it was not fitted on.
    """

    names: list[str]
    centre: dict[str, float]
    scale: dict[str, float]
    learns: dict[str, float]
    translates: dict[str, float]
    spans: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)

    def probabilities(self, values: Mapping[str, float]) -> dict[Outcome, float]:
        """The probability of each outcome for a model with these features."""
        learns, translates = (1 / (1 + math.exp(-min(max(stage["bias"] + sum(self._contributions(stage, values).values()
                                                                             ), -500.0), 500.0)))
                              for stage in (self.learns, self.translates))
        return {"stuck": 1 - learns, "target only": learns * (1 - translates), "translates": learns * translates}

    def judge(self, values: Mapping[str, float]) -> Verdict:
        """The verdict with its reasons."""
        probabilities = self.probabilities(values)
        contributions = [(contribution, name, words) for stage, words in (
            (self.learns, "learning anything"), (self.translates, "reading the source"))
            for name, contribution in self._contributions(stage, values).items()]
        reasons = [f"{describe(name)}: {format_value(name, values[name])} counts "
                   f"{'for' if contribution > 0 else 'against'} {words} ({contribution:+.2f})"
                   for contribution, name, words in sorted(contributions, key=lambda item: -abs(item[0]))
                   if abs(contribution) >= 0.1]
        outside = [f"{describe(name)} is {format_value(name, values[name])}; the runs had {format_value(name, low)} to "
                   f"{format_value(name, high)}, and the nearest of these is taken"
                   for name, (low, high) in self.spans.items() if not low - 1e-9 <= values[name] <= high + 1e-9]
        return Verdict(max(OUTCOMES, key=probabilities.__getitem__), probabilities, reasons, outside)

    def unseen(self, recipe: Recipe, precision: Precision = "fp32") -> list[str]:
        """What a recipe has that none of the runs had, in words: blocks, initialisation, optimizer, schedule, some
        other settings, and the precision. What the rule's facts do not list is not checked."""
        seen, unseen = self.facts.get("seen", {}), []
        for side in ("encoder", "decoder"):
            stack = recipe.model.stack(side)
            if stack.block not in seen.get("blocks", [stack.block]):
                unseen.append(f"no run had the {side} block {stack.block}")
            elif (init := initialisation(stack.block, stack.init)) not in seen.get("inits", {}).get(
                    stack.block, [init]):
                unseen.append(f"the {side}'s initialisation is {init}; runs with {stack.block} had "
                              f"{' or '.join(seen['inits'][stack.block])}")
        for setting in _SETTINGS:
            if (value := attrgetter(setting)(recipe)) not in seen.get(setting, [value]):
                unseen.append(f"{setting} is {value}; the runs had {' or '.join(map(str, seen[setting]))}")
        if (width := recipe.model.width) > max(seen.get("width", [width])):
            unseen.append(f"model.width is {width}; the runs had up to {max(seen['width'])}")
        if precision not in seen.get("precisions", [precision]):
            unseen.append(f"the precision is {precision}; the runs had {' or '.join(seen['precisions'])}")
        return unseen

    def _contributions(self, stage: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
        """Each feature's term of a stage's score."""
        return {name: stage[name] * (min(max(values[name], low), high) - self.centre[name]) / self.scale[name]
                for name in self.names for low, high in [self.spans[name]]}

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
            for needed in (rule.centre, rule.scale, rule.learns, rule.translates, rule.spans):
                if not set(rule.names) <= set(needed):
                    raise KeyError
            if "bias" not in rule.learns or "bias" not in rule.translates:
                raise KeyError
        except OSError as error:
            raise UserError(f"verdict rule {path} cannot be read ({error.strerror}); fit one with "
                            "python -m studies verdict-runs fit") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is not a verdict rule of version {_VERSION}; fit one with python -m studies "
                            "verdict-runs fit") from None
        if unknown := [name for name in rule.names if name not in FEATURES]:
            raise UserError(f"{path} has unknown features: {', '.join(unknown)}; known: {', '.join(FEATURES)}; fit a "
                            "new rule with python -m studies verdict-runs fit")
        return rule
