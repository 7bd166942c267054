"""Words of prepared sentences: from pieces to words and back.

The pieces of the best segmentation are the text itself, but for characters that the vocabulary lacks: those become
`UNKNOWN`, of which any segmentation makes unk again. So no other copy of the text is kept.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from deepnmt.data.subword_variants import WORDS, Sampler
from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.tokens import UNK

UNKNOWN = "\uffff"  # no character
_BYTES = re.compile("(?:<0x[0-9A-F]{2}>)+")


class Words:
    """Reads and writes the words of one side. Every word begins with `SPACE`, as its first piece does."""

    def __init__(self, vocab: Vocabulary, sampler: Sampler | None) -> None:
        """`sampler`: draws segmentations; None: they are the best."""
        self._vocab, self._sampler = vocab, sampler
        self._tags = set(vocab.tags.values())
        self._texts = vocab.names()
        self._texts[UNK] = UNKNOWN
        self._bytes = {number for number, text in enumerate(self._texts) if _BYTES.fullmatch(text)}

    def read(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """The tags that a sentence begins with, and its words."""
        begin = 0
        while begin < len(ids) and ids[begin] in self._tags:
            begin += 1
        text = "".join([self._texts[number] for number in ids[begin:]])
        if not self._bytes.isdisjoint(ids):
            text = _BYTES.sub(_characters, text)
        return list(ids[:begin]), WORDS.findall(text)

    def write(self, words: Sequence[str], generator: random.Random) -> list[int]:
        """The pieces of words."""
        if self._sampler is None:
            return self._vocab.encode(" ".join(word.removeprefix(SPACE) for word in words))
        return self._sampler.sample_words(words, generator)


def _characters(match: re.Match[str]) -> str:
    """The text of pieces that are bytes."""
    digits = match[0].replace("<0x", "").replace(">", "")
    return bytes.fromhex(digits).decode("utf-8", errors="replace")
