"""Beam search, greedy search and sampling with any source of next-token logits (`steppers.Stepper`).

Terms they share: a hypothesis is a sequence of tokens other than bos and pad. It ends with eos, or is truncated at its
sentence's length limit. Its length n counts its tokens, eos included. Its log-probability is the sum of the model's
log-probabilities (fp32, over the whole vocabulary) of these n tokens; its score is that divided by the length penalty
at n (`next_tokens.LengthPenalty`).

`B` sentences, `b` of them not done yet, `K` beams or samples, `N` hypotheses to return, `M` largest length limit,
`V` vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from deepnmt import device as device_
from deepnmt.config import Translate
from deepnmt.decode.next_tokens import NO_RULES, LengthPenalty, Rules, best_extensions, log_normalisers
from deepnmt.decode.steppers import Stepper
from deepnmt.errors import UserError
from deepnmt.model.cache import indices
from deepnmt.tokens import BOS, EOS, PAD

# Sentences that are done are removed from the batch once they are this share of it.
COMPACT_AT = 0.125

# Steps after which the host asks a GPU which sentences are done. In between it prepares the next steps.
GPU_CHECKS = 8


@dataclass(frozen=True)
class Candidate:
    """A finished hypothesis: its tokens without eos, and whether it `ended` with eos or was truncated."""

    tokens: list[int]
    score: float
    log_prob: float
    ended: bool


class Searcher(Protocol):
    """Another program's search with a model; see `visitors`, `searchers`."""

    def search(
        self, sources: Sequence[Sequence[int]], limits: Sequence[int], settings: Translate, barred: Sequence[int]
    ) -> list[list[Candidate]]:
        """The best hypotheses of a batch, as `beam_search` returns them.

        Args:
            sources: token ids with eos.
            limits: of each sentence, the most tokens of a hypothesis.
            settings: of the search.
            barred: tokens that no hypothesis may contain.
        """


class _Place(NamedTuple):
    """Where the hypotheses of b sentences grow by a token.

    Attributes:
        sentences: [b].
        sums: [b, K] their log-probabilities so far.
        length: their new length.
        at_limit: [b] whether that is the sentence's limit; None: in none it is.
        may_end: [b, K] or [b, 1] whether that token may be eos; None: it may in all.
        norms: [b·K] log Σ exp of the logits, if some of these were barred.
    """

    sentences: Tensor
    sums: Tensor
    length: int
    at_limit: Tensor | None
    may_end: Tensor | None
    norms: Tensor | None


class _Step(NamedTuple):
    """The result of one step for the K live hypotheses of b sentences. A log-probability of -inf means no hypothesis.

    Attributes:
        ended: [b, K] log-probabilities of the previous hypotheses if eos ends them.
        live: [b, K] log-probabilities of the extended hypotheses.
        nexts: [b, K] their new tokens.
        parents: [b, K] the previous hypothesis that each extends; None: each its own.
    """

    ended: Tensor
    live: Tensor
    nexts: Tensor
    parents: Tensor | None


class _Finished(NamedTuple):
    """Hypotheses of equal length that finished in one step.

    Attributes:
        sums: [b, K] log-probabilities; -inf: no hypothesis.
        length: of all of them, without eos.
        divisor: the length penalty.
        ended: whether they ended with eos.
    """

    sums: Tensor
    length: int
    divisor: float
    ended: bool


