"""Beam search, greedy search and sampling over anything that gives next-token logits (`steppers.Stepper`).

What all of them share. A hypothesis is a sequence of tokens other than bos and pad. It ends with eos, or is cut when
it reaches its sentence's limit without one. Its length n counts its tokens and, where it has ended, eos. Its
log-probability is the sum of the model's log-probabilities (fp32, over the whole vocabulary) of the n tokens; its score
is that divided by the length penalty at n (`next_tokens.LengthPenalty`).

`B` sentences, `b` of them still searched, `K` beams or samples, `N` hypotheses asked for, `M` longest limit,
`V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepnmt.decode.next_tokens import NEVER, LengthPenalty, extensions, log_normalisers
from deepnmt.decode.steppers import Stepper
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS

# Sentences that are done leave the batch once they are this share of it.
LEAVE = 0.125


@dataclass(frozen=True)
class Candidate:
    """A finished hypothesis: its tokens without eos, and whether it `ended` with eos or was cut."""

    tokens: list[int]
    score: float
    log_prob: float
    ended: bool


class _Finished:
    """The N best finished hypotheses of each of B sentences, found so far."""

    def __init__(self, sentences: int, keep: int, longest: int, device: torch.device) -> None:
        self.scores = torch.full((sentences, keep), -torch.inf, device=device)
        self.sums = torch.full_like(self.scores, -torch.inf)
        self.tokens = torch.zeros(sentences, keep, longest, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sentences, keep, dtype=torch.int64, device=device)  # of tokens, without eos
        self.ended = torch.zeros(sentences, keep, dtype=torch.bool, device=device)

    def offer(self, sentences: Tensor, sums: Tensor, tokens: Tensor, length: int, divisor: float, ended: bool) -> None:
        """Takes in those hypotheses that are good enough; a log-probability of -inf marks what is none.

        Args:
            sentences: [b] their numbers.
            sums: [b, K] log-probabilities.
            tokens: [b, K, M].
            length: of all of them, without eos.
            divisor: the length penalty.
            ended: whether by eos.
        """
        scores, best = torch.cat([self.scores[sentences], sums / divisor], dim=1).topk(self.scores.size(1))
        self.scores[sentences] = scores
        for kept, new in ((self.sums, sums), (self.lengths, torch.full_like(sums, length, dtype=torch.int64)),
                          (self.ended, torch.full_like(sums, ended, dtype=torch.bool))):
            kept[sentences] = torch.cat([kept[sentences], new], dim=1).gather(1, best)
        pool = torch.cat([self.tokens[sentences], tokens], dim=1)
        self.tokens[sentences] = pool.gather(1, best[:, :, None].expand(-1, -1, pool.size(2)))

    def candidates(self) -> list[list[Candidate]]:
        """Of each sentence its hypotheses, best first. Raises `UserError` where the model's scores are no numbers."""
        if bool(self.scores.isnan().any()):
            raise UserError("the model gives scores that are not numbers (NaN): its training has diverged; translate "
                            "with an earlier checkpoint")
        columns = (self.tokens, self.lengths, self.scores, self.sums, self.ended)
        return [
            [Candidate(tokens[:length], score, log_prob, ended)
             for tokens, length, score, log_prob, ended in zip(*sentence, strict=True) if score > -torch.inf]
            for sentence in zip(*(column.tolist() for column in columns), strict=True)
        ]


class _Step(NamedTuple):
    """What a step makes of b sentences' K live hypotheses; a log-probability of -inf marks what is none.

    ended: [b, K] log-probabilities of those of before that eos ends. live, nexts: [b, K] log-probabilities of those
    that go on, and their new tokens. parents: [b, K] which of before each goes on from; None: its own.
    """

    ended: Tensor
    live: Tensor
    nexts: Tensor
    parents: Tensor | None


