"""Several corpora by name: shares, tags, and one corpus, which gives what it always gave."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from corpus_recipes import recipe_of, text, tree_of
from refusals import user_error
from run_files import losses

from deepnmt.checkpoint.checkpoint import WEIGHTS, list_checkpoints
from deepnmt.cli import COMMANDS, main
from deepnmt.config import Recipe, check_recipe, dump_recipe, load_recipe
from deepnmt.data.arrays import Side, SideWriter
from deepnmt.data.batching import Position, Stream
from deepnmt.data.mixing import Mixture, training_stream
from deepnmt.data.parts import Part
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.steppers import CachedStepper
from deepnmt.decode.translate import translate_lines
from deepnmt.evaluate.metrics import make_scorers
from deepnmt.model.init import new_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A small and a large corpus, the small one tagged and used six times as often; validation of two corpora."""
    folder = tmp_path_factory.mktemp("mixed")
    recipe = recipe_of(
        prepared, folder, subword_variants=2,
        train={"large": text(prepared, "train"), "small": text(prepared, "test", weight=6.0, tag="<BT>")},
        valid={"plain": text(prepared, "valid"), "tagged": text(prepared, "test", tag="<BT>", trg_lang="zh")})
    prepare(recipe)
    return recipe


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_shares_of_a_thousand_micro_batches(temperature: float) -> None:
    sizes, weights = [20_000, 3_000, 700], [1.0, 3.0, 2.0]
    weighted = np.array(sizes) * weights
    due = (weighted / weighted.sum()) ** (1 / temperature)
    due /= due.sum()
    mixture = Mixture(sizes, weights, temperature)
    assert sum(mixture.counts()) == sum(sizes)
    lengths = np.random.RandomState(1).randint(5, 40, sum(sizes)).astype(np.int32)

    class Split:
        name, src_lengths, trg_lengths = "train", lengths, lengths

        def __len__(self) -> int:
            return len(lengths)

        def windows(self, epoch: int) -> int:
            return 1

        def window(self, epoch: int, number: int) -> Any:
            return self

    stream: Any = Stream(Split(), 1024, 1, lambda epoch: mixture.rows(1, epoch))  # type: ignore[arg-type]
    used, epoch, index = [], 0, 0
    for _ in range(1000):
        if index == stream.epoch_size(epoch):
            epoch, index = epoch + 1, 0
        used.append(stream.plan(epoch)[index])
        index += 1
    corpora = np.searchsorted(np.cumsum(sizes), np.concatenate(used), side="right")
    found = np.bincount(corpora) / len(corpora)
    assert np.abs(found / due - 1).max() < 0.01


@pytest.mark.parametrize(("weights", "temperature", "due"), [
    ([1.0, 1.0], 1e-3, [4000, 0]), ([1e-5, 1e-5], 1e-3, [4000, 0]), ([1e308, 1.0], 1.0, [4000, 0]),
    ([1.0, 3.0], 1e-3, [2000, 2000])])
def test_shares_beyond_the_range_of_numbers(weights: list[float], temperature: float, due: list[int]) -> None:
    assert Mixture([3000, 1000], weights, temperature).counts() == due


def test_every_pair_of_a_corpus_is_used_equally_often() -> None:
    mixture = Mixture([50, 7], [1.0, 4.0])
    rows = np.concatenate([mixture.rows(3, epoch) for epoch in range(9)])
    used = np.bincount(rows, minlength=57)
    for part in (used[:50], used[50:]):
        assert part.max() - part.min() <= 1 and part.min() > 0
    assert np.array_equal(mixture.rows(3, 5), Mixture([50, 7], [1.0, 4.0]).rows(3, 5))
    assert not np.array_equal(mixture.rows(3, 5), mixture.rows(4, 5))


def test_equal_weights_change_nothing() -> None:
    assert Mixture([5, 9, 2], [2.0, 2.0, 2.0]).counts() == [5, 9, 2]
    assert Mixture([5, 9, 2], [1.0, 1.0, 1.0]).rows(1, 7).tolist() == list(range(16))


