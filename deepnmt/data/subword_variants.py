"""Reproducible random segmentations: BPE-dropout and unigram sampling.

SentencePiece has both, but in its version 0.2.3 two processes sampled differently from the same seed, so preparing the
same text twice gave different bytes. Here the result depends on the seed alone.

No piece spans a space, so words are segmented independently, and intermediate results for each word are cached.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache

from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.tokens import UNK

CACHED = 100_000  # cached results for words; some 50 MB
UNKNOWN_PENALTY = 10.0  # as in SentencePiece: an unknown character scores this much below the worst piece

WORDS = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")


class Sampler(ABC):
    """Samples segmentations of whole texts, without bos and eos."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        self._vocab, self._alpha, self._pieces = vocab, alpha, vocab.pieces()

    @abstractmethod
    def sample(self, word: str, generator: random.Random) -> list[int]:
        """The ids of a random segmentation of one word, in which spaces are written as `SPACE`."""

    def sample_batch(self, texts: list[str], seed: int) -> list[list[int]]:
        """One segmentation of each text: a function of (texts, seed)."""
        generator = random.Random(seed)
        batch = []
        for text in texts:
            ids, text = self._vocab.split_tags(text)
            batch.append(ids + self.sample_words(WORDS.findall(self._vocab.normalize(text)), generator))
        return batch

    def sample_words(self, words: Iterable[str], generator: random.Random) -> list[int]:
        """The ids of one segmentation of each word; as SentencePiece has it, one unk for several in a row."""
        ids: list[int] = []
        for word in words:
            for piece in self.sample(word, generator):
                if piece != UNK or ids[-1:] != [UNK]:
                    ids.append(piece)
        return ids


class BpeDropout(Sampler):
    """BPE in which each merge is skipped with probability `alpha` when its turn comes (Provilkov et al., 2020)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        super().__init__(vocab, alpha)
        self._merged = lru_cache(CACHED)(self._merge)

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Samples the next turn to skip, until there is none. Most words and turns are in the cache already."""
        skipped: tuple[int, ...] = ()
        begin = 0
        while True:
            ids, turns = self._merged(word, skipped)
            sample, survival = generator.random(), 1.0
            for turn in range(begin, turns):  # noqa: B007 (ends after k turns if (1-α)^(k+1) <= sample < (1-α)^k)
                survival *= 1.0 - self._alpha
                if sample >= survival:
                    break
            else:
                return ids
            skipped, begin = (*skipped, turn), turn + 1

    def _merge(self, word: str, skipped: tuple[int, ...]) -> tuple[list[int], int]:
        """Merges neighbours, best score first and leftmost among equals, but not at the turns in `skipped`.

        Returns:
            The ids, and the number of turns: merges that were made or skipped.
        """
        ends = list(range(1, len(word) + 1))  # where the piece that starts at i ends; 0 if no piece starts there
        starts = list(range(-1, len(word)))  # where the piece that ends at i starts
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, middle: int) -> None:
            if left >= 0 and middle < len(word):
                piece = self._pieces.get(word[left:ends[middle]])
                if piece:
                    heapq.heappush(queue, (-piece.score, left, middle, ends[middle]))

        for middle in range(1, len(word)):
            offer(middle - 1, middle)
        turns = 0
        while queue:
            _, left, middle, right = heapq.heappop(queue)
            if ends[left] != middle or ends[middle] != right:
                continue  # one of the two has been merged with its other neighbour
            turns += 1
            if turns - 1 in skipped:
                continue
            ends[left], ends[middle], starts[right] = right, 0, left
            offer(starts[left], left)
            offer(left, right)
        ids = []
        for start, end in enumerate(ends):
            if end:
                ids += self._vocab.ids(word[start:end])
        return ids, turns


class UnigramSampling(Sampler):
    """Samples each segmentation of a word in proportion to its probability^`alpha` (Kudo, 2018, section 3.2)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        super().__init__(vocab, alpha)
        self._longest = max(map(len, self._pieces))
        self._unknown = min(piece.score for piece in self._pieces.values()) - UNKNOWN_PENALTY
        self._known_lattice = lru_cache(CACHED)(self._lattice)

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Walks the lattice from the end; a piece that ends at i is sampled by its share of the paths leading to i."""
        lattice = self._known_lattice(word)
        path: list[int] = []
        end = len(word)
        while end > 0:
            edges = lattice[end]
            remaining = generator.random() if len(edges) > 1 else 0.0
            for end, ids, probability in edges:  # noqa: B007 (if rounding leaves a remainder, the last edge is used)
                remaining -= probability
                if remaining < 0:
                    break
            path[:0] = ids
        return path

    def _lattice(self, word: str) -> list[list[tuple[int, list[int], float]]]:
        """For every position i in the word, the pieces that end there: start, ids and probability.

        forward[j] = log Σ exp(forward[i] + α score(i..j)).
        """
        forward = [0.0]
        lattice: list[list[tuple[int, list[int], float]]] = [[]]
        for end in range(1, len(word) + 1):
            scores = {}
            for start in range(max(0, end - self._longest), end):
                piece = self._pieces.get(word[start:end])
                if piece:
                    scores[start] = forward[start] + self._alpha * piece.score
                elif start == end - 1:
                    scores[start] = forward[start] + self._alpha * self._unknown
            highest = max(scores.values())
            total = highest + math.log(sum(math.exp(score - highest) for score in scores.values()))
            forward.append(total)
            ways = []
            for start, score in scores.items():
                ways.append((start, self._vocab.ids(word[start:end]), math.exp(score - total)))
            lattice.append(ways)
        return lattice


SAMPLERS: dict[str, Callable[[Vocabulary, float], Sampler]] = {"bpe": BpeDropout, "unigram": UnigramSampling}
