"""What the published code of blocks computes, for tests that cannot import it: this program writes
tests/fixtures/published_blocks.json from clones of

    Qwen-Applications/SiameseNorm    70efa00c   deit-model-siamesenorm.py: Block
    lucidrains/hyper-connections     47751035   hyper_connections/hyper_connections.py: HyperConnections
    microsoft/torchscale             4d1e0e82   component: MultiheadAttention, FeedForwardNetwork
    lmsdss/LayerNorm-Scaling         3ac54dde   peft_pretraining/modeling_llama.py: LlamaDecoderLayer
    pixeli99/MixLN                   ff45826    the same

    python tests/support/published_blocks.py SIAMESENORM HYPER_CONNECTIONS TORCHSCALE LAYERNORM_SCALING MIXLN

Parameters and inputs are sines, so that a test can make the same ones. Needs einops.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

D, FFN, HEADS, STREAMS, LAYERS = 8, 12, 2, 4, 3
FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "published_blocks.json"


def wave(number: int, *shape: int) -> Tensor:
    """Values between -1 and 1 that depend on `number`, in float64."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return torch.sin(count * (1.7 + 0.37 * number) + number).view(shape)


def fill(module: nn.Module, number: int) -> None:
    """Sets all parameters of a module, in the order of their names."""
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(module.named_parameters())):
            parameter.copy_(0.5 * wave(100 * number + index, *parameter.shape))


def branch(number: int) -> nn.Linear:
    """What stands for a sub-layer."""
    linear = nn.Linear(D, D).double()
    fill(linear, 50 + number)
    return linear


