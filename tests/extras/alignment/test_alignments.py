"""Word alignments: read and checked, kept beside the pieces, and mapped to them for micro-batches."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus_recipes import recipe_of, text
from refusals import user_error

from deepnmt.config import Recipe
from deepnmt.data.batching import START
from deepnmt.data.mixing import training_stream
from deepnmt.data.prepare import prepare
from deepnmt.data.prepared import PreparedData
from deepnmt.data.text import read_pairs
from deepnmt.data.vocab import SPACE
from deepnmt.extras.alignment.annotations import Links
from deepnmt.extras.alignment.stream import GuidedStream
from deepnmt.tasks.translation.task import TASK as TRANSLATION


def with_links(prepared: Path, folder: Path, *, lines: list[str] | None = None, **data: object) -> Recipe:
    """The small recipe whose tagged test text is trained on too, and has word alignments."""
    count = len((prepared / "text" / "test.en").read_text(encoding="utf-8").splitlines())
    (folder / "links").write_text("\n".join(lines or ["0-0 1-0 1-2"] * (count - 1) + [""]) + "\n")
    train = {"plain": text(prepared, "valid"),
             "tagged": text(prepared, "test", tag="<BT>", alignments=str(folder / "links"))}
    return recipe_of(prepared, folder, train=train, **data)


@pytest.mark.parametrize("shard_pairs", [0, 7])
def test_links_of_words_are_links_of_all_their_pieces(prepared: Path, tmp_path: Path, shard_pairs: int) -> None:
    recipe = with_links(prepared, tmp_path, subword_variants=2, subword_alpha=0.5, shard_pairs=shard_pairs)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"guided_alignment": 0.1})})
    prepare(recipe)
    data = PreparedData.open(recipe.data.folder)
    data.verify()
    plain, tagged = data.corpora("train").values()
    assert data.manifest["splits"]["train"]["alignments"] == {"aligned": tagged - 1, "links": 3 * (tagged - 1),
                                                               "unlike": 0}
    links = Links(data, "train")
    assert links.of(0) == links.of(plain + tagged - 1) == []
    assert links.of(plain) == [(1, 0), (2, 0), (2, 2)]  # the tag is a word of the source
    stream, seen, first = TRANSLATION.stream(recipe, data), 0, 0
    assert isinstance(stream, GuidedStream)
    for epoch in range(2):
        for index in range(stream.epoch_size(epoch)):
            batch = stream.batch(epoch, index, torch.device("cpu"))
            src, trg, found = batch["src"], batch["trg_out"], batch["links"]
            for number, row in enumerate(stream.plan(epoch)[index]):
                words = []
                for vocab, ids in zip(data.vocabs(), (src[number], trg[number]), strict=True):
                    pieces = vocab.to_pieces(ids.tolist())
                    begins = [piece.startswith(SPACE) or piece == "<BT>" for piece in pieces]
                    words.append([-1 if piece in ("</s>", "<pad>") else sum(begins[:i + 1]) - 1
                                  for i, piece in enumerate(pieces)])
                expected = {(t, s) for s, word in enumerate(words[0]) for t, other in enumerate(words[1])
                            if (word, other) in links.of(int(row))}
                mine = found[:, found[0] == number].T.tolist()
                assert {(t, s) for _, t, s, _ in mine} == expected and len(mine) == len(expected)
                assert all(count == sum(other == t for other, _ in expected) for _, t, _, count in mine)
                seen, first = seen + len(mine), first + (len(mine) if epoch == 0 else 0)
            assert all(torch.equal(one, other) for one, other in  # and the rest as ever
                       zip(batch.tensors.values(),
                           training_stream(recipe, data).batch(epoch, index, batch.device).tensors.values(),
                           strict=False))
    assert seen > 6 * (tagged - 1)
    sized = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"update_tokens": 60})})
    fixed = TRANSLATION.stream(sized, data)
    batches = fixed.update(START, fixed.epoch_size(0) if not shard_pairs else 1, 0, 1, torch.device("cpu")).batches
    assert any(not batch.tokens for batch in batches)
    assert shard_pairs or sum(batch["links"].size(1) for batch in batches) == first
    prepare(recipe)  # up to date
    (tmp_path / "links").write_text("0-0\n" * tagged)
    with user_error("was made from other texts than the recipe's data.train names"):
        prepare(recipe)


@pytest.mark.parametrize(("faulty", "message"), [
    (["0-0"], r"links: 1 lines of word alignments for at least 2 sentence pairs; line N of one must align"),
    (["0-0"] * 23, r"links: 23 lines of word alignments for 20 sentence pairs"),
    (["0-0", "0-0 1:1"], r"links, line 2: '1:1' is no link; write links as SOURCE-TARGET, two words counted from 0"),
    (["0-0", "0-0 99-1"], r"links, line 2: 99-1 is beyond the source sentence, which has \d+ words counted from 0"),
    (["0-0 1-0 0-31"], r"links, line 1: 0-31 is beyond the target sentence, which has \d+ words"),
])
def test_faulty_files_are_refused(prepared: Path, tmp_path: Path, faulty: list[str], message: str) -> None:
    recipe = with_links(prepared, tmp_path, lines=faulty)
    with user_error(message):
        prepare(recipe)
    assert not Path(recipe.data.folder).exists()


def test_a_faulty_line_of_a_shard_is_named_where_it_is(prepared: Path, tmp_path: Path) -> None:
    recipe = with_links(prepared, tmp_path, lines=["0-0"] * 9 + ["99-1"] + ["0-0"] * 10, shard_pairs=7)
    with user_error(f"^{tmp_path}/links, line 10: 99-1 is beyond the source sentence"):
        prepare(recipe)


@pytest.mark.parametrize("shard_pairs", [0, 7])
def test_a_pattern_names_files_that_follow_each_other(prepared: Path, tmp_path: Path, shard_pairs: int) -> None:
    (tmp_path / "links.1").write_text("0-0\n" * 9)
    (tmp_path / "links.2").write_text("0-0 1-1\n" * 11)
    train = text(prepared, "test", alignments=str(tmp_path / "links.*"))
    prepare(recipe := recipe_of(prepared, tmp_path, train=train, shard_pairs=shard_pairs))
    counts = PreparedData.open(recipe.data.folder).manifest["splits"]["train"]
    assert counts["pairs"] == counts["read"] == 20 and counts["alignments"]["links"] == 9 + 2 * 11


def test_words_that_pieces_do_not_begin_leave_a_pair_without(prepared: Path, tmp_path: Path) -> None:
    """SentencePiece's character for a space in the text itself begins a word."""
    pairs = list(read_pairs(recipe_of(prepared, tmp_path).data.test["held_out"]))
    for side, lang in enumerate(("en", "de")):
        (tmp_path / f"odd.{lang}").write_text("".join(
            f"{re.sub(' ', SPACE, pair[side], count=number == 1)}\n" if number == 1 else f"{pair[side]}\n"
            for number, pair in enumerate(pairs)), encoding="utf-8")
    (tmp_path / "links").write_text("0-0\n" * len(pairs))
    recipe = recipe_of(prepared, tmp_path, train={"src": str(tmp_path / "odd.en"), "trg": str(tmp_path / "odd.de"),
                                                  "alignments": str(tmp_path / "links")})
    prepare(recipe)
    data = PreparedData.open(recipe.data.folder)
    assert data.manifest["splits"]["train"]["alignments"] == {"aligned": len(pairs) - 1, "links": len(pairs) - 1,
                                                               "unlike": 1}
    assert np.array_equal([bool(Links(data, "train").of(row)) for row in range(3)], [True, False, True])
    with user_error("has no word alignments of the valid text"):
        Links(data, "valid")