def _grow(
    stepper: Stepper, limits: Tensor, sums: Tensor, keep: int, penalty: LengthPenalty,
    extend: Callable[[Tensor, Tensor, Tensor, int], _Step], is_done: Callable[[Tensor, _Step, Tensor], Tensor],
) -> list[list[Candidate]]:
    """Grows hypotheses token by token until every sentence is done; those that reach their limit end as they are.

    Args:
        stepper: B·K rows, nothing stepped yet.
        limits: [B] most tokens of a hypothesis, eos counted; >= 1.
        sums: [B, K] log-probabilities of the empty hypotheses.
        keep: N.
        penalty: of the score.
        extend: from logits [b·K, V], sentences [b], log-probabilities [b, K] and a length with the new token.
        is_done: [b], from sentences [b], their step and the scores [b] that a hypothesis must beat to be among the N.
    """
    device, longest = limits.device, int(limits.max())
    finished = _Finished(len(limits), keep, longest, device)
    sentences, order = torch.arange(len(limits), device=device), torch.arange(sums.size(1), device=device)
    tokens = torch.zeros(*sums.shape, longest, dtype=torch.int64, device=device)
    last = torch.full((sums.numel(),), BOS, device=device)
    for length in range(1, longest + 1):
        # All methods pass here: what must or must not come next (a given prefix, banned words) is -inf in the logits
        # [b·K, V] of token number `length` of these sentences [b].
        step = extend(stepper.step(last), sentences, sums, length)
        divisor, parents, sums = penalty.divisor(length), step.parents, step.live
        finished.offer(sentences, step.ended, tokens, length - 1, divisor, ended=True)
        if parents is not None:
            tokens = tokens.gather(1, parents[:, :, None].expand_as(tokens))
        tokens[:, :, length - 1] = step.nexts
        cut = limits[sentences] == length
        if bool(cut.any()):
            at_limit = sums.masked_fill(~cut[:, None], -torch.inf)
            finished.offer(sentences, at_limit, tokens, length, divisor, ended=False)
        done = cut | is_done(sentences, step, finished.scores[sentences, -1])
        stay = _staying(done)
        if len(stay) == 0:
            break
        if len(stay) <= (1 - LEAVE) * len(done):
            stepper.select(stay)
            sentences, tokens, sums = sentences[stay], tokens[stay], sums[stay]
            parents = None if parents is None else parents[stay]
        else:
            sums[done] = -torch.inf
        # At first all hypotheses of a sentence hold the same.
        if parents is not None and length > 1 and not torch.equal(parents, order.expand_as(parents)):
            stepper.reorder((torch.arange(len(parents), device=device)[:, None] * len(order) + parents).flatten())
        last = tokens[:, :, length - 1].flatten()
    return finished.candidates()


def _staying(done: Tensor) -> Tensor:
    """The numbers [b'] of the sentences that are not done [b], most in their place: those from b' on fill the gaps."""
    stay = (~done).nonzero().squeeze(1)
    order = torch.arange(len(stay), device=done.device)
    order[done[: len(stay)]] = stay[stay >= len(stay)]
    return order


