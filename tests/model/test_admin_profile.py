"""Admin's profile: ω against its definitions, memory of one layer, any division of the batch; and its files."""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import user_error
from tiny_engines import batch_of
from torch.nn.modules.module import register_module_forward_pre_hook

from deepnmt.batch import Batch
from deepnmt.config import Admin, Model
from deepnmt.model.admin_profile import AdminProfile, measure, omega_of
from deepnmt.model.blocks import SIDES
from deepnmt.model.init import new_model
from deepnmt.model.layers import Layer
from deepnmt.plots import plot_admin_profile, plot_learning_curve
from deepnmt.processes.ranks import Ranks
from studies.compare import plot_comparison

VOCAB, SEED, PAD = 50, 3, 3


def shape(encoder: str = "admin", decoder: str = "admin", layers: tuple[int, int] = (3, 2), **more: Any) -> Model:
    return Model.model_validate({
        "width": 16, "heads": 2, "ffn": 32, "dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1,
        "encoder": {"block": encoder, "layers": layers[0]},
        "decoder": {"block": decoder, "layers": layers[1], **more.pop("of_decoder", {})}, **more,
    })


def batches(sizes: tuple[int, ...] = (2, 5, 3), extra: int = 0) -> list[Batch]:
    """Micro-batches of unequal sizes, the first sentence of each the shortest, with `extra` columns of padding."""
    made = []
    for key, rows in enumerate(sizes):
        generator = torch.Generator().manual_seed(key)
        src = torch.full((rows, 7 + extra), PAD)
        trg = torch.full((rows, 6 + extra), PAD)
        src[:, :7] = torch.randint(4, VOCAB, (rows, 7), generator=generator)
        trg[:, :6] = torch.randint(4, VOCAB, (rows, 6), generator=generator)
        lengths = torch.full((rows,), 7)
        lengths[0], src[0, 3:], trg[0, 2:] = 3, PAD, PAD
        made.append(batch_of(src, lengths, trg.clone(), trg, 100 + key))
    return made


def omega_by_definition(input_variance: float, variances: list[float]) -> list[float]:
    """ω from the variances of a stack's input and of its branch outputs."""
    return [1.0, *(math.sqrt(input_variance + sum(variances[:i])) for i in range(1, len(variances)))]


def sees(real: torch.Tensor) -> torch.Tensor:
    """[B, T] to [B, 1, T, T]: the keys up to each position, without padding."""
    return real[:, None, None] & torch.ones(real.size(1), real.size(1), dtype=torch.bool).tril()


