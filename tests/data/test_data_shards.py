"""Training text in shards: planned in windows, each pair as often as in one piece; prepared in parts, byte for byte as
in one call."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus_recipes import recipe_of, text
from kills import kill_before
from refusals import Refused, contents, user_error
from warm import Warm, train

from deepnmt.batch import Batch
from deepnmt.checkpoint.checkpoint import WEIGHTS, list_checkpoints
from deepnmt.config import Recipe, dump_recipe
from deepnmt.data import parts
from deepnmt.data.batching import START, WINDOW, Position, Stream, plan_epoch
from deepnmt.data.mixing import training_stream
from deepnmt.data.parts import Part, parts_folder
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.data.shards import Shard, ShardedText
from deepnmt.data.sources import scan
from deepnmt.data.windows import Windows

CPU = torch.device("cpu")
WORDS = ["the", "dog", "sees", "a", "small", "house", "and", "old", "trees", "near", "some", "green", "river", "today"]


@pytest.fixture(scope="module")
def sharded(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The demo text in six shards, and a tagged corpus in one that is used six times as often; four windows."""
    folder = tmp_path_factory.mktemp("sharded")
    recipe = recipe_of(
        prepared, folder, shard_pairs=100, window_pairs=160, subword_variants=2,
        train={"large": text(prepared, "train"), "small": text(prepared, "test", weight=6.0, tag="<BT>")})
    prepare(recipe)
    return recipe


