"""The training text with `data.modify`: the same in every layout and after a kill, in micro-batches that fit, with word
alignments that follow, and segmentations as those that are kept on the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus_recipes import recipe_of, text
from refusals import user_error
from run_files import losses, records, tensors
from warm import Warm

from deepnmt.batch import Batch
from deepnmt.config import Recipe, dump_recipe, load_recipe, with_settings
from deepnmt.data.batching import START, Position, Stream
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.extras.modify import stream as stream_module
from deepnmt.extras.modify.stream import ModifiedWindow
from deepnmt.processes.process_group import processes
from deepnmt.tasks.translation.task import TASK as TRANSLATION
from deepnmt.tokens import BOS, EOS, PAD, UNK
from deepnmt.training.status import FINISHED
from deepnmt.training.trainer import train
from deepnmt.visitors import visitor_modules

CPU = torch.device("cpu")
ALL = {"upper": 0.1, "title": 0.1, "lower": 0.1, "typos": 0.1, "copies": 0.2, "insert_words": 0.05,
       "drop_words": 0.05, "swap_words": 0.05, "subwords": True}


@pytest.fixture(scope="module")
def plain(prepared: Path) -> Recipe:
    return load_recipe(prepared / "recipe.yaml")


@pytest.fixture(params=["exact", "planned"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How windows are modified: at once, or as those of more pairs."""
    if request.param == "planned":
        monkeypatch.setattr(stream_module, "EXACT", 100)
    return str(request.param)


def modified(recipe: Recipe, **settings: Any) -> Recipe:
    return with_settings(recipe, {"data.modify": settings or ALL})


def stream_of(recipe: Recipe) -> Any:
    return TRANSLATION.stream(recipe, open_prepared(recipe))


def walk(stream: Stream, epochs: int, position: Position = START) -> Iterator[tuple[Position, Batch]]:
    while position.epoch < epochs:
        update = stream.update(position, 1, 0, 1, CPU)
        yield position, update.batches[0]
        position = update.next


