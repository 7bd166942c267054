"""Batch plans: every sentence once, within the budget, with little padding, reproducible; and collated batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import user_error

from deepnmt.data.arrays import SideWriter, Split, variant_stem
from deepnmt.data.batching import (
    Position,
    Stream,
    collate,
    plan_epoch,
    plan_eval,
    plan_updates,
    random_order,
    share_out,
)
from deepnmt.data.prepared import PreparedData, publish
from deepnmt.tokens import PAD


def _lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    src = np.clip(random.lognormal(2.7, 0.5, count), 2, 80).astype(np.int32)
    return src, np.clip(src * random.lognormal(0, 0.2, count), 2, 80).astype(np.int32)


def _split(folder: Path, variants: int = 0) -> Split:
    """A split of random sentences, of other lengths in each variant."""
    for number, stem in enumerate(["train", *(variant_stem("train", k) for k in range(variants))]):
        for side, lengths in zip(("src", "trg"), _lengths(300, seed=number)):
            tokens = np.random.RandomState(number).randint(4, 65000, int(lengths.sum() - 300)).astype(np.uint16)
            SideWriter(folder, f"{stem}.{side}").add(tokens, lengths - 1)
    publish(folder, folder, {"settings": {}, "inputs": {}, "vocab": {}, "splits": {"train": {"variants": variants}}})
    return PreparedData.open(folder).split("train")


def test_random_order_is_a_fixed_permutation() -> None:
    assert sorted(random_order(1000, 3, 4)) == list(range(1000))
    assert random_order(8, 1, 2).tolist() == [5, 6, 3, 2, 1, 0, 4, 7]  # must never change, else runs cannot resume
    assert not np.array_equal(random_order(1000, 3, 4), random_order(1000, 4, 3))


@pytest.mark.parametrize("tokens", [80, 400, 4096, 10**7])
def test_every_sentence_is_planned_once_within_the_budget_and_padding_is_counted(tokens: int) -> None:
    src, trg = _lengths(3000)
    plan = plan_epoch(src, trg, tokens, seed=1, epoch=0)
    assert sorted(plan.order.tolist()) == list(range(3000))
    assert plan.starts[0] == 0 and plan.starts[-1] == 3000 and (np.diff(plan.starts) > 0).all()
    padded = 0
    for batch in (plan[m] for m in range(len(plan))):
        sides = len(batch) * int(src[batch].max()), len(batch) * int(trg[batch].max())
        assert max(sides) <= tokens
        padded += sum(sides)
    assert plan.waste == pytest.approx(1 - (int(src.sum()) + int(trg.sum())) / padded, abs=1e-12)
    with pytest.raises(IndexError):
        plan[len(plan)]


def test_padding_is_low_for_lengths_like_those_of_text() -> None:
    src, trg = _lengths(30000)
    assert plan_epoch(src, trg, 4096, 1, 0).waste < 0.08
    shuffled = random_order(30000, 9)
    sizes = np.full(300, 100)
    naive = sum(int((sizes * side[shuffled].reshape(300, 100).max(axis=1)).sum()) for side in (src, trg))
    assert 1 - (int(src.sum()) + int(trg.sum())) / naive > 0.5  # padding of the same text unsorted


def test_plan_is_a_function_of_seed_and_epoch() -> None:
    src, trg = _lengths(3000)
    plans = {key: plan_epoch(src, trg, 512, *key) for key in ((1, 0), (1, 1), (2, 0))}
    again = plan_epoch(src, trg, 512, 1, 0)
    assert np.array_equal(again.order, plans[1, 0].order) and np.array_equal(again.starts, plans[1, 0].starts)
    batches = {key: {tuple(sorted(plan[m])) for m in range(len(plan))} for key, plan in plans.items()}
    assert len(batches[1, 0] & batches[1, 1]) < 5 and len(batches[1, 0] & batches[2, 0]) < 5


def test_micro_batches_come_in_random_order() -> None:
    src, trg = _lengths(3000)
    plan = plan_epoch(src, trg, 512, 1, 0)
    longest = [int(trg[plan[m]].max()) for m in range(len(plan))]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_batches_are_filled_to_the_budget() -> None:
    same = np.full(100, 10, dtype=np.int32)
    plan = plan_epoch(same, same, 73, 1, 0)
    assert sorted(np.diff(plan.starts).tolist()) == [2, *[7] * 14] and plan.waste == 0.0


def test_sentence_over_the_budget_is_rejected_in_training_and_a_batch_by_itself_in_evaluation() -> None:
    src, trg = np.array([3, 50, 4], dtype=np.int32), np.array([3, 3, 4], dtype=np.int32)
    with user_error(r"batch.tokens is 20, but a training sentence has 50 tokens"):
        plan_epoch(src, trg, 20, 1, 0)
    plan = plan_eval(src, trg, 20)
    assert [plan[m].tolist() for m in range(len(plan))] == [[2], [1], [0]]
    assert len(plan_eval(src[:0], trg[:0], 20)) == 0


def test_evaluation_plan_is_sorted_and_complete() -> None:
    src, trg = _lengths(500)
    plan = plan_eval(src, trg, 300)
    assert sorted(plan.order.tolist()) == list(range(500))
    assert (np.diff(trg[plan.order]) <= 0).all()
    assert all(len(plan[m]) * max(src[plan[m]].max(), trg[plan[m]].max()) <= 300 for m in range(len(plan)))


CPU = torch.device("cpu")


def test_stream_does_not_depend_on_the_size_of_updates_the_start_or_the_ranks(tmp_path: Path) -> None:
    split = _split(tmp_path, variants=3)
    one, batches = Stream(split, 200, seed=1), []
    position, tokens = Position(0, 0), 0
    total = sum(one.epoch_size(epoch) for epoch in range(4))
    for _ in range(total):
        update = one.update(position, 1, 0, 1, CPU)
        batches += update.batches
        tokens += update.tokens
        position = update.next
    assert position == Position(4, 0)
    other = Stream(split, 200, seed=1)
    whole = other.update(Position(0, 0), total, 0, 1, CPU)
    assert whole.next == position and [b.key for b in whole.batches] == [b.key for b in batches]
    assert whole.tokens == tokens == sum(batch.tokens for batch in batches)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(whole.batches, batches) for name in a.tensors)
    assert len({batch.key for batch in batches}) == total
    index = one.epoch_size(0) - 3
    resumed = Stream(split, 200, seed=1).update(Position(0, index), 7, 0, 1, CPU)
    assert [b.key for b in resumed.batches] == [b.key for b in batches[index:index + 7]]
    assert resumed.next == Position(1, 4) and resumed.passes == index / one.epoch_size(0)
    assert resumed.batches[0].key == index and resumed.batches[3].key == 2**32
    shares = [Stream(split, 200, seed=1).update(Position(0, index), 7, rank, 2, CPU) for rank in range(2)]
    for rank, share in enumerate(shares):
        assert [b.key for b in share.batches] == [b.key for b in resumed.batches[rank::2]]
        assert (share.tokens, share.passes, share.next) == (resumed.tokens, resumed.passes, resumed.next)


def test_an_update_of_a_fixed_size_has_the_same_sentences_for_any_ranks_and_micro_batches(tmp_path: Path) -> None:
    split = _split(tmp_path)
    total = int(split.trg_lengths.sum())
    found: list[list[list[int]]] = []  # by stream: of each update the targets, as numbers of its sentences
    for tokens, world in ((80, 1), (200, 1), (10**6, 1), (80, 2), (300, 3), (10**6, 4), (200, 16), (90, 64)):
        streams = [Stream(split, tokens, seed=1, update_tokens=1000) for _ in range(world)]
        count, position, seen = streams[0].epoch_size(0), Position(0, 0), 0
        assert count == round(total / 1000)
        keys: set[int] = set()
        found.append([])
        for _ in range(2 * count):
            shares = [stream.update(position, 1, rank, world, CPU) for rank, stream in enumerate(streams)]
            batches = [batch for share in shares for batch in share.batches]
            assert len({len(share.batches) for share in shares}) == 1 and len(batches) >= 8
            assert all(batch[side].numel() <= tokens for batch in batches for side in ("src", "trg_out"))
            assert {(share.tokens, share.next) for share in shares} == {(shares[0].tokens, shares[0].next)}
            assert sum(batch.tokens for batch in batches) == shares[0].tokens
            assert 600 < shares[0].tokens < 1300
            keys |= {batch.key for batch in batches}
            seen += len(batches)
            rows = [row for batch in batches if batch.tokens for row in batch["trg_out"].tolist()]
            found[-1].append(sorted(tuple(piece for piece in row if piece != PAD) for row in rows))  # type: ignore
            position = shares[0].next
        assert len(keys) == seen and position == Position(2, 0)
    assert all(other == found[0] for other in found)
    assert found[0][:count] != found[0][count:] and sum(map(len, found[0][:count])) == len(split)
    middle = Stream(split, 80, seed=1, update_tokens=1000).update(Position(1, 3), 1, 0, 1, CPU)
    assert sum(batch.tokens for batch in middle.batches) == sum(map(len, found[0][count + 3]))
    with user_error("batch.tokens is 20, but a training sentence has 57 tokens"):
        Stream(split, 20, seed=1, update_tokens=1000).update(Position(0, 0), 1, 0, 1, CPU)


def test_shares_of_an_update_are_equally_large_with_little_padding() -> None:
    src, trg = _lengths(30000)
    plan = plan_updates(src, trg, 8192, 1, 0)
    sizes = [int(trg[np.concatenate(plan.update(number))].sum()) for number in range(plan.updates)]
    assert sum(sizes) == int(trg.sum()) and np.mean(sizes) == pytest.approx(8192, rel=0.05)
    assert np.std(sizes) < 0.06 * 8192
    for world in (1, 2, 4, 8, 16):
        shares = [share_out(plan.update(number), src, trg, 8192, world) for number in range(plan.updates)]
        assert np.mean([share.waste for share, _ in shares]) < plan.waste + 0.015
        assert all(len(share) == each * world for share, each in shares)


def test_epochs_use_the_variants_in_turn(tmp_path: Path) -> None:
    split = _split(tmp_path, variants=2)
    stream = Stream(split, 200, seed=1)
    for epoch in (0, 1, 2, 5):
        expected = split.variant(epoch % 2)
        assert np.array_equal(stream.split(epoch).src_lengths, expected.src_lengths)
        plan = plan_epoch(expected.src_lengths, expected.trg_lengths, 200, 1, epoch)
        assert np.array_equal(stream.plan(epoch).order, plan.order)
    assert stream.epoch_size(0) != stream.epoch_size(1)


def test_stream_rejects_a_position_of_other_data(tmp_path: Path) -> None:
    stream = Stream(_split(tmp_path), 200, seed=1)
    size = stream.epoch_size(0)
    assert stream.update(Position(0, size), 1, 0, 1, CPU).batches[0].key == 1 << 32
    with user_error(f"micro-batch {size + 1} of epoch 0, which now has {size}"):
        stream.update(Position(0, size + 1), 1, 0, 1, CPU)


def test_collate_by_hand(tmp_path: Path) -> None:
    for side, tokens, lengths in (("src", [5, 6, 7], [2, 1]), ("trg", [8, 9, 10, 11], [1, 3])):
        SideWriter(tmp_path, f"train.{side}").add(np.array(tokens, dtype=np.uint16), np.array(lengths))
    publish(tmp_path, tmp_path, {"settings": {}, "inputs": {}, "vocab": {}, "splits": {"train": {"variants": 0}}})
    batch = collate(PreparedData.open(tmp_path).split("train"), [0, 1], 7, CPU)
    assert [tensor.tolist() for tensor in batch.tensors.values()] == [
        [[5, 6, 2], [7, 2, 3]], [3, 2], [[1, 8, 3, 3], [1, 9, 10, 11]], [[8, 2, 3, 3], [9, 10, 11, 2]]]
    assert (batch.tokens, batch.key) == (6, 7) and {tensor.dtype for tensor in batch.tensors.values()} == {torch.int64}


def test_collated_rows_are_the_sentences(tmp_path: Path) -> None:
    split = _split(tmp_path)
    rows = random_order(300, 1)[:40]
    batch = collate(split, rows, 0, CPU)
    src_in, lengths, trg_in, trg_out = batch.tensors.values()
    for row, i in enumerate(rows):
        src, trg = split.sources[i].tolist(), split.targets[i].tolist()
        assert src_in[row, : lengths[row]].tolist() == [*src, 2]
        assert trg_in[row, : len(trg) + 1].tolist() == [1, *trg]
        assert trg_out[row, : len(trg) + 1].tolist() == [*trg, 2]
        assert (trg_in[row, len(trg) + 1:] == 3).all() and (trg_out[row, len(trg) + 1:] == 3).all()
    assert batch.tokens == int(split.trg_lengths[rows].sum())