def test_the_plan_is_pure(mixed: Recipe) -> None:
    """From any position, and dealt to any number of processes, the same micro-batches follow."""
    data = open_prepared(mixed)
    sizes = [training_stream(mixed, data).epoch_size(epoch) for epoch in range(2)]
    whole = training_stream(mixed, data).update(Position(0, 0), sum(sizes), 0, 1, CPU).batches
    begin = sizes[0] - 5
    resumed = training_stream(mixed, data).update(Position(0, begin), 16, 0, 1, CPU)
    dealt = [training_stream(mixed, data).update(Position(0, begin), 16, rank, 8, CPU).batches for rank in range(8)]
    for number, batch in enumerate(resumed.batches):
        for other in (whole[begin + number], dealt[number % 8][number // 8]):
            assert other.key == batch.key
            assert all(torch.equal(a, b) for a, b in zip(other.tensors.values(), batch.tensors.values(), strict=True))


def test_shares_of_prepared_data(mixed: Recipe) -> None:
    data = open_prepared(mixed)
    large, small = data.corpora("train").values()
    stream = training_stream(mixed, data)
    rows = np.concatenate([stream.plan(0)[m] for m in range(stream.epoch_size(0))])
    assert len(rows) == large + small
    assert (rows >= large).mean() == pytest.approx(6 * small / (large + 6 * small), abs=0.51 / len(rows))


# -- one corpus --------------------------------------------------------------------------------------------------------


def test_one_corpus_with_a_name_gives_the_same_bytes(prepared: Path, tmp_path: Path) -> None:
    recipe = recipe_of(prepared, tmp_path, train={"only": text(prepared, "train", weight=3.0)})
    prepare(recipe)
    files = {file.name for file in (prepared / "data").iterdir()}
    assert {file.name for file in (tmp_path / "data").iterdir()} == files
    for name in files - {"manifest.json"}:
        assert (tmp_path / "data" / name).read_bytes() == (prepared / "data" / name).read_bytes(), name
    plain = load_recipe(prepared / "recipe.yaml")
    for one, other in zip(training_stream(plain, open_prepared(plain)).update(Position(0, 0), 40, 0, 1, CPU).batches,
                          training_stream(recipe, open_prepared(recipe)).update(Position(0, 0), 40, 0, 1, CPU).batches):
        assert one.key == other.key and all(torch.equal(one[name], other[name]) for name in one.tensors)


# -- tags --------------------------------------------------------------------------------------------------------------


def test_a_tag_is_one_piece_in_front_of_the_source(mixed: Recipe, prepared: Path) -> None:
    data = open_prepared(mixed)
    vocab, _ = data.vocabs()
    tag = vocab.tags["<BT>"]
    assert vocab.tags == {"<BT>": 4} and vocab.encode("<BT> the dog") == [tag, *vocab.encode("the dog")]
    assert tag not in vocab.encode("the <BT> dog <BT>") and vocab.encode("<BT>") == [tag]
    assert vocab.decode([tag, *vocab.encode("the dog")]) == "the dog"
    large = data.corpora("train")["large"]
    for split in (data.split("train"), data.split("train").variant(0), data.split("train").variant(1)):
        firsts = [int(split.sources[i][0]) for i in range(len(split))]
        assert tag not in firsts[:large] and set(firsts[large:]) == {tag}
        assert not any(tag in split.targets[i] for i in range(len(split)))
    assert data.split("valid").src_text()[20].startswith("<BT> ")


class Tagger(CachedStepper):
    """Would write nothing but tags."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().step(tokens)
        logits[:, 4] = 100.0
        return logits


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_a_tag_never_comes_out(mixed: Recipe, method: str) -> None:
    vocabs = open_prepared(mixed).vocabs()
    model = new_model(mixed.model, vocabs[0].size, vocabs[1].size, 1)
    settings = mixed.translate.model_copy(update={"method": method})
    lines = ["the dog sees the house", "<BT> the dog", "<BT>"]
    plain, tagged = (translate_lines(model, vocabs, lines, settings, stepper=stepper)
                     for stepper in (CachedStepper, Tagger))
    # a beam compares log-probabilities, of which tags have their share; the others choose among what is left
    assert method == "beam" or [best[0].text for best in tagged] == [best[0].text for best in plain]
    assert not any(piece in vocabs[1].tags for best in tagged for piece in best[0].pieces)
    assert all(best[0].text for best in tagged[:2]) and tagged[2][0].text == ""


def test_validation_by_corpus_and_resuming_in_an_epoch(
    mixed: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped and resumed is the run that was not, and its log has the figures of each corpus, which is
    scored in its own language."""
    langs: list[str] = []
    monkeypatch.setattr("deepnmt.tasks.translation.validate.make_scorers",
                        lambda lang: langs.append(lang) or make_scorers(lang))
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(mixed), encoding="utf-8")
    for run, ends in (("whole", [9]), ("broken", [4, 9])):
        for updates in ends:
            assert main("train", [str(file), f"run={tmp_path / run}", f"train.updates={updates}"]) == 0
    logs = {}
    for run in ("whole", "broken"):
        lines = [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        logs[run] = {line["update"]: line["loss"] for line in lines if line["type"] == "train"}
        valid = [line for line in lines if line["type"] == "valid"][-1]
        assert {"plain/loss", "tagged/loss", "plain/bleu", "tagged/bleu"} <= valid.keys()
        assert valid["bleu"] == pytest.approx((valid["plain/bleu"] + valid["tagged/bleu"]) / 2)
        assert min(valid["plain/loss"], valid["tagged/loss"]) <= valid["loss"] <= max(valid["plain/loss"],
                                                                                     valid["tagged/loss"])
    assert logs["whole"] == logs["broken"] and len(logs["whole"]) == 9
    assert set(langs) == {"de", "zh"}
    weights = [(list_checkpoints(tmp_path / run / "checkpoints")[-1] / WEIGHTS).read_bytes()
               for run in ("whole", "broken")]
    assert weights[0] == weights[1]
    with user_error("data.train.corpora.small.weight: 6.0 -> 2.0"):
        COMMANDS["train"]([str(tmp_path / "whole"), "data.train.small.weight=2.0", "train.updates=10"])


# -- large vocabularies ------------------------------------------------------------------------------------------------


def test_tokens_of_a_large_vocabulary_have_32_bits(tmp_path: Path) -> None:
    tokens = np.array([4, 65_535, 65_536, 70_000], dtype=np.uint32)
    for name, size, suffix in (("a", 65_536, "tokens"), ("b", 65_537, "tokens32")):
        some = tokens[tokens < size] if size == 65_536 else tokens
        SideWriter(tmp_path, name, size).add(some, np.array([1, len(some) - 1]))
        assert (tmp_path / f"{name}.{suffix}").stat().st_size == (4 if size == 65_536 else 16)
    files = [file.name for file in tmp_path.iterdir()]
    assert Side(tmp_path, files, "a")[1].tolist() == [65_535]
    assert Side(tmp_path, files, "b")[1].tolist() == [65_535, 65_536, 70_000]


def with_characters(model: bytes, count: int) -> bytes:
    """A BPE model with `count` characters more, U+20000 and those after it. Its file is a protocol buffer, so pieces
    (field 1: text, score, kind) can be appended."""
    def piece(number: int) -> bytes:
        text = chr(0x20000 + number).encode()
        fields = bytes([10, len(text)]) + text + b"\x15" + struct.pack("<f", -9e4 - number) + b"\x18\x01"
        return bytes([10, len(fields)]) + fields

    return model + b"".join(map(piece, range(count)))


def test_a_run_with_a_large_vocabulary(prepared: Path, tmp_path: Path) -> None:
    """Prepared, dealt out and trained on: the ids arrive as they were, and the loss is that of the first model."""
    model, draw = with_characters((prepared / "data" / "src.spm").read_bytes(), 66_000), np.random.RandomState(1)
    (tmp_path / "large.spm").write_bytes(model)
    for side in ("en", "de"):
        lines = ["".join(map(chr, 0x20000 + draw.randint(0, 66_000, 9))) for _ in range(40)]
        (tmp_path / f"text.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given = [str(prepared / "recipe.yaml"), f"run={tmp_path}/run", f"data.folder={tmp_path}/data", "data.test={}",
             *(f"data.{split}={{src: {tmp_path}/text.en, trg: {tmp_path}/text.de}}" for split in ("train", "valid")),
             f"vocab.model={tmp_path}/large.spm", "model.width=8", "model.dropout=0.0", "model.encoder.block=pre_ln",
             "model.decoder.block=pre_ln", "train.updates=1", "train.valid_bleu=false"]
    recipe = load_recipe(given[0], given[1:])
    prepare(recipe)
    data, vocab = open_prepared(recipe), Vocabulary(model)
    assert (tmp_path / "data" / "train.src.tokens32").exists() and vocab.size == 66_300
    batch = training_stream(recipe, data).batch(0, 0, CPU)
    for ids, side in ((batch["src"], "en"), (batch["trg_out"], "de")):
        known = vocab.encode_batch((tmp_path / f"text.{side}").read_text(encoding="utf-8").splitlines())
        assert all(row in known for row in ids[:, :-1].tolist()) and ids.max() >= 65_536
    sums = new_model(recipe.model, vocab.size, vocab.size, recipe.seed, 0.1)(batch)
    assert main("train", given) == 0
    assert losses(tmp_path / "run")[1] == pytest.approx(sums.loss.item() / batch.tokens, rel=1e-5)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "said"), [
    ({"train": {"a": {"src": "x", "trg": "y", "weight": 0.0}}}, "data.train.corpora.a.weight: is 0.0, must be greater"),
    ({"train": {"a": {"src": "x", "trg": "y", "wieght": 2}}}, "wieght: unknown setting; did you mean .*weight"),
    ({"train": {"a": {"src": "x"}}}, "data.train.corpora.a: give 'src' and 'trg' files"),
    ({"train": {"a": {"src": "x", "trg": "y"}, "src": "x", "trg": "y"}}, "give either one corpus .src, trg., or"),
    ({"train": {"a": {"src": "x", "trg": "y"}, "columns": [2, 1]}}, "give either one corpus .columns., or corpora by"),
    ({"valid": {"a": {"src": "x", "trg": "y"}, "trg_lang": "zh"}}, "give either one corpus .trg_lang., or corpora by"),
    ({"train": {"a": {"src": "x", "trg": "y"}, "corpora": 5}}, "data.train.corpora: is 5"),
    ({"train": {"a": {"src": "x", "trg": "y"}, "corpora": {"a": [1]}}}, "data.train.corpora.a: is .1."),
    ({"train": {"a/b": {"src": "x", "trg": "y"}}}, "a corpus's name has letters"),
    ({"train": {"a": {"src": "x", "trg": "y", "tag": "<2 de>"}}}, "data.train.corpora.a.tag"),
])
def test_mistakes_in_a_recipe(prepared: Path, tmp_path: Path, data: dict[str, Any], said: str) -> None:
    with user_error(said):
        recipe_of(prepared, tmp_path, **data)


