"""SentencePiece vocabularies: the model file is the vocabulary, there is no second file.

Text is not normalised beyond whitespace (`identity`): SentencePiece's usual NFKC rules turn typographic quotes, the
ellipsis or superscripts into other characters, which a model then copies into its output, while BLEU is measured on
the raw reference. Runs of spaces still become one.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from deepnmt import config
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS, PAD, UNK

SPACE = "\u2581"  # how SentencePiece writes a space


class Piece(NamedTuple):
    """An id and its score: the higher, the earlier BPE merges it; the log probability of a unigram model."""

    id: int
    score: float


def train_vocabulary(sentences: Iterable[str], settings: config.Vocab) -> bytes:
    """Trains a SentencePiece model; the same sentences and settings give the same bytes.

    Training runs on one thread (with more, the sums of the unigram model depend on scheduling) and reads an iterator,
    so that no path enters the file. SentencePiece leaves out lines over 4,192 bytes.

    Raises:
        UserError: the text cannot fill `vocab.size`, `vocab.size` cannot hold its characters, or there is no text that
            SentencePiece would read.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, model_type=settings.kind, vocab_size=settings.size,
            unk_id=UNK, bos_id=BOS, eos_id=EOS, pad_id=PAD, byte_fallback=settings.byte_fallback,
            character_coverage=settings.character_coverage, normalization_rule_name="identity", num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _size_fault(str(error), settings) from None
    return model.getvalue()


def _size_fault(message: str, settings: config.Vocab) -> Exception:
    """What a failed training means to the user; any other failure is passed on as it is."""
    if largest := re.search(r"set it to a value <= (\d+)", message):
        return UserError(f"vocab.size is {settings.size}, but the training text gives at most {largest[1]} "
                         f"{settings.kind} pieces; set vocab.size to {largest[1]} or less")
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UserError(f"vocab.size is {settings.size}, but the training text has characters for {smallest[1]} "
                         f"pieces; set vocab.size to {smallest[1]} or more, or vocab.character_coverage lower")
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("the training text holds nothing to learn a vocabulary from: every line is over 4,192 bytes, "
                         f"which SentencePiece leaves out, or is all spaces and {SPACE}; give a sentence a line")
    return RuntimeError(f"SentencePiece could not train: {message}")


class Vocabulary:
    """One SentencePiece model. `bytes` is its file, `fingerprint` the SHA-256 of that, `size` its number of pieces."""

    def __init__(self, model: bytes) -> None:
        """Raises `UserError` where `model` is not a SentencePiece model with unk 0, bos 1, eos 2, pad 3."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError("the vocabulary is not a SentencePiece model; prepare the data again") from None
        special = (self._processor.unk_id(), self._processor.bos_id(), self._processor.eos_id(),
                   self._processor.pad_id())
        if special != (UNK, BOS, EOS, PAD):
            raise UserError(f"the vocabulary has unk, bos, eos, pad at {special}; deepnmt needs them at "
                            f"{(UNK, BOS, EOS, PAD)}; train it with deepnmt")
        self.bytes = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.size: int = self._processor.get_piece_size()
        self._bytes = any(self._processor.is_byte(i) for i in range(self.size))

    @classmethod
    def load(cls, file: Path) -> Vocabulary:
        """Reads a model file. Raises `UserError` where it cannot be read or is no such model."""
        try:
            return cls(file.read_bytes())
        except OSError as error:
            raise UserError(f"vocabulary {file} cannot be read: {error.strerror or error}") from None

    def encode(self, text: str) -> list[int]:
        """The best segmentation, without bos and eos. No text gives the ids of bos, eos or pad."""
        return self._processor.encode(text)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for many texts at once, on the calling process's one thread."""
        return self._processor.encode(texts, num_threads=1)

    def normalize(self, text: str) -> str:
        """The text as pieces are cut from it: runs of spaces are one, every word begins with `SPACE`."""
        return self._processor.normalize(text)

    def pieces(self) -> dict[str, Piece]:
        """The pieces that segmentation chooses from: neither unk, bos, eos and pad, nor single bytes."""
        model = self._processor
        return {model.id_to_piece(i): Piece(i, model.get_score(i)) for i in range(self.size)
                if not (model.is_unknown(i) or model.is_control(i) or model.is_byte(i))}

    def ids(self, piece: str) -> list[int]:
        """The id of a piece; of a character that is none: its bytes' ids with byte fallback, else unk."""
        number = self._processor.piece_to_id(piece)
        if number != UNK:
            return [number]
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in piece.encode()] if self._bytes else [UNK]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bos, eos and pad have none."""
        return self._processor.decode([int(i) for i in ids])
