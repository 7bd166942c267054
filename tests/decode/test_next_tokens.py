"""Rules on next tokens, truncated sampling, minimum Bayes risk and alignments."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import sacrebleu
import tiny_run
import torch
from refusals import user_error
from test_search import BOS, EOS, PAD, PENALTIES, WORDS, TableStepper, assert_same, every_hypothesis, log_prob
from torch import Tensor
from torch.nn import functional as F

from deepnmt import config
from deepnmt.checkpoint.checkpoint import LoadedModel, load_model
from deepnmt.data.vocab import SPACE
from deepnmt.decode.align import align, alignment_layer, pharaoh, recorded_attention, words_of
from deepnmt.decode.mbr import expected_chrf
from deepnmt.decode.next_tokens import LengthPenalty, Rules
from deepnmt.decode.sampling import make_sampler
from deepnmt.decode.search import beam_search, choose_greedily, decode_independently
from deepnmt.decode.translate import translate_files, translate_lines
from deepnmt.model.sublayers import split_heads
from deepnmt.tokens import UNK

PENALTY = LengthPenalty("average", 1.0)
LIMITS = torch.tensor([4, 3, 4])


def has_repeat(tokens: list[int], n: int) -> bool:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("penalty", PENALTIES[:2], ids=["sum", "mean"])
def test_without_repeats_a_wide_beam_is_exhaustive_search(n: int, penalty: LengthPenalty) -> None:
    found = beam_search(TableStepper(3, 64), LIMITS, 64, 60, penalty, rules=Rules(no_repeat=n))
    for sentence, limit in enumerate(LIMITS.tolist()):
        every = [entry for entry in every_hypothesis(sentence, limit, penalty) if not has_repeat(entry[1], n)]
        assert_same(found[sentence], every[:60])
        likeliest = every_hypothesis(sentence, limit, penalty)[:60]
        assert limit == 3 or any(has_repeat(tokens, n) for _, tokens, _ in likeliest)


@pytest.mark.parametrize("patience", [None, 1.0])
def test_with_prefixes_a_wide_beam_is_exhaustive_search(patience: float | None) -> None:
    """Prefixes of different length, none, and one with a token that is never chosen."""
    prefixes = torch.tensor([[5, 6], [PAD, PAD], [BOS, PAD]])
    rules = Rules(barred=(4,), prefixes=prefixes)
    found = beam_search(TableStepper(3, 64), LIMITS, 64, 5, PENALTY, patience, rules=rules)
    for sentence, begin in enumerate([[5, 6], [], [BOS]]):
        limit = int(LIMITS[sentence])
        every = [(score, tokens, ended) for score, tokens, ended in _beginning(sentence, limit, begin)
                 if 4 not in tokens]
        if patience is None:
            assert_same(found[sentence], every[:5])
        assert all(c.tokens[: len(begin)] == begin for c in found[sentence])


def _beginning(sentence: int, limit: int, begin: list[int]) -> list[tuple[float, list[int], bool]]:
    """All hypotheses that begin so, best first."""
    if BOS not in begin:
        return [entry for entry in every_hypothesis(sentence, limit, PENALTY) if entry[1][: len(begin)] == begin]
    found = []
    for length in range(limit):
        for rest in itertools.product(WORDS, repeat=length):
            ended = length + len(begin) < limit
            counted = (*begin, *rest, EOS) if ended else (*begin, *rest)
            found.append((log_prob(sentence, counted) / PENALTY.divisor(len(counted)), [*begin, *rest], ended))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_rules_hold_without_a_beam(method: str) -> None:
    uniforms = torch.rand(30, 4, 9, generator=torch.Generator().manual_seed(1))
    choose = choose_greedily if method == "greedy" else make_sampler(uniforms, 1.5)
    begin = [[5, 5, 4]] * 15 + [[PAD] * 3] * 15
    found = decode_independently(TableStepper(30, 4), torch.full((30,), 9), 4, choose, PENALTY,
                                 Rules((0,), 5, 2, torch.tensor(begin)))
    for sentence, candidates in enumerate(found):
        for candidate in candidates:
            assert len(candidate.tokens) >= 5 and 0 not in candidate.tokens and not has_repeat(candidate.tokens, 2)
            assert sentence >= 15 or candidate.tokens[:3] == [5, 5, 4]
            counted = (*candidate.tokens, EOS) if candidate.ended else tuple(candidate.tokens)
            assert candidate.log_prob == pytest.approx(log_prob(sentence, counted), abs=1e-4)


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_a_hypothesis_without_a_token_left_ends_before_its_least_length(method: str) -> None:
    """Of four words none may come twice, and the first is barred. One sentence begins with a word that comes twice."""
    begin = torch.tensor([[PAD] * 5, [4, 5, 6, 6, 0]])
    rules, limits = Rules((0,), 9, 1, begin), torch.tensor([9, 9])
    if method == "beam":
        found = beam_search(TableStepper(2, 4), limits, 4, 4, PENALTY, rules=rules)
    else:
        choose = choose_greedily if method == "greedy" else make_sampler(torch.rand(2, 4, 9), 1.0, top_p=0.9)
        found = decode_independently(TableStepper(2, 4), limits, 4, choose, PENALTY, rules)
    for sentence, candidates, words in zip(range(2), found, ([4, 5, 6], [0, 4, 5, 6, 6]), strict=True):
        assert candidates
        for candidate in candidates:
            assert candidate.ended and sorted(candidate.tokens) == words
            assert candidate.log_prob == pytest.approx(log_prob(sentence, (*candidate.tokens, EOS)), abs=1e-4)


@pytest.mark.parametrize(("options", "kept"), [
    ({"top_k": 3}, [0, 1, 3]), ({"top_k": 1}, [3]), ({"top_p": 0.5}, [1, 3]), ({"top_p": 0.7}, [0, 1, 3]),
    ({"top_p": 1e-9}, [3]), ({"epsilon": 0.1}, [0, 1, 3]), ({"epsilon": 0.9}, [3]), ({}, [0, 1, 2, 3, 4]),
    ({"top_k": 4, "top_p": 0.99, "epsilon": 0.06}, [0, 1, 3]),
])
def test_samples_have_the_truncated_distribution(options: dict[str, float], kept: list[int]) -> None:
    """Of five tokens, over 20,000 draws, within three standard deviations; as often under a temperature."""
    p, count = torch.tensor([0.2, 0.25, 0.05, 0.45, 0.05]).double(), 20_000
    if options.get("top_k") == 4:  # two tokens are as likely; the first of them is kept, but too unlikely
        p = torch.tensor([0.2, 0.25, 0.055, 0.45, 0.045]).double()
    uniforms = torch.rand(1, count, 1, generator=torch.Generator().manual_seed(5))
    for temperature in (1.0, 2.0):
        sample = make_sampler(uniforms, temperature, **options)  # type: ignore[arg-type]
        drawn = sample((temperature * p.log()).expand(count, -1), torch.tensor([0]), 0)
        expected = torch.zeros(5).double()
        expected[kept] = p[kept] / p[kept].sum()
        sigma = (expected * (1 - expected) / count).sqrt()
        assert ((drawn.bincount(minlength=5) / count - expected).abs() <= 3 * sigma).all()


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """An untrained model that finds `<unk>` likely."""
    loaded = load_model(tiny_run.write(tiny_run.recipe_of(tmp_path_factory.mktemp("run")), 1, seed=2))
    with torch.no_grad():
        loaded.model.output_weight.mul_(4)
    return loaded


LINES = ["a dog sees the tree", "", "two cats", "the old red house is in the garden", "birds"]


@pytest.mark.parametrize("method", ["beam", "greedy", "sample", "mbr"])
def test_unknown_pieces_are_not_written(method: str, loaded: LoadedModel) -> None:
    def pieces(unknown: bool) -> Counter[str]:
        settings = config.Translate(method=method, unknown=unknown, max_extra=4)  # type: ignore[arg-type]
        return Counter(piece for best in translate_lines(loaded.model, loaded.vocabs, LINES * 4, settings)
                       for piece in best[0].pieces)

    with torch.no_grad():
        before = loaded.model.output_weight[0].clone()
        likely = loaded.trg_vocab.to_ids([pieces(unknown=False).most_common(1)[0][0]])
        loaded.model.output_weight[0] = 1.5 * loaded.model.output_weight[likely].squeeze(0)
        try:
            assert "<unk>" in pieces(unknown=True)
            assert "<unk>" not in pieces(unknown=False)
        finally:
            loaded.model.output_weight[0] = before


def test_expected_chrf_is_sacrebleus() -> None:
    texts = ["the house is old", "the house is old", "a house", "", "old", "houses are  old ✓", "the old house", "x"]
    metric = sacrebleu.CHRF()
    expected = [sum(metric.sentence_score(one, [other]).score for other in texts) / len(texts) for one in texts]
    assert expected_chrf(texts) == pytest.approx(expected, abs=1e-9)


def test_mbr_takes_the_sample_that_is_most_like_all(loaded: LoadedModel) -> None:
    sampling = {"temperature": 0.8, "epsilon": 0.02, "max_extra": 4}
    drawn = translate_lines(loaded.model, loaded.vocabs, LINES, config.Translate.model_validate(
        {"method": "sample", "nbest": 12, **sampling}))
    chosen = translate_lines(loaded.model, loaded.vocabs, LINES, config.Translate.model_validate(
        {"method": "mbr", "samples": 12, "nbest": 2, **sampling}))
    metric = sacrebleu.CHRF()
    for samples, best in zip(drawn, chosen, strict=True):
        if not samples[0].text:
            continue
        utility = {one.text: sum(metric.sentence_score(one.text, [other.text]).score for other in samples) / 12
                   for one in samples}
        assert best[0].score == pytest.approx(max(utility.values()), abs=1e-6)
        assert [h.score for h in best] == pytest.approx(sorted(utility.values(), reverse=True)[:2], abs=1e-6)
        assert all(h.log_prob == max(s.log_prob for s in samples if s.text == h.text) for h in best)


# -- alignments --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_links_are_the_largest_attention(loaded: LoadedModel) -> None:
    vocab, attention = loaded.trg_vocab, loaded.model.decoder_layers[0].cross_attn
    texts = ["two birds sing", "the cat"], ["a dog sees", "old red house in"]
    src, trg = ([vocab.encode(text) for text in side] for side in texts)
    length = max(map(len, src)) + 1
    source = torch.tensor([[*ids, EOS, *[PAD] * (length - 1 - len(ids))] for ids in src])
    begin = torch.tensor([[BOS, *ids, *[PAD] * (max(map(len, trg)) - len(ids))] for ids in trg])
    lengths = torch.tensor([len(ids) + 1 for ids in src])
    seen: list[tuple[Tensor, ...]] = []
    handle = attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with recorded_attention(attention) as weights:
        loaded.model.decode(begin, loaded.model.encode(source, lengths), lengths)
    handle.remove()
    x, keys, _, mask = seen[0]
    unit = torch.eye(length).expand(2, attention.heads, -1, -1)  # so that what is attended to is the weight
    q = split_heads(attention.q(x), attention.heads)
    expected = F.scaled_dot_product_attention(q, keys, unit, mask).mean(1)
    torch.testing.assert_close(weights[0], expected)
    links = align(loaded.model, 0, source, lengths, begin, trg, loaded.vocabs)
    for b in range(2):
        best = expected[b, : len(trg[b]), : len(src[b])].argmax(1).tolist()
        s, t = words_of(src[b], vocab), words_of(trg[b], vocab)
        assert links[b] == sorted({(s[i], t[j]) for j, i in enumerate(best)})
        assert {target for _, target in links[b]} == set(range(len(texts[1][b].split())))


def test_words_of_pieces_are_the_texts_words(loaded: LoadedModel) -> None:
    text = "the  smallish dog ✓ sees"
    words = words_of(loaded.trg_vocab.encode(text), loaded.trg_vocab)
    assert words[0] == 0 and words[-1] == 4 and sorted(set(words)) == [0, 1, 2, 3, 4] and words == sorted(words)
    vocab = loaded.trg_vocab
    ids = {name: number for number, name in enumerate(vocab.names())}
    the, space, dog = vocab.encode("the"), ids[SPACE], vocab.encode("dog")
    for pieces in ([*the, UNK, *dog], [*the, UNK, *the], [*the, space], [*the, space, *dog], [space, *the, UNK]):
        written = words_of(pieces, vocab, written=True)
        assert max(written) + 1 == len(vocab.decode(pieces).split()), vocab.to_pieces(pieces)
        assert written == sorted(written)
    assert words_of([*the, UNK, *dog], vocab)[len(the)] == 0, "of a source unk is a part of a word"
    assert pharaoh([(0, 1), (12, 3)]) == "0-1 12-3"
    assert alignment_layer(loaded.model, 1) == alignment_layer(loaded.model, 0) == 0
    with user_error(r"translate\.alignment_layer is 2, but the model's decoder has 1 layers"):
        alignment_layer(loaded.model, 2)


def test_alignments_are_written_beside_the_translations(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    settings = config.Translate(max_extra=4)
    translate_files(loaded.folder, str(tmp_path / "in"), str(tmp_path / "out"), settings, output_format="jsonl",
                    alignments=str(tmp_path / "links"))
    links = (tmp_path / "links").read_text().splitlines()
    objects = [json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()]
    assert len(links) == len(LINES)
    for line, text, found in zip(links, LINES, objects, strict=True):
        best = found["hypotheses"][0]
        pairs = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert pairs == [tuple(pair) for pair in best["alignment"]]  # of an empty line, too
        assert all(s < len(text.split()) and t < len(best["text"].split()) for s, t in pairs)
        assert bool(pairs) == bool(best["pieces"])
    with user_error("alignments and translations would go into the same file"):
        translate_files(loaded.folder, str(tmp_path / "in"), "-", settings, alignments="-")
    with user_error("alignments and translations would go into the same file"):
        translate_files(loaded.folder, str(tmp_path / "in"), str(tmp_path / "new"), settings,
                        alignments=f"{tmp_path}/../{tmp_path.name}/new")
    begins = tmp_path / "begins"
    begins.write_text("\n" * len(LINES), encoding="utf-8")
    with user_error("begins is the input file itself"):
        translate_files(loaded.folder, str(tmp_path / "in"), str(tmp_path / "new"), settings, prefixes=str(begins),
                        alignments=str(begins))
    assert begins.read_text() == "\n" * len(LINES) and not (tmp_path / "new").exists()
