"""`init: published` and the options of blocks, against the published formulas in plain tensors and against figures."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import BLOCKS, VOCAB, batch
from test_block_models import three_steps
from test_blocks import branches_of, formula, normalised, stream_of
from torch import Tensor
from torch.nn import functional as F

from deepnmt import config
from deepnmt.config import Model
from deepnmt.model.blocks import BLOCKS as CLASSES
from deepnmt.model.blocks import SIDES, AdminClosedForm, LayerPosition, Side, tensors
from deepnmt.model.init import Initialiser, fill, new_model
from deepnmt.model.published import PUBLISHED
from deepnmt.model.transformer import Stack, Transformer, build_layer

D, H, WIDTH, FFN, LAYERS = 16, 4, 512, 2048, 18
PAGE = Path(__file__).parents[2] / "studies" / "results" / "initial_weights.md"


def shape(block: str, layers: int = 3, width: int = D, ffn: int = 24, tied: str = "all", **settings: Any) -> Model:
    """A model of one block on both sides, as published unless `settings` say otherwise."""
    stack = {"block": block, "layers": layers, "init": "published", **settings}
    return Model.model_validate({"width": width, "heads": H, "ffn": ffn, "dropout": 0.0, "max_length": 32,
                                 "tied": tied, "encoder": stack, "decoder": stack})


def randomised(model: Model) -> Transformer:
    """A model whose parameters are all moved away from their initial values."""
    built = new_model(model, VOCAB, VOCAB, 1, label_smoothing=0.1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=generator))
    return built


# ---- figures of the page


def columns_of(header: str) -> list[list[str]]:
    """The rows of the page's table with this header."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(header) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.replace("`", "").strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


PLACES = {"q": ("qkv", 0, 3), "k": ("qkv", 1, 3), "v": ("qkv", 2, 3)}
MATRICES = ("q", "k", "v", "out", "fc1", "fc2")
DRAWS = columns_of("| block | side | parameters | `published` | `auto` | draw of `published` |")
NAMED = {block for row in DRAWS for block in row[0].split(", ")}


def entries(row: list[str]) -> list[tuple[str, Side, str]]:
    """The (block, side, parameter) that a row is about; `q` of a decoder is also `cross_q`."""
    blocks = [block for block in BLOCKS if block not in NAMED] if row[0] == "the others" else row[0].split(", ")
    found: list[tuple[str, Side, str]] = []
    for block, side, what in itertools.product(blocks, SIDES, row[2].split(", ")):
        if side in row[1] or row[1] == "both":
            found.append((block, side, what.removeprefix("self_")))
            if side == "decoder" and what.split()[0] in MATRICES[:4]:
                found.append((block, side, f"cross_{what}"))
    return found


def drawn(
    block: str, init: str, side: Side, what: str, layers: range, width: int = WIDTH, ffn: int = FFN
) -> Tensor:
    """All elements of one matrix, or of its bias (`q bias`), in these layers of 18L-18L."""
    source = Initialiser(shape(block, LAYERS, width, ffn, init=init), VOCAB, VOCAB, 1)
    word, _, kind = what.partition(" ")
    cross, matrix = word.startswith("cross_"), word.removeprefix("cross_")
    path, part, parts = PLACES.get(matrix, (matrix, 0, 1))
    if cross:
        path, part, parts = ("q", 0, 1) if matrix == "q" else ("kv", part - 1, 2) if path == "qkv" else (path, 0, 1)
    place = "ffn" if matrix.startswith("fc") else "cross_attn" if cross else "self_attn"
    values = [source(f"{side}.layers.{i}.{place}.{path}.{kind or 'weight'}") for i in layers]
    return torch.stack([value.chunk(parts)[part] if value.ndim else value for value in values])


