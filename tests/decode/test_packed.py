"""Packed linear maps: a search with them finds what it finds without."""

from __future__ import annotations

import copy

import pytest
import torch
from small_models import model_of
from test_decoding import LINES, Numbers, assert_same
from torch import nn
from torch.testing import assert_close

from deepnmt import config
from deepnmt.decode import packed
from deepnmt.decode.models import cast_weights
from deepnmt.decode.packed import PackedLinear, can_pack, pack, packed_copy
from deepnmt.decode.translate import translate_lines

pytestmark = pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
                                reason="matrices are packed on CPUs with AVX2")


@pytest.mark.parametrize("block", ["admin", "fixup"])
def test_a_packed_model_translates_as_before(block: str) -> None:
    """Fixup's linear maps subtract a number first, so they stay as they are."""
    model = model_of(block)
    other = packed_copy(model)
    kinds = {type(module) for module in other.decoder.modules()}
    assert nn.Linear not in kinds and (PackedLinear in kinds) == (block == "admin") and other.project is not None
    assert not any(isinstance(module, PackedLinear) for module in model.modules()) and model.project is None
    assert other.output_weight is model.output_weight
    vocab = Numbers()
    for method in ("greedy", "beam"):
        settings = config.Translate(method=method, beam=4, nbest=4 if method == "beam" else 1)
        assert_same(*(translate_lines(each, (vocab, vocab), LINES, settings)  # type: ignore[arg-type]
                      for each in (other, model)))


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("bf16", 2e-2)])
def test_products_of_any_number_of_rows(precision: str, tolerance: float) -> None:
    model = cast_weights(model_of("post_ln"), precision)
    ffn, x = model.decoder_layers[0].ffn, torch.randn(64, 3, model.shape[0]).to(model.output_weight.dtype)
    packed_ffn = pack(copy.deepcopy(model)).decoder_layers[0].ffn
    assert isinstance(packed_ffn.activation, nn.Identity) == can_pack(model.output_weight)  # ReLU included
    with torch.inference_mode():
        for rows in (1, 2, 5, 31, 64):
            assert_close(packed_ffn(x[:rows]), ffn(x[:rows]), rtol=tolerance, atol=tolerance)


def test_a_model_stays_as_it_is_where_nothing_can_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    model = pack(model_of("post_ln"))
    monkeypatch.undo()
    monkeypatch.setattr(packed, "_pack", None)
    assert not any(isinstance(module, PackedLinear) for module in pack(model).modules())


def test_bf16_stays_as_it_is_on_a_cpu_without_avx_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model = cast_weights(model_of("post_ln"), "bf16")
    assert not any(isinstance(module, PackedLinear) for module in pack(model).modules())
    assert can_pack(torch.ones(2, 2))
