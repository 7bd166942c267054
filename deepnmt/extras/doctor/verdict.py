"""Predicts what a recipe's model will do after a number of updates: features of a short training trial, and a rule.

The trial makes `TRIAL` updates of the recipe on its own text, at its own peak rate. The rule is a small JSON file that
`studies/verdict_fit.py` writes and that comes with deepnmt: two linear regressions with their spreads. One expects how
far the validation loss will be below that of the tokens' frequencies, the other the source's gain. From these follow
the probabilities of the outcomes (`outcome.py`). The rule was fitted on runs of which both were measured, and records
what these runs were like, to report where a recipe is unlike them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepnmt.batch import Batch
from deepnmt.config import Fact, Precision, Recipe
from deepnmt.data.batching import Stream, collate
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.extras.doctor.outcome import GAIN, MARGIN, OUTCOMES, Measured, Outcome, frequencies, measure_outcome
from deepnmt.extras.doctor.variants import initialisation
from deepnmt.model.transformer import Transformer
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.local import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress
from deepnmt.tasks.translation.source_use import measure_source_use

SHIPPED = Path(__file__).with_name("verdict.json")
TRIAL = 40  # updates
TOKENS = 256  # target tokens of each of them, at most
_LOOKS, _LOOKED_AT = (10, 20, 30, TRIAL), 32  # after which of them the use of the source is measured; sentences
_WARMUP = 20  # at most so many of them for the warm-up
_END = 10  # of them make up its end
LEAST_DROP, MOST_DROP = -0.4, 2.5  # nats below the frequencies; what lies outside counts as these
LEAST_GAIN, MOST_GAIN = 1e-4, 3.0  # nats; what lies outside counts as these
_NO_GAIN = 1.25e-4  # nats; a smaller gain is none
_FLOOR = 0.02  # no outcome is given a smaller probability
_FORMAT, _VERSION = "deepnmt-verdict", 5

# What each feature is, in words; of `LOGARITHMS` its logarithm to base 10 is taken. A rule may also use products, as
# in `a*b`.
FEATURES: dict[str, str] = {
    "trial_loss": "validation loss after the trial, below that of the tokens' frequencies, nats a token",
    "trial_norm": "gradient norm over the last 10 updates of the trial",
    "uneven": "change of the training loss from one update to the next, last 10 updates of the trial",
    "trial_gain": "gain of the source after the trial, nats a token",
    "below": "whether the validation loss after the trial is below that of the frequencies (1: yes)",
    "blind": "whether the source has no gain after the trial (1: none)",
    "rate": "peak learning rate",
    "budget": "learning rates of all updates, summed, over those of the trial",
    "updates": "updates",
    "length": "target tokens of a sentence",
    "width": "model width",
    "layers": "layers of both stacks",
    "batch": "target tokens of an update",
}
# Those that are logarithms; shown without the log.
LOGARITHMS = {"trial_norm", "uneven", "trial_gain", "rate", "budget", "updates", "length", "width", "layers", "batch"}


def describe(name: str) -> str:
    """A feature in words, for a reader."""
    return " × ".join(FEATURES[part] for part in name.split("*"))


def _values_of(name: str, values: Mapping[str, float]) -> str:
    return " of " + " × ".join(format_value(part, values[part]) for part in name.split("*"))


def format_value(name: str, value: float) -> str:
    """A feature's value, for a reader."""
    if name not in LOGARITHMS:
        return f"{value:.2f}"
    return f"{10**value:.2g}" if value < 2 else f"{10**value:,.0f}"


def expected_rank(probabilities: Mapping[Any, float]) -> float:
    """0 for a model that is surely stuck, 1 for the target side only, 2 for one that translates."""
    return sum(rank * probabilities[name] for rank, name in enumerate(OUTCOMES))