@pytest.fixture(scope="module")
def plain(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The demo text in six shards and four windows."""
    recipe = recipe_of(prepared, tmp_path_factory.mktemp("plain"), shard_pairs=100, window_pairs=160)
    prepare(recipe)
    return recipe


def _batches(stream: Stream, epochs: int, windows: int) -> Iterator[tuple[Position, Batch]]:
    for epoch in range(epochs):
        for window in range(windows):
            for number in range(len(stream.plan(epoch, window))):
                position = Position(epoch, window * WINDOW + number)
                yield position, stream.batch(epoch, position.index, CPU)


def _equal(one: Batch, other: Batch) -> bool:
    return one.key == other.key and all(torch.equal(one[name], other[name]) for name in one.tensors)


def _sentences(batch: Batch) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(tuple(side[side != 3].tolist()) for side in (src, trg))
            for src, trg in zip(batch["src"], batch["trg_out"], strict=True)]


# -- windows -----------------------------------------------------------------------------------------------------------


def test_one_shard_has_the_bytes_and_the_plan_of_one_piece(prepared: Path, tmp_path: Path) -> None:
    recipe = recipe_of(prepared, tmp_path, shard_pairs=600)
    prepare(recipe)
    old, new = contents(prepared / "data"), contents(tmp_path / "data")
    assert {name for name in new if name.startswith("train.")} == {
        "train.00000/manifest.json", *(f"train.00000/train.{side}.{kind}" for side in ("src", "trg")
                                       for kind in ("tokens", "offsets"))}
    for name, content in old.items():
        if name != "manifest.json":
            assert new.get(name, new.get(f"train.00000/{name}")) == content, name
    whole = recipe_of(prepared, tmp_path).model_copy(update={"data": recipe.data.model_copy(update={
        "folder": str(prepared / "data")})})
    streams = [training_stream(one, PreparedData.open(one.data.folder)) for one in (whole, recipe)]
    size = streams[0].epoch_size(0)
    one, other = (stream.update(START, 2 * size, 0, 1, CPU) for stream in streams)
    assert all(map(_equal, one.batches, other.batches)) and len(other.batches) == 2 * size
    assert (one.tokens, one.passes, one.next) == (other.tokens, other.passes, other.next)


def test_scored_texts_keep_their_tags(prepared: Path, tmp_path: Path) -> None:
    """Training translates the validation text as it is kept here."""
    tagged = {name: text(prepared, name, tag="<2de>") for name in ("train", "valid", "test")}
    kept = []
    for folder, pairs in ((tmp_path / "whole", 0), (tmp_path / "shards", 600)):
        recipe = recipe_of(prepared, folder, shard_pairs=pairs, train=tagged["train"], valid=tagged["valid"],
                           test={"held_out": tagged["test"]})
        prepare(recipe)
        kept.append([(folder / "data" / f"{name}.src.txt").read_text("utf-8") for name in ("valid", "test.held_out")])
    assert kept[0] == kept[1] and all(one.startswith("<2de> ") for one in kept[1])


def test_every_pair_once_an_epoch(plain: Recipe, prepared: Path) -> None:
    stream = training_stream(plain, open_prepared(plain))
    whole = training_stream(recipe_of(prepared, prepared), PreparedData.open(prepared / "data"))
    due = Counter(sentence for m in range(whole.epoch_size(0)) for sentence in _sentences(whole.batch(0, m, CPU)))
    seen = [Counter(), Counter(), Counter()]
    orders: list[list[int]] = [[], [], []]
    for position, batch in _batches(stream, 3, 4):
        seen[position.epoch].update(_sentences(batch))
        orders[position.epoch].append(len(batch["src"]))
        assert max(batch["src"].numel(), batch["trg_in"].numel()) <= 256
    assert seen[0] == seen[1] == seen[2] == due
    assert orders[0] != orders[1] != orders[2], "every epoch is planned anew"


def test_padding_of_a_window_is_near_that_of_the_whole() -> None:
    draw = np.random.RandomState(3)
    src = np.clip(draw.lognormal(2.7, 0.5, 60_000), 2, 80).astype(np.int32)
    trg = np.clip(src * draw.lognormal(0, 0.2, 60_000), 2, 80).astype(np.int32)
    whole = plan_epoch(src, trg, 4096, 1, 0).waste
    windows = [plan_epoch(src[start:start + 15_000], trg[start:start + 15_000], 4096, 1, 0, number).waste
               for number, start in enumerate(range(0, 60_000, 15_000))]
    assert whole < np.mean(windows) < 2 * whole, "with a quarter of the sentences to choose from"


class _Made(ShardedText):
    """Shards of so many pairs that are not on the disk."""

    def __init__(self, sizes: dict[str, list[int]]) -> None:
        self.made = sizes

    @property
    def sizes(self) -> dict[str, list[int]]:
        return self.made


class Fixed:
    """As many pairs of each corpus in every epoch."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def counts(self, epoch: int) -> list[int]:
        return self._counts

    def starts(self, epoch: int) -> list[int]:
        return [epoch * count for count in self._counts]


@pytest.mark.parametrize(("counts", "pairs"), [([700, 50, 30], 111), ([350, 400, 30], 64), ([0, 780, 0], 1000),
                                               ([780, 0, 0], 7), ([13, 13, 754], 50)])
def test_shares_hold_in_every_window_and_passes_use_every_pair(counts: list[int], pairs: int) -> None:
    sizes = {"a": [100, 0, 250, 350], "b": [25, 25], "c": [30]}
    windows, epochs = Windows(_Made(sizes), Fixed(counts), 7, pairs), 5
    used = {(corpus, shard): np.zeros(size, int) for corpus, part in enumerate(sizes.values())
            for shard, size in enumerate(part)}
    for epoch in range(epochs):
        for number in range(windows.windows(epoch)):
            in_window = [0, 0, 0]
            for corpus, shard, start, stop in windows.ranges(epoch, number):
                assert 0 <= start < stop <= used[corpus, shard].size
                used[corpus, shard][start:stop] += 1
                in_window[corpus] += stop - start
            assert all(abs(found - count / windows.windows(epoch)) < 1 for found, count in zip(in_window, counts))
            assert 0 < sum(in_window) < pairs + 3
    for corpus, count in enumerate(counts):
        times = np.concatenate([part for (of, _), part in used.items() if of == corpus])
        assert times.sum() == epochs * count and times.max() - times.min() <= 1
    if counts == [700, 50, 30]:  # an epoch is a pass
        orders = [[piece for number in range(windows.windows(0)) for piece in windows.ranges(epoch, number)]
                  for epoch in (0, 1)]
        assert orders[0] != orders[1], "every pass has its blocks in another order"
    again = Windows(_Made(sizes), Fixed(counts), 7, pairs)
    assert again.ranges(4, 0) == windows.ranges(4, 0) != Windows(_Made(sizes), Fixed(counts), 8, pairs).ranges(4, 0)


def test_shares_tags_and_sampled_segmentations(sharded: Recipe) -> None:
    data = open_prepared(sharded)
    tag = data.vocabs()[0].tags["<BT>"]
    stream = training_stream(sharded, data)
    large, small = data.corpora("train").values()
    due = 6 * small / (large + 6 * small)
    epochs: list[list[tuple[tuple[int, ...], ...]]] = [[], [], []]
    for position, batch in _batches(stream, 3, 4):
        epochs[position.epoch] += _sentences(batch)
    for epoch in epochs:
        assert len(epoch) == large + small
        assert np.mean([src[0] == tag for src, _ in epoch]) == pytest.approx(due, abs=0.01)
    vocab = data.vocabs()[1]
    texts = [{vocab.decode(trg) for _, trg in epoch} for epoch in epochs]
    pieces = [set(epoch) for epoch in epochs]
    assert len(texts[0] & texts[1]) > 150 and len(pieces[0] & pieces[1]) < 0.5 * len(texts[0] & texts[1])


def test_any_number_of_processes_and_any_start_give_the_same_updates(sharded: Recipe) -> None:
    """Through the ends of windows and epochs: 1 × 8 = 8 × 1 = 2 × 4, and from every position what came after it."""
    data = open_prepared(sharded)

    def walk(rank: int, world: int, position: Position = START, updates: int = 14) -> list[Any]:
        stream, found = training_stream(sharded, data), []
        for _ in range(updates):
            update = stream.update(position, 8, rank, world, CPU)
            position = update.next
            found.append(update)
        return found

    alone = walk(0, 1)
    assert alone[-1].next.epoch >= 1 and {update.next.index // WINDOW for update in alone} == {0, 1, 2, 3}
    for world in (8, 2):
        for rank in range(world):
            for one, dealt in zip(alone, walk(rank, world), strict=True):
                assert (dealt.tokens, dealt.passes, dealt.next) == (one.tokens, one.passes, one.next)
                assert all(map(_equal, dealt.batches, one.batches[rank::world]))
    for number, update in enumerate(alone[:-1]):
        [resumed] = walk(0, 1, update.next, 1)
        assert all(map(_equal, resumed.batches, alone[number + 1].batches))
        assert resumed.next == alone[number + 1].next and resumed.passes == alone[number + 1].passes
    passes = [update.passes for update in alone]
    assert passes == sorted(set(passes)) and passes[0] == 0.0
    with user_error("training stopped at micro-batch 4194304 of epoch 0, which now has"):
        training_stream(sharded, data).update(Position(0, 4 * WINDOW), 1, 0, 1, CPU)


def test_the_next_window_is_planned_in_the_background(plain: Recipe) -> None:
    data, made = open_prepared(plain), []
    stream = training_stream(plain, data)
    plan = stream._make

    def watched(epoch: int, window: int) -> Any:
        made.append((epoch, window, threading.current_thread() is threading.main_thread()))
        return plan(epoch, window)

    stream._make = watched  # type: ignore[method-assign]
    position = START
    while position.epoch < 1:
        position = stream.update(position, 1, 0, 1, CPU).next
    stream.update(position, 1, 0, 1, CPU)
    assert made[0] == (0, 0, True) and made[1:5] == [(0, 1, False), (0, 2, False), (0, 3, False), (1, 0, False)]


def train_until(update: str, *arguments: str) -> int:
    """`deepnmt train`, killed when it has computed this update and before its checkpoint has its name."""
    kill_before(1, f"update-{int(update):08d}", "os.rename")
    return train(*arguments)


def test_training_killed_in_every_window(plain: Recipe, tmp_path: Path, warm: Warm) -> None:
    """kill -9 in each of the windows; a run that goes on after it is the run that was not killed."""
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(plain), encoding="utf-8")
    changed = ["batch.accumulation=9", "train.validate_every=100", "train.save_every=1", "train.updates=9"]
    windows = set()
    warm.train(1, file, f"run={tmp_path / 'whole'}", *changed)
    assert warm.wait() == [0], warm.said()
    for update in (2, 4, 6, 8):
        warm.start(1, "test_data_shards:train_until", update, file, f"run={tmp_path / 'broken'}", *changed)
        assert warm.wait() == [-9], warm.said()
        newest = list_checkpoints(tmp_path / "broken" / "checkpoints")[-1]
        state = json.loads((newest / "state.json").read_text())
        assert newest.name == f"update-{update - 1:08d}"
        windows.add(state["micro_batch"] // WINDOW)
    warm.train(1, file, f"run={tmp_path / 'broken'}", *changed)
    assert warm.wait() == [0], warm.said()
    assert windows == {0, 1, 2, 3}
    weights = [(list_checkpoints(tmp_path / run / "checkpoints")[-1] / WEIGHTS).read_bytes()
               for run in ("whole", "broken")]
    assert weights[0] == weights[1]


# -- parts -------------------------------------------------------------------------------------------------------------


def _corpus(folder: Path, name: str, lines: int, seed: int) -> dict[str, str]:
    """Two files of short sentences, many of which are there twice, some empty, and some in other corpora, too."""
    draw = random.Random(seed)
    sides: list[list[str]] = [[], []]
    for _ in range(lines):
        words = draw.choices(WORDS, k=draw.choice((0, 1, 2, 5, 9)))
        for side, sentences in zip((words, words[::-1]), sides, strict=True):
            sentences.append(" ".join(side))
    files = {"src": str(folder / f"{name}.en"), "trg": str(folder / f"{name}.de")}
    for file, sentences in zip(files.values(), sides, strict=True):
        Path(file).write_text("\n".join(sentences) + "\n" * (seed % 2), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("texts")
    return {"news": _corpus(folder, "news", 230, 1), "web": _corpus(folder, "web", 410, 2)}


def _recipe(prepared: Path, folder: Path, train: dict[str, Any], **data: Any) -> Recipe:
    recipe = recipe_of(prepared, folder, **{"train": train, "shard_pairs": 100, **data})
    return recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update={"size": 60})})