def siamese(clone: Path) -> Tensor:
    """Both streams [2, 2, 3, D] after LAYERS of its blocks."""
    source = (clone / "deit-model-siamesenorm.py").read_text(encoding="utf-8")
    [code] = re.findall(r"^class Block\(.*?(?=^class )", source, re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {"nn": nn, "DropPath": nn.Identity, "Mlp": lambda **_: nn.Identity(),
                             "Attention": lambda *_, **__: nn.Identity()}
    exec(code, space)
    x = y = wave(1, 2, 3, D)
    for index in range(LAYERS):
        block = space["Block"](D, HEADS, index=index, norm_layer=lambda width: nn.LayerNorm(width, eps=1e-5)).double()
        for i in range(2):
            for number, name in enumerate(("post_norm", "pre_norm", "input_norm")):
                fill(block.get_submodule(f"{name}{i + 1}"), 10 * index + 3 * i + number)
        block.attn, block.mlp = branch(2 * index), branch(2 * index + 1)
        x, y = block(x, y)
    return torch.stack([x, y])


def hyper(clone: Path) -> Tensor:
    """Its streams [2, 3, STREAMS, D] after one sub-layer, the sixth."""
    code = load(clone / "hyper_connections" / "hyper_connections.py")
    theirs = code.HyperConnections(STREAMS, dim=D, branch=branch(1), layer_index=5).double()
    for number, name in enumerate(("static_alpha", "dynamic_alpha_fn", "dynamic_alpha_scale", "static_beta",
                                   "dynamic_beta_fn", "dynamic_beta_scale")):
        parameter = theirs.get_parameter(name)
        parameter.data = wave(number, *parameter.shape)
    theirs.get_parameter("norm.gamma").data.zero_()
    streams = wave(9, 2, 3, STREAMS, D)
    mixed = theirs(streams.permute(0, 2, 1, 3).reshape(2 * STREAMS, 3, D))
    return mixed.view(2, STREAMS, 3, D).permute(0, 2, 1, 3)


def sub_ln(clone: Path) -> dict[str, Tensor]:
    """Outputs [2, 3, D] of its self-attention, cross-attention and FFN."""
    folder = clone / "torchscale" / "component"
    package = ModuleType("component")
    package.__path__ = [str(folder)]
    sys.modules |= {"component": package, "fairscale": ModuleType("fairscale"), "fairscale.nn": SimpleNamespace(
        checkpoint_wrapper=None, wrap=None)}  # type: ignore[dict-item]
    attention = importlib.import_module("component.multihead_attention").MultiheadAttention
    feed_forward = load_class(folder / "feedforward_network.py", "FeedForwardNetwork")
    args = SimpleNamespace(multiway=False, layernorm_eps=1e-5, xpos_rel_pos=False, flash_attention=False)
    x, memory, found = wave(1, 2, 3, D), wave(2, 2, 4, D), {}
    for number, (name, own) in enumerate((("self_attn", True), ("cross_attn", False))):
        module = attention(args, D, HEADS, self_attention=own, encoder_decoder_attention=not own, subln=True).double()
        fill(module, number)
        other = x if own else memory
        found[name] = module(x.clone(), other.clone(), other.clone())[0]
    module = feed_forward(D, FFN, "gelu", 0.0, 0.0, 1e-5, True).double()
    fill(module, 2)
    return {**found, "ffn": module(x)}


class Word(str):
    """A text that stays as it is: the code of LayerNorm scaling looks for LNS in what it has made lower-case."""

    def lower(self) -> str:
        return self


class Attention(nn.Linear):
    """`branch` with what their layers expect of an attention."""

    def forward(self, hidden_states: Tensor, **_: object) -> Any:  # type: ignore[override]
        return super().forward(hidden_states), None, None


def llama(clone: Path, kind: str, layers: int) -> Tensor:
    """Outputs [2, 3, D] of so many of its layers, of which the lowest is Post-LN with the kind `post_pre`."""
    source = (clone / "peft_pretraining" / "modeling_llama.py").read_text(encoding="utf-8")
    [code] = re.findall(r"^class LlamaDecoderLayer\(.*?(?=^class |^@|^[A-Z_]+ = )", source, re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {
        "nn": nn, "torch": torch, "math": math, "Optional": Optional, "Tuple": tuple, "LlamaConfig": None,
        "print": lambda *_: None,
        "os": SimpleNamespace(getenv=lambda name, *_: "1" if name == "POST_NUM" else Word(kind)),
        "LlamaRMSNorm": nn.RMSNorm, "LlamaMLP": lambda **_: nn.Linear(D, D),
        "LlamaAttention": lambda **_: Attention(D, D)}
    exec(code, space)
    x = wave(1, 2, 3, D)
    settings = SimpleNamespace(hidden_size=D, num_hidden_layers=layers, intermediate_size=D, hidden_act="",
                               rms_norm_eps=1e-5)
    for index in range(layers):
        layer = space["LlamaDecoderLayer"](settings, index).double()
        names = (("post_attention", "post_feedforward") if kind == "post_pre" and not index else
                 ("input", "post_attention"))
        for i, name in enumerate(names):
            fill(layer.get_submodule(f"{name}_layernorm"), 2 * index + i)
        fill(layer.self_attn, 50 + 2 * index)
        fill(layer.mlp, 50 + 2 * index + 1)
        x = layer(x)[0]
    return x


def load(file: Path) -> Any:
    """A file of Python code as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_class(file: Path, name: str) -> Any:
    """A class of a file whose other imports are not wanted."""
    source = file.read_text(encoding="utf-8")
    parts = re.findall(rf"^(?:class {name}|def get_activation_fn)\(.*?(?=^class |^def |\Z)", source, re.M | re.S)
    space: dict[str, Any] = {"nn": nn, "torch": torch, "F": F, "LayerNorm": nn.LayerNorm}
    exec("\n".join(parts), space)
    return space[name]


if __name__ == "__main__":
    clones = [Path(word) for word in sys.argv[1:]]
    with torch.no_grad():
        figures = {"siamese": siamese(clones[0]), "hyper": hyper(clones[1]), **sub_ln(clones[2]),
                   "lns": llama(clones[3], "LNS", LAYERS), "mix_ln": llama(clones[4], "post_pre", 4)}
    rows = {name: [round(value, 12) for value in tensor.flatten().tolist()] for name, tensor in figures.items()}
    FIXTURE.write_text(json.dumps(rows) + "\n", encoding="utf-8")