def omega_of_whole_model(
    model: Model, data: list[Batch], omega: dict[str, float] | None = None, count_padding: bool = False
) -> dict[str, list[float]]:
    """ω of both stacks, from hooks on the whole model and `torch.var` over all its outputs at once.

    Args:
        omega: of the model that is measured; None: all 1.
    """
    built = new_model(model, VOCAB, VOCAB, SEED, omega=omega).train()
    outputs: dict[str, list[torch.Tensor]] = {}
    real: dict[str, torch.Tensor] = {}

    def seen(name: str, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        here = real[name.split(".")[0]]
        if count_padding and name.endswith("input"):
            output = output.masked_fill(~here[..., None], 0)
        outputs[name].append(output.flatten(0, 1) if count_padding else output[here])
        return output

    for name, module in built.named_modules():
        if count_padding and name.startswith("decoder.") and name.endswith(".self_attn"):
            module.register_forward_pre_hook(
                lambda _m, given, _k: ((given[0], sees(real["decoder"])), {"causal": False}), with_kwargs=True)
        if ".rule.adds." in name or name in ("encoder.input", "decoder.input"):
            outputs[name] = []
            module.register_forward_hook(partial(seen, name))
    with torch.no_grad():
        for batch in data:
            src, lengths, trg_out = batch["src"], batch["src_lengths"], batch["trg_out"]
            real.update(encoder=torch.arange(src.size(1)) < lengths[:, None], decoder=trg_out != PAD)
            built(batch)
    variances = {name: torch.cat(parts).double().var(correction=0).item() for name, parts in outputs.items()}
    return {side: omega_by_definition(variances[f"{side}.input"],
                                      [v for n, v in variances.items() if n.startswith(f"{side}.layers")])
            for side in SIDES}


def test_omega_of_hand_made_variances() -> None:
    assert [omega_of([4.0, 1.0, 8.0][:count]) for count in (1, 2, 3)] == [1.0, math.sqrt(5), math.sqrt(13)]


@pytest.mark.parametrize("blocks", [("admin", "admin"), ("pre_ln", "admin"), ("b2t", "admin"), ("admin", "post_ln"),
                                    ("dlcl", "admin"), ("t_fixup", "admin"), ("admin_closed_form", "admin")])
@pytest.mark.parametrize("tied", ["all", "none"])
@pytest.mark.parametrize(("method", "count_padding"), [("in_place", False), ("in_place", True), ("separate", False)])
def test_sub_layer_by_sub_layer_equals_the_whole_model(
    blocks: tuple[str, str], tied: str, method: Any, count_padding: bool
) -> None:
    """In place: a model that starts from the ω measures the same ω. Separate: one with all ω at 1 does."""
    model, data = shape(*blocks, tied=tied), batches()
    profile = measure(model, VOCAB, VOCAB, SEED, data, settings=Admin(method=method, count_padding=count_padding))
    expected = omega_of_whole_model(model, data, profile.omega if method == "in_place" else None, count_padding)
    for side, block, omega in zip(SIDES, blocks, (profile.encoder, profile.decoder), strict=True):
        assert omega == (pytest.approx(expected[side], rel=1e-12) if block == "admin" else [])
        assert omega[:1] == ([1.0] if block == "admin" else [])
    assert profile.provenance["method"] == method and profile.provenance["count_padding"] is count_padding


def test_a_model_of_other_pieces_is_profiled_as_a_whole() -> None:
    """RMSNorm, gates, rotary positions and sizes by side; dropped layers are measured like the others."""
    pieces = {"norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "tied": "decoder"}
    sizes, data = {"width": 12, "heads": 3, "ffn": 20}, batches()
    model = shape(**pieces, of_decoder=sizes)
    profile = measure(model, VOCAB, VOCAB, SEED, data)
    expected = omega_of_whole_model(model, data, profile.omega)
    assert profile.encoder == pytest.approx(expected["encoder"], rel=1e-12)
    assert profile.decoder == pytest.approx(expected["decoder"], rel=1e-12)
    dropping = measure(shape(**pieces, of_decoder={**sizes, "layer_drop": 0.9}), VOCAB, VOCAB, SEED, data)
    assert dropping.omega == profile.omega


def test_both_methods_agree_until_an_omega_is_in_place() -> None:
    model, data = shape(layers=(6, 4)), batches()
    inside, apart = (measure(model, VOCAB, VOCAB, SEED, data, settings=Admin(method=method))
                     for method in ("in_place", "separate"))
    assert measure(model, VOCAB, VOCAB, SEED, data) == inside, "in place is the default"
    # F_2 is the first output that ω_1 enters, and ω_1 is 1; ω_2 enters F_3, which enters ω_4
    assert inside.encoder[:3] == apart.encoder[:3] and inside.encoder[3] != apart.encoder[3]


def test_the_printed_formula_starts_from_a_variance_of_one() -> None:
    model, data = shape(), batches()
    printed = measure(model, VOCAB, VOCAB, SEED, data, settings=Admin(method="separate", input_variance="one"))
    whole = omega_of_whole_model(model, data)
    for side, omega in zip(SIDES, (printed.encoder, printed.decoder), strict=True):
        differences = [value**2 - expected**2 for value, expected in zip(omega[1:], whole[side][1:], strict=True)]
        assert differences == pytest.approx([differences[0]] * len(differences)) and abs(differences[0]) > 0.05
        assert omega[0] == 1.0


def test_padding_counts_only_if_asked() -> None:
    model = shape(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    for count_padding in (False, True):
        plain, padded = (measure(model, VOCAB, VOCAB, SEED, batches(extra=extra),
                                 settings=Admin(count_padding=count_padding)) for extra in (0, 9))
        for before, after in ((plain.encoder, padded.encoder), (plain.decoder, padded.decoder)):
            if count_padding:
                assert after[1] < 0.9 * before[1], "zeros at the stack's input"
            else:
                assert after == pytest.approx(before, rel=1e-6)


def test_where_padding_counts_the_decoders_self_attention_does_not_see_it() -> None:
    """As in the authors' code. Only what padding puts out itself can show it: F_1 by hand, in plain operations."""
    model = shape(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, layers=(1, 1))
    built, data = new_model(model, VOCAB, VOCAB, SEED), batches(extra=2)
    attention, inputs, outputs = built.decoder.layers[0].self_attn, [], []
    for batch in data:
        _, _, trg_in, trg_out = batch.tensors.values()
        real = trg_out != PAD
        x = built.decoder.input(built.table("trg")(trg_in)) * real[..., None]
        q, k, v = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(2, 3) / math.sqrt(8)).masked_fill(~sees(real), -torch.inf)
        inputs.append(x.flatten(0, 1))
        outputs.append(attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).flatten(0, 1))
    variances = [torch.cat(parts).double().var(correction=0).item() for parts in (inputs, outputs)]
    found = measure(model, VOCAB, VOCAB, SEED, data, settings=Admin(count_padding=True)).decoder
    assert found[1] == pytest.approx(math.sqrt(sum(variances)), rel=1e-6)


def test_dropout_is_on_and_depends_on_key_and_seed() -> None:
    model, data = shape(), batches()
    first = measure(model, VOCAB, VOCAB, SEED, data).encoder
    torch.manual_seed(99)
    assert measure(model, VOCAB, VOCAB, SEED, data).encoder == first
    other_keys = [replace(batch, key=batch.key + 1) for batch in data]
    assert measure(model, VOCAB, VOCAB, SEED, other_keys).encoder != first
    assert measure(model, VOCAB, VOCAB, SEED + 1, data).encoder != first


def in_turns(world: int, job: Callable[[Ranks], AdminProfile]) -> list[AdminProfile]:
    """The result of each rank: threads of which one runs at a time, and the next when it waits for a sum."""
    sent: dict[int, list[float]] = {}
    turn, met = threading.Lock(), threading.Barrier(world, timeout=60)

    class Turns(Ranks):
        def sum(self, values: Sequence[float]) -> list[float]:
            sent[self.rank] = list(values)
            turn.release()
            met.wait()
            sums = [math.fsum(column) for column in zip(*sent.values(), strict=True)]
            met.wait()
            turn.acquire()
            return sums

    def rank(number: int) -> AdminProfile:
        with turn:
            return job(Turns(number, world, number, world, torch.device("cpu")))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


@pytest.mark.parametrize("method", ["in_place", "separate"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_batch_measure_the_same(world: int, method: Any) -> None:
    model, data, settings = shape(layers=(6, 4)), batches(), Admin(method=method)
    alone = measure(model, VOCAB, VOCAB, SEED, data, settings=settings)
    profiles = in_turns(world, lambda ranks: measure(  # with four ranks the last one has nothing
        model, VOCAB, VOCAB, SEED, data[ranks.rank::world], ranks, settings=settings))
    for profile in profiles:
        assert profile == profiles[0]
        assert profile.encoder == pytest.approx(alone.encoder, rel=1e-12)
        assert profile.decoder == pytest.approx(alone.decoder, rel=1e-12)
        assert profile.provenance == alone.provenance
    first = measure(model, VOCAB, VOCAB, SEED, data[:1], settings=settings).encoder
    assert first != pytest.approx(alone.encoder, rel=1e-3)


@pytest.mark.slow
def test_a_thousand_layers_need_the_memory_of_one() -> None:
    model = shape(layers=(1000, 50))
    live: weakref.WeakSet[Layer] = weakref.WeakSet()
    counts: list[int] = []

    def count(module: torch.nn.Module, _inputs: Any) -> None:
        if isinstance(module, Layer):
            live.add(module)
            counts.append(sum(p.numel() for layer in live for p in layer.parameters()))

    handle = register_module_forward_pre_hook(count)
    try:
        profile = measure(model, VOCAB, VOCAB, SEED, batches((2,)))
    finally:
        handle.remove()
    one = sum(p.numel() for p in new_model(shape(layers=(1, 1)), VOCAB, VOCAB, SEED).decoder.layers.parameters())
    assert len(counts) == 1050 and max(counts) <= 2 * one
    assert len(profile.encoder) == 2000 and len(profile.decoder) == 150
    for omega in (profile.encoder, profile.decoder):
        assert all(low < high for low, high in pairwise(omega))


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to profile"):
        measure(shape("post_ln", "pre_ln"), VOCAB, VOCAB, SEED, batches())
    with pytest.raises(ValueError, match="micro-batch"):
        measure(shape(), VOCAB, VOCAB, SEED, [])


def made(encoder: int = 6, decoder: int = 6) -> AdminProfile:
    return AdminProfile([1 + i / 8 for i in range(encoder)], [1 + i / 3 for i in range(decoder)], {"seed": 1})


def test_a_model_is_initialised_with_the_profile() -> None:
    built = new_model(shape(), VOCAB, VOCAB, SEED, omega=made().omega)
    for stack, size, values in ((built.encoder, 2, made().encoder), (built.decoder, 3, made().decoder)):
        for i, value in enumerate(values):
            assert torch.equal(stack.layers[i // size].rule.omegas[i % size], torch.full((16,), value))
    with pytest.raises(ValueError, match="6 sub-layers, but the profile has 4"):
        new_model(shape(), VOCAB, VOCAB, SEED, omega=made(4).omega)
    mixed = new_model(shape("b2t", "admin"), VOCAB, VOCAB, SEED, omega=made(0).omega)
    assert mixed.decoder.layers[1].rule.omegas[2][0].item() == pytest.approx(made().decoder[5])


def test_json_round_trip_is_exact(tmp_path: Path) -> None:
    profile = measure(shape(), VOCAB, VOCAB, SEED, batches(), data="abc")
    profile.save(tmp_path / "new" / "p.json")
    assert AdminProfile.load(tmp_path / "new" / "p.json", shape()) == profile
    content = json.loads((tmp_path / "new" / "p.json").read_text(encoding="utf-8"))
    assert list(content["omega"])[:3] == [f"encoder.layers.{name}" for name in ("0.self_attn", "0.ffn", "1.self_attn")]
    assert list(content["omega"])[-2:] == ["decoder.layers.1.cross_attn", "decoder.layers.1.ffn"]
    assert content["provenance"]["target_tokens"] == sum(batch.tokens for batch in batches())
    assert content["provenance"]["model"] == shape().model_dump() and content["provenance"]["data"] == "abc"
    other = measure(shape(), VOCAB, VOCAB, SEED, batches(), data="abd")
    other.save(tmp_path / "other.json")
    assert json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))["hash"] != content["hash"]


def indexed(*counts: int) -> str:
    return "".join(f"{i + 1} {1 + i / 8}\n" for count in counts for i in range(count))


def bare(count: int) -> str:
    return "".join(f"{1 + i / 8}\n" for i in range(count))


@pytest.mark.parametrize("text", [indexed(6, 6), bare(6) * 2, "\ufeff" + indexed(6, 6).replace("\n", "\r\n\r\n"),
                                  indexed(6, 6).replace(" ", ".0\t")])
def test_text_formats(text: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(text.encode())
    profile = AdminProfile.load(tmp_path / "p", shape())
    assert profile.encoder == profile.decoder == [1 + i / 8 for i in range(6)]


def test_text_of_one_stack(tmp_path: Path) -> None:
    (tmp_path / "p").write_text(indexed(6))
    for blocks in (("b2t", "admin"), ("admin", "b2t")):
        profile = AdminProfile.load(tmp_path / "p", shape(*blocks))
        assert [len(profile.encoder), len(profile.decoder)] == [6 * (block == "admin") for block in blocks]


@pytest.mark.parametrize(("text", "fault"), [
    (bare(11), r"11 values, but .* 6 \+ 6 = 12"),
    (indexed(6, 9), r"15 values, but .* 6 \+ 6 = 12"),
    (indexed(9, 3), r"9 values for the encoder and 3 for the decoder, but .* 6 \+ 6"),
    (indexed(12), "12 values for the encoder and 0 for the decoder"),
    ("1 1.0\n2 1.5\n4 1.6\n", "line 3 has index 4 after 2"),
    ("1.0\n\n1.5\n-2\n", "line 4 has '-2'"),
    ("1.0\nnan\n", "line 2 has 'nan'"),
    ("1.0\n0\n", "line 2 has '0'"),
    ("1 1.0\n2 big\n", "line 2 has 'big'"),
    ("1 1.0\n1.5\n", "line 2 has 1 columns, but the first line has 2"),
    ("encoder attn 1.0\n", "line 1 has 3 columns"),
    ("\n", "empty"),
    ("{", "not a profile"),
    ('{"format": "deepnmt-admin-profile", "version": 2, "omega": {}, "provenance": {}}', "not a profile"),
])
def test_messages_about_faulty_files(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_text(text)
    with user_error(fault):
        AdminProfile.load(tmp_path / "p", shape())


def test_messages_about_faulty_json_values(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made(8).save(path)
    with user_error(r"8 values for the encoder and 6 for the decoder, but .* 6 \+ 6"):
        AdminProfile.load(path, shape())
    made().save(path)
    path.write_text(path.read_text().replace("1.125", "-1.125"))
    with user_error(r"-1.125 for encoder.layers.0.ffn"):
        AdminProfile.load(path, shape())
    with user_error("cannot be read"):
        AdminProfile.load(tmp_path / "none", shape())


def test_pictures_are_plotted(tmp_path: Path) -> None:
    plot_admin_profile(made(decoder=0), tmp_path / "a.png")
    records = [{"type": "train", "update": 1, "loss": "nan"}, {"type": "train", "update": 2, "loss": 3.5},
               {"type": "valid", "update": 2, "loss": 3.0, "bleu": 12.5}, {"type": "event", "update": 2}]
    plot_learning_curve(records, tmp_path / "b.png", "demo")
    plot_learning_curve([], tmp_path / "c.png", "demo")
    plot_comparison({"one": {1: 2.0, 2: math.nan}, "two": {}}, tmp_path / "d.png", "title", "loss")
    for name in "abcd":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
