"""Search over a toy language model: a table with a random distribution for every prefix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from refusals import user_error
from torch import Tensor

from deepnmt import device
from deepnmt.decode.next_tokens import BLOCK, ROWS, LengthPenalty, Rules, best_entries, best_extensions, log_normalisers
from deepnmt.decode.sampling import make_sampler
from deepnmt.decode.search import (
    Candidate,
    _compacted,
    beam_search,
    choose_greedily,
    decode_independently,
)

BOS, EOS, PAD = 1, 2, 3
VOCAB = 7  # unk and three words besides bos, eos and pad
WORDS = [0, 4, 5, 6]
PENALTIES = [LengthPenalty("none", 1.0), LengthPenalty("average", 1.0), LengthPenalty("average", 0.5),
             LengthPenalty("gnmt", 0.7)]


def table_logits(sentence: int, prefix: tuple[int, ...]) -> Tensor:
    """fp32 logits [VOCAB] after `prefix`, which begins with bos; that of pad is -inf as in the model."""
    generator = np.random.default_rng((sentence, *prefix))
    logits = torch.from_numpy(2.5 * generator.standard_normal(VOCAB)).float()
    logits[PAD] = -torch.inf
    return logits


class TableStepper:
    """A stepper of the table; it fails if rows leave their sentence."""

    def __init__(
        self, sentences: int, beams: int, logits: Callable[[int, tuple[int, ...]], Tensor] = table_logits
    ) -> None:
        self.beams = beams
        self.logits = logits
        self.rows: list[tuple[int, tuple[int, ...]]] = [(s, ()) for s in range(sentences) for _ in range(beams)]

    def step(self, tokens: Tensor) -> Tensor:
        self.rows = [(s, (*prefix, t)) for (s, prefix), t in zip(self.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.logits(*row) for row in self.rows])

    def reorder(self, rows: Tensor) -> None:
        moved = [self.rows[r] for r in rows.tolist()]
        assert [s for s, _ in moved] == [s for s, _ in self.rows]
        self.rows = moved

    def select(self, sentences: Sequence[int]) -> None:
        self.rows = [self.rows[s * self.beams + k] for s in sentences for k in range(self.beams)]


def log_prob(sentence: int, tokens: tuple[int, ...]) -> float:
    """The log-probability of tokens, eos included if there is one, in float64."""
    given = [(BOS, *tokens[:i]) for i in range(len(tokens))]
    return sum(float(table_logits(sentence, g).double().log_softmax(0)[t]) for g, t in zip(given, tokens, strict=True))


def every_hypothesis(sentence: int, limit: int, penalty: LengthPenalty) -> list[tuple[float, list[int], bool]]:
    """All hypotheses up to `limit` as (score, tokens without eos, ended), best first."""
    found = []
    for length in range(limit + 1):
        for words in itertools.product(WORDS, repeat=length):
            ended = length < limit
            counted = (*words, EOS) if ended else words
            score = log_prob(sentence, counted) / penalty.divisor(len(counted))
            found.append((score, list(words), ended))
    return sorted(found, reverse=True)


def first_come(
    sentence: int, limit: int, beams: int, penalty: LengthPenalty, patience: float | None
) -> tuple[list[tuple[float, list[int], bool]], int]:
    """Beam search by its definition, in plain Python: hypotheses, best first, and the number of steps.

    It is done when patience·K hypotheses have ended among the K best; without patience it continues to the limit.
    """
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished, count, length = [], 0.0, 0
    while length < limit and (patience is None or count < patience * beams):
        length += 1
        grown, ended = [], []
        for total, words in live:
            log_probs = table_logits(sentence, (BOS, *words)).double().log_softmax(0)
            ended.append((total + float(log_probs[EOS]), words))
            grown += [(total + float(log_probs[w]), (*words, w)) for w in WORDS]
        finished += [(total / penalty.divisor(length), list(words), True) for total, words in ended]
        live = sorted(grown, reverse=True)[:beams]
        count += sum(entry in ended for entry in sorted(live + ended, reverse=True)[:beams])
    if length == limit:
        finished += [(total / penalty.divisor(limit), list(words), False) for total, words in live]
    return sorted(finished, reverse=True), length


def assert_same(found: list[Candidate], expected: list[tuple[float, list[int], bool]]) -> None:
    assert [(c.tokens, c.ended) for c in found] == [(tokens, ended) for _, tokens, ended in expected]
    assert [c.score for c in found] == pytest.approx([score for score, _, _ in expected], abs=1e-5)


def test_length_penalties_by_hand() -> None:
    assert LengthPenalty("none", 2.0).divisor(9) == 1.0
    assert LengthPenalty("average", 0.5).divisor(9) == 3.0
    assert LengthPenalty("average", 1.0).divisor(7) == 7.0
    assert LengthPenalty("gnmt", 1.0).divisor(7) == 2.0
    assert LengthPenalty("gnmt", 0.6).divisor(10) == pytest.approx(math.exp(0.6 * math.log(2.5)))
    assert LengthPenalty("average", 0.0).divisor(5) == LengthPenalty("gnmt", 0.0).divisor(5) == 1.0


@pytest.mark.parametrize("vocab", [5, 40, 8 * BLOCK, 20 * BLOCK, 20 * BLOCK + 1, 33 * BLOCK - 1, 1000])
def test_best_entries_is_topk(vocab: int) -> None:
    logits = torch.randn(50, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, [0, vocab - 2]] = -torch.inf
    values, columns = best_entries(logits, 5)
    expected = logits.topk(5)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


def test_extensions_are_fp32_log_probabilities_of_a_half_precision_model() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = logits.double().log_softmax(1)
    values, tokens, ends = best_extensions(logits, 3)
    assert values.dtype == ends.dtype == torch.float32
    torch.testing.assert_close(ends.double(), expected[:, EOS], atol=1e-6, rtol=0)
    torch.testing.assert_close(values.double(), expected.gather(1, tokens), atol=1e-6, rtol=0)
    expected[:, [BOS, EOS, PAD]] = -torch.inf
    torch.testing.assert_close(values.double(), expected.topk(3).values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 5])
def test_rows_are_the_same_alone_and_in_groups(rows: int) -> None:
    """Logits of hundreds, as a model may give whose softmax is sharp: their exponentials do not fit fp32."""
    logits = 150 * torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows))
    logits[:, PAD] = -torch.inf
    logits[0, EOS] = 1000.0
    expected = logits.double().log_softmax(1)
    norms = logits.double().logsumexp(1)
    torch.testing.assert_close(log_normalisers(logits).double(), norms, atol=0, rtol=1e-6)
    values, tokens, ends = best_extensions(logits, 4)
    torch.testing.assert_close(ends.double(), expected[:, EOS], atol=1e-3, rtol=1e-6)
    torch.testing.assert_close(values.double(), expected.gather(1, tokens), atol=1e-3, rtol=1e-6)
    expected[:, [BOS, EOS, PAD]] = -torch.inf
    assert torch.equal(tokens, expected.topk(4).indices)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_wide_beam_is_exhaustive_search(penalty: LengthPenalty) -> None:
    limits = [4, 1, 3, 2, 4]
    found = beam_search(TableStepper(5, 4**4), torch.tensor(limits), 4**4, 20, penalty)
    for sentence, limit in enumerate(limits):
        assert_same(found[sentence], every_hypothesis(sentence, limit, penalty)[:20])


@pytest.mark.parametrize("patience", [None, 0.2, 1.0, 2.5])
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize(("beams", "nbest"), [(1, 1), (2, 1), (3, 3), (5, 2)])
def test_stopping_early_changes_nothing_but_by_patience(
    beams: int, nbest: int, penalty: LengthPenalty, patience: float | None
) -> None:
    limits = [9, 4, 1, 7, 9, 12, 2, 9]
    stepper = TableStepper(len(limits), beams)
    found = beam_search(stepper, torch.tensor(limits), beams, nbest, penalty, patience)
    expected = [first_come(sentence, limit, beams, penalty, patience) for sentence, limit in enumerate(limits)]
    for ours, (theirs, _) in zip(found, expected, strict=True):
        assert_same(ours, theirs[:nbest])
    assert {len(prefix) for _, prefix in stepper.rows} <= set(range(1, max(steps for _, steps in expected) + 1))


def test_patience_stops_a_search_that_would_continue() -> None:
    """"4" may end or continue, and then surely has seven more words, so that log(1/2) costs less a token."""

    def late(sentence: int, prefix: tuple[int, ...]) -> Tensor:
        logits = torch.full((VOCAB,), -30.0)
        logits[EOS if len(prefix) == 9 else 4] = 0.0
        if len(prefix) == 2:
            logits[EOS] = 0.1
        return logits

    limits, penalty = torch.tensor([30]), LengthPenalty("average", 1.0)
    assert beam_search(TableStepper(1, 1, late), limits, 1, 1, penalty, 1.0)[0][0].tokens == [4]
    assert beam_search(TableStepper(1, 1, late), limits, 1, 1, penalty)[0][0].tokens == [4] * 8


# -- finish: best ------------------------------------------------------------------------------------------------------

WIDE = 50
ROWS_OF_LOGITS = torch.randn(2**14, WIDE, generator=torch.Generator().manual_seed(0))


def hashed_logits(states: Tensor, length: int, peaked: bool) -> Tensor:
    """Logits [R, WIDE] after prefixes with these hashes [R]; eos becomes likelier with the length."""
    logits = (3.0 if peaked else 0.3) * ROWS_OF_LOGITS[states % len(ROWS_OF_LOGITS)]
    logits[:, EOS] += (0.7 if peaked else 0.35) * length - 1.0
    logits[:, [BOS, PAD]] = -torch.inf
    return logits


def next_states(states: Tensor, tokens: Tensor) -> Tensor:
    """The hashes of prefixes with one more token."""
    return (states * 1_103_515_245 + tokens * 12_345 + 7_919) % 2**31


class HashStepper:
    """A stepper of `hashed_logits`; the first prefix of sentence n has the hash n."""

    def __init__(self, sentences: int, beams: int, peaked: bool) -> None:
        self.states, self.length = torch.arange(sentences).repeat_interleave(beams), 0
        self.beams, self.peaked = beams, peaked

    def step(self, tokens: Tensor) -> Tensor:
        if self.length:
            self.states = next_states(self.states, tokens)
        self.length += 1
        return hashed_logits(self.states, self.length, self.peaked)

    def reorder(self, rows: Tensor) -> None:
        self.states = self.states[rows]

    def select(self, sentences: Sequence[int]) -> None:
        self.states = self.states.view(-1, self.beams)[sentences].flatten()


def first_come_first_served(
    sentence: int, limit: int, beams: int, penalty: LengthPenalty, peaked: bool
) -> list[tuple[float, list[int], bool]]:
    """fairseq's rule, one sentence at a time: hypotheses, best first.

    In every step all extensions by any token are ranked together, eos among them; but eos is never first, and the only
    token at the limit. Those of the `beams` best that are eos end, until `beams` have; the `beams` best others live on.
    """
    states, totals, words = torch.tensor([sentence]), torch.zeros(1), [[]]
    finished: list[tuple[float, list[int], bool]] = []
    for length in range(1, limit + 1):
        log_probs = hashed_logits(states, length, peaked).log_softmax(1)
        if length == limit:
            log_probs[:, torch.arange(WIDE) != EOS] = -torch.inf
        elif length == 1:
            log_probs[:, EOS] = -torch.inf
        values, indices = (totals[:, None] + log_probs).flatten().topk(min(2 * beams, len(totals) * WIDE - 1))
        ranked = [(value, index // WIDE, index % WIDE)
                  for value, index in zip(values.tolist(), indices.tolist(), strict=True) if value > -math.inf]
        finished += [(value / penalty.divisor(length), words[row], True)
                     for value, row, token in ranked[:beams] if token == EOS][: beams - len(finished)]
        live = [entry for entry in ranked if entry[2] != EOS][:beams]
        if len(finished) == beams or not live:
            break
        rows, tokens = torch.tensor([row for _, row, _ in live]), torch.tensor([token for _, _, token in live])
        states, totals = next_states(states[rows], tokens), torch.tensor([value for value, _, _ in live])
        words = [[*words[row], token] for _, row, token in live]
    return sorted(finished, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("beams", [1, 4, 5, 20])
@pytest.mark.parametrize("peaked", [True, False], ids=["peaked", "flat"])
def test_the_best_finish_first_come_first_served(peaked: bool, beams: int, alpha: float) -> None:
    """Every hypothesis is the rule's; by the default rule many best ones are others."""
    sentences, penalty = 200, LengthPenalty("average", alpha)
    limits = [(1, 8, 25, 8)[sentence % 4] for sentence in range(sentences)]

    def search(**options: Any) -> list[list[Candidate]]:
        return beam_search(HashStepper(sentences, beams, peaked), torch.tensor(limits), beams, beams, penalty, 1.0,
                           **options)

    found = search(finish="best", rules=Rules(min_length=1))
    expected = [first_come_first_served(n, limit, beams, penalty, peaked) for n, limit in enumerate(limits)]
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    others = search()
    assert sum(ours[0] != theirs[0] for ours, theirs in zip(found, others, strict=True)) >= sentences / 10


