"""Predicts what a recipe's model will do after a number of updates: features of a short training trial, and a rule.

The trial makes `TRIAL` updates of the recipe on its own text, at its own peak rate. The rule is a JSON file that
`studies/verdict_fit.py` writes and that comes with deepnmt: a random forest (Breiman 2001), which gives the
probabilities of the outcomes (`outcome.py`). It was fitted on runs whose outcomes were measured, and records what these
runs were like, to report where a recipe is unlike them.
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
from deepnmt.config import Fact, Modify, Precision, Recipe
from deepnmt.data.batching import Stream, collate
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.prepared import PreparedData
from deepnmt.errors import UserError
from deepnmt.extras.doctor.outcome import OUTCOMES, Outcome, frequencies, measure_outcome
from deepnmt.extras.doctor.variants import initialisation
from deepnmt.model.transformer import Transformer
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress
from deepnmt.tasks.translation.source_use import SourceUse, measure_validation_text, rows_of_corpora

SHIPPED = Path(__file__).with_name("verdict.json")
TRIAL = 40  # updates
TOKENS = 256  # target tokens of each of them, at most
_LOOKS, _LOOKED_AT = (10, 20, 30, TRIAL), 32  # after which of them the use of the source is measured; sentences
_WARMUP = 20  # at most so many of them for the warm-up
_END = 10  # of them make up its end
_LEAST_DROP, _MOST_DROP = -0.4, 2.5  # nats below the frequencies; what lies outside counts as these
_LEAST_GAIN, _MOST_GAIN = 1e-4, 3.0  # nats; what lies outside counts as these
_NO_GAIN = 1.25e-4  # nats; a smaller gain is none
FLOOR = 0.02  # no outcome is given a smaller probability
SURE = 0.8  # a probability from which on a rule is sure of what it says
_NOT_MEASURED = -1.0  # for a figure of the source that a trial lacks: those of the oldest runs
_FORMAT, _VERSION = "deepnmt-verdict", 6

# What each feature is, in words; of `LOGARITHMS` its logarithm to base 10 is taken.
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
    "frequencies": "loss of the tokens' frequencies, nats a token",
    "width": "model width",
    "layers": "layers of both stacks",
    "batch": "target tokens of an update",
    "seen": "target tokens of all updates",
    "encoder_common": "share of one common vector in the encoder's output after the trial",
    "decoder_common": "share of one common vector in the decoder's output after the trial",
    "attention": "how even cross-attention is after the trial (1: entirely)",
}
# Those of `SourceUse`, by feature.
_SOURCE = {"encoder_common": "encoder_common", "decoder_common": "decoder_common",
           "attention": "cross_attention_entropy"}
# Those that are logarithms; shown without the log.
LOGARITHMS = {"trial_norm", "uneven", "trial_gain", "rate", "budget", "updates", "length", "width", "layers", "batch",
              "seen"}


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
    if isinstance(value, (list, dict, bool, type(None))):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


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
    train = data.split("train")
    valid = data.split("valid").truncated(recipe.model.max_length)
    stream = training_stream(recipe, data, stream_kind(recipe, data))
    rates = trial_rates(recipe)
    losses: list[float] = []
    norms: list[float] = []
    source: list[dict[str, float]] = []
    alone = Ranks.alone(device)

    def look(number: int) -> None:
        use = SourceUse.mean(measure_validation_text(recipe, data, engine, alone, _LOOKED_AT).values())
        if use is not None:
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
    measured = measure_outcome(engine.evaluate, valid, rows_of_corpora(data).values(),
                               frequencies(train, model.output_weight.size(0)), device)
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
    rates = 0.0
    for number in range(1, updates + 1):
        passes = (number - 1) * tokens / trial.epoch
        rates += learning_rate(recipe.optimizer.lr, recipe.schedule, number, recipe.train.updates, passes)
    norms, losses = trial.norms[-_END:], trial.losses[-_END - 1:]
    finite = math.isfinite(trial.own + trial.shuffled + sum(trial.losses) + sum(norms))
    drop, norm, step, gain = _LEAST_DROP, 10.0, 1.0, 0.0  # what a divergence counts as
    if finite:
        drop = trial.frequencies - trial.own
        norm = fmean(norms)
        step = fmean(abs(after - before) for before, after in pairwise(losses))
        gain = trial.shuffled - trial.own
    source = dict.fromkeys(_SOURCE.values(), _NOT_MEASURED)
    if trial.source:
        source |= trial.source[-1]
    return {
        "trial_loss": min(max(drop, _LEAST_DROP), _MOST_DROP),
        "trial_norm": math.log10(max(norm, 1e-3)),
        "uneven": math.log10(max(step, 1e-3)),
        "trial_gain": math.log10(min(max(gain, _LEAST_GAIN), _MOST_GAIN)),
        "below": float(finite and trial.own < trial.frequencies),
        "blind": float(gain < _NO_GAIN),
        "rate": math.log10(recipe.optimizer.lr),
        "budget": math.log10(max(rates / trial.rates, 1e-6)),
        "updates": math.log10(updates),
        "length": math.log10(trial.length),
        "frequencies": trial.frequencies,
        "width": math.log10(recipe.model.shape("decoder").width),
        "layers": math.log10(recipe.model.encoder.layers + recipe.model.decoder.layers),
        "batch": math.log10(tokens),
        "seen": math.log10(updates * tokens),
        **{name: _share(source[figure]) for name, figure in _SOURCE.items()},
    }


def _share(value: float) -> float:
    """A share; 1, as of a collapsed model, where it is not a number."""
    return value if math.isfinite(value) else 1.0


# -- the rule ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The rule's prediction for one model and number of updates.

    Attributes:
        outcome: the most probable one.
        probabilities: of each outcome.
        reasons: the features that move the chance to translate most, the largest first, in words.
        outside: features beyond the range of the runs that the rule was fitted on, in words.
    """

    outcome: Outcome
    probabilities: dict[Outcome, float]
    reasons: list[str]
    outside: list[str]