def _prepared(recipe: Recipe) -> dict[str, bytes]:
    prepare(recipe)
    assert not parts_folder(Path(recipe.data.folder)).exists()
    return contents(Path(recipe.data.folder))


def test_parts_in_any_order_give_the_bytes_of_one_call(prepared: Path, texts: dict[str, Any], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    whole = _prepared(_recipe(prepared, tmp_path / "whole", texts))
    recipe = _recipe(prepared, tmp_path / "parts", texts)
    for number in (3, 1, 1, 2, 3):
        prepare(recipe, Part(number, 3))
        assert not Path(recipe.data.folder).exists()
    said = capsys.readouterr().err
    assert ("part 3 of 3 has done what it can; 6 of 8 units are not read yet, train.news.00000 among them; give the "
            "same command again when they have") in said
    assert "training the vocabulary of 60 bpe pieces\n" in said  # not: on some of the pairs
    prepare(recipe, Part(1, 3))
    assert contents(Path(recipe.data.folder)) == whole
    prepare(recipe, Part(2, 3))
    assert "is complete" in capsys.readouterr().err
    assert _prepared(_recipe(prepared, tmp_path / "two", texts, workers=2)) == whole
    manifest = json.loads(whole["manifest.json"])
    assert manifest["splits"]["train"]["read"] == 640 and list(manifest["shards"]) == ["news", "web"]
    PreparedData.open(recipe.data.folder).verify()


def test_the_same_pairs_are_left_out_as_of_one_piece(prepared: Path, texts: dict[str, Any], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates across units and corpora are found in ranges of hashes."""
    monkeypatch.setattr(parts, "BUCKET", 50)
    valid = {name: text(prepared, name) for name in ("valid", "test")}
    one = _prepared(_recipe(prepared, tmp_path / "one", texts, shard_pairs=0, valid=valid))
    many = _prepared(_recipe(prepared, tmp_path / "many", texts, valid=valid))
    assert one["src.spm"] == many["src.spm"]
    for side in ("src", "trg"):
        name = f"train.{side}.tokens"
        shards = sorted(file for file in many if file.endswith(f"/{name}"))
        assert len(shards) == 8 and b"".join(many[shard] for shard in shards) == one[name]
    then, now = (json.loads(folder["manifest.json"]) for folder in (one, many))
    assert then["splits"] == now["splits"] and then["splits"]["train"]["left_out"]["duplicate"] > 20
    assert then["inputs"] == now["inputs"]


@pytest.mark.parametrize("number", [5, 25, 70])
def test_killed_and_called_again(prepared: Path, texts: dict[str, Any], tmp_path: Path, number: int) -> None:
    """kill -9 before a change of a file, in each of the steps; then the same command finishes the same bytes."""
    whole = _prepared(_recipe(prepared, tmp_path / "whole", texts))
    recipe = _recipe(prepared, tmp_path / "killed", texts)
    child = os.fork()
    if not child:
        kill_before(number, tmp_path / "killed")
        prepare(recipe)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not Path(recipe.data.folder).exists() and parts_folder(Path(recipe.data.folder)).exists()
    assert _prepared(recipe) == whole


def test_another_process_finishes_while_this_one_waits(
    prepared: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has removed the folder with the lock, which one that waits then does not find; the data are complete."""
    recipe = _recipe(prepared, tmp_path / "a", texts)
    alone, turns = parts._alone, iter(range(3))

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        if next(turns) == 2:
            monkeypatch.setattr(parts, "_alone", alone)
            prepare(recipe)
            raise FileNotFoundError(folder)
        with alone(folder):
            yield

    monkeypatch.setattr(parts, "_alone", late)
    assert parts.prepare_in_parts(recipe, Path(recipe.data.folder))
    assert _prepared(recipe)


def test_the_sample_of_the_vocabulary_is_drawn_by_hash(prepared: Path, texts: dict[str, Any], tmp_path: Path) -> None:
    def vocabulary(most: int, name: str, **data: Any) -> bytes:
        recipe = _recipe(prepared, tmp_path / name, texts, **data)
        return _prepared(recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update={
            "size": 40, "max_sentences": most})}))["src.spm"]

    few = vocabulary(500, "a")
    assert few == vocabulary(500, "b", shard_pairs=37) != vocabulary(10_000, "c")


