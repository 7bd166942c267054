"""SentencePiece vocabularies. The model file is the vocabulary; there is no second file.

Runs of spaces become one, but text is not normalised otherwise (`identity`). SentencePiece's default, NFKC, would
replace typographic quotes, ellipses and superscripts, and a model would learn to write the replacements, while BLEU
compares with the raw reference.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from deepnmt import config
from deepnmt.config.choices import VOCAB_KINDS
from deepnmt.errors import UserError
from deepnmt.tokens import BOS, EOS, PAD, UNK

LEARNED = 4_000  # bytes of a line that a vocabulary is learned from; SentencePiece passes by longer ones
SPACE = "\u2581"  # SentencePiece's character for a space


class Piece(NamedTuple):
    """Id and score of a piece. BPE merges higher scores first; in a unigram model the score is a log probability."""

    id: int
    score: float


def train_vocabulary(sentences: Iterable[str], settings: config.Vocab, tags: Sequence[str] = ()) -> bytes:
    """Trains a SentencePiece model and returns its file; the same sentences and settings give the same bytes.

    `tags` become control symbols: pieces that no text is segmented into.

    Training runs on one thread, because with more the sums of the unigram model depend on scheduling. It reads an
    iterator, so that the file contains no path. SentencePiece skips lines over 4,192 bytes.

    Raises:
        UserError: `vocab.size` is too large for the text or too small for its characters, or SentencePiece skips every
            line; or what `sentences` raise.
    """
    model = io.BytesIO()
    faults: list[UserError] = []

    def watched() -> Iterator[str]:
        try:
            yield from sentences
        except UserError as fault:  # which SentencePiece would report as its own
            faults.append(fault)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=watched(), model_writer=model, model_type=settings.kind, vocab_size=settings.size,
            unk_id=UNK, bos_id=BOS, eos_id=EOS, pad_id=PAD, byte_fallback=settings.byte_fallback,
            character_coverage=settings.character_coverage, normalization_rule_name="identity", num_threads=1,
            minloglevel=2, control_symbols=list(tags),
        )
    except RuntimeError as error:
        raise (faults[0] if faults else _size_fault(str(error), settings, len(tags))) from None
    return model.getvalue()


class VocabularySizeError(UserError):
    """`vocab.size` is too large for a text, or too small for its characters; `limit` is the next size that is not."""

    def __init__(self, text: str, limit: int) -> None:
        super().__init__(text)
        self.limit = limit


def _size_fault(message: str, settings: config.Vocab, tags: int) -> Exception:
    """The `UserError` for an error of SentencePiece's trainer that the user can correct, else a `RuntimeError`. `tags`:
    how many the vocabulary has."""
    if "(vocab_size) >= (0)" in message:  # what is left of it for words
        others = 4 + tags + 256 * settings.byte_fallback
        return VocabularySizeError(
            f"vocab.size is {settings.size}, but {others} pieces are no words: the four special ones, tags, and the "
            f"256 of vocab.byte_fallback if it is true; set vocab.size to more than {others}", others + 1)
    largest = re.search(r"set it to a value <= (\d+)", message)
    if largest:
        return VocabularySizeError(
            f"vocab.size is {settings.size}, but the training text gives at most {largest[1]} {settings.kind} pieces; "
            f"set vocab.size to {largest[1]} or less", int(largest[1]))
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if smallest:
        return VocabularySizeError(
            f"vocab.size is {settings.size}, but the training text has characters for {smallest[1]} pieces; set "
            f"vocab.size to {smallest[1]} or more, or vocab.character_coverage lower", int(smallest[1]))
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("the training text has no line to learn a vocabulary from: every line is over 4,192 bytes, "
                         f"which SentencePiece skips, or has only spaces and {SPACE}; give one sentence a line")
    return RuntimeError(f"SentencePiece could not train: {message}")


def shorter(line: str) -> Iterator[str]:
    """A line in parts of whole words that SentencePiece reads; what follows without a space for too long is left out.
    """
    while len(line.encode()) > LEARNED:
        cut = line.rfind(" ", 0, LEARNED // 4)  # a character has at most four bytes
        if cut < 0:
            return
        yield line[:cut]
        line = line[cut + 1:]
    yield line


def without_tags(text: str, tags: Collection[str]) -> str:
    """A text without those of these tags that it begins with."""
    while tags and (word := text.partition(" ")[0]) in tags:
        text = text[len(word) + 1:]
    return text


def vocabulary_files(model: Path) -> tuple[Path, Path] | None:
    """The files of source and target that a `vocab.model` names, a folder or a file; None if there are none."""
    if model.is_file():
        return model, model
    folders = [model, model / "averaged", *sorted((model / "checkpoints").glob("update-*"), reverse=True)]
    for folder in folders:
        src, trg = folder / "src.spm", folder / "trg.spm"
        if src.is_file() and trg.is_file():
            return src, trg
    return None


def given_vocabularies(settings: config.Vocab, tags: Sequence[str]) -> list[bytes]:
    """The SentencePiece models that `vocab.model` names: one, or that of the source and that of the target.

    Raises:
        UserError: there are none, they do not fit the other settings, or one of `tags` is not a piece.
    """
    name = str(settings.model)
    files = vocabulary_files(Path(name))
    if files is None:
        raise UserError(f"vocab.model is {name}, where there is no vocabulary; give a SentencePiece file, or the "
                        "folder of prepared data, of a checkpoint, or of a run that has saved one")
    remedy = "give another, or train one with deepnmt, or with spm_train --unk_id=0 --bos_id=1 --eos_id=2 --pad_id=3"
    models = []
    for file in files:
        try:
            models.append(Vocabulary.load(file, remedy))
        except UserError as fault:
            raise UserError(f"vocab.model names {file}, and {fault}") from None
    if settings.shared and models[0].bytes != models[1].bytes:
        raise UserError(f"vocab.model is {name}, which has a vocabulary for each side, but vocab.shared is true; set "
                        "vocab.shared=false, and model.tied as there")
    if not settings.shared and Path(name).is_file():
        raise UserError(f"vocab.model is {name}, a single vocabulary, but vocab.shared is false; set "
                        "vocab.shared=true, or give a folder that holds src.spm and trg.spm")
    if models[0].kind != settings.kind:
        raise UserError(f"vocab.model is {name}, a {models[0].kind} vocabulary, but vocab.kind is {settings.kind}; set "
                        f"vocab.kind={models[0].kind}")
    for tag in tags:
        if tag not in models[0].tags:
            raise UserError(f"the tag {tag!r} is not a piece of the vocabulary that vocab.model names, {name}, whose "
                            f"tags are {', '.join(models[0].tags) or 'none'}; remove the tag "
                            "if the recipe names it, or set vocab.model to null, so that a vocabulary is trained")
    if settings.shared:
        return [models[0].bytes]
    return [model.bytes for model in models]


class Vocabulary:
    """A SentencePiece model.

    Attributes:
        bytes: the content of its file.
        fingerprint: the SHA-256 of `bytes`.
        size: the number of pieces.
        tags: the ids of tags by their text.
    """

    def __init__(self, model: bytes, remedy: str = "") -> None:
        """Raises `UserError` if `model` is not a SentencePiece model with unk 0, bos 1, eos 2, pad 3; `remedy`: what to
        do then, where that is not to prepare the data again."""
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError(f"the vocabulary is not a SentencePiece model; {remedy or 'prepare the data again'}"
                            ) from None
        special = (self._processor.unk_id(), self._processor.bos_id(), self._processor.eos_id(),
                   self._processor.pad_id())
        if special != (UNK, BOS, EOS, PAD):
            remedy = remedy or f"deepnmt needs them at {(UNK, BOS, EOS, PAD)}; train it with deepnmt"
            raise UserError(f"the vocabulary has unk, bos, eos, pad at {special}; {remedy}")
        self.bytes = model
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.size: int = self._processor.get_piece_size()
        self._bytes = any(self._processor.is_byte(i) for i in range(self.size))
        self.tags: dict[str, int] = {}
        for number in range(self.size):
            if self._processor.is_control(number) and number not in special:
                self.tags[self._processor.id_to_piece(number)] = number

    @property
    def kind(self) -> str:
        """The kind of model, by which SentencePiece segments; one that deepnmt does not train counts as unigram."""
        from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which tensorboard brings

        model_file: Any = sentencepiece_model_pb2  # its classes are made when it is imported
        number = model_file.ModelProto.FromString(self.bytes).trainer_spec.model_type
        return next((name for name, row in VOCAB_KINDS.items() if row.model_type == number), "unigram")

    @classmethod
    def load(cls, file: Path, remedy: str = "") -> Vocabulary:
        """Reads a model file. Raises `UserError` if it cannot be read or is not such a model; `remedy`: see there."""
        try:
            return cls(file.read_bytes(), remedy)
        except OSError as error:
            way = f"; {remedy}" if remedy else ""
            raise UserError(f"vocabulary {file} cannot be read: {error.strerror or error}{way}") from None

    @property
    def files(self) -> dict[str, bytes]:
        """The only vocabulary of a checkpoint or of prepared data, as it lies there: under both names, so that
        `vocab.model` finds it."""
        return {"src.spm": self.bytes, "trg.spm": self.bytes}

    def names(self) -> list[str]:
        """The texts of all pieces, in the order of their ids, special pieces and tags included."""
        return [self._processor.id_to_piece(i) for i in range(self.size)]

    def split_tags(self, text: str) -> tuple[list[int], str]:
        """The ids of the tags that a text begins with, and the rest of it."""
        rest = without_tags(text, self.tags)
        return [self.tags[word] for word in text[: len(text) - len(rest)].split()], rest

    def encode(self, text: str) -> list[int]:
        """The ids of the best segmentation, without bos and eos. No text is encoded as bos, eos or pad, and as a tag
        only at its beginning."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str], tags: bool = True) -> list[list[int]]:
        """`encode` for many texts at once, on one thread; without `tags` these are text, too."""
        if not (tags and self.tags):
            return self._processor.encode(texts, num_threads=1)
        tags_and_rest = [self.split_tags(text) for text in texts]
        encoded = self._processor.encode([rest for _, rest in tags_and_rest], num_threads=1)
        return [[*tags, *ids] for (tags, _), ids in zip(tags_and_rest, encoded, strict=True)]

    @cached_property
    def begins_word(self) -> list[bool]:
        """For each id whether a word begins with its piece; words are what spaces separate, and tags are words."""
        tags = set(self.tags.values())
        return [name.startswith(SPACE) or i in tags for i, name in enumerate(self.names())]

    def normalize(self, text: str) -> str:
        """The text that is segmented: runs of spaces are one, and every word begins with `SPACE`."""
        return self._processor.normalize(text)

    def pieces(self) -> dict[str, Piece]:
        """The pieces that text can be segmented into, without unk, bos, eos, pad and single bytes."""
        model = self._processor
        pieces = {}
        for number in range(self.size):
            if not (model.is_unknown(number) or model.is_control(number) or model.is_byte(number)):
                pieces[model.id_to_piece(number)] = Piece(number, model.get_score(number))
        return pieces

    def ids(self, piece: str) -> list[int]:
        """The id of a piece. For a character that is not one: the ids of its bytes with byte fallback, else unk."""
        number = self._processor.piece_to_id(piece)
        if number != UNK:
            return [number]
        if not self._bytes:
            return [UNK]
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in piece.encode()]

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces of `ids`, as SentencePiece writes them."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def to_ids(self, pieces: Sequence[str]) -> list[int] | None:
        """The ids of pieces; None if the vocabulary has not all of them."""
        ids = [self._processor.piece_to_id(piece) for piece in pieces]
        return ids if self.to_pieces(ids) == list(pieces) else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bos, eos and pad are skipped."""
        return self._processor.decode([int(i) for i in ids])
