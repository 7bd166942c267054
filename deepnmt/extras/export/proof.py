"""What an exported model must show before it is kept: the scores and translations of deepnmt's own.

Two comparisons on lines of a text are the proof: the log-probability of every token of the references, and greedy
translations token by token. Where these part at two tokens that deepnmt's model finds equally likely, rounding decides,
so such a tie is counted apart. A beam search meets many more ties, which one cannot tell from outside; so its BLEU must
only lie within the interval that so few lines leave open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepnmt.config import Translate
from deepnmt.data.text import Pair
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.steppers import CachedStepper, MakeStepper
from deepnmt.decode.translate import search_batch
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import EvaluationSet, score_lines
from deepnmt.evaluate.metrics import compare as bootstrap
from deepnmt.model.transformer import Transformer
from deepnmt.progress import show_progress
from deepnmt.tokens import BOS, EOS, PAD

SCORED = 200  # lines at most whose references are scored
BATCH = 64  # sentences
TOLERANCE = 1e-4  # nats a token, and between the two tokens of a tie
GREEDY = Translate(method="greedy")
# the stopping rule of other programs: as many hypotheses as beams have ended
BEAM = Translate(method="beam", beam=5, finish="best", patience=1.0)

Ids = Sequence[Sequence[int]]


class Engine(Protocol):
    """A model that can be compared. Sources are token ids with eos, targets are without."""

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        """The log-probability of each target token and of eos."""

    def search(self, sources: Ids, limit: int, settings: Translate) -> list[list[int]]:
        """The best translations, of at most `limit` tokens."""


class Native:
    """deepnmt's own model, or what steps in its place."""

    def __init__(self, model: Transformer, stepper: MakeStepper = CachedStepper) -> None:
        self._model, self._stepper = model, stepper

    @torch.inference_mode()
    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        src, lengths = padded(sources)
        wanted, _ = padded([[*target, EOS] for target in targets])
        state = self._stepper(self._model, src, lengths, 1, wanted.size(1))
        scores, last = [], torch.full((len(sources),), BOS)
        for nexts in wanted.unbind(1):
            scores.append(state.step(last).float().log_softmax(1).gather(1, nexts[:, None]).squeeze(1))
            last = nexts
        table = torch.stack(scores, dim=1).tolist()
        return [row[: len(target) + 1] for row, target in zip(table, targets, strict=True)]

    @torch.inference_mode()
    def search(self, sources: Ids, limit: int, settings: Translate) -> list[list[int]]:
        src, lengths = padded(sources)
        count = len(sources)
        best = search_batch(self._model, src, lengths.tolist(), [limit] * count, [[]] * count, range(count), settings,
                            1, self._stepper, ())
        return [candidates[0].tokens for candidates in best]


