"""Random segmentations that are the same in every process: BPE-dropout and unigram sampling.

SentencePiece has both, but with version 0.2.3 two processes were seen to draw differently from the same seed, so the
same text would not give the same bytes twice. Here a seed decides everything.

No piece reaches over a space, so words are independent, and what a word needs is worked out once and kept.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.tokens import UNK

CACHED = 100_000  # words and ways to segment them; some 50 MB
UNKNOWN_PENALTY = 10.0  # as in SentencePiece: an unknown character scores this much below the worst piece

_WORDS = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")


class Sampler(ABC):
    """Draws segmentations of whole texts, without bos and eos."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        self._vocab, self._alpha, self._pieces = vocab, alpha, vocab.pieces()

    @abstractmethod
    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Pieces of one word, its spaces written as SentencePiece writes them."""

    def sample_batch(self, texts: list[str], seed: int) -> list[list[int]]:
        """One segmentation of each text: a function of (texts, seed)."""
        generator = random.Random(seed)
        batch = []
        for text in texts:
            ids: list[int] = []
            for word in _WORDS.findall(self._vocab.normalize(text)):
                for piece in self.sample(word, generator):
                    if piece != UNK or ids[-1:] != [UNK]:  # SentencePiece makes one unk of several in a row
                        ids.append(piece)
            batch.append(ids)
        return batch


class BpeDropout(Sampler):
    """BPE where every merge is left out with probability `alpha` when its turn comes (Provilkov et al., 2020)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        super().__init__(vocab, alpha)
        self._merged = lru_cache(CACHED)(self._merge)

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Draws the turn that is left out next, until none is: for most words and turns the result is known already."""
        left_out: tuple[int, ...] = ()
        begin = 0
        while True:
            ids, turns = self._merged(word, left_out)
            drawn, survival = generator.random(), 1.0
            for turn in range(begin, turns):  # noqa: B007 (k turns on where (1-α)^(k+1) <= drawn < (1-α)^k)
                survival *= 1.0 - self._alpha
                if drawn >= survival:
                    break
            else:
                return ids
            left_out, begin = (*left_out, turn), turn + 1

    def _merge(self, word: str, left_out: tuple[int, ...]) -> tuple[list[int], int]:
        """Merges neighbours, best score first and leftmost among equals, but not at the turns in `left_out`.

        Returns:
            The pieces, and how many merges had their turn on the way to them, made or left out.
        """
        ends = list(range(1, len(word) + 1))  # where the piece that starts at i ends; 0 where none starts any more
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
            if turns - 1 in left_out:
                continue
            ends[left], ends[middle], starts[right] = right, 0, left
            offer(starts[left], left)
            offer(left, right)
        return [i for start, end in enumerate(ends) if end for i in self._vocab.ids(word[start:end])], turns


class UnigramSampling(Sampler):
    """All segmentations of a word, each with its probability to the power `alpha` (Kudo, 2018, section 3.2)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        super().__init__(vocab, alpha)
        self._longest = max(map(len, self._pieces))
        self._unknown = min(piece.score for piece in self._pieces.values()) - UNKNOWN_PENALTY
        self._known_lattice = lru_cache(CACHED)(self._lattice)

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Walks the lattice from the end: the piece ending at i is drawn by its share of the paths to there."""
        lattice = self._known_lattice(word)
        path: list[int] = []
        end = len(word)
        while end > 0:
            edges = lattice[end]
            drawn = generator.random() if len(edges) > 1 else 0.0
            for end, ids, probability in edges:  # noqa: B007 (the last one where rounding leaves none)
                drawn -= probability
                if drawn < 0:
                    break
            path[:0] = ids
        return path

    def _lattice(self, word: str) -> list[list[tuple[int, list[int], float]]]:
        """For every i in the word the pieces that end there: start, ids and probability.

        forward[j] = log Σ exp(forward[i] + α score(i..j)).
        """
        forward = [0.0]
        lattice: list[list[tuple[int, list[int], float]]] = [[]]
        for end in range(1, len(word) + 1):
            scores = {}
            for start in range(max(0, end - self._longest), end):
                piece = self._pieces.get(word[start:end])
                if piece or start == end - 1:
                    scores[start] = forward[start] + self._alpha * (piece.score if piece else self._unknown)
            highest = max(scores.values())
            total = highest + math.log(sum(math.exp(score - highest) for score in scores.values()))
            forward.append(total)
            lattice.append([(start, self._vocab.ids(word[start:end]), math.exp(score - total))
                            for start, score in scores.items()])
        return lattice


SAMPLERS: dict[str, Callable[[Vocabulary, float], Sampler]] = {"bpe": BpeDropout, "unigram": UnigramSampling}
