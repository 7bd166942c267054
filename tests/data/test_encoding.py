"""Encoding a chunk: which pairs are kept, the order of the sides, and sampled segmentations that are too long."""

from __future__ import annotations

import numpy as np

from deepnmt import config
from deepnmt.data.encoding import Encoder, EncodingJob, Pieces, encode_pairs
from deepnmt.data.vocab import Vocabulary, train_vocabulary

WORDS = [a + b + c for a in ("b", "kl", "st") for b in ("an", "ei", "o") for c in ("da", "ten", "s")]
PAIRS = [(" ".join(WORDS[i:i + 1 + i % 4]), " ".join(WORDS[i + 1:i + 3])) for i in range(20)]
MODEL = train_vocabulary([line for pair in PAIRS * 5 for line in pair], config.Vocab(size=50))


def _sentences(pieces: Pieces) -> list[list[int]]:
    return [part.tolist() for part in np.split(pieces.tokens, np.cumsum(pieces.lengths)[:-1])]


def test_plain_segmentation_is_the_vocabularys_and_filters_apply() -> None:
    vocab = Vocabulary(MODEL)
    whole = Encoder(EncodingJob(MODEL, MODEL))(0, PAIRS)
    assert _sentences(whole.sides[0][0]) == [vocab.encode(src) for src, _ in PAIRS] and not whole.codes.any()
    longest = [max(len(vocab.encode(side)) for side in pair) for pair in PAIRS]
    limit = sorted(longest)[10]
    kept = Encoder(EncodingJob(MODEL, MODEL, config.Filters(max_tokens=limit)))(0, PAIRS)
    fitting = [pair for pair, length in zip(PAIRS, longest) if length <= limit]
    assert 0 < len(fitting) < 20 and (kept.codes == 0).sum() == len(fitting)
    assert _sentences(kept.sides[0][1]) == [vocab.encode(trg) for _, trg in fitting]


def test_sampled_segmentation_over_the_limit_is_replaced_by_the_plain_one() -> None:
    vocab = Vocabulary(MODEL)
    limit = max(len(vocab.encode(side)) for pair in PAIRS for side in pair)
    unlimited = Encoder(EncodingJob(MODEL, MODEL, None, variants=1, alpha=0.5))(0, PAIRS).sides[1][0]
    assert unlimited.lengths.max() > limit
    limited = Encoder(EncodingJob(MODEL, MODEL, config.Filters(max_tokens=limit), variants=1, alpha=0.5))(0, PAIRS)
    for sampled, encoded, (src, _) in zip(_sentences(unlimited), _sentences(limited.sides[1][0]), PAIRS):
        assert encoded == (sampled if len(sampled) <= limit else vocab.encode(src))


def test_every_chunk_side_and_variant_is_sampled_independently() -> None:
    encoder = Encoder(EncodingJob(MODEL, MODEL, None, variants=2, alpha=0.5))
    same = [(src, src) for src, _ in PAIRS]
    first, second = encoder(0, same), encoder(1, same)
    samples = {tuple(side.tokens.tolist()) for chunk in (first, second) for sides in chunk.sides[1:] for side in sides}
    assert len(samples) == 8
    again = encoder(0, same)
    assert all(np.array_equal(a.tokens, b.tokens) for x, y in zip(first.sides, again.sides) for a, b in zip(x, y))


def test_one_process_streams() -> None:
    """The first chunk is yielded before the third is read."""
    read = []

    def endless():
        for number in range(10**9):
            read.append(number)
            yield PAIRS[number % 20]

    chunk = next(encode_pairs(endless(), EncodingJob(MODEL, MODEL), workers=1))
    assert len(chunk.codes) == 2000 and len(read) <= 4000