@pytest.mark.parametrize("row", DRAWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_initial_weights_are_those_of_the_page(row: list[str]) -> None:
    """Standard deviations to 1 % (the page has three digits); a uniform draw has kurtosis 1.8, a normal one 3."""
    *_, theirs, ours, draw = row
    for block, side, what in entries(row):
        # a bias depends on no depth, so that more layers than there are make its figure exact
        layers = range(90) if what.endswith("bias") else range(2, 3)
        for init, expected in (("published", float(theirs)), ("auto", float(ours))):
            values = drawn(block, init, side, what, layers).flatten()
            std = float(values.std(correction=0))
            assert std == pytest.approx(expected, rel=0.01), (block, side, what, init)
            assert abs(float(values.mean())) <= 0.02 * expected
            if init == "published" and expected:
                kurtosis = float((values / std).pow(4).mean())
                assert kurtosis == pytest.approx({"uniform": 1.8, "normal": 3.0}[draw], rel=0.03)
                if draw == "uniform":
                    assert float(values.abs().max()) == pytest.approx(math.sqrt(3) * expected, rel=0.01)


def test_the_page_has_every_matrix_and_bias() -> None:
    """Every matrix once; biases that it does not list are 0; equal figures are equal weights."""
    listed = {entry: row for row in DRAWS for entry in entries(row)}
    assert len(listed) == sum(len(entries(row)) for row in DRAWS)
    for block, side in itertools.product(BLOCKS, SIDES):
        for word in (*MATRICES, *(f"cross_{matrix}" for matrix in MATRICES[:4] if side == "decoder")):
            *_, theirs, ours, draw = listed[block, side, word]
            both = [drawn(block, init, side, word, range(2, 4), D, 24) for init in ("published", "auto")]
            same = both[0].shape == both[1].shape and torch.equal(*both)
            assert same == (theirs == ours and draw != "normal"), (block, side, word)
            if (block, side, f"{word} bias") not in listed:
                for init in ("published", "auto"):
                    assert not drawn(block, init, side, f"{word} bias", range(2, 4), D, 24).any()


def test_blocks_without_a_variant_start_as_with_auto() -> None:
    for block in BLOCKS:
        assert (LayerPosition.of(shape(block), "encoder", 0).block is CLASSES[block]) == (block not in PUBLISHED)
        assert LayerPosition.of(shape(block, init="auto"), "encoder", 0).block is CLASSES[block]


def test_tables_are_drawn_alike_either_way() -> None:
    page = PAGE.read_text(encoding="utf-8")
    [(usual, t_fixup)] = re.findall(r"normal with ([\d.]+), with `t_fixup` (\d\.\d+)", page)
    for block in BLOCKS:
        draws = (Initialiser(shape(block, LAYERS, WIDTH, init=init), 1000, 1000, 1) for init in ("auto", "published"))
        auto, published = (draw("embeddings.shared.weight") for draw in draws)
        assert torch.equal(auto, published)
        assert float(auto[1:].std()) == pytest.approx(float(t_fixup if block == "t_fixup" else usual), rel=0.01), block


def test_an_output_table_of_its_own_starts_at_zero_with_fixup_alone() -> None:
    for block in BLOCKS:
        model = shape(block, tied="none")
        assert bool(new_model(model, VOCAB, VOCAB, 1).output_weight.any()) == (block != "fixup")
        assert new_model(shape(block), VOCAB, VOCAB, 1).output_weight.any()


# ---- formulas


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("block", [block for block in PUBLISHED if block != "fixup"])
def test_a_variant_follows_its_block_s_formula(block: str, side: Side) -> None:
    torch.manual_seed(3)
    position = LayerPosition(side, 1, 6, 4, D, config.Stack(block=block, init="published"))
    rule = position.block(position)
    fill(rule, lambda name: torch.tensor(rule.initial_value(position, name)))
    with torch.no_grad():
        for parameter in rule.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    f, x = branches_of(side), stream_of(block, side)
    if block == "admin_closed_form":
        assert {name.split(".")[0] for name, _ in rule.named_parameters()} == {"norms"}
        omega, expected = math.sqrt(13 / math.log(13) - 1), x  # n = 2 · 6 = 3 · 4
        for i, branch in enumerate(f):
            expected = normalised(omega * expected + branch(expected), rule, i)
    else:
        expected = formula(block, x, f, rule, side)
    torch.testing.assert_close(tensors(rule(x, f))[-1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("change", "layers", "encoder", "decoder"), [
    ("log", (18, 18), 3.04084, 3.56719), ("constant", (18, 18), 6.0, 7.34847), ("constant", (60, 12), 10.95445, 6.0),
    ("linear", (60, 12), 1.0, 1.0),
])
def test_omega_by_the_growth_of_the_output_s_change(
    change: str, layers: tuple[int, int], encoder: float, decoder: float
) -> None:
    """sqrt(n) and 1, n = 2N or 3M; trained without `published`."""
    for side, omega in zip(SIDES, (encoder, decoder), strict=True):
        settings = config.Stack(block="admin_closed_form", output_change=change)
        assert AdminClosedForm.constant(LayerPosition(side, 0, *layers, D, settings)) == pytest.approx(omega, abs=1e-5)
    for init, trained in (("auto", 6), ("published", 0)):
        built = new_model(shape("admin_closed_form", output_change=change, init=init), VOCAB, VOCAB, 1)
        omegas = [p for name, p in built.encoder.named_parameters() if "omega" in name]
        assert len(omegas) == trained and all((p == omegas[0][0]).all() for p in omegas)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_looks_linear_is_mirrored_in_an_ordinary_ffn(activation: str) -> None:
    """Both halves exactly; fc1 has all rows, and its halves have biases of their own."""
    model = shape("looks_linear").model_copy(update={"activation": activation})
    for side in SIDES:
        layer = build_layer(model, side, 1, 1)
        fill(layer, Initialiser(model, VOCAB, VOCAB, 1), layer.name)
        ffn, x, y = layer.ffn, torch.randn(7, D), torch.randn(7, D)
        assert ffn.fc1.weight.shape == (24, D) and ffn.fc2.weight.shape == (D, 24) and ffn.fc1.bias.shape == (24,)
        assert torch.equal(ffn.fc1.weight[:12], -ffn.fc1.weight[12:])
        assert torch.equal(ffn.fc2.weight[:, :12], -ffn.fc2.weight[:, 12:])
        torch.testing.assert_close(ffn(2 * x - 3 * y), 2 * ffn(x) - 3 * ffn(y), rtol=1e-5, atol=1e-5)
        for parameter in ffn.parameters():
            parameter.add_(torch.randn_like(parameter))
        h = F.relu(x @ ffn.fc1.weight.T + ffn.fc1.bias) if activation == "relu" else F.gelu(
            x @ ffn.fc1.weight.T + ffn.fc1.bias)
        torch.testing.assert_close(ffn(x), h @ ffn.fc2.weight.T + ffn.fc2.bias, rtol=1e-5, atol=1e-5)


def attention(p: dict[str, Tensor], name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    heads = [part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)
    return mixed @ p[f"{name}.out.weight"].T


def fixup_ffn(p: dict[str, Tensor], h: Tensor, shift: Tensor) -> Tensor:
    inner = ((h - shift) @ p["ffn.fc1.weight"].T - p["ffn.shift"]).relu()
    return (inner - p["ffn.fc2_shift"]) @ p["ffn.fc2.weight"].T


@torch.no_grad()
def test_fixup_is_the_published_layers() -> None:
    """Two layers of each side and the stacks' tops, in plain products; 6 and 8 scalars a layer, no bias vector."""
    model = randomised(shape("fixup", layers=2))
    src, lengths, trg, _ = batch([5, 5], [4, 4])
    x, y = model.encoder.input(model.table("src")(src)), model.decoder.input(model.table("trg")(trg))
    for layer in model.encoder.layers:
        p = dict(layer.named_parameters())
        assert sum(v.numel() == 1 for v in p.values()) == 6 and not any("bias" in name for name in p)
        parts = ((x - p["rule.shifts.0"]) @ p["self_attn.qkv.weight"].T).chunk(3, -1)
        h = x + p["rule.scales.0"] * attention(p, "self_attn", *parts, False)
        x = h + p["rule.scales.1"] * fixup_ffn(p, h, p["rule.shifts.1"])
    memory = (x - model.get_parameter("encoder.norm.shift")) * model.get_parameter("encoder.norm.scale")
    torch.testing.assert_close(model.encode(src, lengths), memory, rtol=1e-5, atol=1e-5)
    for layer in model.decoder.layers:
        p = dict(layer.named_parameters())
        assert sum(v.numel() == 1 for v in p.values()) == 8 and not any("bias" in name for name in p)
        parts = ((y - p["rule.shifts.0"]) @ p["self_attn.qkv.weight"].T).chunk(3, -1)
        h = y + p["rule.scales.0"] * attention(p, "self_attn", *parts, True)
        q = (h - p["rule.shifts.1"]) @ p["cross_attn.q.weight"].T
        crossed = attention(p, "cross_attn", q, *(memory @ p["cross_attn.kv.weight"].T).chunk(2, -1), False)
        h = h + p["rule.scales.1"] * crossed
        y = h + p["rule.scales.2"] * fixup_ffn(p, h, p["rule.shifts.2"])
    y = y - model.get_parameter("decoder.norm.shift")
    torch.testing.assert_close(model.decode(trg, memory, lengths), y, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in model.decoder.norm.named_parameters()] == ["shift"]


@torch.no_grad()
def test_new_scalars_of_fixup_change_nothing() -> None:
    """Scales 1 and shifts 0: a new stack is the identity."""
    model = new_model(shape("fixup"), VOCAB, VOCAB, 1).eval()
    src, lengths, trg, _ = batch([5, 5], [4, 4])
    memory = model.encode(src, lengths)
    assert torch.equal(memory, model.encoder.input(model.table("src")(src)))
    assert torch.equal(model.decode(trg, memory, lengths), model.decoder.input(model.table("trg")(trg)))


# ---- DLCL

HISTORIES: list[dict[str, Any]] = [
    {"init": init, "history_window": window, "history_softmax": softmax}
    for init in ("auto", "published") for window in (0, 1, 2) for softmax in (False, True)]


def sums(stack: Stack, settings: dict[str, Any]) -> list[Tensor]:
    """The rows of the triangular matrix, each over all y_0 ... y_l."""
    window, rows = settings["history_window"], []
    weights = [layer.rule.mix.weights for layer in stack.layers] + [stack.norm.mix.weights]
    for below, row in enumerate(weights, start=1):
        learned = settings["init"] == "published" and not settings["history_softmax"]
        kept = below if learned else min(below, window or below)
        assert row.shape == (kept,)
        rows.append(F.pad(torch.softmax(row, 0) if settings["history_softmax"] else row, (below - kept, 0)))
    return rows


def dlcl_encoder(stack: Stack, x: Tensor, pre_norm: bool, settings: dict[str, Any]) -> Tensor:
    """An encoder as the paper writes it, with an LN for each y but, as published, y_0."""
    mixes, ys = [*(layer.rule.mix for layer in stack.layers), stack.norm.mix], [x]

    def norm(k: int, y: Tensor) -> Tensor:
        if k == 0 and settings["init"] == "published":
            return y
        return F.layer_norm(y, (D,), mixes[k].norm.weight, mixes[k].norm.bias)

    def mixed(row: Tensor) -> Tensor:
        if pre_norm:
            return sum(w * norm(k, y) for k, (w, y) in enumerate(zip(row, ys, strict=True)))
        return norm(len(ys) - 1, sum(w * y for w, y in zip(row, ys, strict=True)))

    *rows, last = sums(stack, settings)
    for layer, row in zip(stack.layers, rows, strict=True):
        x = mixed(row)
        for i in range(2):
            h = layer.rule.norms[i](x) if pre_norm else x
            x = x + (layer.ffn(h) if i else layer.self_attn(h, None, causal=False))
            x = x if pre_norm else layer.rule.norms[i](x)
        ys.append(x)
    return stack.norm.norm(mixed(last))


@torch.no_grad()
@pytest.mark.parametrize("settings", HISTORIES, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.parametrize("block", ["dlcl", "dlcl_post"])
def test_dlcl_s_windows_and_softmax(block: str, settings: dict[str, Any]) -> None:
    """The encoder against the matrix; decoding step by step against decoding at once."""
    model = randomised(shape(block, layers=4, **settings))
    src, _, trg, _ = batch([5, 5], [6, 6])
    lengths, x = torch.tensor([5, 5]), model.encoder.input(model.table("src")(src))
    memory = model.encode(src, lengths)
    torch.testing.assert_close(memory, dlcl_encoder(model.encoder, x, block == "dlcl", settings), rtol=1e-5, atol=1e-5)
    cache = model.start_cache(memory, lengths, 1, 6)
    steps = torch.stack([model.step(trg[:, t], cache) for t in range(6)], dim=1)
    torch.testing.assert_close(steps, model.decode(trg, memory, lengths), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("settings", HISTORIES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_new_sums_are_means_of_the_window(settings: dict[str, Any]) -> None:
    built = new_model(shape("dlcl", layers=4, **settings), VOCAB, VOCAB, 1)
    for stack in (built.encoder, built.decoder):
        for below, row in enumerate(sums(stack, settings), start=1):
            kept = min(below, settings["history_window"] or below)
            torch.testing.assert_close(row, F.pad(torch.full((kept,), 1 / kept), (below - kept, 0)))


def test_a_window_keeps_no_more_outputs_than_it_sums() -> None:
    position = LayerPosition("encoder", 4, 6, 4, D, config.Stack(block="dlcl", history_window=2))
    rule = CLASSES["dlcl"](position)
    fill(rule, lambda name: torch.tensor(rule.initial_value(position, name)))
    assert len(rule((torch.randn(1, 3, D), torch.randn(1, 3, D)), branches_of("encoder"))) == 2


# ---- training


def test_another_function_has_other_names_or_shapes() -> None:
    """So checkpoints of two `init` are averaged only if their weights mean the same."""
    def shapes(block: str, init: str) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in new_model(shape(block, init=init), VOCAB, VOCAB, 1).named_parameters()}

    other = {block for block in BLOCKS if shapes(block, "auto") != shapes(block, "published")}
    assert other == {"admin_closed_form", "fixup", "looks_linear", "dlcl", "dlcl_post"}


@pytest.mark.parametrize("block", [block for block in PUBLISHED if not block.startswith("dlcl")])
@pytest.mark.parametrize("tied", ["all", "none"])
def test_every_variant_trains(block: str, tied: str) -> None:
    three_steps(shape(block, layers=2, tied=tied))


@pytest.mark.parametrize("block", ["dlcl", "dlcl_post"])
def test_published_dlcl_trains(block: str) -> None:
    """In the post-norm form the first weight of all has a gradient too, since y_0 is not normed."""
    three_steps(shape(block, layers=2))


@torch.no_grad()
@pytest.mark.parametrize("block", ["fixup", "looks_linear"])
def test_a_variant_decodes_step_by_step_as_in_one_pass(block: str) -> None:
    model = randomised(shape(block))
    src, lengths, trg, _ = batch([7, 3, 5], [6, 6, 6])
    memory = model.encode(src, lengths)
    cache = model.start_cache(memory, lengths, 1, 6)
    steps = torch.stack([model.step(trg[:, t], cache) for t in range(6)], dim=1)
    torch.testing.assert_close(steps, model.decode(trg, memory, lengths), rtol=1e-4, atol=1e-5)
