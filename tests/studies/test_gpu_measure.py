"""The arithmetic of model FLOPs utilisation, and the random batches it is measured on."""

from __future__ import annotations

import pytest
import torch

from deepnmt.config import Model, Stack
from deepnmt.processes.ranks import Ranks
from studies.benchmarks.gpu_measure import MIN_TOKENS, model_flops, random_batch, step_figures, timed_updates


@pytest.mark.parametrize(("encoder", "decoder", "gigaflop"), [(6, 6, 0.37), (60, 12, 1.548), (50, 50, 2.325)])
def test_flops_of_a_pair_of_tokens(encoder: int, decoder: int, gigaflop: float) -> None:
    model = Model(encoder=Stack(layers=encoder), decoder=Stack(layers=decoder))  # d 512, inner 2,048
    found = model_flops(model, vocab=32_000, sentences=1000, source=28, target=28) / 28_000 / 1e9
    assert round(found, 2 if encoder == 6 else 3) == gigaflop


def test_flops_count_each_product_once() -> None:
    model = Model(width=4, heads=2, ffn=6, encoder=Stack(layers=1), decoder=Stack(layers=1))
    encoder = 5 * (4 * 16 + 2 * 24)  # query, key, value, output; two of the FFN
    decoder = 3 * (6 * 16 + 2 * 24 + 4 * 10) + 5 * 2 * 16  # and of cross-attention query, output; then key and value
    scores = 4 * 4 * (5 * 5 + 3 * 1.5 + 3 * 5)
    assert model_flops(model, 10, 7, 5, 3) == pytest.approx(7 * (6 * (encoder + decoder) + 3.5 * scores), rel=1e-12)


def test_rates_are_those_of_the_median_update() -> None:
    model = Model(width=16, heads=2, ffn=32, encoder=Stack(layers=2), decoder=Stack(layers=1))
    figures = step_figures(model, 50, 4, 8, [0.5, 0.25, 4.0])
    assert figures["target_tokens_per_second"] == figures["source_tokens_per_second"] == 32 / 0.5
    assert figures["model_tflops"] == pytest.approx(model_flops(model, 50, 4, 8, 8) / 0.5 / 1e12, rel=1e-12)
    assert (figures["fastest"], figures["slowest"], figures["steps"]) == (0.25, 4.0, 3)


@pytest.mark.parametrize(("seconds", "until", "tokens", "timed", "ended"), [
    (1.0, 16.0, 32768, 12, 16.0),  # all
    (1.0, 15.9, 32768, 11, 15.0),
    (1.0, 6.5, 32768, 3, 6.0),  # half of them warm-up
    (1.0, 2.0, 32768, 1, 2.0),
    (1.0, 1.6, 8192, 1, 1.5),  # the first left too little time for a second: two of a quarter
    (1.0, 1.0, MIN_TOKENS, 1, 1.0625),  # no time at all: one of `MIN_TOKENS`
])
def test_updates_end_in_time(seconds: float, until: float, tokens: int, timed: int, ended: float,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes time in proportion to its tokens; the clock shows the sum."""
    taken: list[float] = []

    def update(size: int, number: int) -> float:
        taken.append(seconds * size / 32768)
        return taken[-1]

    monkeypatch.setattr("time.monotonic", lambda: sum(taken))
    found = timed_updates(update, 32768, 4, 12, until)
    assert found == (tokens, [seconds * tokens / 32768] * timed) and sum(taken) == ended


def test_random_batch_is_a_batch() -> None:
    batch = random_batch(6, 9, 40, 3, Ranks.alone())
    src, lengths, trg_in, trg_out = batch.tensors.values()
    assert src.shape == trg_in.shape == trg_out.shape == (6, 9) and (batch.key, batch.tokens) == (3, 54)
    assert lengths.tolist() == [9] * 6
    assert (src[:, -1] == 2).all() and (trg_out[:, -1] == 2).all() and (trg_in[:, 0] == 1).all()
    assert torch.equal(trg_in[:, 1:], trg_out[:, :-1])
    assert int(torch.cat([src[:, :-1], trg_out[:, :-1]]).min()) >= 4 and int(src.max()) < 40
    assert not torch.equal(src, random_batch(6, 9, 40, 4, Ranks.alone())["src"])