def test_a_sample_may_begin_with_what_files_that_are_no_text_begin_with(prepared: Path, tmp_path: Path) -> None:
    """The first sentence of a unit may be left out, and the second, which is no first line of a text, be `%PDF-1`."""
    files = _corpus(tmp_path, "some", 50, 1)
    for file in files.values():
        lines = Path(file).read_text(encoding="utf-8")
        Path(file).write_text(f"\n%PDF-1 {len(file)} {Path(file).suffix}\n{lines}", encoding="utf-8")
    assert _prepared(_recipe(prepared, tmp_path, {"some": files}))


def test_what_is_there_is_not_encoded_again(prepared: Path, texts: dict[str, Any], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = parts.encode_text
    monkeypatch.setattr(parts, "encode_text", lambda folder, name, *rest: (
        encoded.append(folder.name.split("-")[1] if name == "train" else ""), encode(folder, name, *rest))[1])

    def make(name: str, train: dict[str, Any], **data: Any) -> set[str]:
        encoded.clear()
        recipe = _recipe(prepared, tmp_path / name, train, **data)
        _prepared(recipe)
        PreparedData.open(recipe.data.folder).verify()
        return {shard.rpartition(".")[0] for shard in encoded if shard}

    assert make("old", texts) == {"train.news", "train.web"}
    more = {**texts, "talks": _corpus(tmp_path, "talks", 120, 3)}
    reuse = [str(tmp_path / "old" / "data")]
    assert make("more", more, reuse=reuse) == {"train.talks"}
    assert make("weights", {**texts, "web": {**texts["web"], "weight": 2.0}}, reuse=reuse) == set()
    assert make("fewer", {"news": texts["news"]}, reuse=[str(tmp_path / "more" / "data")]) == set()
    (tmp_path / "old" / "data" / "train.news.00000" / "train.src.tokens").stat()
    with user_error(r"data.reuse names .*, which was made with vocab.size 60, but the recipe has 61"):
        recipe = _recipe(prepared, tmp_path / "other", texts, reuse=reuse)
        prepare(recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update={"size": 61})}))
    # once the vocabulary is taken from it, that folder may go
    late = _recipe(prepared, tmp_path / "late", more, reuse=reuse)

    def all_but_encoding(work: parts.Work, units: Sequence[Any], step: Any) -> None:
        for unit in units if step is parts.read_unit else ():
            step(work, unit)

    assert "are not encoded yet" in parts.prepare_in_steps(late, Path(late.data.folder), all_but_encoding)
    (tmp_path / "old").rename(tmp_path / "gone")
    prepare(late)
    assert PreparedData.open(late.data.folder).fingerprint == PreparedData.open(tmp_path / "more/data").fingerprint


