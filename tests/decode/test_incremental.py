"""Decoding step by step equals decoding the whole target at once."""

from __future__ import annotations

import pytest
import torch
from small_models import BLOCKS, VOCAB, batch, model_of
from torch import Tensor

B, K, T = 3, 2, 6


class Decoding:
    """Three sentences, each with two different hypotheses."""

    def __init__(self, block: str = "admin") -> None:
        self.model = model_of(block)
        src, self.lengths, _, _ = batch([7, 3, 5], [T] * B)
        self.tokens = torch.randint(4, VOCAB, (B * K, T), generator=torch.Generator().manual_seed(2))
        self.memory = self.model.encode(src, self.lengths)
        self.cache = self.model.start_cache(self.memory, self.lengths, K, T)

    def steps(self, tokens: Tensor, *at: int) -> Tensor:
        return torch.stack([self.model.step(tokens[:, t], self.cache) for t in at], dim=1)

    def whole(self, tokens: Tensor) -> Tensor:
        return self.model.decode(tokens, self.memory.repeat_interleave(K, 0), self.lengths.repeat_interleave(K))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_steps_equal_the_whole(block: str) -> None:
    d = Decoding(block)
    assert_close(d.steps(d.tokens, *range(T)), d.whole(d.tokens))


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_a_first_step_for_all_hypotheses_at_once(block: str) -> None:
    """The first tokens of a sentence's hypotheses are passed once; the following ones differ."""
    d = Decoding(block)
    d.tokens[:, 0] = d.tokens[::K, 0].repeat_interleave(K)
    d.cache.past.fill_(torch.nan)  # as uninitialised memory may contain
    whole = d.whole(d.tokens)
    assert_close(d.model.step(d.tokens[::K, 0], d.cache), whole[::K, 0])
    assert_close(d.steps(d.tokens, *range(1, T)), whole[:, 1:])


@torch.no_grad()
def test_reordered_hypotheses_continue_from_their_own_past() -> None:
    d = Decoding()
    rows = torch.tensor([1, 1, 2, 3, 5, 4])  # within each sentence: doubled, kept, exchanged
    d.steps(d.tokens, 0, 1, 2)
    d.cache.reorder(rows)
    history = torch.cat([d.tokens[rows, :3], d.tokens[:, 3:]], dim=1)
    assert_close(d.steps(d.tokens, *range(3, T)), d.whole(history)[:, 3:])


@torch.no_grad()
@pytest.mark.parametrize("kept", [[2, 0], [0, 2], [0, 1], [1, 2], [1, 0, 2], [1]], ids=str)
def test_selected_sentences_continue_alone(kept: list[int]) -> None:
    """Selects twice: the second time from a cache that the first selection has shrunk."""
    d = Decoding()
    d.steps(d.tokens, 0, 1)
    given = d.tokens.view(B, K, T)
    for t, keep in ((2, kept), (4, [len(kept) - 1])):
        d.cache.select(keep)
        given, d.memory, d.lengths = given[keep], d.memory[keep], d.lengths[keep]
        rows = given.flatten(0, 1)
        assert_close(d.steps(rows, t, t + 1), d.whole(rows)[:, t : t + 2])


@torch.no_grad()
def test_rows_of_a_mask_stay_where_they_begin() -> None:
    """On a GPU at multiples of 8; a layer would copy others in every step."""
    d = Decoding()
    lengths = torch.tensor([3, 5, 2])
    wide = torch.where(torch.arange(8) < lengths[:, None], 0.0, -torch.inf)[:, None, None, :5]
    given, d.cache.mask = wide.clone(), wide
    d.cache.select([2, 0])
    assert d.cache.mask.stride(0) == 8 and torch.equal(d.cache.mask, given[[2, 0]])


def test_a_cache_longer_than_the_positions_is_rejected() -> None:
    model = model_of("admin")
    src, lengths, _, _ = batch([4], [4])
    with pytest.raises(ValueError, match="33 decoding steps exceed"):
        model.start_cache(model.encode(src, lengths), lengths, 1, 33)