def test_mistakes_that_the_text_shows(prepared: Path, tmp_path: Path, mixed: Recipe) -> None:
    for name in ("<unk>", "<s>", "<0x41>"):
        with user_error(f"the tag '{name}' is a piece of the vocabulary that stands for something else"):
            prepare(recipe_of(prepared, tmp_path, train={"a": text(prepared, "train", tag=name)}))
    with user_error("the tag 'e' is a single character, which no text could have any more; give it a longer name"):
        prepare(recipe_of(prepared, tmp_path, train=text(prepared, "train", tag="e")))
    with user_error("data.valid has the tag '<2fr>', which is not a piece of the vocabulary, whose tags are <2de>"):
        prepare(recipe_of(prepared, tmp_path, train={"a": text(prepared, "train", tag="<2de>")},
                          valid=text(prepared, "valid", tag="<2fr>")))
    for side in ("en", "de"):
        (tmp_path / f"empty.{side}").write_text("\n\n", encoding="utf-8")
    with user_error(r"data.filters leave out all pairs of none \(empty 2\) in data.train"):
        none = {"src": str(tmp_path / "empty.en"), "trg": str(tmp_path / "empty.de")}
        prepare(recipe_of(prepared, tmp_path, train={"a": text(prepared, "train"), "none": none}))
    with user_error(r"two\.yaml is not valid YAML: .*'a' is given twice"):
        (tmp_path / "two.yaml").write_text("data:\n  train:\n    a: {src: x, trg: y}\n    a: {src: x, trg: y}\n")
        load_recipe(tmp_path / "two.yaml")
    tree = yaml.safe_load(dump_recipe(mixed))
    tree["data"]["train"]["corpora"]["small"]["tag"] = None
    with user_error("was made with data.train.corpora"):
        open_prepared(check_recipe(tree, "recipe"))
    shutil.rmtree(tmp_path / "data", ignore_errors=True)


