"""Vocabularies: ids, determinism, round trips, error messages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest
from refusals import user_error

from deepnmt import config
from deepnmt.data.vocab import Vocabulary, train_vocabulary
from deepnmt.errors import UserError
from deepnmt.tokens import PAD, UNK

ONSETS, RHYMES = ("b", "d", "kl", "m", "st", "tr"), ("an", "ei", "o", "urt")
WORDS = [a + b + c for a, b, c in itertools.product(ONSETS, RHYMES, ("", "a", "en"))]
LINES = [" ".join(WORDS[(i * step) % len(WORDS)] for step in (1, 7, 11, 5)) for i in range(1, 300)]

KINDS = pytest.mark.parametrize("kind", ["bpe", "unigram"])


def _train(kind: str, size: int = 60, byte_fallback: bool = False) -> Vocabulary:
    settings = config.Vocab.model_validate({"kind": kind, "size": size, "byte_fallback": byte_fallback})
    return Vocabulary(train_vocabulary(LINES, settings))


@KINDS
def test_round_trip_size_and_same_bytes(kind: str) -> None:
    vocab, again = _train(kind), _train(kind)
    assert vocab.bytes == again.bytes and vocab.fingerprint == again.fingerprint
    assert vocab.size == 60
    assert [vocab.decode(vocab.encode(line)) for line in LINES] == LINES
    assert vocab.encode_batch(LINES) == [vocab.encode(line) for line in LINES]


def test_text_never_becomes_a_special_piece_and_special_pieces_have_no_text() -> None:
    vocab = _train("bpe")
    assert not {1, 2, PAD} & set(vocab.encode("<s> ban </s> <pad>"))
    plain = vocab.encode(LINES[0])
    assert vocab.decode([1, *plain, 2, PAD, PAD]) == LINES[0]
    assert vocab.encode("") == [] == vocab.encode("  ")


def test_only_whitespace_is_normalised() -> None:
    vocab = _train("bpe", size=330, byte_fallback=True)
    text = "„ban“ … ½ \ufb01"
    assert vocab.decode(vocab.encode(text)) == text  # NFKC would give three dots, 1/2 and fi
    assert vocab.encode(" ban   bei ") == vocab.encode("ban bei")


def test_with_byte_fallback_nothing_is_unknown() -> None:
    assert UNK in _train("bpe").encode("ban 猫")
    vocab = _train("bpe", size=330, byte_fallback=True)
    assert UNK not in vocab.encode("ban 猫") and vocab.decode(vocab.encode("ban 猫")) == "ban 猫"


@KINDS
def test_errors_of_size_name_a_size_that_works(kind: str) -> None:
    with user_error(r"vocab.size is 5000, but the training text gives at most (\d+)") as error:
        _train(kind, 5000)
    largest = int(re.findall(r"at most (\d+)", str(error.value))[0])
    assert _train(kind, largest).size == largest
    with user_error(r"vocab.size is 8, but the training text has characters for") as error:
        _train(kind, 8)
    smallest = int(re.findall(r"to (\d+) or more", str(error.value))[0])
    assert _train(kind, smallest).size == smallest


@pytest.mark.parametrize(("byte_fallback", "tags", "others"), [(True, 0, 260), (False, 6, 10), (True, 1, 261)])
def test_a_vocabulary_that_has_no_room_for_words(byte_fallback: bool, tags: int, others: int) -> None:
    settings = config.Vocab(kind="word", size=8, byte_fallback=byte_fallback)
    names = [f"<{number}>" for number in range(tags)]
    with user_error(f"vocab.size is 8, but {others} pieces are no words: .*; set vocab.size to more than {others}$"):
        train_vocabulary(LINES, settings, names)
    settings = settings.model_copy(update={"size": others + 1})
    assert Vocabulary(train_vocabulary(LINES, settings, names)).size == others + 1


def test_a_fault_of_the_text_is_told_as_it_is() -> None:
    def lines() -> Iterator[str]:
        yield LINES[0]
        raise UserError("text, line 2: not valid UTF-8")

    with user_error("^text, line 2: not valid UTF-8$"):
        train_vocabulary(lines(), config.Vocab())


@KINDS
@pytest.mark.parametrize("line", ["ban bei " * 600, "\u2581 \u2581", " "])
def test_a_text_that_sentencepiece_skips(kind: str, line: str) -> None:
    settings = config.Vocab.model_validate({"kind": kind, "size": 20})
    with user_error("no line to learn a vocabulary from: every line is over 4,192 bytes"):
        train_vocabulary([line] * 3, settings)


def test_other_files_are_rejected_as_vocabularies(tmp_path) -> None:
    with user_error("not a SentencePiece model"):
        Vocabulary(b"no model")
    with user_error(r"unk, bos, eos, pad at"):
        Vocabulary(b"")
    with user_error(r"none\.spm cannot be read"):
        Vocabulary.load(tmp_path / "none.spm")