@dataclass(frozen=True)
class Proof:
    """What the comparison found.

    Attributes:
        lines, scored: compared by search, and by the scores of their references.
        difference: the largest of a token's log-probability, in nats.
        identical, ties: greedy translations that are the same, and that part at a tie.
        bleu, own_bleu: of the exported model and of deepnmt's, by beam search.
        interval: of 95 % of the exported model's BLEU over resamples of the lines, to either side.
    """

    lines: int
    scored: int
    difference: float
    identical: int
    ties: int
    bleu: float
    own_bleu: float
    interval: float
    signature: str

    def faults(self) -> Iterator[str]:
        """What keeps the export from being kept."""
        if not self.difference <= TOLERANCE:
            yield f"a token's log-probability differs by {self.difference:.1e} nats (allowed: {TOLERANCE:g})"
        others = self.lines - self.identical - self.ties
        if others > 0:
            yield f"{others} of {self.lines} greedy translations differ"
        if self.lines > 1 and not abs(self.bleu - self.own_bleu) <= self.interval:  # one line has no interval
            yield (f"BLEU is {self.bleu:.2f} ± {self.interval:.2f}, the interval of 95 %, in place of "
                   f"{self.own_bleu:.2f}")

    def sentence(self) -> str:
        """The figures."""
        ties = f", {self.ties} part at a tie" if self.ties else ""
        return (f"log-probabilities of {self.scored} references within {self.difference:.1e} nats a token; greedy "
                f"translations of {self.identical} of {self.lines} lines identical{ties}; BLEU {self.bleu:.2f} ± "
                f"{self.interval:.2f} (deepnmt {self.own_bleu:.2f})")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    own: Engine, other: Engine, vocabs: tuple[Vocabulary, Vocabulary], pairs: Sequence[Pair], max_length: int,
    lang: str,
) -> Proof:
    """Compares an exported model with deepnmt's own on sentence pairs in language `lang`, and shows progress.

    Pairs with an empty source, or of more than `max_length` tokens, are left out.

    Raises:
        UserError: no pair is left.
    """
    examples, rows = [], []
    for source, target in pairs:
        src, trg = vocabs[0].encode(source), vocabs[1].encode(target)
        if src and max(len(src), len(trg)) < max_length:
            rows.append(([*src, EOS], trg))
            examples.append((source, target))
    if not rows:
        raise UserError(f"the text to compare on has no pair of at most {max_length - 1} tokens (model.max_length is "
                        f"{max_length}); give another with --text")
    scored = min(SCORED, len(rows))
    total = 2 * scored + 4 * len(rows)
    line = f"comparing with deepnmt: {{:,}} of {total:,} lines scored or translated"
    with show_progress(line, desc="comparing", total=total, unit=" lines", leave=False) as progress:
        done = 0
        difference = 0.0
        for batch in _batches(range(scored), rows):
            sources, targets = zip(*(rows[i] for i in batch), strict=True)
            for mine, theirs in zip(own.score(sources, targets), other.score(sources, targets), strict=True):
                worst = float((torch.tensor(mine) - torch.tensor(theirs)).abs().max())  # NaN stays NaN
                if math.isnan(worst) or worst > difference:
                    difference = worst
            done += 2 * len(batch)
            progress(done)
        identical = ties = 0
        translations: dict[str, list[str]] = {"deepnmt": [""] * len(rows), "exported": [""] * len(rows)}
        for batch in _batches(range(len(rows)), rows):
            batched = [rows[i][0] for i in batch]
            limit = min(max_length, 2 * max(map(len, batched)) + 20)
            greedy = [engine.search(batched, limit, GREEDY) for engine in (own, other)]
            for source, mine, theirs in zip(batched, *greedy, strict=True):
                if mine == theirs:
                    identical += 1
                elif _is_tie(own, source, mine, theirs):
                    ties += 1
            for name, engine in (("deepnmt", own), ("exported", other)):
                for i, tokens in zip(batch, engine.search(batched, limit, BEAM), strict=True):
                    translations[name][i] = vocabs[1].decode(tokens)
            done += 4 * len(batch)
            progress(done)
    texts = EvaluationSet("the text", [source for source, _ in examples], [[target for _, target in examples]])
    own_bleu, bleu = (score_lines(lines, texts.references, lang, metrics=["bleu"]) for lines in translations.values())
    resampled, = bootstrap(translations, texts, lang, ["bleu"])
    return Proof(len(rows), scored, difference, identical, ties, bleu.values["bleu"], own_bleu.values["bleu"],
                 resampled.interval, bleu.signatures["bleu"])


def _is_tie(own: Engine, source: Sequence[int], mine: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether deepnmt's model finds the first two tokens that differ equally likely."""
    same = 0
    while same < min(len(mine), len(theirs)) and mine[same] == theirs[same]:
        same += 1
    # the next token of each, or eos, which `score` adds
    first = own.score([source], [mine[: same + 1]])[0][same]
    second = own.score([source], [theirs[: same + 1]])[0][same]
    return abs(first - second) <= TOLERANCE


def _batches(numbers: Sequence[int], rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """The numbers of similarly long pairs together."""
    order = sorted(numbers, key=lambda i: (len(rows[i][0]), len(rows[i][1])))
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


def padded(sources: Ids) -> tuple[Tensor, Tensor]:
    return (pad_sequence([torch.tensor(source) for source in sources], True, PAD),
            torch.tensor([len(source) for source in sources]))
