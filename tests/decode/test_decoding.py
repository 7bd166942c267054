"""Search over real Transformers: with and without the cache, alone and in a batch, against exhaustive search."""

from __future__ import annotations

import itertools
import logging
from typing import ClassVar

import pytest
import torch
from small_models import BLOCKS, VOCAB, model_of, shapes
from torch import nn

from deepnmt import config
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import beam_search
from deepnmt.decode.steppers import CachedStepper, MakeStepper
from deepnmt.decode.translate import Hypothesis, most_steps, translate_lines
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import BOS, EOS
from studies.benchmarks.recomputing import RecomputingStepper

LINES = ["4 5 6 7 8 9 10", "22", "", "11 4 4 17 6 5 9 20 13 12 8 19", "9 8 7", "   ", "14 15 16 4", "10 11", "5 6 7"]
WORDS = [0, 4, 5, 6, 7]  # the tokens of a vocabulary of 8 other than bos, eos and pad

BEAM = config.Translate(beam=4, nbest=3, max_ratio=1.0, max_extra=3)
METHODS = {
    "beam": BEAM,
    "gnmt": config.Translate(beam=3, length_penalty="gnmt", alpha=0.6, max_ratio=1.0, max_extra=3),
    "fairseq": config.Translate(beam=4, nbest=3, finish="best", patience=1.0, min_length=1, max_ratio=1.0, max_extra=3),
    "greedy": config.Translate(method="greedy", max_ratio=1.0, max_extra=3),
    "sample": config.Translate(method="sample", nbest=3, temperature=0.7, max_ratio=1.0, max_extra=3),
}


