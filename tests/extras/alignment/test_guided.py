"""Guided alignment's loss, and its place in the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from small_models import VOCAB, batch, batch_of, shapes
from torch import Tensor

from deepnmt.extras.alignment.objective import Guided, alignment_loss
from deepnmt.model.attention_weights import attention_scores, layer_index
from deepnmt.model.init import Initialiser, fill
from deepnmt.model.objective import CrossEntropy, Objective, RDrop
from deepnmt.model.sublayers import key_mask, split_heads
from deepnmt.model.transformer import Transformer

LINKS = {0: {0: [1], 2: [0, 3], 3: [3]}, 2: {1: [2], 4: [0, 1, 2]}}  # sentence: target: sources
WEIGHT = 0.3


def links() -> Tensor:
    rows = [(b, t, s, len(sources)) for b, row in LINKS.items() for t, sources in row.items() for s in sources]
    return torch.tensor(rows).T.contiguous()


def model_of(weight: float = WEIGHT, layer: int = 0, r_drop: float = 0.0) -> Transformer:
    shape = shapes("pre_ln", (1, 2), 0.1)
    objective: Objective = RDrop(CrossEntropy(0.1), r_drop) if r_drop else CrossEntropy(0.1)
    model = Transformer(shape, VOCAB, VOCAB, 1, Guided(objective, layer, weight) if weight else objective)
    fill(model, Initialiser(shape, VOCAB, VOCAB, 1))
    return model.train()


def reference(attention: Tensor) -> float:
    """The loss of the papers, from one pass's attention [B, H, T, S], a link after the other."""
    total = 0.0
    for b, row in LINKS.items():
        for t, sources in row.items():
            mean = attention[b, :, t].mean(0)
            for s in sources:
                total -= float(mean[s].log()) / len(sources)
    return total


def test_the_loss_is_the_papers_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 3, 5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    loss = alignment_loss(scores, links(), 3)
    passes = scores.detach().softmax(3).chunk(2)
    assert float(loss.detach()) == pytest.approx((reference(passes[0]) + reference(passes[1])) / 2, rel=1e-14)
    assert torch.autograd.gradcheck(partial(alignment_loss, links=links(), sentences=3), scores)
    assert float(alignment_loss(scores.detach(), links()[:, :0], 3)) == 0.0


@pytest.mark.parametrize(("layer", "r_drop", "recompute"), [(0, 0.0, 0), (2, 4.0, 0), (1, 0.0, 2)])
def test_a_model_in_training_adds_it_to_its_loss(layer: int, r_drop: float, recompute: int) -> None:
    """Masks of dropout are as without it, and only the layer's own attention counts."""
    inputs = batch([5, 3, 4], [6, 4, 5])
    linked, plain = batch_of(*inputs, key=7, links=links()), model_of(0.0, r_drop=r_drop)
    model = model_of(layer=layer, r_drop=r_drop)
    model.recompute = recompute
    attention, seen = plain.decoder_layers[layer_index(layer, 2)].cross_attn, []
    attention.register_forward_pre_hook(lambda module, given: seen.append(
        (split_heads(module.q(given[0]), 4) @ given[1].transpose(2, 3) / 2).masked_fill(~given[3], -torch.inf)))
    with torch.no_grad():
        before = plain(batch_of(*inputs, key=7))
    sums = model(linked)
    expected = [reference(part) for part in seen[0].detach().softmax(3).chunk(2 if r_drop else 1)]
    found = float(sums.others["alignment_loss"])
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert torch.equal(sums.nll, before.nll)
    assert float(sums.loss.detach()) == pytest.approx(float(before.loss) + WEIGHT * found, rel=1e-6)
    sums.loss.backward()
    other = model_of(layer=layer, r_drop=r_drop)
    other(linked).loss.backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]  # with recomputation or without
    assert model(batch_of(*inputs, key=7)).others == model.eval()(linked).others == {}  # no links, and in validation


def test_scores_take_both_kinds_of_masks() -> None:
    q, keys, lengths = torch.randn(2, 3, 8), torch.randn(2, 4, 5, 2), torch.tensor([5, 3])
    mask = key_mask(lengths, 5, torch.float32)
    assert mask is not None
    added = torch.where(mask, 0.0, -torch.inf)  # as on a GPU
    assert torch.equal(attention_scores(q, keys, mask), attention_scores(q, keys, added))
    assert [layer_index(0, 6), layer_index(0, 1), layer_index(6, 6)] == [4, 0, 5]