def _shown(value: object) -> str:
    """A setting's value, as in a recipe."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict, bool, type(None))) else str(value)


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
        source: `SourceUse` after some of the updates, whose number is `update`; from few sentences, for the picture.
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
    source: list[dict[str, float]] = field(default_factory=list)


def run_trial(
    model: Transformer, recipe: Recipe, data: PreparedData, device: torch.device, progress: Progress = no_progress
) -> Trial:
    """Trains a fresh model for `TRIAL` updates, in place, in fp32, on the first micro-batches of the recipe's own
    training, each cut to about `TOKENS` target tokens.

    The rate is the peak after a warm-up of the recipe's length, but of at most half the trial.
    """
    engine = LocalEngine(model, recipe, device)
    train, valid = data.split("train"), data.split("valid").truncated(recipe.model.max_length)
    stream = training_stream(recipe, data)
    rates, losses, norms, source = trial_rates(recipe), [], [], []
    alone = Ranks.alone(device)

    def look(number: int) -> None:
        use = measure_source_use(engine, recipe, valid, range(len(valid)), alone, _LOOKED_AT)
        source.append({"update": number, **asdict(use)})

    look(0)
    for number, rate in enumerate(rates):
        batch = cut_batch(stream, number % len(stream.plan(0)), TOKENS, number, device)
        stats = engine.train_step([batch], batch.tokens, rate)
        losses.append(stats.nll / batch.tokens)
        norms.append(stats.grad_norm)
        progress(number + 1)
        if number + 1 in _LOOKS:
            look(number + 1)
    epoch = float(stream.split(0).trg_lengths.sum())
    measured = measure_outcome(engine.evaluate, valid, frequencies(train, model.output_weight.size(0)), device)
    return Trial(losses, norms, measured.own, measured.shuffled, measured.frequencies, sum(rates),
                 float(train.trg_lengths.mean()), epoch / len(stream.plan(0)), epoch, source)


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
    tokens = recipe.batch.update_tokens or trial.micro_batch * recipe.batch.entries(data_world)  # of an update
    rates = sum(learning_rate(recipe.optimizer.lr, recipe.schedule, number, recipe.train.updates,
                              (number - 1) * tokens / trial.epoch) for number in range(1, updates + 1))
    norms, losses = trial.norms[-_END:], trial.losses[-_END - 1:]
    finite = math.isfinite(trial.own + trial.shuffled + sum(trial.losses) + sum(norms))
    gain = trial.shuffled - trial.own if finite else 0.0
    return {
        "trial_loss": _drop(trial.frequencies - trial.own) if finite else LEAST_DROP,
        "trial_norm": math.log10(max(fmean(norms), 1e-3)) if finite else 1.0,
        "uneven": math.log10(max(fmean(abs(b - a) for a, b in pairwise(losses)), 1e-3)) if finite else 0.0,
        "trial_gain": math.log10(_gain(gain)),
        "below": float(finite and trial.own < trial.frequencies),
        "blind": float(gain < _NO_GAIN),
        "rate": math.log10(recipe.optimizer.lr),
        "budget": math.log10(max(rates / trial.rates, 1e-6)),
        "updates": math.log10(updates),
        "length": math.log10(trial.length),
        "width": math.log10(recipe.model.shape("decoder").width),
        "layers": math.log10(recipe.model.encoder.layers + recipe.model.decoder.layers),
        "batch": math.log10(tokens),
    }


def targets(measured: Measured) -> tuple[float, float]:
    """What the rule expects of a measured outcome: nats below the frequencies, and the gain's logarithm; both within
    limits, and the least of them for what is not finite."""
    finite = math.isfinite(measured.own + measured.shuffled)
    return (_drop(measured.frequencies - measured.own) if finite else LEAST_DROP,
            math.log10(_gain(measured.gain if finite else 0.0)))


def _drop(value: float) -> float:
    return min(max(value, LEAST_DROP), MOST_DROP)


def _gain(value: float) -> float:
    return min(max(value, LEAST_GAIN), MOST_GAIN)


# -- the rule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The rule's prediction for one model and number of updates.

    Attributes:
        outcome: the most probable one.
        probabilities: of each outcome.
        drop, gain: the expected nats below the frequencies, and the expected gain of the source in nats; neither is
            outside the limits that the rule was fitted with.
        reasons: the features by the size of their contributions, the largest first, in words.
        outside: features beyond the range of the runs that the rule was fitted on, in words.
    """

    outcome: Outcome
    probabilities: dict[Outcome, float]
    drop: float
    gain: float
    reasons: list[str]
    outside: list[str]