def test_without_patience_the_best_finish_as_often_as_they_can() -> None:
    """Then no hypothesis is lost by stopping: a higher patience finds the same, a lower one never a better."""
    penalty, limits = LengthPenalty("average", 1.0), torch.full((200,), 12)
    by_patience = {patience: beam_search(HashStepper(200, 4, True), limits, 4, 1, penalty, patience, "best")
                   for patience in (1.0, 100.0, None)}
    assert by_patience[100.0] == by_patience[None] != by_patience[1.0]
    for early, late in zip(by_patience[1.0], by_patience[None], strict=True):
        assert early[0].score <= late[0].score


@pytest.mark.parametrize("finish", ["any", "best"])
def test_a_least_length_is_kept_unless_the_limit_is_lower(finish: Literal["any", "best"]) -> None:
    penalty, limits = LengthPenalty("none", 1.0), torch.tensor([9, 2, 1, 9, 4] * 8)
    found = beam_search(HashStepper(40, 4, False), limits, 4, 4, penalty, None, finish, Rules(min_length=3))
    unbounded = beam_search(HashStepper(40, 4, False), limits, 4, 4, penalty, None, finish)
    greedy = decode_independently(HashStepper(40, 1, False), limits, 1, choose_greedily, penalty, Rules(min_length=3))
    assert min(len(candidate.tokens) for best in unbounded for candidate in best) == 0
    for candidates in (found, greedy):
        for limit, best in zip(limits.tolist(), candidates, strict=True):
            assert best and all(min(3, limit - 1) <= len(candidate.tokens) <= limit for candidate in best)