def sentences(stream: Any, epoch: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The pieces of every sentence of an epoch, by its number."""
    found = {}
    for position, batch in walk(stream, epoch + 1, Position(epoch, 0)):
        rows = stream.sentences(position.epoch, position.index)[1]
        for row, *sides in zip(rows.tolist(), batch["src"].tolist(), batch["trg_out"].tolist(), strict=True):
            found[row] = tuple(tuple(piece for piece in side if piece not in (BOS, EOS, PAD)) for side in sides)
    return found


def test_a_sentence_is_a_function_of_seed_epoch_and_number(plain: Recipe, way: str) -> None:
    recipe = modified(plain)
    first = sentences(stream_of(recipe), 1)
    assert first == sentences(stream_of(with_settings(recipe, {"batch.tokens": 999})), 1), "whatever its micro-batch"
    for other in (sentences(stream_of(recipe), 0), sentences(stream_of(with_settings(recipe, {"seed": 8})), 1)):
        assert np.mean([first[row] != other[row] for row in first]) > 0.9


def test_any_number_of_processes_and_any_start_give_the_same(plain: Recipe, way: str) -> None:
    recipe = modified(plain)
    whole = dict(walk(stream_of(recipe), 2))
    begin = Position(0, stream_of(recipe).epoch_size(0) - 3)
    dealt = [stream_of(recipe).update(begin, 8, rank, 4, CPU) for rank in range(4)]
    together = stream_of(recipe).update(begin, 8, 0, 1, CPU)
    assert sum(update.tokens for update in dealt) == together.tokens and together.shared
    assert {update.next for update in dealt} == {together.next}
    by_key = {batch.key: batch for batch in whole.values()}
    for batch in (*(batch for update in dealt for batch in update.batches), *together.batches):
        assert all(torch.equal(batch[name], by_key[batch.key][name]) for name in batch.tensors)


def test_windows_of_shards_are_modified_too(prepared: Path, tmp_path: Path, way: str) -> None:
    recipe = recipe_of(prepared, tmp_path, shard_pairs=100, window_pairs=160, modify=ALL)
    prepare(recipe)
    whole = list(walk(stream_of(recipe), 2))
    again = dict(walk(stream_of(recipe), 2, whole[-9][0]))
    for position, batch in whole[-9:]:
        assert all(torch.equal(again[position][name], batch[name]) for name in batch.tensors)
    plain = {tuple(line) for _, batch in walk(stream_of(with_settings(recipe, {"data.modify": {}})), 2)
             for line in batch["trg_out"].tolist()}
    assert sum(tuple(line) not in plain for _, batch in whole for line in batch["trg_out"].tolist()) > 600


def test_updates_of_a_fixed_size_have_the_same_sentences_in_any_layout(plain: Recipe, way: str) -> None:
    recipe = with_settings(modified(plain), {"batch.update_tokens": 600})
    found = []
    for world in (1, 2, 4):
        updates = [stream_of(recipe).update(START, 1, rank, world, CPU) for rank in range(world)]
        lines = sorted(tuple(piece for piece in line if piece != PAD) for update in updates
                       for batch in update.batches for line in batch["trg_out"].tolist())
        found.append(([line for line in lines if line], sum(update.tokens for update in updates)))
    assert found[0] == found[1] == found[2] and len(found[0][0]) > 10


def test_micro_batches_fit_and_nearly_all_sentences_are_modified(plain: Recipe, way: str) -> None:
    recipe = modified(plain, **ALL | {"upper": 0.3})
    stream, left = stream_of(recipe), 0
    for _, batch in walk(stream, 2):
        assert max(batch["src"].numel(), batch["trg_in"].numel()) <= recipe.batch.tokens
    for epoch in range(2):
        window: Any = stream.split(epoch)
        assert isinstance(window, ModifiedWindow)
        for row in range(len(window.src_lengths)):
            new, most = next(window.draws(row)), recipe.data.filters.max_tokens  # which no segmentation exceeds
            left += window.pair(row) is None and new is not None and max(map(len, new[:2])) <= most
    assert left <= 0.01 * 2 * len(window.src_lengths)


def test_cases_of_both_sides_have_their_rates(plain: Recipe) -> None:
    recipe = modified(plain, upper=0.2, lower=0.1)
    data, window = open_prepared(recipe), stream_of(recipe).split(0)
    counts: Counter[str] = Counter()
    for row in range(600):
        texts = [vocab.decode(side[row].tolist())
                 for vocab, side in zip(data.vocabs(), (window.sources, window.targets), strict=True)]
        counts[next((kind for kind in ("isupper", "islower") if all(getattr(one, kind)() for one in texts)), "")] += 1
    stored = data.split("train")
    lower = sum(data.vocabs()[0].decode(stored.sources[row].tolist()).islower()
                and data.vocabs()[1].decode(stored.targets[row].tolist()).islower() for row in range(600))
    for kind, rate, natural in (("isupper", 0.2, 0), ("islower", 0.1, lower)):
        expected = 600 * rate + natural * (1 - rate - (0.2 if kind == "islower" else 0.0))
        assert abs(counts[kind] - expected) < 3 * (600 * rate * (1 - rate)) ** 0.5 + 6


def test_nothing_set_changes_nothing(plain: Recipe) -> None:
    assert type(stream_of(plain)) is Stream and not stream_of(plain).update(START, 1, 0, 1, CPU).shared


def test_drawn_segmentations_are_as_those_on_the_disk(plain: Recipe, way: str, prepared: Path, tmp_path: Path) -> None:
    """Of eight epochs: the same pieces in the same frequency, from a folder without any of the eight."""
    stored = recipe_of(prepared, tmp_path, subword_variants=8)
    prepare(stored)
    drawn = modified(plain, subwords=True)
    folders = [Path(recipe.data.folder) for recipe in (stored, drawn)]
    sizes = [sum(file.stat().st_size for file in folder.glob("train.*")) for folder in folders]
    assert sizes[0] > 8 * sizes[1]
    counts = [Counter(piece for epoch in range(8) for sides in sentences(stream_of(recipe), epoch).values()
                      for side in sides for piece in side) for recipe in (stored, drawn)]
    totals = [sum(count.values()) for count in counts]
    assert totals[1] == pytest.approx(totals[0], rel=0.01)
    apart = 0
    for piece in counts[0].keys() | counts[1].keys():
        one, other = (count[piece] for count in counts)
        apart += abs(one - other) > 3 * (one + other) ** 0.5
    assert apart <= 0.01 * len(counts[0])


# -- alignments --------------------------------------------------------------------------------------------------------


def with_links(prepared: Path, folder: Path, **modify: Any) -> Recipe:
    """The tagged test text, whose first words are linked: each source word with the target's of the same place."""
    lines = [(prepared / "text" / f"test.{lang}").read_text(encoding="utf-8").splitlines() for lang in ("en", "de")]
    links = [" ".join(f"{i}-{i}" for i in range(min(len(a.split()), len(b.split())))) for a, b in zip(*lines)]
    (folder / "links").write_text("\n".join(links) + "\n")
    train = {"plain": text(prepared, "valid"),
             "tagged": text(prepared, "test", tag="<BT>", alignments=str(folder / "links"))}
    recipe = recipe_of(prepared, folder, train=train, modify=modify)
    prepare(recipe)
    return with_settings(recipe, {"train.guided_alignment": 0.1})


def test_links_follow_the_modified_words(prepared: Path, tmp_path: Path, way: str) -> None:
    """The words that a link joins are those that it joined, in another place and cut into other pieces."""
    recipe = with_links(prepared, tmp_path, **ALL | {"copies": 0.0, "typos": 0.0})
    data = PreparedData.open(recipe.data.folder)
    stream: Any = TRANSLATION.stream(recipe, data)
    stored, vocabs = data.split("train"), data.vocabs()
    moved = seen = 0

    def words(vocab: Any, ids: Any) -> list[str]:
        return ["".join(word).lower() for word in vocab.decode(list(ids)).split()]

    for position, batch in walk(stream, 4):
        rows = stream.sentences(position.epoch, position.index)[1].tolist()
        sentence, target, source, _ = batch["links"].tolist()
        for number, row in enumerate(rows):
            window = stream.split(position.epoch)
            links = window.column("links")[row].reshape(-1, 2).tolist()
            before = [words(vocab, side[row]) for vocab, side in
                      zip(vocabs, (stored.sources, stored.targets), strict=True)]
            after = [words(vocab, side[row]) for vocab, side in
                     zip(vocabs, (window.sources, window.targets), strict=True)]
            given = stored.column("links")[row].reshape(-1, 2).tolist()
            tag = 1 if given else 0  # which decoding leaves out
            if not any(UNK in side[row] for side in (window.sources, window.targets)):
                joined = {(before[0][s - tag], before[1][t]) for s, t in given}
                assert {(after[0][s - tag], after[1][t]) for s, t in links} <= joined
            assert len(links) >= 0.6 * len(given) - 1
            moved, seen = moved + (links != given), seen + bool(given)
            in_batch = {(t, s) for i, t, s in zip(sentence, target, source, strict=True) if i == number}
            begins = [np.cumsum(np.array(vocab.begins_word)[ids]) - 1 for vocab, ids in
                      zip(vocabs, (window.sources[row], window.targets[row]), strict=True)]
            expected = {(t, s) for t, word in enumerate(begins[1]) for s, other in enumerate(begins[0])
                        if [other, word] in links}
            assert in_batch == expected
    assert moved > 0.2 * seen > 0


def test_terms_are_translations_by_the_links(prepared: Path, tmp_path: Path) -> None:
    recipe = with_links(prepared, tmp_path, terms=0.5)
    data = PreparedData.open(recipe.data.folder)
    window: Any = TRANSLATION.stream(recipe, data).split(0)
    stored, (source, target) = data.split("train"), data.vocabs()
    replaced = total = 0
    for row in range(data.corpora("train")["plain"], len(stored)):
        words = [source.decode(side[row].tolist()).split() for side in (stored.sources, window.sources)]
        translation = target.decode(stored.targets[row].tolist()).split()
        for old, new, other in zip(*words, translation, strict=False):
            assert new in (old, other)
            replaced, total = replaced + (new == other != old), total + (other != old)
    assert abs(replaced - total / 2) < 3 * (total / 4) ** 0.5 + 0.02 * total


def test_terms_need_alignments(plain: Recipe, prepared: Path, tmp_path: Path) -> None:
    recipe = with_links(prepared, tmp_path, terms=0.5)
    elsewhere = with_settings(recipe, {"data.folder": plain.data.folder, "train.guided_alignment": 0.0})
    with user_error("data.modify.terms is 0.5, but prepared data .* has no word alignments of the training text"):
        TRANSLATION.stream(elsewhere, PreparedData.open(plain.data.folder))
    assert TRANSLATION.plan is not None
    assert "updates per epoch" in TRANSLATION.plan(recipe, None)


def test_a_recipe_without_the_visitor(plain: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deepnmt.visitors.PACKAGE", tmp_path)
    with user_error("data.modify needs deepnmt/extras/modify, which is not installed"):
        stream_of(modified(plain))
    assert visitor_modules("stream") == []


# -- runs --------------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """As a kill is, between two updates."""


def test_a_killed_run_equals_the_whole(plain: Recipe, tmp_path: Path) -> None:
    recipe = with_settings(modified(plain), {"train.valid_bleu": False, "train.save_every": 1})

    def run(folder: Path, killed: int = 0) -> Path:
        @contextmanager
        def hook(number: int) -> Iterator[None]:
            if number == killed:
                raise KilledError
            yield

        with processes(1) as ranks:
            assert train(with_settings(recipe, {"run": str(folder)}), ranks, watch=lambda *_: hook) == FINISHED
        return folder

    whole = run(tmp_path / "whole")
    for killed in (2, 7):
        with pytest.raises(KilledError):
            run(tmp_path / "broken", killed)
    broken = run(tmp_path / "broken")
    assert losses(broken) == losses(whole)
    for name in ("weights", "moments"):
        ours, theirs = tensors(broken, 12, name), tensors(whole, 12, name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


LAYOUTS = {"one": (1, 4, 0), "two": (2, 2, 0), "pipeline": (2, 4, 2)}  # processes, accumulation, stages


def job(recipe: str, folder: str, name: str) -> None:
    """Runs on each rank."""
    _, accumulation, stages = LAYOUTS[name]
    stream_module.EXACT = 0  # as if there were more pairs, so that processes have to sum what they have
    with processes(threads=1, group=True) as ranks:
        settings = load_recipe(Path(recipe), [
            f"run={folder}", f"batch.accumulation={accumulation}", f"parallel.pipeline_stages={stages}",
            "parallel.ds_config=ds_configs/zero1.json", "parallel.precision=fp32", "train.valid_bleu=false",
            "train.updates=4", "model.encoder.block=pre_ln", "model.decoder.block=pre_ln"])
        assert train(settings, ranks) == FINISHED


def test_layouts_read_the_same_text(plain: Recipe, tmp_path: Path, warm: Warm) -> None:
    """One process, two, and a pipeline of two stages: equal losses, and numbers of target tokens to the unit."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(modified(plain)))
    for name, (world, _, _) in LAYOUTS.items():
        warm.run(world, "test_stream:job", tmp_path / "recipe.yaml", tmp_path / name, name)
    one = records(tmp_path / "one", "train")
    for name in LAYOUTS:
        other = records(tmp_path / name, "train")
        assert [record["target_tokens"] for record in other] == [record["target_tokens"] for record in one]
        assert [record["loss"] for record in other] == pytest.approx([record["loss"] for record in one], rel=1e-5)