class _Record:
    """What a search has done: the steps of the hypotheses, and those that have finished.

    Tokens are not put together before the end, when each of the N best is followed from its last token to its first. So
    a step only keeps what it has made.
    """

    def __init__(self, sums: Tensor, keep: int) -> None:
        self.best = sums.new_full((len(sums), keep), -torch.inf)  # the N highest scores of the b sentences
        self._shape = tuple(sums.shape)
        # Lists by the sentences that were there [b], whenever these change: new tokens, parents, and what finished.
        self._parts: list[tuple[Tensor, list[Tensor], list[Tensor | None], list[_Finished]]] = []
        self._ranked = 0
        self.select(torch.arange(len(sums), device=sums.device))

    def select(self, sentences: Tensor, positions: Tensor | None = None) -> None:
        """Goes on with `sentences` [b], which were at these positions; all finished ones must be ranked."""
        if positions is not None:
            self.best = self.best[positions]
        self._parts.append((sentences, [], [], []))
        self._ranked = 0

    def add(self, step: _Step, length: int, divisor: float, truncated: Tensor | None) -> None:
        """Adds a step to the new `length`, with the log-probabilities [b, K] of what it truncated."""
        _, nexts, parents, finished = self._parts[-1]
        nexts.append(step.nexts)
        parents.append(step.parents)
        finished.append(_Finished(step.ended, length - 1, divisor, True))
        if truncated is not None:
            finished.append(_Finished(truncated, length, divisor, False))

    def rank(self) -> Tensor:
        """The scores [b] that another hypothesis must beat to be among the N best."""
        fresh = self._parts[-1][-1][self._ranked :]
        self._ranked += len(fresh)
        if fresh:
            divisors = torch.tensor([entry.divisor for entry in fresh], device="cpu")
            scores = torch.stack([entry.sums for entry in fresh], 2) / divisors.to(self.best.device, non_blocking=True)
            self.best = torch.cat([self.best, scores.flatten(1)], dim=1).topk(self.best.size(1)).values
        return self.best[:, -1]

    def candidates(self) -> list[list[Candidate]]:
        """The hypotheses of all sentences, best first. Raises `UserError` if a score is NaN."""
        count, beams = self._shape
        finished = list(itertools.chain.from_iterable(part[-1] for part in self._parts))
        sums = torch.full((count, len(finished), beams), -torch.inf, device="cpu")
        nexts = sums.new_zeros(sum(len(part[1]) for part in self._parts), count, beams, dtype=torch.int64)
        parents = torch.arange(beams, device="cpu").expand(nexts.shape).clone()
        step = entry = 0
        for sentences, tokens, origins, ended in self._parts:
            if not tokens:
                continue
            rows = sentences.cpu()
            steps = slice(step, step + len(tokens))
            nexts[steps, rows] = torch.stack(tokens).cpu()
            known = [origin for origin in origins if origin is not None]
            if known:  # of all steps or of none
                parents[steps, rows] = torch.stack(known).cpu()
            entries = slice(entry, entry + len(ended))
            sums[rows, entries] = torch.stack([hypotheses.sums for hypotheses in ended], 1).cpu()
            step, entry = steps.stop, entries.stop
        divisors = sums.new_tensor([hypotheses.divisor for hypotheses in finished])
        scores = (sums / divisors[:, None]).flatten(1)
        scores, best = scores.topk(self.best.size(1))
        of = best // beams  # the entry of `finished`
        beam = best % beams
        lengths = nexts.new_tensor([hypotheses.length for hypotheses in finished])[of]
        words = nexts.new_zeros(*best.shape, int(lengths.max()))
        for number in reversed(range(words.size(2))):
            words[..., number] = nexts[number].gather(1, beam)
            beam = torch.where(number < lengths, parents[number].gather(1, beam), beam)
        if bool(scores.isnan().any()):
            raise UserError("the model's scores are not numbers (NaN), because its training has diverged; translate "
                            "with an earlier checkpoint")
        log_probs = sums.flatten(1).gather(1, best)
        lists = [column.tolist() for column in (words, lengths, scores, log_probs, of)]  # of B sentences
        results: list[list[Candidate]] = []
        for sentence in zip(*lists, strict=True):
            hypotheses: list[Candidate] = []
            for row, length, score, log_prob, entry in zip(*sentence, strict=True):
                if score > -torch.inf:
                    hypotheses.append(Candidate(row[:length], score, log_prob, finished[entry].ended))
            results.append(hypotheses)
        return results


