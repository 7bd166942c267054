"""What a layer is worth: nothing if it adds nothing. That runs of `compare-blocks` have the figures is tested there."""

from __future__ import annotations

import pytest
import torch
from small_models import batch, batch_of, model_of

from studies import layers


@pytest.mark.parametrize("block", ["pre_ln", "attn_res"])
def test_a_layer_that_adds_nothing_is_worth_nothing(block: str) -> None:
    """Its matrices that write into the stream are 0; a layer that adds something changes the loss."""
    model = model_of(block).eval()
    data = [batch_of(*batch([7, 3, 5], [6, 2, 4]))]
    layer = model.decoder.layers[1]
    whole = layers.loss_of(model, data)
    assert abs(layers.loss_without([layer], model, data) - whole) > 1e-3
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if ".out." in name or ".fc2." in name:
                parameter.zero_()
    whole = layers.loss_of(model, data)
    assert layers.loss_without([layer], model, data) == pytest.approx(whole, abs=1e-6)
    found = layers.profile(model, data)["decoder"]
    assert found["turn"][1] < 0.1 < found["turn"][0]
    assert found["together"][0] == pytest.approx(min(found["worth"]))
    assert found["together"][-1] == pytest.approx(layers.loss_without([*model.decoder.layers], model, data) - whole)
