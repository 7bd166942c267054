"""What the search computes with: length penalties, rules on next tokens, and the best of them.

`B` sentences, `b` of them not done yet, `K` hypotheses of each, `R` rows (all hypotheses), `M` largest length limit,
`V` vocabulary, `C` candidates kept for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepnmt import device
from deepnmt.model.cache import indices
from deepnmt.tokens import BOS, EOS, PAD

FORBIDDEN = (BOS, PAD)  # tokens that no hypothesis may ever contain

BLOCK = 16  # logits in a block of `best_entries`: the fastest of 8 … 64 on a CPU at V = 8,000

# Rows that a CPU works on at a time. Their temporaries fit a core's cache and memory that the process already has. For
# all rows at once they would be allocated anew in every step, which takes longer than the arithmetic.
ROWS = 32


@dataclass(frozen=True)
class LengthPenalty:
    """The divisor that turns a sum of log-probabilities into a score. The length n counts eos, but not bos.

    none: 1. average: n^alpha. gnmt: ((5 + n) / 6)^alpha (Wu et al. 2016, Google's Neural Machine Translation System,
    equation 14).
    """

    name: Literal["none", "average", "gnmt"]
    alpha: float

    def divisor(self, length: int) -> float:
        """The divisor at `length` >= 1. It never decreases with the length: the bound of `beam_search` relies on it."""
        if self.name == "none":
            return 1.0
        if self.name == "average":
            return float(length) ** self.alpha
        return float((5 + length) / 6) ** self.alpha


@dataclass(frozen=True)
class Rules:
    """What hypotheses must keep to, whatever the model's probabilities.

    Rules only narrow the choice of the next token. The log-probability of what is chosen, or given, stays the model's,
    from the softmax over the whole vocabulary.

    Attributes:
        barred: tokens that are not chosen, besides bos and pad. A prefix may contain them.
        min_length: fewest tokens before eos, if the limit allows, and as long as another token may be chosen.
        no_repeat: no sequence of so many tokens is chosen twice in a hypothesis; 0: any may be.
        prefixes: what hypotheses begin with, int64 [B, P], pad behind the shorter ones; None: nothing is given.
    """

    barred: tuple[int, ...] = ()
    min_length: int = 0
    no_repeat: int = 0
    prefixes: Tensor | None = None

    @property
    def never(self) -> list[int]:
        """All tokens that are not chosen."""
        return [*FORBIDDEN, *self.barred]

    def given(self, sentences: Tensor, length: int) -> Tensor | None:
        """The prefixes' token number `length` (from 1) of sentences [b]: [b], pad behind a prefix; None behind all."""
        if self.prefixes is None or length > self.prefixes.size(1):
            return None
        return self.prefixes[sentences, length - 1]

    def bar_repeats(self, logits: Tensor, tokens: Tensor, length: int) -> Tensor | None:
        """Sets logits [b·K, V] to -inf for tokens number `length` that would repeat a sequence of `no_repeat` tokens.

        Args:
            tokens: [b, K, M], of which `length` - 1 are chosen.

        Returns:
            The rows' log Σ exp before that [b·K]; None if nothing can repeat.
        """
        n = self.no_repeat
        if not n or length <= n:
            return None
        norms = log_normalisers(logits)
        windows = tokens.flatten(0, 1)[:, : length - 1].unfold(1, n, 1)  # [b·K, length - n, n]
        latest = tokens.flatten(0, 1)[:, None, length - n : length - 1]
        repeats = (windows[:, :, :-1] == latest).all(2) & (windows[:, :, -1] != EOS)  # behind eos all may repeat
        logits.scatter_(1, torch.where(repeats, windows[:, :, -1], PAD), -torch.inf)
        return norms

    def bars_all(self, logits: Tensor) -> Tensor:
        """Whether eos alone is left [R], by logits [R, V] that have been through `bar_repeats`."""
        left = logits.index_fill(1, indices([EOS, *self.never], logits.device), -torch.inf)
        return left.amax(1) == -torch.inf


NO_RULES = Rules()


def best_entries(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row of logits [R, V] and their columns, both [R, count], largest first.

    Equals `logits.topk(count)` but is several times as fast on a CPU: only the `count` blocks with the largest maxima
    can hold one of the largest values.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if blocks < 4 * count:
        return logits.topk(count)
    whole = blocks * BLOCK  # block b has the columns b, b + blocks, b + 2·blocks …
    maxima = logits[:, :whole].view(rows, BLOCK, blocks).amax(1)
    chosen = maxima.topk(count).indices
    steps = torch.arange(0, whole, blocks, device=logits.device)
    columns = (chosen[:, None, :] + steps[None, :, None]).flatten(1)
    rest = torch.arange(whole, vocab, device=logits.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    values, indices = logits.gather(1, columns).topk(count)
    return values, columns.gather(1, indices)


def _row_groups(logits: Tensor) -> tuple[Tensor, ...]:
    """The rows in groups of a size that suits the device."""
    return logits.split(ROWS if logits.device.type == "cpu" else max(1, len(logits)))


def log_normalisers(logits: Tensor) -> Tensor:
    """log Σ exp of each row of logits [R, V], fp32 [R]."""
    return torch.cat([part.float().logsumexp(1) for part in _row_groups(logits)])


def best_extensions(
    logits: Tensor, count: int, apart: Tensor | None = None, norms: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The best next tokens of each hypothesis.

    Args:
        logits: [R, V] of any float type; overwritten.
        count: C, at most V.
        apart: int64, eos and the tokens that are not among the best; None: eos and `FORBIDDEN`.
        norms: the rows' log Σ exp, fp32 [R]; None: of these logits.

    Returns:
        The log-probabilities [R, C] of the best tokens other than `apart`; these tokens [R, C]; and the
        log-probability [R] of eos. Log-probabilities are fp32, from the softmax over the whole vocabulary.
    """
    if apart is None:
        apart = indices([EOS, *FORBIDDEN], logits.device)
    if device.on_gpu(logits):
        log_probs = logits.log_softmax(1, torch.float32) if norms is None else logits.float() - norms[:, None]
        ends = log_probs[:, EOS].clone()
        values, tokens = log_probs.index_fill_(1, apart, -torch.inf).topk(count)
        return values, tokens, ends
    parts, start = [], 0
    for group in _row_groups(logits):
        own = None if norms is None else norms[start : start + len(group)]
        parts.append(_best_extensions(group.float(), count, apart, own))
        start += len(group)
    values, tokens, ends = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, tokens, ends


def _best_extensions(
    logits: Tensor, count: int, apart: Tensor, norms: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`best_extensions` for one group of rows, fp32; `apart`: eos, and the tokens that are not among the best."""
    special = logits[:, apart]
    logits[:, apart] = -torch.inf
    values, tokens = best_entries(logits, count)
    if norms is not None:
        return values - norms[:, None], tokens, special[:, 0] - norms
    largest = torch.maximum(values[:, 0], special.amax(1))[:, None]  # subtracted, so that exp does not overflow
    total = logits.sub_(largest).exp_().sum(1, keepdim=True) + (special - largest).exp_().sum(1, keepdim=True)
    norm = largest + total.log_()
    return values - norm, tokens, special[:, 0] - norm[:, 0]