def _grow_hypotheses(
    stepper: Stepper, limits: Tensor, sums: Tensor, keep: int, penalty: LengthPenalty, rules: Rules,
    extend: Callable[[Tensor, _Place], _Step], is_done: Callable[[Tensor, Tensor, Tensor], Tensor],
    prompt: bool = False,
) -> list[list[Candidate]]:
    """Grows hypotheses token by token until every sentence is done; those that reach their limit are truncated.

    Args:
        stepper: B·K rows, at position 0.
        limits: [B] most tokens of a hypothesis, eos included; >= 1.
        sums: [B, K] initial log-probabilities.
        keep: N.
        penalty: for the score.
        rules: on the next tokens.
        extend: makes a step, from logits [b·K, V] at a place.
        is_done: which sentences [b] are done, from their indices [b], log-probabilities [b, K], and the scores [b] that
            another hypothesis must beat to be among the N best.
        prompt: whether it changes the result if a sentence goes on after it is done.
    """
    device, on = limits.device, device_.on_gpu(limits)
    ends = set(limits.tolist())
    longest = max(ends)
    checks = GPU_CHECKS if on else 1
    width = sums.size(1)
    record = _Record(sums, keep)
    sentences, order = torch.arange(len(limits), device=device), torch.arange(width, device=device)
    first = order.new_empty(0)  # row of each sentence
    tokens = torch.zeros(*sums.shape, longest if rules.no_repeat else 0, dtype=torch.int64, device=device)
    last = torch.full((sums.numel(),), BOS, device=device)
    for length in range(1, longest + 1):
        # All search methods pass here, so rules on tokens are kept here.
        logits = stepper.step(last)
        at_limit = limits == length if length in ends else None
        may_end = (limits == length)[:, None] if length <= rules.min_length else None
        given = rules.given(sentences, length)
        if given is not None:
            behind = (given == PAD)[:, None]
            may_end = behind if may_end is None else may_end & behind
            forced = sums + _log_probs(logits, given.repeat_interleave(width)).view_as(sums)
        norms = rules.bar_repeats(logits, tokens, length)
        if norms is not None and may_end is not None:  # where no token is left, a hypothesis ends before its time
            stuck = rules.bars_all(logits).view_as(sums)
            may_end = may_end | (stuck if given is None else stuck & behind)
        step = extend(logits, _Place(sentences, sums, length, at_limit, may_end, norms))
        if given is not None:
            live, nexts = torch.where(behind, step.live, forced), torch.where(behind, step.nexts, given[:, None])
            step = step._replace(live=live, nexts=nexts)
            if step.parents is not None:
                step = step._replace(parents=torch.where(behind, step.parents, order))
        sums, parents, nexts = step.live, step.parents, step.nexts
        truncated = None
        if at_limit is not None:
            truncated = sums.masked_fill(~at_limit[:, None], -torch.inf)
            sums = sums.masked_fill(at_limit[:, None], -torch.inf)
        record.add(step, length, penalty.divisor(length), truncated)
        if rules.no_repeat:
            if parents is not None:
                tokens = tokens.gather(1, parents[:, :, None].expand_as(tokens))
            tokens[:, :, length - 1] = nexts
        if prompt or length % checks == 0:
            done = is_done(sentences, sums, record.rank())
            sums = sums.masked_fill(done[:, None], -torch.inf)
        if length % checks == 0:
            stay = _compacted(done.tolist())
            if not stay:
                break
            if len(stay) <= (1 - COMPACT_AT) * len(done):
                stepper.select(stay)
                positions = indices(stay, device)
                sentences, limits, tokens = sentences[positions], limits[positions], tokens[positions]
                sums, nexts = sums[positions], nexts[positions]
                if parents is not None:
                    parents = parents[positions]
                record.select(sentences, positions)
        # After the first step all rows of a sentence in the stepper are still equal.
        if parents is not None and length > 1 and (on or not torch.equal(parents, order.expand_as(parents))):
            if len(first) != len(parents):
                first = torch.arange(0, parents.numel(), width, device=device)[:, None]
            stepper.reorder((first + parents).flatten())
        last = nexts.flatten()
    return record.candidates()


