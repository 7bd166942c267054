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

import sentencepiece

from deepnmt import config
from deepnmt.errors import UserError

UNK, BOS, EOS, PAD = 0, 1, 2, 3


def train_vocabulary(sentences: Iterable[str], settings: config.Vocab) -> bytes:
    """Trains a SentencePiece model; the same sentences and settings give the same bytes.

    Training runs on one thread (with more, the sums of the unigram model depend on scheduling) and reads an iterator,
    so that no path enters the file. SentencePiece leaves out lines over 4,192 bytes.

    Raises:
        UserError: the text cannot fill `vocab.size`, or `vocab.size` cannot hold its characters.
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

    def sample_batch(self, texts: list[str], alpha: float, seed: int) -> list[list[int]]:
        """One random segmentation of each text, a function of (texts, alpha, seed) alone.

        BPE: BPE-dropout, `alpha` is the chance that a merge is left out (Provilkov et al., 2020). Unigram: drawn from
        all segmentations by their probability to the power `alpha` (Kudo, 2018), so a small alpha strays far.
        """
        sentencepiece.set_random_generator_seed(seed)
        return self._processor.encode(texts, num_threads=1, enable_sampling=True, alpha=alpha, nbest_size=-1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bos, eos and pad have none."""
        return self._processor.decode([int(i) for i in ids])
