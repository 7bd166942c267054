"""Decoding step by step gives what decoding the whole target at once gives."""

from __future__ import annotations

import pytest
import torch
from small_models import BLOCKS, VOCAB, batch, model_of

from deepnmt import config

B, K, T = 3, 2, 6


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_steps_equal_the_whole(block: config.Block) -> None:
    """With other tokens in each hypothesis."""
    model = model_of(block)
    src, lengths, _, _ = batch([7, 3, 5], [T] * B)
    tokens = torch.randint(4, VOCAB, (B * K, T), generator=torch.Generator().manual_seed(2))
    memory = model.encode(src, lengths)
    whole = model.decode(tokens, memory.repeat_interleave(K, 0), lengths.repeat_interleave(K))
    cache = model.start_cache(memory, lengths, K, T)
    steps = torch.stack([model.step(tokens[:, t], cache) for t in range(T)], dim=1)
    torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("block", BLOCKS)
def test_a_first_step_for_all_hypotheses_at_once(block: config.Block) -> None:
    """Their first tokens are given once, the following ones differ."""
    model = model_of(block)
    src, lengths, _, _ = batch([7, 3, 5], [T] * B)
    tokens = torch.randint(4, VOCAB, (B * K, T), generator=torch.Generator().manual_seed(2))
    tokens[:, 0] = tokens[::K, 0].repeat_interleave(K)
    memory = model.encode(src, lengths)
    whole = model.decode(tokens, memory.repeat_interleave(K, 0), lengths.repeat_interleave(K))
    cache = model.start_cache(memory, lengths, K, T)
    cache.past.fill_(torch.nan)  # as memory that is new may hold
    first = model.step(tokens[::K, 0], cache)
    torch.testing.assert_close(first, whole[::K, 0], rtol=1e-5, atol=1e-5)
    steps = torch.stack([model.step(tokens[:, t], cache) for t in range(1, T)], dim=1)
    torch.testing.assert_close(steps, whole[:, 1:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_reordered_hypotheses_go_on_from_their_own_past() -> None:
    model = model_of("admin")
    src, lengths, _, _ = batch([7, 3, 5], [T] * B)
    memory = model.encode(src, lengths)
    tokens = torch.randint(4, VOCAB, (B * K, T), generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([1, 1, 2, 3, 5, 4])  # within each sentence: doubled, kept, exchanged
    cache = model.start_cache(memory, lengths, K, T)
    for t in range(3):
        model.step(tokens[:, t], cache)
    cache.reorder(rows)
    history = torch.cat([tokens[rows, :3], tokens[:, 3:]], dim=1)
    steps = torch.stack([model.step(tokens[:, t], cache) for t in range(3, T)], dim=1)
    whole = model.decode(history, memory.repeat_interleave(K, 0), lengths.repeat_interleave(K))
    torch.testing.assert_close(steps, whole[:, 3:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kept", [[2, 0], [0, 2], [0, 1], [1, 2], [1, 0, 2], [1]], ids=str)
def test_selected_sentences_go_on_alone(kept: list[int]) -> None:
    """Twice: the second selection meets a cache that the first has made smaller."""
    model = model_of("admin")
    src, lengths, _, _ = batch([7, 3, 5], [T] * B)
    memory = model.encode(src, lengths)
    tokens = torch.randint(4, VOCAB, (B * K, T), generator=torch.Generator().manual_seed(2))
    cache = model.start_cache(memory, lengths, K, T)
    for t in range(2):
        model.step(tokens[:, t], cache)
    given = tokens.view(B, K, T)
    for t, keep in ((2, kept), (4, [len(kept) - 1])):
        cache.select(torch.tensor(keep))
        given, memory, lengths = given[keep], memory[keep], lengths[keep]
        rows = given.flatten(0, 1)
        steps = torch.stack([model.step(rows[:, i], cache) for i in (t, t + 1)], dim=1)
        whole = model.decode(rows, memory.repeat_interleave(K, 0), lengths.repeat_interleave(K))
        torch.testing.assert_close(steps, whole[:, t : t + 2], rtol=1e-5, atol=1e-5)


def test_a_cache_longer_than_the_positions_is_refused() -> None:
    model = model_of("admin")
    src, lengths, _, _ = batch([4], [4])
    with pytest.raises(ValueError, match="33 decoding steps exceed"):
        model.start_cache(model.encode(src, lengths), lengths, 1, 33)