@pytest.mark.parametrize("done", ["", "0", "1", "01", "10", "0010110", "1110001", "1111111", "0000"])
def test_compaction_keeps_places_and_fills_gaps(done: str) -> None:
    order = _compacted([flag == "1" for flag in done])
    assert sorted(order) == [i for i, flag in enumerate(done) if flag == "0"]
    assert all(order[i] == i for i in range(len(order)) if done[i] == "0")


@pytest.mark.parametrize("limits", [(1, 8, 25, 8), (3, 17), (8,), (16, 2)], ids=str)
def test_a_gpu_is_asked_every_eight_steps_and_finds_the_same(limits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    """The host reads the limits, what is done every eight steps, and the result."""
    lengths, penalty = torch.tensor([limits[i % len(limits)] for i in range(60)]), LengthPenalty("average", 1.0)
    prefixes = torch.full((60, 2), PAD)
    prefixes[::3, 0], prefixes[::6, 1] = 4, 5

    def search(peaked: bool) -> list[list[Candidate]]:
        found = decode_independently(HashStepper(60, 3, peaked), lengths, 3, choose_greedily, penalty)
        for patience, finish, rules in ((None, "any", Rules()), (1.0, "best", Rules(min_length=2, no_repeat=2)),
                                        (0.5, "any", Rules(prefixes=prefixes))):
            found += beam_search(HashStepper(60, 4, peaked), lengths, 4, 2, penalty, patience, finish, rules)
        return found

    expected = [search(peaked) for peaked in (False, True)]
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    for theirs, peaked in zip(expected, (False, True), strict=True):
        for ours, their in zip(search(peaked), theirs, strict=True):
            assert [(c.tokens, c.ended) for c in ours] == [(c.tokens, c.ended) for c in their]
            assert [c.score for c in ours] == pytest.approx([c.score for c in their], abs=1e-6)
    reads, read = [0], Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        reads[0] += 1
        return read(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    beam_search(HashStepper(60, 4, False), lengths, 4, 2, penalty)
    assert reads[0] <= 2 + 5 + max(limits) // 8


def test_search_stops_as_soon_as_nothing_can_improve() -> None:
    """After "4" the model is sure that the sentence ends: two steps are enough, whatever the limit."""

    def sure(sentence: int, prefix: tuple[int, ...]) -> Tensor:
        logits = torch.full((VOCAB,), -20.0)
        logits[4 if prefix == (BOS,) else EOS] = 0.0
        return logits

    stepper = TableStepper(3, 2, sure)
    found = beam_search(stepper, torch.tensor([50, 50, 50]), 2, 1, LengthPenalty("none", 1.0))
    assert [c[0].tokens for c in found] == [[4]] * 3
    assert {len(prefix) for _, prefix in stepper.rows} == {2}


def test_a_hypothesis_at_the_limit_is_truncated_and_marked() -> None:
    def endless(sentence: int, prefix: tuple[int, ...]) -> Tensor:
        logits = torch.full((VOCAB,), -30.0)
        logits[5] = 0.0
        return logits

    limits, penalty = torch.tensor([6]), LengthPenalty("average", 1.0)
    for found in (beam_search(TableStepper(1, 2, endless), limits, 2, 1, penalty),
                  decode_independently(TableStepper(1, 1, endless), limits, 1, choose_greedily, penalty)):
        assert found[0][0].tokens == [5] * 6
        assert not found[0][0].ended


def test_greedy_follows_the_likeliest_token() -> None:
    limits, penalty = [8, 3, 8, 1, 20], LengthPenalty("gnmt", 0.6)
    found = decode_independently(TableStepper(len(limits), 1), torch.tensor(limits), 1, choose_greedily, penalty)
    for sentence, limit in enumerate(limits):
        tokens: tuple[int, ...] = ()
        while len(tokens) < limit and EOS not in tokens:
            logits = table_logits(sentence, (BOS, *tokens))
            logits[BOS] = -torch.inf
            tokens = (*tokens, int(logits.argmax()))
        score = log_prob(sentence, tokens) / penalty.divisor(len(tokens))
        assert_same(found[sentence], [(score, [t for t in tokens if t != EOS], EOS in tokens)])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_models_distribution(temperature: float) -> None:
    """20,000 samples of a first token: each frequency is within 4 standard deviations of its probability."""
    draws = 20_000
    logits = table_logits(3, (BOS,))
    logits[BOS] = -torch.inf
    probabilities = (logits.double() / temperature).softmax(0)
    uniforms = torch.from_numpy(np.random.default_rng(5).random((1, draws, 1), dtype=np.float32))
    tokens = make_sampler(uniforms, temperature)(logits.expand(draws, -1), torch.tensor([0]), 0)
    frequencies = tokens.bincount(minlength=VOCAB) / draws
    spread = (probabilities * (1 - probabilities) / draws).sqrt()
    assert bool(((frequencies - probabilities).abs() <= 4 * spread).all())
    assert frequencies[BOS] == frequencies[PAD] == 0


def test_the_extreme_uniforms_give_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    for uniform, token in ((0.0, 1), (below_one, 2)):
        assert make_sampler(torch.full((1, 1, 1), uniform), 1.0)(logits, torch.tensor([0]), 0).item() == token


def test_samples_are_scored_by_the_model_and_sorted() -> None:
    limits, penalty, count = [6, 2, 9], LengthPenalty("average", 1.0), 8
    uniforms = torch.from_numpy(np.random.default_rng(1).random((3, count, 9), dtype=np.float32))
    sampler = make_sampler(uniforms, 0.8)
    found = decode_independently(TableStepper(3, count), torch.tensor(limits), count, sampler, penalty)
    for sentence, limit in enumerate(limits):
        assert len(found[sentence]) == count
        assert [c.score for c in found[sentence]] == sorted((c.score for c in found[sentence]), reverse=True)
        for candidate in found[sentence]:
            counted = (*candidate.tokens, EOS) if candidate.ended else tuple(candidate.tokens)
            assert len(counted) == limit if not candidate.ended else len(counted) <= limit
            assert candidate.log_prob == pytest.approx(log_prob(sentence, counted), abs=1e-5)
            assert candidate.score == pytest.approx(candidate.log_prob / len(counted), abs=1e-6)


def test_nan_scores_are_rejected() -> None:
    def broken(sentence: int, prefix: tuple[int, ...]) -> Tensor:
        return torch.full((VOCAB,), torch.nan)

    with user_error("diverged"):
        beam_search(TableStepper(2, 3, broken), torch.tensor([4, 4]), 3, 1, LengthPenalty("none", 1.0))
    with user_error("diverged"):
        decode_independently(TableStepper(2, 1, broken), torch.tensor([4, 4]), 1, choose_greedily,
                             LengthPenalty("none", 1.0))
