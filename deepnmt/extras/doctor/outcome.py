"""What a trained model does with its source, measured on validation text: one of three outcomes.

The same targets are scored twice, by the plain loss in nats a target token: with their own sources, and with shuffled
ones (see `tasks/translation/source_use.py`), each corpus for itself. The difference is the source's gain.

    stuck        not finite, or less than `MARGIN` below the loss of a model that knows only how frequent each target
                 token is
    target only  lower than that, but the source's gain is below `GAIN`: a language model of the target
    translates   the source's gain is `GAIN` or more
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.data.prepared import Split
from deepnmt.tasks.translation.source_use import BATCH, GAIN, SENTENCES, paired_batches
from deepnmt.tokens import PAD

Outcome = Literal["stuck", "target only", "translates"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # from the worst to the best
WORDS: dict[str, str] = {"stuck": "stuck or diverging", "target only": "the target side only",
                         "translates": "translates"}
MARGIN = 0.1  # nats: models that learn no more than the frequencies rest 0.1 above to 0.05 below their loss
_CHUNK = 1000  # sentences read at a time

Evaluate = Callable[[Sequence[Batch]], Sequence[tuple[float, float]]]  # an engine's: (loss, nll) of each batch


@dataclass(frozen=True)
class Measured:
    """Plain losses of a validation text in nats a target token.

    Attributes:
        own: with the sentences' own sources.
        shuffled: with shuffled ones.
        frequencies: of a model that knows only how frequent each token is.
    """

    own: float
    shuffled: float
    frequencies: float

    @property
    def gain(self) -> float:
        """The source's gain."""
        return self.shuffled - self.own

    @property
    def outcome(self) -> Outcome:
        """The outcome, see above."""
        if not self.own < self.frequencies - MARGIN:  # also where it is not a number
            return "stuck"
        return "translates" if self.gain >= GAIN else "target only"


def measure_outcome(
    evaluate: Evaluate, valid: Split, corpora: Collection[range], surprise: Tensor, device: torch.device
) -> Measured:
    """Scores up to `SENTENCES` sentences of the validation text, spread evenly over the lengths of each corpus.

    Sources are shuffled within a corpus: the language tag of another would tell by itself.

    Args:
        corpora: the sentences of each; those of one sentence are left out, and another has two or more.
        surprise: `frequencies` of the training text.
    """
    own: list[Batch] = []
    shuffled: list[Batch] = []
    each = max(2, SENTENCES // len(corpora))
    for rows in corpora:
        if len(rows) > 1:
            batches, others = paired_batches(valid, rows, each, BATCH, device)
            own += batches
            shuffled += others
    tokens = sum(batch.tokens for batch in own)
    own_nll = sum(nll for _, nll in evaluate(own))
    shuffled_nll = sum(nll for _, nll in evaluate(shuffled))
    guessed = sum(guess(surprise, batch["trg_out"]) * batch.tokens for batch in own)
    return Measured(own_nll / tokens, shuffled_nll / tokens, guessed / tokens)


def frequencies(train: Split, vocab: int) -> Tensor:
    """-log of each token's share of the training text's targets, eos included, [V]; every count is raised by 1, so
    that none is 0."""
    counts = np.ones(vocab)
    for start in range(0, len(train), _CHUNK):
        ids, _ = train.targets.with_eos(np.arange(start, min(start + _CHUNK, len(train))))
        counts += np.bincount(ids[ids != PAD], minlength=vocab)
    return torch.from_numpy(-np.log(counts / counts.sum()))


def guess(surprise: Tensor, targets: Tensor) -> float:
    """The loss of targets [B, T] under the frequencies, in nats a token."""
    return float(surprise[targets[targets != PAD].cpu()].mean())
