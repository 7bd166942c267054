"""Layers under torch.compile (`parallel.compile`): two graphs a stack for all its layers and all shapes of a batch.

Only what a layer computes is compiled. Its dropout is seeded before, so masks stay a function of (seed, micro-batch,
layer), and recomputed layers draw the same ones again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from deepnmt.errors import UserError
from deepnmt.model.layers import Layer


def compile_layers(module: nn.Module, device: torch.device, backend: str = "inductor") -> None:
    """Compiles every layer of a model or stage, for training; evaluation and decoding stay as they are.

    Raises:
        UserError: this machine has no compiler.
    """
    if backend == "inductor":
        _check_compiler(device)
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.compute = _in_training(layer, layer.compute, backend)  # type: ignore[assignment, arg-type]


def _in_training(layer: Layer, plain: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """`plain`, compiled for training, but not while hooks look into the layer: a graph knows none."""
    compiled, parts = torch.compile(plain, backend=backend, dynamic=True), list(layer.modules())

    def compute(*inputs: Any) -> Any:
        seen = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        return (compiled if layer.training and not seen else plain)(*inputs)

    return compute


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        compilers, needed = [os.environ.get("CC", "cc"), "gcc", "clang"], "Triton and a C compiler"
        complete = find_spec("triton") is not None
    else:
        compilers, needed, complete = [os.environ.get("CXX", "c++"), "g++", "clang++"], "a C++ compiler", True
    if not complete or not any(map(shutil.which, compilers)):
        raise UserError(f"parallel.compile is true, which needs {needed}, but this machine has none; install g++"
                        f"{' and triton' if device.type == 'cuda' else ''}, or set parallel.compile=false")