@pytest.mark.parametrize("shard_pairs", [0, 50])
def test_a_file_that_moves_to_another_corpus(prepared: Path, tmp_path: Path, shard_pairs: int) -> None:
    """All files are the same, in the same order, but not the tags of their sentences."""
    def of(first: int) -> Recipe:
        files = [text(prepared, name) for name in ("train", "test", "valid")]
        corpora = {}
        for name, some in (("a", files[:first]), ("b", files[first:])):
            corpora[name] = {side: [file[side] for file in some] for side in ("src", "trg")} | {"tag": f"<{name}>"}
        return recipe_of(prepared, tmp_path, train=corpora, valid=text(prepared, "valid"), shard_pairs=shard_pairs)

    if shard_pairs:
        prepare(of(1), Part(1, 2))
        with user_error("data.parts holds what was prepared of other texts"):
            prepare(of(2), Part(2, 2))
    prepare(of(1))
    with user_error("was made from other texts than the recipe's data.train names"):
        prepare(of(2))
    with user_error("was made from other texts than the recipe's data.train names"):
        open_prepared(of(2))
    prepare(of(1))  # up to date


def test_pretagged_text(prepared: Path, tmp_path: Path) -> None:
    """Tags that stand in the text itself are listed in the recipe; the overlap is that of what comes after them."""
    for side in ("en", "de"):
        lines = (prepared / "text" / f"train.{side}").read_text(encoding="utf-8").splitlines()
        (tmp_path / f"t.{side}").write_text("".join(f"{'<2de> ' * (side == 'en')}{line}\n" for line in lines))
    tree = tree_of(prepared, tmp_path, train={"src": str(tmp_path / "t.en"), "trg": str(tmp_path / "t.de")})
    tree["vocab"] = {"size": 300, "tags": ["<2de>"]}
    prepare(check_recipe(tree, "recipe"))
    data = PreparedData.open(tmp_path / "data")
    assert {int(data.split("train").sources[i][0]) for i in range(50)} == {4}
    assert Vocabulary.load(tmp_path / "data" / "src.spm").tags == {"<2de>": 4}
    plain = {side: (prepared / "text" / f"train.{side}").read_text(encoding="utf-8") for side in ("en", "de")}
    for name, (src, trg) in {"untagged": (plain["en"], "x\n" * plain["en"].count("\n")),
                             "tagged": (Path(tmp_path / "t.en").read_text(encoding="utf-8"), plain["de"])}.items():
        (tmp_path / f"{name}.en").write_text(src, encoding="utf-8")
        (tmp_path / f"{name}.de").write_text(trg, encoding="utf-8")
        tree["data"] |= {"folder": str(tmp_path / f"data-{name}"), "shard_pairs": 200 if name == "tagged" else 0,
                         "valid": {"src": str(tmp_path / f"{name}.en"), "trg": str(tmp_path / f"{name}.de")}}
        train = PreparedData.open(prepare(check_recipe(tree, "recipe"))).manifest["splits"]["train"]
        assert train["overlap"] == train["read"] - train["left_out"]["empty"] - train["left_out"]["identical"]
