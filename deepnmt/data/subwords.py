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
from typing import Literal, NamedTuple, Protocol

from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.tokens import UNK

CACHED = 100_000  # words and ways to segment them; some 50 MB
UNKNOWN_PENALTY = 10.0  # as in SentencePiece: an unknown character scores this much below the worst piece

_WORDS = re.compile(f"{SPACE}?[^{SPACE}]+|{SPACE}")


class _WordSampler(Protocol):
    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Pieces of one word, its spaces written as SentencePiece writes them."""


class Sampler:
    """Draws segmentations of whole texts, without bos and eos."""

    def __init__(self, vocab: Vocabulary, kind: Literal["bpe", "unigram"], alpha: float) -> None:
        """`alpha` as `BpeDropout` and `UnigramSampling` take it."""
        self._vocab = vocab
        self._words: _WordSampler = BpeDropout(vocab, alpha) if kind == "bpe" else UnigramSampling(vocab, alpha)

    def sample_batch(self, texts: list[str], seed: int) -> list[list[int]]:
        """One segmentation of each text: a function of (texts, seed)."""
        generator = random.Random(seed)
        return [self._sample(text, generator) for text in texts]

    def _sample(self, text: str, generator: random.Random) -> list[int]:
        ids: list[int] = []
        for word in _WORDS.findall(self._vocab.normalize(text)):
            for piece in self._words.sample(word, generator):
                if piece != UNK or ids[-1:] != [UNK]:  # SentencePiece makes one unk of several in a row
                    ids.append(piece)
        return ids


class _Merged(NamedTuple):
    """A word's pieces, and how many merges had their turn on the way to them, made or left out."""

    ids: list[int]
    turns: int


class BpeDropout:
    """BPE where every merge is left out with probability `alpha` when its turn comes (Provilkov et al., 2020)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        self._vocab, self._alpha = vocab, alpha
        self._pieces = vocab.pieces()
        self._merged: dict[tuple[str, tuple[int, ...]], _Merged] = {}

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Draws the turn that is left out next, until none is: for most words and turns the result is known already."""
        left_out: tuple[int, ...] = ()
        begin = 0
        while True:
            merged = self._recall(word, left_out)
            turn = begin + self._first_left_out(generator.random(), merged.turns - begin)
            if turn == merged.turns:
                return merged.ids
            left_out, begin = (*left_out, turn), turn + 1

    def _first_left_out(self, drawn: float, turns: int) -> int:
        """The k with (1-α)^(k+1) <= `drawn` < (1-α)^k for a number drawn from [0, 1), or `turns` if that is less."""
        survival = 1.0
        for k in range(turns):
            survival *= 1.0 - self._alpha
            if drawn >= survival:
                return k
        return turns

    def _recall(self, word: str, left_out: tuple[int, ...]) -> _Merged:
        merged = self._merged.get((word, left_out))
        if merged is None:
            if len(self._merged) >= CACHED:
                self._merged.clear()
            merged = self._merged[word, left_out] = self._merge(word, left_out)
        return merged

    def _merge(self, word: str, left_out: tuple[int, ...]) -> _Merged:
        """Merges neighbours, best score first and leftmost among equals, but not at the turns in `left_out`."""
        symbols = list(word)
        before, after = list(range(-1, len(word) - 1)), [*range(1, len(word)), -1]
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                piece = symbols[left] + symbols[right]
                if piece in self._pieces:
                    heapq.heappush(queue, (-self._pieces[piece].score, left, right, piece))

        for left in range(len(word) - 1):
            offer(left, left + 1)
        turns = 0
        while queue:
            _, left, right, piece = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != piece:
                continue  # one of the two has been merged with its other neighbour
            turns += 1
            if turns - 1 in left_out:
                continue
            symbols[left], symbols[right] = piece, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            offer(before[left], left)
            offer(left, after[left])
        return _Merged([i for symbol in symbols if symbol for i in self._vocab.ids(symbol)], turns)


class _Edge(NamedTuple):
    """A piece that ends at some place of a word, and how probable it is there."""

    start: int
    ids: list[int]
    probability: float


class UnigramSampling:
    """All segmentations of a word, each with its probability to the power `alpha` (Kudo, 2018, section 3.2)."""

    def __init__(self, vocab: Vocabulary, alpha: float) -> None:
        self._vocab, self._alpha = vocab, alpha
        self._pieces = vocab.pieces()
        self._longest = max(map(len, self._pieces))
        self._unknown = min(piece.score for piece in self._pieces.values()) - UNKNOWN_PENALTY
        self._lattices: dict[str, list[list[_Edge]]] = {}

    def sample(self, word: str, generator: random.Random) -> list[int]:
        """Walks the lattice from the end: the piece ending at a place is drawn by its share of the paths to there."""
        lattice = self._lattices.get(word)
        if lattice is None:
            if len(self._lattices) >= CACHED:
                self._lattices.clear()
            lattice = self._lattices[word] = self._lattice(word)
        path: list[list[int]] = []
        end = len(word)
        while end > 0:
            edges = lattice[end]
            edge = edges[0]
            if len(edges) > 1:
                drawn = generator.random()
                for edge in edges:
                    drawn -= edge.probability
                    if drawn < 0:
                        break
            path.append(edge.ids)
            end = edge.start
        return [i for ids in reversed(path) for i in ids]

    def _lattice(self, word: str) -> list[list[_Edge]]:
        """For every place in the word the pieces that end there. forward[j] = log Σ exp(forward[i] + α score(i..j))."""
        forward = [0.0]
        lattice: list[list[_Edge]] = [[]]
        for end in range(1, len(word) + 1):
            starts = [i for i in range(max(0, end - self._longest), end) if i == end - 1 or word[i:end] in self._pieces]
            scores = [forward[i] + self._alpha * self._score(word[i:end]) for i in starts]
            highest = max(scores)
            total = highest + math.log(sum(math.exp(score - highest) for score in scores))
            forward.append(total)
            lattice.append([_Edge(i, self._vocab.ids(word[i:end]), math.exp(score - total))
                            for i, score in zip(starts, scores)])
        return lattice

    def _score(self, piece: str) -> float:
        return self._pieces[piece].score if piece in self._pieces else self._unknown