@dataclass(frozen=True)
class Node:
    """A node of a tree.

    Attributes:
        shares: of each outcome among the runs of the fit that came here, in the order of `OUTCOMES`.
        feature: the one that divides them; None for a leaf.
        threshold: of that feature. Runs with this value or less went to the node of number `low`, the others to `high`.
    """

    shares: list[float]
    feature: str | None = None
    threshold: float = 0.0
    low: int = 0
    high: int = 0


Tree = list[Node]  # the first is the root


def path(tree: Tree, values: Mapping[str, float]) -> list[Node]:
    """The nodes from the root to the leaf that the features lead to."""
    node = tree[0]
    nodes = [node]
    while node.feature is not None:
        below = values[node.feature] <= node.threshold
        node = tree[node.low if below else node.high]
        nodes.append(node)
    return nodes


def with_floor(shares: Mapping[Outcome, float], power: float) -> dict[Outcome, float]:
    """Probabilities from a forest's shares: raised to `power`, and none below `FLOOR`."""
    raised = {outcome: share**power for outcome, share in shares.items()}
    rest, total = 1 - len(OUTCOMES) * FLOOR, sum(raised.values())
    return {outcome: FLOOR + rest * value / total for outcome, value in raised.items()}


@dataclass(frozen=True)
class VerdictRule:
    """A rule that predicts an outcome from features: a random forest fitted on runs.

    Attributes:
        trees: of the forest.
        power: the mean of the trees' shares is raised to it and divided by its sum. A forest says too little of what it
            knows, and a power above 1 mends that.
        spans: by feature, its smallest and largest value among the runs. Values are clipped to it.
        facts: the runs it was fitted on, and how right it was on runs that it was not fitted on.
    """

    trees: list[Tree]
    power: float
    spans: dict[str, list[float]]
    facts: dict[str, Any] = field(default_factory=dict)

    def probabilities(self, values: Mapping[str, float]) -> dict[Outcome, float]:
        """The probability of each outcome for a model with these features, none below `FLOOR`."""
        clipped = self._clipped(values)
        leaves = [path(tree, clipped)[-1].shares for tree in self.trees]
        means = [fmean(shares) for shares in zip(*leaves, strict=True)]
        return with_floor(dict(zip(OUTCOMES, means, strict=True)), self.power)

    def judge(self, values: Mapping[str, float]) -> Verdict:
        """The verdict with its reasons."""
        probabilities = self.probabilities(values)
        moves = self.contributions(values)
        reasons = []
        for name in sorted(moves, key=lambda name: -abs(moves[name])):
            if abs(moves[name]) >= 0.02:
                reasons.append(f"{FEATURES[name]} of {format_value(name, values[name])}: {100 * moves[name]:+.0f} "
                               "points")
        outside = []
        for name, (low, high) in self.spans.items():
            if not low - 1e-9 <= values[name] <= high + 1e-9:
                outside.append(f"{FEATURES[name]} is {format_value(name, values[name])}; the runs had "
                               f"{format_value(name, low)} to {format_value(name, high)}, and the nearest of these is "
                               "taken")
        return Verdict(max(OUTCOMES, key=probabilities.__getitem__), probabilities, reasons, outside)

    def contributions(self, values: Mapping[str, float]) -> dict[str, float]:
        """By feature, how much it moves the share that translates: the sum of its steps along the paths, the mean over
        the trees (Saabas 2014, Interpreting random forests)."""
        clipped = self._clipped(values)
        moves: dict[str, float] = {}
        for tree in self.trees:
            for node, following in pairwise(path(tree, clipped)):
                assert node.feature is not None  # only the last node of a path is a leaf
                step = following.shares[-1] - node.shares[-1]
                moves[node.feature] = moves.get(node.feature, 0.0) + step / len(self.trees)
        return moves

    def reaches(self, values: Mapping[str, float]) -> bool:
        """Whether the runs had as many updates and as large a budget as these features, or more. A longer training is
        judged as the longest of theirs, so nothing is known of what it adds."""
        for name in ("updates", "budget"):
            if name in self.spans and values[name] > self.spans[name][1] + 1e-9:
                return False
        return True

    def unseen(self, recipe: Recipe, precision: Precision = "fp32") -> list[str]:
        """What a recipe has that none of the runs had, in words: blocks, initialisation, optimizer, schedule, some
        other settings, and the precision. What the rule's facts do not list is not checked."""
        seen, unseen = self.facts.get("seen", {}), []
        for side in ("encoder", "decoder"):
            stack = recipe.model.stack(side)
            init = initialisation(stack.block, stack.init)
            inits = seen.get("inits", {}).get(stack.block, [init])
            if stack.block not in seen.get("blocks", [stack.block]):
                unseen.append(f"no run had the {side} block {stack.block}")
            elif init not in inits:
                unseen.append(f"the {side}'s initialisation is {init}; runs with {stack.block} had "
                              f"{' or '.join(inits)}")
        for setting in Recipe.marked(Fact.SEEN):
            value = attrgetter(setting)(recipe)
            if setting in seen and value not in seen[setting]:
                unseen.append(f"{setting} is {_shown(value)}; the runs had {' or '.join(map(_shown, seen[setting]))}")
        if recipe.data.modify != Modify() and seen:
            unseen.append("data.modify changes the training text; the runs read theirs as it is prepared")
        encoder, decoder = recipe.model.shape("encoder"), recipe.model.shape("decoder")
        if encoder != decoder and seen:
            unseen.append("encoder and decoder differ in width, heads or ffn; those of the runs did not")
        width = max(encoder.width, decoder.width)
        if width > max(seen.get("width", [width])):
            unseen.append(f"model.width is {width}; the runs had up to {max(seen['width'])}")
        if precision not in seen.get("precisions", [precision]):
            unseen.append(f"the precision is {precision}; the runs had {' or '.join(seen['precisions'])}")
        return unseen

    def _clipped(self, values: Mapping[str, float]) -> dict[str, float]:
        """The features, clipped to the range of the runs."""
        return {name: min(max(values[name], low), high) for name, (low, high) in self.spans.items()}

    def save(self, file: Path) -> None:
        """Writes JSON. Raises `UserError` if it cannot."""
        trees = []
        for tree in self.trees:
            nodes: list[list[Any]] = []
            for node in tree:
                nodes.append([node.shares])
                if node.feature:
                    nodes[-1] += [node.feature, node.threshold, node.low, node.high]
            trees.append(nodes)
        content = {"format": _FORMAT, "version": _VERSION, "facts": self.facts, "spans": self.spans,
                   "power": self.power, "trees": trees}
        try:
            file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
        except OSError as error:
            way = "put the runs into a folder that you can write to"
            if file == SHIPPED:
                way = "remove --ship"
            raise UserError(f"verdict rule {file} cannot be written ({error.strerror}); {way}") from None

    @classmethod
    def load(cls, file: Path = SHIPPED) -> VerdictRule:
        """Reads a rule.

        Raises:
            UserError: the file is missing, or it is not a rule of this version.
        """
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT or content.pop("version") != _VERSION:
                raise KeyError
            trees = [[Node(*node) for node in tree] for tree in content.pop("trees")]
            rule = cls(trees, **content)
            features = rule.spans.keys()
            if not all(trees):
                raise KeyError
            for tree in trees:
                for number, node in enumerate(tree):
                    if len(node.shares) != len(OUTCOMES):
                        raise KeyError
                    if node.feature is None:
                        continue
                    inside = number < node.low < len(tree) and number < node.high < len(tree)
                    if not inside or node.feature not in features:
                        raise KeyError
        except OSError as error:
            raise UserError(f"verdict rule {file} cannot be read ({error.strerror}); fit one with "
                            "python -m studies verdict-runs fit") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{file} is not a verdict rule of version {_VERSION}; fit one with python -m studies "
                            "verdict-runs fit") from None
        unknown = [name for name in rule.spans if name not in FEATURES]
        if unknown:
            raise UserError(f"{file} has unknown features: {', '.join(unknown)}; known: {', '.join(FEATURES)}; fit a "
                            "new rule with python -m studies verdict-runs fit")
        return rule