@dataclass(frozen=True)
class Line:
    """A linear regression: constant + Σ weight · (x - centre) / scale, by feature or product of features.

    Attributes:
        spread: the standard deviation of what a run had about what was expected of it, for runs not fitted on; from
            their median distance.
    """

    constant: float
    weights: dict[str, float]
    centre: dict[str, float]
    scale: dict[str, float]
    spread: float

    def contributions(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each feature's term."""
        return {name: weight * (math.prod(values[part] for part in name.split("*")) - self.centre[name])
                / self.scale[name] for name, weight in self.weights.items()}

    def expected(self, values: Mapping[str, float]) -> float:
        """The value of the line."""
        return self.constant + sum(self.contributions(values).values())

    def below(self, mark: float, values: Mapping[str, float]) -> float:
        """The probability of ending below the mark, by a logistic distribution."""
        z = math.pi / math.sqrt(3) * (mark - self.expected(values)) / self.spread
        return 1 / (1 + math.exp(-min(max(z, -40.0), 40.0)))


@dataclass(frozen=True)
class VerdictRule:
    """A rule that predicts an outcome from features, fitted on runs.

    A model is stuck if its validation loss is not `MARGIN` below that of the frequencies. One that is not stuck
    translates if the source's gain is `GAIN` or more.

    Attributes:
        loss: expects how far the validation loss is below that of the tokens' frequencies, in nats.
        gain: expects the logarithm of the source's gain in nats.
        spans: by feature, its smallest and largest value among the runs. Values are clipped to it.
        facts: the runs it was fitted on, and how right it was on runs that it was not fitted on.
    """

    loss: Line
    gain: Line
    spans: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)

    def probabilities(self, values: Mapping[str, float]) -> dict[Outcome, float]:
        """The probability of each outcome for a model with these features, none below `_FLOOR`."""
        clipped = self._clipped(values)
        stuck = self.loss.below(MARGIN, clipped)
        translates = (1 - stuck) * (1 - self.gain.below(math.log10(GAIN), clipped))
        plain: dict[Outcome, float] = {"stuck": stuck, "target only": 1 - stuck - translates, "translates": translates}
        return {outcome: _FLOOR + (1 - len(plain) * _FLOOR) * value for outcome, value in plain.items()}

    def judge(self, values: Mapping[str, float]) -> Verdict:
        """The verdict with its reasons."""
        probabilities, clipped = self.probabilities(values), self._clipped(values)
        contributions = [(contribution, name, contribution * factor, words) for line, factor, words in (
            (self.loss, 1.0, "{:+.2f} nats of the loss below the frequencies"),
            (self.gain, 1.0, "{:+.2f} powers of ten of the source's gain"))
            for name, contribution in line.contributions(clipped).items()]
        reasons = [f"{describe(name)}{_values_of(name, values)}: {words.format(shown)}"
                   for contribution, name, shown, words in sorted(contributions, key=lambda item: -abs(item[0]))
                   if abs(contribution) >= 0.05]
        outside = [f"{describe(name)} is {format_value(name, values[name])}; the runs had {format_value(name, low)} to "
                   f"{format_value(name, high)}, and the nearest of these is taken"
                   for name, (low, high) in self.spans.items() if not low - 1e-9 <= values[name] <= high + 1e-9]
        return Verdict(max(OUTCOMES, key=probabilities.__getitem__), probabilities, _drop(self.loss.expected(clipped)),
                       _gain(10 ** self.gain.expected(clipped)), reasons, outside)

    def reaches(self, values: Mapping[str, float]) -> bool:
        """Whether the runs had as many updates and as large a budget as these features, or more. A longer training is
        judged as the longest of theirs, so nothing is known of what it adds."""
        return all(values[name] <= self.spans[name][1] + 1e-9 for name in ("updates", "budget") if name in self.spans)

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
        for setting in Recipe.marked(Fact.SEEN):
            value = attrgetter(setting)(recipe)
            if setting in seen and value not in seen[setting]:
                unseen.append(f"{setting} is {_shown(value)}; the runs had {' or '.join(map(_shown, seen[setting]))}")
        encoder, decoder = (recipe.model.shape(side) for side in ("encoder", "decoder"))
        if encoder != decoder and seen:
            unseen.append("encoder and decoder differ in width, heads or ffn; those of the runs did not")
        if (width := max(encoder.width, decoder.width)) > max(seen.get("width", [width])):
            unseen.append(f"model.width is {width}; the runs had up to {max(seen['width'])}")
        if precision not in seen.get("precisions", [precision]):
            unseen.append(f"the precision is {precision}; the runs had {' or '.join(seen['precisions'])}")
        return unseen

    def _clipped(self, values: Mapping[str, float]) -> dict[str, float]:
        """The features, clipped to the range of the runs."""
        return {name: min(max(values[name], low), high) for name, (low, high) in self.spans.items()}

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
            rule = cls(Line(**content.pop("loss")), Line(**content.pop("gain")), **content)
            used = {part for line in (rule.loss, rule.gain) for name in line.weights for part in name.split("*")}
            if any(line.weights.keys() - each.keys() for line in (rule.loss, rule.gain)
                   for each in (line.centre, line.scale)) or used - rule.spans.keys():
                raise KeyError
        except OSError as error:
            raise UserError(f"verdict rule {path} cannot be read ({error.strerror}); fit one with "
                            "python -m studies verdict-runs fit") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is not a verdict rule of version {_VERSION}; fit one with python -m studies "
                            "verdict-runs fit") from None
        if unknown := [name for name in rule.spans if name not in FEATURES]:
            raise UserError(f"{path} has unknown features: {', '.join(unknown)}; known: {', '.join(FEATURES)}; fit a "
                            "new rule with python -m studies verdict-runs fit")
        return rule