def test_packed_files_tables_and_files_that_share_a_shard(
    prepared: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    src, trg = (Path(texts["web"][side]).read_text(encoding="utf-8").splitlines() for side in ("src", "trg"))
    halves = {side: [str(tmp_path / f"{half}.{side}.gz") for half in "ab"] for side in ("src", "trg")}
    for side, lines in (("src", src), ("trg", trg)):
        for file, part in zip(halves[side], (lines[:130], lines[130:]), strict=True):
            with gzip.open(file, "wt", encoding="utf-8") as stream:
                stream.write("".join(f"{line}\n" for line in part))
    table = tmp_path / "web.tsv"
    table.write_text("".join(f"{b}\tx\t{a}\n" for a, b in zip(src, trg, strict=True)), encoding="utf-8")
    plain = _prepared(_recipe(prepared, tmp_path / "plain", {"web": texts["web"]}))
    for name, corpus in (("packed", halves), ("table", {"tsv": str(table), "columns": [3, 1]})):
        same = _prepared(_recipe(prepared, tmp_path / name, {"web": corpus}))
        arrays = {file for file in plain if not file.endswith("manifest.json")}
        assert arrays == {file for file in same if not file.endswith("manifest.json")}
        assert all(plain[file] == same[file] for file in arrays)
    folders = [PreparedData.open(tmp_path / name / "data").fingerprint for name in ("plain", "packed", "table")]
    assert len(set(folders)) == 1, "the fingerprint is that of the content"


@pytest.mark.parametrize("name", ["news.en", "valid.de"])
def test_a_text_that_changes_between_the_parts_is_refused(name: str, prepared: Path, tmp_path: Path) -> None:
    """With the same size, so that nothing but its hash shows it."""
    train = {"news": _corpus(tmp_path, "news", 90, 1), "web": _corpus(tmp_path, "web", 90, 2)}
    valid = {"src": str(tmp_path / "valid.en"), "trg": str(tmp_path / "valid.de")}
    for side, file in valid.items():
        Path(file).write_text(Path(text(prepared, "valid")[side]).read_text(encoding="utf-8"), encoding="utf-8")
    recipe = _recipe(prepared, tmp_path, train, valid=valid)
    prepare(recipe, Part(2, 2))
    content = (tmp_path / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(content.replace("a", "o"), encoding="utf-8")
    with user_error(f"{name} changed while it was prepared, so nothing was kept; wait until nothing writes it any"):
        prepare(recipe)
    assert not (tmp_path / "data").exists() and not (tmp_path / "data.parts").exists()
    prepare(recipe)
    prepare(recipe)  # up to date with what it is now


@pytest.mark.slow
def test_dask_gives_the_same_bytes(prepared: Path, texts: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("dask", reason="Dask is not installed: pip install 'deepnmt[dask]'")
    whole = _prepared(_recipe(prepared, tmp_path / "whole", texts))
    recipe = _recipe(prepared, tmp_path / "dask", texts)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    script = Path(__file__).parents[2] / "recipes" / "launch" / "prepare_with_dask.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "recipe.yaml")], check=True, timeout=600)
    assert contents(Path(recipe.data.folder)) == whole


def test_marks_are_where_lines_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.data.sources.BLOCK", 17)
    file, draw = tmp_path / "text", random.Random(5)
    lines = [b"x" * draw.randrange(9) for _ in range(200)]
    for end in (b"", b"\n"):
        content = b"\n".join(lines) + end
        file.write_bytes(content)
        found = scan(file, 13, 10)
        assert found.lines == 200 and found.bytes == len(content)
        starts = np.cumsum([0, *(len(line) + 1 for line in lines)]).tolist()
        due = {number: starts[number] for number in range(1, 200) if (13 + number) % 10 == 0}
        assert {number: start for number, start in found.marks.items() if number < 200} == due


# -- mistakes and damage -----------------------------------------------------------------------------------------------


def test_windows_that_cannot_be_numbered(plain: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.data.windows.WINDOWS", 2)
    with user_error("^data.window_pairs is .*, so an epoch has 4 windows, but at most 2 can be numbered; set it to "
                    r"\d+ or more$"):
        training_stream(plain, open_prepared(plain)).update(START, 200, 0, 1, CPU)


def test_damage_is_noticed_when_a_shard_is_read(plain: Recipe, prepared: Path, tmp_path: Path) -> None:
    recipe = recipe_of(prepared, tmp_path, shard_pairs=100, window_pairs=160)
    prepare(recipe)
    file = tmp_path / "data" / "train.00003" / "train.src.tokens"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    data = open_prepared(recipe)
    data.verify_as_read()
    stream = training_stream(recipe, data)
    with user_error(r"shard of prepared data .*train.00003 is damaged: the SHA-256 of train.src.tokens differs"):
        stream.update(START, 200, 0, 1, CPU)
    with user_error("the SHA-256 of train.src.tokens differs"):
        PreparedData.open(recipe.data.folder).verify()
    file.write_bytes(b"")
    with user_error("train.src.tokens has 0 bytes"):
        training_stream(recipe, open_prepared(recipe)).update(START, 200, 0, 1, CPU)
    text = PreparedData.open(plain.data.folder).train
    assert isinstance(text, ShardedText)
    with user_error("is another shard than the manifest of the whole names"):
        Shard(Path(plain.data.folder) / "train.00001", text._shards[""][0])


def test_mistakes(prepared: Path, plain: Recipe, texts: dict[str, Any], tmp_path: Path, refused: Refused) -> None:
    for part, words in (("3", "--part is '3', must be NUMBER/COUNT"), ("0/4", "are numbered 1 to 4"),
                        ("5/4", "are numbered 1 to 4")):
        assert words in refused("prepare", prepared / "recipe.yaml", "--part", part)
    assert "data.shard_pairs is 0, so that the text is one piece" in refused(
        "prepare", prepared / "recipe.yaml", "--part", "1/2", f"data.folder={tmp_path / 'none'}")
    with user_error("was made with data.shard_pairs 100, but the recipe has None"):
        open_prepared(plain.model_copy(update={"data": plain.data.model_copy(update={"shard_pairs": 0})}))
    with user_error(r"data: reuse \(old\) has no effect on a text in one piece; set shard_pairs as it was there"):
        _recipe(prepared, tmp_path, texts, reuse="old", shard_pairs=0)
    recipe = _recipe(prepared, tmp_path / "begun", texts)
    prepare(recipe, Part(1, 2))
    with user_error(r"begun/data.parts holds what was prepared of other texts or with other settings; delete it"):
        prepare(_recipe(prepared, tmp_path / "begun", {"news": texts["news"]}), Part(1, 2))
    (tmp_path / "begun" / "data.parts" / "index.json").write_bytes(b"")  # as after a power failure
    with user_error(r"begun/data.parts is damaged: index.json cannot be read .*; delete the folder and run deepnmt"):
        prepare(recipe, Part(1, 2))
    file = Path(texts["news"]["src"])
    unequal = {"src": str(file), "trg": texts["web"]["trg"]}
    with user_error(r"news.en has 230 lines and .*web.de has 410; line N of one must belong to line N of"):
        prepare(_recipe(prepared, tmp_path / "unequal", {"a": unequal}))


def _with_vocab(recipe: Recipe, **vocab: Any) -> Recipe:
    return recipe.model_copy(update={"vocab": recipe.vocab.model_copy(update=vocab)})


def test_mistakes_are_told_before_the_text_is_read(prepared: Path, plain: Recipe, texts: dict[str, Any],
                                                   tmp_path: Path) -> None:
    """Nothing is begun then, so that the corrected recipe is not refused for the parts of the wrong one."""
    other, valid = str(tmp_path / "other"), text(prepared, "valid", tag="<2de>")
    Path(other).mkdir()
    (tmp_path / "other" / "note").touch()
    recipe = _recipe(prepared, tmp_path / "new", texts)
    for wrong, said in (
        (_recipe(prepared, tmp_path / "new", texts, reuse="nowhere"),
         "data.reuse names nowhere, where there is no prepared data; correct its path, or remove it from data.reuse"),
        (_recipe(prepared, tmp_path / "new", texts, reuse=other), f"data.reuse names {other}: .* no manifest.json"),
        (_recipe(prepared, tmp_path / "new", texts, reuse=plain.data.folder), "made with vocab.size .* recipe has 60;"),
        (_with_vocab(recipe, model="nowhere"), "vocab.model is nowhere, where there is no vocabulary"),
        (_recipe(prepared, tmp_path / "new", texts, valid=valid), "data.valid has the tag '<2de>', which is not"),
    ):
        with user_error(said):
            prepare(wrong, Part(1, 2))
        assert not parts_folder(Path(recipe.data.folder)).exists()


def test_data_are_reused_whose_vocabulary_was_given(prepared: Path, plain: Recipe, texts: dict[str, Any],
                                                    tmp_path: Path) -> None:
    """Then neither its size nor how it was learned is known, and only its kind has to be that of the recipe."""
    old = _with_vocab(_recipe(prepared, tmp_path / "old", texts), model=plain.data.folder)
    prepare(old)
    new = _recipe(prepared, tmp_path / "new", texts, reuse=old.data.folder)
    with user_error("was made with vocab.kind bpe, but the recipe has unigram; set it to that, or remove data.reuse"):
        prepare(_with_vocab(new, kind="unigram"))
    prepare(new)
    assert (tmp_path / "new" / "data" / "src.spm").read_bytes() == (tmp_path / "old" / "data" / "src.spm").read_bytes()