class Numbers:
    """A vocabulary whose pieces are their ids."""

    tags: ClassVar[dict[str, int]] = {}

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def to_pieces(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def split_tags(self, text: str) -> tuple[list[int], str]:
        return [], text


def sharp(block: str = "post_ln") -> Transformer:
    """A model that clearly prefers some tokens, as a trained one does, so that no choice depends on the last bit."""
    model = model_of(block)
    with torch.no_grad():
        norms = [module for module in model.decoder.modules() if isinstance(module, nn.LayerNorm)]
        (norms[-1].weight if norms else model.output_weight).mul_(3)
    return model


def translated(
    model: Transformer, lines: list[str], settings: config.Translate, stepper: MakeStepper = CachedStepper,
    numbers: list[int] | None = None,
) -> list[list[Hypothesis]]:
    vocab = Numbers()
    return translate_lines(model, (vocab, vocab), lines, settings, stepper=stepper, numbers=numbers)  # type: ignore[arg-type]


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        assert [(h.text, h.tokens, h.ended) for h in left] == [(h.text, h.tokens, h.ended) for h in right]
        assert [h.score for h in left] == pytest.approx([h.score for h in right], abs=1e-5)
        assert [h.log_prob for h in left] == pytest.approx([h.log_prob for h in right], rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("method", METHODS)
def test_cache_changes_nothing(method: str, block: str) -> None:
    model, settings = sharp(block), METHODS[method]
    assert_same(translated(model, LINES, settings), translated(model, LINES, settings, RecomputingStepper))


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_changes_nothing(method: str) -> None:
    """Lines one by one, in one batch, and in batches of few tokens."""
    model, settings = sharp(), METHODS[method]
    together = translated(model, LINES, settings)
    apart = [translated(model, [line], settings, numbers=[n])[0] for n, line in enumerate(LINES, start=1)]
    small = translated(model, LINES, settings.model_copy(update={"batch_tokens": 40}))
    assert_same(together, apart)
    assert_same(together, small)


def test_the_order_of_lines_changes_nothing() -> None:
    model = sharp()
    turned = translated(model, LINES[::-1], METHODS["sample"], numbers=list(range(len(LINES), 0, -1)))
    assert_same(translated(model, LINES, METHODS["sample"]), turned[::-1])


@torch.no_grad()
def test_a_wide_beam_equals_exhaustive_search() -> None:
    """The whole decoder scores all hypotheses, each given as a target."""
    penalty = LengthPenalty("average", 0.8)
    model = new_model(shapes("admin"), 8, 8, seed=3).eval()
    src, lengths, limits = torch.tensor([[4, 5, 6, EOS], [7, 4, EOS, 3]]), torch.tensor([4, 3]), torch.tensor([4, 3])
    beams = len(WORDS) ** 4
    found = beam_search(CachedStepper(model, src, lengths, beams, 4), limits, beams, 10, penalty)
    memory = model.encode(src, lengths)
    for sentence, limit in enumerate(limits.tolist()):
        scored = []
        for size in range(limit + 1):
            words = torch.tensor(list(itertools.product(WORDS, repeat=size)), dtype=torch.int64)
            counted = words if size == limit else torch.cat([words, torch.full((len(words), 1), EOS)], dim=1)
            inputs = torch.cat([torch.full((len(words), 1), BOS), counted[:, :-1]], dim=1)
            rows = torch.full((len(words),), sentence)
            logits = model.logits(model.decode(inputs, memory[rows], lengths[rows]))
            sums = logits.log_softmax(-1).gather(2, counted[:, :, None]).sum((1, 2))
            scores = sums / penalty.divisor(counted.size(1))
            scored += list(zip(scores.tolist(), words.tolist(), strict=True))
        best = sorted(scored, reverse=True)[:10]
        assert [c.tokens for c in found[sentence]] == [words for _, words in best]
        assert [c.score for c in found[sentence]] == pytest.approx([score for score, _ in best], abs=1e-5)


@torch.no_grad()
def test_scores_are_those_of_the_whole_decoder() -> None:
    """The decoder, forced along every hypothesis of a beam, gives the same log-probability and score."""
    model = sharp("deepnorm")
    for line, best in zip(LINES, translated(model, LINES, BEAM), strict=True):
        for hypothesis in best if line.strip() else []:
            src = torch.tensor([[*Numbers().encode(line), EOS]])
            words = Numbers().encode(hypothesis.text)
            counted = torch.tensor([[*words, EOS] if hypothesis.ended else words])
            inputs = torch.cat([torch.tensor([[BOS]]), counted[:, :-1]], dim=1)
            lengths = torch.tensor([src.size(1)])
            logits = model.logits(model.decode(inputs, model.encode(src, lengths), lengths))
            log_prob = logits.log_softmax(-1).gather(2, counted[:, :, None]).sum().item()
            assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-5)
            assert hypothesis.score == pytest.approx(log_prob / counted.size(1), abs=1e-5)
            assert hypothesis.tokens == len(words)


@torch.no_grad()
def test_the_settings_reach_the_search() -> None:
    """The divisor of a score, n-grams that may not come again, and samples that leave no choice."""
    model = sharp()
    for settings, divisor in (({"length_penalty": "none"}, lambda n: 1.0), ({"alpha": 0.5}, lambda n: n**0.5),
                              ({"length_penalty": "gnmt", "alpha": 0.6}, lambda n: ((5 + n) / 6) ** 0.6)):
        for best in translated(model, LINES, BEAM.model_copy(update=settings)):
            for hypothesis in best:
                counted = hypothesis.tokens + hypothesis.ended
                assert hypothesis.score == pytest.approx(hypothesis.log_prob / divisor(max(1, counted)))
    again = translated(model, LINES, METHODS["greedy"])
    once = translated(model, LINES, METHODS["greedy"].model_copy(update={"no_repeat_ngram": 1}))
    assert any(len(set(best[0].pieces)) < best[0].tokens for best in again)
    assert all(len(set(best[0].pieces)) == len(best[0].pieces) for best in once)
    for alone in ({"top_k": 1}, {"top_p": 1e-9}, {"epsilon": 0.999}, {"temperature": 1e-6}):
        sampled = translated(model, LINES, config.Translate(method="sample", max_ratio=1.0, max_extra=3, **alone))
        assert [best[0].text for best in sampled] == [best[0].text for best in again], alone


def test_settings_bound_the_length_and_the_model_bounds_the_settings() -> None:
    """max_ratio and max_extra count eos in the source; no translation is longer than model.max_length (32)."""
    model = model_of("post_ln")
    with torch.no_grad():
        model.output_weight[EOS] = 0.0  # the other logits' maximum is above 0: no hypothesis ends early
    greedy = config.Translate(method="greedy", max_ratio=1.5, max_extra=2)
    assert [best[0].tokens for best in translated(model, ["4 5 6", "4"], greedy)] == [8, 5]
    long = config.Translate(method="greedy", max_ratio=9.0, max_extra=99)
    assert [(best[0].tokens, best[0].ended) for best in translated(model, ["4 5 6"], long)] == [(32, False)]


@pytest.mark.parametrize("method", METHODS)
def test_settings_say_how_many_tokens_come_before_the_end(method: str) -> None:
    model = model_of("post_ln")
    with torch.no_grad():  # eos has the logit 8 everywhere, all others 0
        norm = model.get_submodule("decoder.layers.1.rule.norms.2")
        for parameter, value in ((norm.weight, 0.0), (norm.bias, 1.0), (model.output_weight, 0.0)):
            parameter.fill_(value)
        model.output_weight[EOS] = 0.5
    settings = METHODS[method].model_copy(update={"length_penalty": "none"})
    short, long = (translated(model, ["4 5 6 7"], settings.model_copy(update={"min_length": least}))[0]
                   for least in (settings.min_length, 5))
    assert (min(h.tokens for h in short), min(h.tokens for h in long)) == (settings.min_length, 5)


def test_every_ending_of_the_best_alone_is_ended() -> None:
    """finish: best ends with eos at the limit what finish: any cuts."""
    model = model_of("post_ln")
    with torch.no_grad():
        model.output_weight[EOS] = 0.0
    ended = {finish: {h.ended for h in translated(model, ["4 5 6"], BEAM.model_copy(update={"finish": finish}))[0]}
             for finish in ("any", "best")}
    assert ended == {"any": {False}, "best": {True}}


def test_an_overlong_line_is_truncated_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = sharp()
    words = [str(4 + i % (VOCAB - 4)) for i in range(40)]
    with caplog.at_level(logging.WARNING):
        found = translated(model, ["4", " ".join(words)], METHODS["greedy"])
    assert caplog.messages == ["line 2 has 40 tokens; only its first 31 are translated (model.max_length is 32)"]
    assert_same(found[1:], translated(model, [" ".join(words[:31])], METHODS["greedy"]))


def test_a_prefix_may_be_followed_by_a_token() -> None:
    """Be it as long as the longest translation by the ratio."""
    assert most_steps(sharp(), config.Translate(max_ratio=0.1, max_extra=0), 3, given=5) == 6


def test_a_model_in_training_mode_stays_in_it() -> None:
    model = new_model(shapes("post_ln", dropout=0.5), VOCAB, VOCAB, seed=1).train()
    first, second = (translated(model, LINES, METHODS["greedy"]) for _ in range(2))
    assert first == second
    assert model.training
    assert all(layer.training for layer in model.decoder.layers)


def test_samples_depend_on_seed_and_line_number() -> None:
    model, vocab = model_of("post_ln"), Numbers()
    settings = METHODS["sample"].model_copy(update={"temperature": 2.0})

    def draw(seed: int) -> list[list[Hypothesis]]:
        lines = ["4 5 6 7 8"] * 3
        return translate_lines(model, (vocab, vocab), lines, settings, seed=seed)  # type: ignore[arg-type]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1)[0] != draw(1)[1]
