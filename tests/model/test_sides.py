"""A model may lack a side: a decoder without cross-attention, or an encoder by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import recipe_with
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.config.choices import ACTIVATIONS, BLOCKS, NORMS, POSITIONS, TYINGS
from deepnmt.errors import UserError
from deepnmt.model.admin_profile import AdminProfile, measure
from deepnmt.model.blocks import LayerPosition, profiled_sublayers
from deepnmt.model.init import new_model
from deepnmt.model.sublayers import SelfAttention
from deepnmt.model.transformer import Transformer, unit_names
from deepnmt.parallel.pipeline.boundary import Boundary
from deepnmt.parallel.pipeline.partition import cost_units, partition
from deepnmt.tokens import PAD
from deepnmt.training.dry_run import count_parameters

VOCAB, LAYERS = 11, 3
SHAPES: list[dict[str, Any]] = [
    *({"block": block} for block in BLOCKS),
    *({"block": block, "init": "published"} for block in BLOCKS
      if BLOCKS[block].published and block != "fixup"),  # whose encoder has a scale at its top
    *({"block": "pre_ln", "positions": name} for name in POSITIONS),
    *({"block": "post_ln", "norm": name} for name in NORMS),
    *({"block": "b2t", "activation": name} for name in ACTIVATIONS),
]


def settings(lacking: str, block: str, init: str = "auto", **others: Any) -> Model:
    """A model that lacks a side; the other has a block."""
    stack = {"block": block, "layers": LAYERS, "init": init}
    sides = {"encoder": None, "decoder": stack} if lacking == "encoder" else {"encoder": stack, "decoder": None}
    return Model.model_validate({"width": 8, "heads": 2, "ffn": 12, "dropout": 0.0, **sides, **others})


def batch_of(rows: int = 3, length: int = 7) -> Batch:
    ids = torch.randint(PAD + 1, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    return Batch({"src": ids[:, :-1], "src_lengths": torch.full((rows,), length), "trg_in": ids[:, :-1],
                  "trg_out": ids[:, 1:]}, key=3, tokens=rows * length)


def stirred(model: Transformer) -> Transformer:
    """With other weights than at first, so that none of them is without effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape.values()))
def test_a_decoder_alone_is_a_causal_encoder(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same weights, and see the same tokens; step by step the decoder says the same."""
    decoder, batch = stirred(new_model(settings("encoder", **shape), VOCAB, VOCAB, 1)), batch_of()
    encoder = Transformer(settings("decoder", **shape), VOCAB, VOCAB, 1).eval()
    encoder.load_state_dict({name.replace("decoder.", "encoder."): weight
                             for name, weight in decoder.state_dict().items()})
    assert not any("cross_attn" in name for name in decoder.state_dict())
    hidden = decoder.run(batch)[1]
    assert isinstance(hidden, Tensor)
    cache, steps = decoder.start_alone(3, 7), []
    for column in batch["trg_in"].T:
        steps.append(decoder.step(column, cache))
    torch.testing.assert_close(torch.stack(steps, 1), hidden, rtol=1e-4, atol=1e-5)
    whole = SelfAttention.forward
    monkeypatch.setattr(SelfAttention, "forward",
                        lambda self, x, mask, causal: whole(self, x, mask, causal=True))
    torch.testing.assert_close(encoder.run(batch)[1], hidden, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("lacking", ["encoder", "decoder"])
@pytest.mark.parametrize("block", BLOCKS)
def test_stages_compute_what_the_whole_does(block: str, lacking: str) -> None:
    """Each unit as a stage of its own; what they send has the shape that the next expects."""
    model, batch = settings(lacking, block), batch_of()
    whole = stirred(new_model(model, VOCAB, VOCAB, 1))
    names, sent = unit_names(model), None
    for number, name in enumerate(names):
        stage = Transformer(model, VOCAB, VOCAB, 1, units=range(number, number + 1)).eval()
        stage.load_state_dict({key: whole.state_dict()[key] for key in stage.state_dict()})
        below = Boundary(model, name) if number else None
        assert below is None or sent is None or tuple(sent.shape) == below.shape(batch)
        memory, hidden = stage.run(batch, *(below.unpack(sent, batch) if below and sent is not None else ()))
        if name != "output":
            sent = Boundary(model, names[number + 1]).pack(memory, hidden)
    torch.testing.assert_close(hidden, whole.run(batch)[1])
    assert partition(cost_units(model, VOCAB, VOCAB), 3).bounds[-1] == len(names) == LAYERS + 2


def test_constants_of_a_stack_by_itself() -> None:
    """DeepNet, table 1: α = (2L)^(1/4), β = (8L)^(-1/4). Magneto, table 2: γ = √ln(2L)."""
    for lacking, side in (("encoder", "decoder"), ("decoder", "encoder")):
        deep = LayerPosition.of(settings(lacking, "deepnorm"), side, 0)  # type: ignore[arg-type]
        assert deep.block.fixed_omega(deep) == pytest.approx(6 ** 0.25)
        assert deep.block.matrix_gain(deep, "v") == pytest.approx(24 ** -0.25)
        sub = LayerPosition.of(settings(lacking, "sub_ln"), side, 0)  # type: ignore[arg-type]
        assert sub.block.sublayer_gain(sub, "ffn", "fc1") == pytest.approx(math.log(6) ** 0.5)


def test_a_model_without_sides_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder and decoder are both null"):
        Model.model_validate({"encoder": None, "decoder": None})


def test_null_is_written_and_read_again() -> None:
    model = settings("encoder", "b2t")
    assert Model.model_validate(model.model_dump()) == model
    assert (model.sides, model.depths, model.block_names) == (("decoder",), "3L", ("b2t",))
    assert dict(model.tables) == {"trg": "shared", "out": "shared"}


@pytest.mark.parametrize("lacking", ["encoder", "decoder"])
def test_omegas_of_a_stack_by_itself(lacking: str, tmp_path: Path) -> None:
    """There are two a layer, by whose names the weights get them; the file that holds them is read again."""
    model = settings(lacking, "admin")
    profile = measure(model, VOCAB, VOCAB, 1, [batch_of()])
    assert list(profile.omega) == profiled_sublayers(model, model.last) and len(profile.omega) == 2 * LAYERS
    profile.save(tmp_path / "profile.json")
    assert AdminProfile.load(tmp_path / "profile.json", model).omega == profile.omega
    started = new_model(model, VOCAB, VOCAB, 1, omega=profile.omega)
    layer = f"{model.last}.layers.{LAYERS - 1}"
    top = float(started.get_parameter(f"{layer}.rule.omegas.1").detach()[0])
    assert top == pytest.approx(profile.omega[f"{layer}.ffn"]) and top > 1


def test_translation_needs_both_sides() -> None:
    with pytest.raises(UserError, match=r"model\.encoder\.layers: is 0, but task: translation needs the encoder"):
        recipe_with(model={"encoder": None})
    with pytest.raises(UserError, match=r"model\.decoder\.layers: is 0, but task: translation needs the decoder"):
        recipe_with(model={"decoder": None})


@pytest.mark.parametrize("lacking", ["encoder", "decoder"])
@pytest.mark.parametrize("tied", TYINGS)
def test_parameters_of_a_stack_by_itself_are_counted(lacking: str, tied: str) -> None:
    model = settings(lacking, "dlcl", tied=tied)
    assert count_parameters(model, VOCAB, VOCAB) == sum(
        p.numel() for p in Transformer(model, VOCAB, VOCAB, 1).parameters())