def beam_search(
    stepper: Stepper, limits: Tensor, beams: int, nbest: int, penalty: LengthPenalty, patience: float | None = None
) -> list[list[Candidate]]:
    """The best `nbest` hypotheses of each sentence that a beam of `beams` finds, best first.

    From the empty hypothesis on, at each step every live hypothesis of a sentence is finished once by eos, and the
    `beams` extensions of the highest log-probability by another token live on; at the limit these are finished as they
    are. A sentence is done when no continuation of a live hypothesis can be among its `nbest` best: log-probabilities
    only fall, so the score of a continuation is at most the present log-probability divided by the penalty at the
    limit. The result is therefore that of going on to the limit, and with a beam wide enough to hold every prefix that
    of trying every hypothesis.

    With a `patience` a sentence is done as well when `patience`·K hypotheses have ended whose log-probability was, when
    they did, among the K highest of all extensions of its live hypotheses, eos included (Kasai et al. 2022, A Call for
    Clarity in Beam Search; 1 is the usual rule of first come, first served). That is sooner, and a better hypothesis
    may be missed.

    Args:
        stepper: B·`beams` rows, nothing stepped yet.
        limits: [B] most tokens of a hypothesis, eos counted; >= 1.
        beams: K.
        nbest: N <= K.
        penalty: of the score.
        patience: > 0, or None to go on until nothing can be gained.
    """
    device = limits.device
    counts = torch.zeros(len(limits), dtype=torch.int64, device=device)  # of hypotheses ended, for `patience`
    last_divisors = torch.tensor([penalty.divisor(limit) for limit in limits.tolist()], device=device)
    start = torch.full((len(limits), beams), -torch.inf, device=device)
    start[:, 0] = 0.0  # all beams start alike, so one of them is enough

    def extend(logits: Tensor, sentences: Tensor, sums: Tensor, length: int) -> _Step:
        log_probs, nexts, ends = extensions(logits, min(beams, logits.size(1)))
        live, best = (sums[:, :, None] + log_probs.view(*sums.shape, -1)).flatten(1).topk(beams)
        return _Step(sums + ends.view_as(sums), live, nexts.view(len(sums), -1).gather(1, best),
                     best // log_probs.size(1))

    def is_done(sentences: Tensor, step: _Step, worst: Tensor) -> Tensor:
        done = step.live[:, 0] / last_divisors[sentences] <= worst
        if patience is not None:
            values, columns = torch.cat([step.live, step.ended], dim=1).topk(beams)
            counts[sentences] += ((columns >= beams) & (values > -torch.inf)).sum(1)
            done |= counts[sentences] >= patience * beams
        return done

    return _grow(stepper, limits, start, nbest, penalty, extend, is_done)


# How a hypothesis that is on its own goes on: the next tokens [b·K] of sentences [b] at a step, from 0, given logits
# [b·K, V] (-inf: forbidden).
Choice = Callable[[Tensor, Tensor, int], Tensor]


def most_likely(logits: Tensor, sentences: Tensor, step: int) -> Tensor:
    """The choice of greedy search."""
    return logits.argmax(1)


def sampling(uniforms: Tensor, temperature: float) -> Choice:
    """The choice of sampling: from softmax(logits / temperature), by inverting its cumulative distribution.

    Args:
        uniforms: fp32 numbers in [0, 1), one for each sentence, sample and step [B, K, M]. They alone decide, so a
            sentence's samples do not depend on the batch it is in.
        temperature: below 1 the likely tokens become more likely.
    """

    def sample(logits: Tensor, sentences: Tensor, step: int) -> Tensor:
        # In float64 an fp32 number below 1 times the total stays below the total, so the search never runs off the end.
        mass = (logits.double() / temperature).softmax(1).cumsum(1)
        points = uniforms[sentences, :, step].double().view(-1, 1) * mass[:, -1:]
        return torch.searchsorted(mass, points, right=True).squeeze(1)

    return sample


def follow(
    stepper: Stepper, limits: Tensor, count: int, choice: Choice, penalty: LengthPenalty
) -> list[list[Candidate]]:
    """`count` hypotheses of each sentence, each grown on its own token by token until eos or the limit; best first.

    Greedy search is one hypothesis with `most_likely`, samples are several with `sampling`. The log-probabilities are
    the model's own, whatever the temperature.

    Args:
        stepper: B·`count` rows, nothing stepped yet.
        limits: [B] most tokens of a hypothesis, eos counted; >= 1.
        count: K.
        choice: of the next token.
        penalty: of the score.
    """

    def extend(logits: Tensor, sentences: Tensor, sums: Tensor, length: int) -> _Step:
        logits = logits.float()
        norm = log_normalisers(logits)
        logits[:, NEVER] = -torch.inf
        chosen = choice(logits, sentences, length - 1)
        sums = sums + (logits.gather(1, chosen[:, None]).squeeze(1) - norm).view_as(sums)
        nexts = chosen.view_as(sums)
        eos = nexts == EOS
        return _Step(sums.masked_fill(~eos, -torch.inf), sums.masked_fill(eos, -torch.inf), nexts, None)

    return _grow(stepper, limits, torch.zeros(len(limits), count, device=limits.device), count, penalty, extend,
                 lambda _, step, __: (step.live == -torch.inf).all(1))
