"""Adaptive inputs and adaptive softmax against plain ones, PyTorch's, and finite differences."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_models import batch, batch_of
from torch import nn
from torch.nn import functional as F

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.model.adaptive import Bands
from deepnmt.model.init import new_model
from deepnmt.model.objective import BandedCrossEntropy
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD
from deepnmt.training.dry_run import count_parameters

VOCAB, WIDTH = 23, 8


def filled(bounds: list[int]) -> tuple[Bands, torch.Tensor]:
    bands = Bands(VOCAB, WIDTH, bounds, 2)
    table = torch.full((bands.rows, WIDTH), torch.nan)
    bands.fill(table, torch.Generator().manual_seed(1))
    return bands, table


def rows(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(0, VOCAB, (count,), generator=generator)


def test_one_band_is_plain_softmax() -> None:
    """To 1e-6, the gradients too."""
    bands, table = filled([])
    hidden, targets = rows()
    hidden.requires_grad_()
    table.requires_grad_()
    loss, _ = bands.losses(hidden, table, targets)
    ours = torch.autograd.grad(loss, [hidden, table])
    plain = F.cross_entropy(hidden @ table[:VOCAB].t(), targets, reduction="sum")
    theirs = torch.autograd.grad(plain, [hidden, table])
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bounds", [[9], [5, 11], [5, 6, 20]])
def test_it_is_that_of_pytorch(bounds: list[int]) -> None:
    """`AdaptiveLogSoftmaxWithLoss` with these weights: losses, and all log-probabilities, which sum to 1."""
    bands, table = filled(bounds)
    hidden, targets = rows()
    theirs = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, bounds, div_value=2.0)
    with torch.no_grad():
        theirs.head.weight.copy_(table[: bands.head])
        for band in range(1, len(bounds) + 1):
            theirs.tail[band - 1][0].weight.copy_(bands.projection(table, band))
            theirs.tail[band - 1][1].weight.copy_(bands.vectors(table, band))
    loss, nll = bands.losses(hidden, table, targets)
    torch.testing.assert_close(loss / len(targets), theirs(hidden, targets).loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, nll)
    every = bands.log_probabilities(hidden, table)
    torch.testing.assert_close(every, theirs.log_prob(hidden), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(len(hidden)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(-every.gather(1, targets[:, None]).sum(), loss, rtol=1e-6, atol=1e-5)


def test_inputs_are_projected_vectors() -> None:
    bands, table = filled([5, 11])
    ids = torch.tensor([[1, 5, 22], [10, 11, 4]])
    made = bands.embed(table, ids)
    for place in itertools.product(range(2), range(3)):
        token = int(ids[place])
        band = sum(token >= bound for bound in (5, 11))
        expected = bands.vectors(table, band)[token - bands.starts[band]] @ bands.projection(table, band)
        torch.testing.assert_close(made[place], expected)
    assert bands.widths == [8, 4, 2]
    parts = [5 * 8, 6 * 4, 12 * 2, 8 * 8, 4 * 8, 2 * 8, 2 * 8]  # vectors, projections, classes
    assert table.numel() == sum(parts)


def model() -> Model:
    return Model.model_validate({
        "width": WIDTH, "heads": 2, "ffn": 12, "dropout": 0.0, "encoder": None, "bands": [5, 11], "band_factor": 2,
        "decoder": {"block": "post_ln", "layers": 1}})


def exact(made: Transformer, one: Batch) -> float:
    """The loss in fp64, token by token."""
    table, bands, counted = made.output_weight, made.bands, one["trg_out"] != PAD
    assert bands is not None
    hidden = made.run(one)[1]
    assert isinstance(hidden, torch.Tensor)
    total = 0.0
    for state, target in zip(hidden[counted], one["trg_out"][counted].tolist(), strict=True):
        band = sum(target >= bound for bound in (5, 11))
        head = (table[: bands.head] @ state).log_softmax(0)
        total -= float(head[target if band == 0 else 4 + band])
        if band:
            logits = bands.vectors(table, band) @ (bands.projection(table, band) @ state)
            total -= float(logits.log_softmax(0)[target - bands.starts[band]])
    return total


def test_tied_gradients_are_finite_differences() -> None:
    """The table is input, projection and output at once; each of its numbers has the gradient of all three."""
    made = new_model(model(), VOCAB, VOCAB, 1).eval()
    made.objective = BandedCrossEntropy(Bands(VOCAB, WIDTH, [5, 11], 2), 0.0, 1)
    one = batch_of(*batch([3, 2], [6, 5]))
    made(one).loss.backward()
    gradient, step = made.output_weight.grad, 1e-5
    assert gradient is not None
    wide = copy.deepcopy(made).double()
    assert float(made(one).loss) == pytest.approx(exact(wide, one), rel=1e-6)
    with torch.no_grad():
        weight = wide.output_weight
        for place in itertools.islice(itertools.product(range(weight.size(0)), range(WIDTH)), 0, None, 7):
            values = []
            for sign in (1, -2):
                weight[place] += sign * step
                values.append(exact(wide, one))
            weight[place] += step
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(gradient[place]), abs=1e-4)


def test_further_bands_have_a_dropout_of_their_own() -> None:
    made, one = new_model(model(), VOCAB, VOCAB, 1), batch_of(*batch([3, 2], [6, 5]))
    losses = []
    for dropout, training in ((0.0, True), (0.5, True), (0.5, False)):
        made.objective = BandedCrossEntropy(Bands(VOCAB, WIDTH, [5, 11], 2), dropout, 1)
        losses.append(float(made.train(training)(one).loss))
    assert losses[0] != losses[1] and losses[0] == losses[2]


def test_parameters_in_bands_are_counted() -> None:
    made = new_model(model(), VOCAB, VOCAB, 1)
    assert count_parameters(model(), VOCAB, VOCAB) == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize(("changes", "said"), [
    ({"encoder": {}}, "bands .* are for language models"), ({"tied": "none"}, "need tied: all"),
    ({"bands": [11, 5]}, "must rise"), ({"bands": []}, "band_dropout .* has no effect"),
    ({"bands": [5, 6, 7, 8]}, "leave the last one no width")])
def test_faulty_bands(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Model.model_validate({**model().model_dump(), "band_dropout": 0.1, **changes})
