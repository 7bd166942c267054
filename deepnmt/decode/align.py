"""Word alignments from cross-attention.

`B` sentences, `S` source length, `T` target length, `D` width, `H` heads, `d` = D / H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.errors import UserError
from deepnmt.model.attention_weights import AttentionHook, layer_index
from deepnmt.model.hooks import hooks
from deepnmt.model.sublayers import CrossAttention
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import UNK

Links = list[tuple[int, int]]  # of a word of the source and one of the translation, counted from 0


def alignment_layer(model: Transformer, layer: int) -> int:
    """The decoder layer, counted from 0, that gives alignments: number `layer` (from 1), or for 0 the last but one,
    whose attention is most like an alignment without any training for it (Garg et al. 2019, Jointly Learning to Align
    and Translate with Transformer Models).

    Raises:
        UserError: the model has no such layer.
    """
    layers = len(model.decoder_layers)
    if layer > layers:
        raise UserError(f"translate.alignment_layer is {layer}, but the model's decoder has {layers} layers; set it to "
                        f"{layers} or less")
    return layer_index(layer, layers)


@contextmanager
def recorded_attention(attention: CrossAttention) -> Iterator[list[Tensor]]:
    """A list that gets the weights [B, T, S] of every call of a cross-attention, averaged over heads, fp32."""
    weights: list[Tensor] = []
    with hooks() as handles:
        handles += AttentionHook(lambda scores: weights.append(scores.softmax(3).mean(1))).attach(attention)
        yield weights


def align(
    model: Transformer, layer: int, src: Tensor, lengths: Tensor, trg_in: Tensor, targets: Sequence[Sequence[int]],
    vocabs: tuple[Vocabulary, Vocabulary],
) -> list[Links]:
    """The links of sentences with their translations: each piece of a translation with the piece of the source, other
    than eos, that the step which predicted it attended to most; and so the words that these are pieces of.

    Args:
        layer: of the decoder, from 0.
        src, lengths, trg_in: [B, S], [B] and [B, T], as for the model.
        targets: the translations' token ids, without eos.
        vocabs: source and target.
    """
    with recorded_attention(model.decoder_layers[layer].cross_attn) as weights:
        model.decode(trg_in, model.encode(src, lengths), lengths)
    alignments = []
    for row, source, length, target in zip(weights[0], src.tolist(), lengths.tolist(), targets, strict=True):
        src_words = words_of(source[: length - 1], vocabs[0])
        trg_words = words_of(target, vocabs[1], written=True)
        links = set()
        if length > 1 and target:
            best = row[: len(target), : length - 1].argmax(1).tolist()
            for piece, word in zip(best, trg_words, strict=True):
                if word >= 0 and src_words[piece] >= 0:
                    links.add((src_words[piece], word))
        alignments.append(sorted(links))
    return alignments


def words_of(ids: Sequence[int], vocab: Vocabulary, written: bool = False) -> list[int]:
    """For each piece the number of its word, from 0; words are what spaces separate, and a piece that is only a space
    is of the next one.

    Args:
        written: as `ids` are written, where unk is a word, ⁇, and tags, which are not written, have the number -1.
            Else tags are words, and unk is a part of one.
    """
    numbers, word, begins = [], -1, True
    tags = set(vocab.tags.values())
    for token, name in zip(ids, vocab.to_pieces(ids), strict=True):
        if written and token in tags:
            numbers.append(-1)
            continue
        alone = written and token == UNK
        begins = begins or alone or vocab.begins_word[token]
        if name == SPACE:
            numbers.append(word + 1)
            continue
        if begins:
            word += 1
        numbers.append(word)
        begins = alone
    return [min(number, word) for number in numbers]


def pharaoh(links: Links) -> str:
    """Links as Pharaoh wrote them and other programs read them: "0-0 1-2"."""
    return " ".join(f"{source}-{target}" for source, target in links)
