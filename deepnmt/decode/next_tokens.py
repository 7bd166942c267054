"""Numbers the search is made of: length penalties, and the log-probabilities of the best next tokens.

`R` rows (hypotheses), `V` vocabulary, `C` candidates kept of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepnmt.tokens import BOS, EOS, PAD

NEVER = (BOS, PAD)  # tokens no hypothesis contains

BLOCK = 16  # logits a block of `best_entries` holds: the fastest of 8 … 64 on a CPU at V = 8,000

# Rows a CPU works on at a time. Temporaries of that many stay in a core's cache and in memory that the process already
# has; those of all rows come new from the system in every step, which takes longer than the arithmetic.
ROWS = 32


@dataclass(frozen=True)
class LengthPenalty:
    """What a sum of log-probabilities is divided by. The length n counts the tokens with eos, without bos.

    none: 1. average: n^alpha. gnmt: ((5 + n) / 6)^alpha (Wu et al. 2016, Google's Neural Machine Translation System,
    equation 14).
    """

    name: Literal["none", "average", "gnmt"]
    alpha: float

    def divisor(self, length: int) -> float:
        """The divisor at `length` >= 1. It never falls with the length, which the search's bound relies on."""
        if self.name == "none":
            return 1.0
        return float(length if self.name == "average" else (5 + length) / 6) ** self.alpha


def best_entries(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row of logits [R, V] and their columns, both [R, count], largest first.

    The same as `logits.topk(count)`, several times as fast on a CPU: only the `count` blocks with the largest maxima
    can hold one of the largest values.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if blocks < 4 * count:
        return logits.topk(count)
    whole = blocks * BLOCK  # block b is the columns b, b + blocks, b + 2·blocks …
    maxima = logits[:, :whole].view(rows, BLOCK, blocks).amax(1)
    chosen = maxima.topk(count).indices
    steps = torch.arange(0, whole, blocks, device=logits.device)
    columns = (chosen[:, None, :] + steps[None, :, None]).flatten(1)
    rest = torch.arange(whole, vocab, device=logits.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    values, places = logits.gather(1, columns).topk(count)
    return values, columns.gather(1, places)


def _parts(logits: Tensor) -> tuple[Tensor, ...]:
    """The rows in groups that fit the device."""
    return logits.split(ROWS if logits.device.type == "cpu" else max(1, len(logits)))


def log_normalisers(logits: Tensor) -> Tensor:
    """log Σ exp of each row of logits [R, V], fp32 [R]."""
    return torch.cat([part.float().logsumexp(1) for part in _parts(logits)])


def extensions(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """How each hypothesis may go on.

    Args:
        logits: [R, V] of any float type; overwritten.
        count: C, at most V.

    Returns:
        The log-probabilities [R, C] of the best tokens other than bos, eos and pad, those tokens [R, C], and the
        log-probability [R] of eos. Log-probabilities are fp32 and those of the model's whole softmax.
    """
    parts = [_extensions(part.float(), count) for part in _parts(logits)]
    values, tokens, ends = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, tokens, ends


def _extensions(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`extensions` of fp32 logits."""
    apart = logits[:, [EOS, *NEVER]]
    logits[:, [EOS, *NEVER]] = -torch.inf
    values, tokens = best_entries(logits, count)
    largest = torch.maximum(values[:, 0], apart.amax(1))[:, None]  # the shift that keeps exp from overflowing
    total = logits.sub_(largest).exp_().sum(1, keepdim=True) + (apart - largest).exp_().sum(1, keepdim=True)
    norm = largest + total.log_()
    return values - norm, tokens, apart[:, 0] - norm[:, 0]