def _log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens [R], one for each row of logits [R, V], fp32."""
    return logits.gather(1, tokens[:, None]).squeeze(1).float() - log_normalisers(logits)


def _compacted(done: list[bool]) -> list[int]:
    """The indices of the b' sentences that are not done. Most keep their place; those from b' on fill gaps."""
    stay = list(range(done.count(False)))
    gaps = [i for i in stay if done[i]]
    rest = [i for i in range(len(stay), len(done)) if not done[i]]
    for gap, sentence in zip(gaps, rest, strict=True):
        stay[gap] = sentence
    return stay


def beam_search(
    stepper: Stepper, limits: Tensor, beams: int, nbest: int, penalty: LengthPenalty, patience: float | None = None,
    finish: Literal["any", "best"] = "any", rules: Rules = NO_RULES,
) -> list[list[Candidate]]:
    """Beam search: the best `nbest` hypotheses of each sentence, best first.

    Each step ends every live hypothesis of a sentence with eos, as one finished hypothesis, and keeps the `beams`
    extensions by another token that have the highest log-probability. At the limit these are truncated. A sentence is
    done when no continuation of a live hypothesis can be among its `nbest` best: log-probabilities only decrease, so
    the score of a continuation is at most the present log-probability divided by the penalty at the limit. Stopping
    then does not change the result, and a beam wide enough for every prefix is an exhaustive search.

    With `patience` a sentence is also done when `patience`·K hypotheses have ended whose log-probability was among the
    K highest of all extensions, eos included (Kasai et al. 2022, A Call for Clarity in Beam Search). That is faster,
    but may miss a better hypothesis.

    With `finish: best` only those hypotheses end, with `patience` no more than `patience`·K of a sentence, the
    likelier first. At the limit all live ones end with eos and none is truncated. With `patience` 1 and a least length
    of 1 that is the search of fairseq (Ott et al. 2019): first come, first served. Without `finish: best`, `patience` 1
    stops when that search does, but the hypotheses to choose from are more.

    Args:
        stepper: B·`beams` rows, at position 0.
        limits: [B] most tokens of a hypothesis, eos included; >= 1.
        beams: K.
        nbest: N <= K.
        penalty: for the score.
        patience: > 0; None: search until no better hypothesis is possible.
        finish: which hypotheses may end.
        rules: on the next tokens.
    """
    device = limits.device
    counts = torch.zeros(len(limits), dtype=torch.int64, device=device)  # of hypotheses that ended among the K best
    most = math.inf
    if patience is not None:
        most = math.ceil(min(patience * beams, 2**53))
    divisors = [penalty.divisor(limit) for limit in limits.tolist()]
    last_divisors = torch.tensor(divisors, device=device)
    apart = indices([EOS, *rules.never], device)
    start = torch.full((len(limits), beams), -torch.inf, device=device)
    start[:, 0] = 0.0  # all beams start equal, so only one is used

    def extend(logits: Tensor, place: _Place) -> _Step:
        sentences, sums, _, at_limit, may_end, norms = place
        log_probs, nexts, ends = best_extensions(logits, min(beams, logits.size(1)), apart, norms)
        live, best = (sums[:, :, None] + log_probs.view(*sums.shape, -1)).flatten(1).topk(beams)
        ended = sums + ends.view_as(sums)
        if may_end is not None:
            ended = ended.masked_fill(~may_end, -torch.inf)
        if finish == "best" and at_limit is not None:
            live = live.masked_fill(at_limit[:, None], -torch.inf)
        if finish == "best" or patience is not None:
            values, columns = torch.cat([live, ended], dim=1).topk(beams)
            among = (columns >= beams) & (values > -torch.inf)
            if finish == "best":
                among &= counts[sentences, None] + among.cumsum(1) <= most
                chosen = torch.zeros(len(sums), 2 * beams, dtype=torch.bool, device=device).scatter(1, columns, among)
                ended = ended.masked_fill(~chosen[:, beams:], -torch.inf)
            counts[sentences] += among.sum(1)
        return _Step(ended, live, nexts.view(len(sums), -1).gather(1, best), best // log_probs.size(1))

    def is_done(sentences: Tensor, sums: Tensor, worst: Tensor) -> Tensor:
        done = sums[:, 0] / last_divisors[sentences] <= worst
        if patience is not None:
            done |= counts[sentences] >= most
        return done

    return _grow_hypotheses(stepper, limits, start, nbest, penalty, rules, extend, is_done,
                            prompt=patience is not None)


# Chooses the next tokens [b·K], from logits [b·K, V] (-inf: forbidden), sentences [b] and the step, from 0.
ChooseToken = Callable[[Tensor, Tensor, int], Tensor]


def choose_greedily(logits: Tensor, sentences: Tensor, step: int) -> Tensor:
    """Greedy search: the most likely token."""
    return logits.argmax(1)


def decode_independently(
    stepper: Stepper, limits: Tensor, count: int, choose: ChooseToken, penalty: LengthPenalty, rules: Rules = NO_RULES,
) -> list[list[Candidate]]:
    """`count` hypotheses of each sentence, each extended independently until eos or the limit; best first.

    Greedy search is one hypothesis with `choose_greedily`; sampling is several with `sampling.make_sampler`.
    Log-probabilities are the model's, at temperature 1.

    Args:
        stepper: B·`count` rows, at position 0.
        limits: [B] most tokens of a hypothesis, eos included; >= 1.
        count: K.
        choose: chooses the next tokens.
        penalty: for the score.
        rules: on the next tokens.
    """

    never = indices(rules.never, limits.device)

    def extend(logits: Tensor, place: _Place) -> _Step:
        logits = logits.float()
        norm = log_normalisers(logits) if place.norms is None else place.norms
        logits[:, never] = -torch.inf
        if place.may_end is not None:
            logits[:, EOS].masked_fill_(~place.may_end.expand_as(place.sums).flatten(), -torch.inf)
        chosen = choose(logits, place.sentences, place.length - 1)
        log_probs = logits.gather(1, chosen[:, None]).squeeze(1) - norm
        sums = place.sums + log_probs.view_as(place.sums)
        nexts = chosen.view_as(sums)
        eos = nexts == EOS
        return _Step(sums.masked_fill(~eos, -torch.inf), sums.masked_fill(eos, -torch.inf), nexts, None)

    start = torch.zeros(len(limits), count, device=limits.device)
    return _grow_hypotheses(stepper, limits, start, count, penalty, rules, extend,
                            lambda _, sums, __: (sums == -torch.inf).all(1))
