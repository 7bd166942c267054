"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for two GPUs. Each function is a process
of its own and prints its figures as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import twins
from torch import Tensor

from deepnmt.extras.kernels import fused, kernels

ROWS, WIDTH, VOCAB = 5, 40, 300
ARCHITECTURES = (80, 90)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in units of the last place of a number of about 1."""
    if not ours.numel() or not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs.to(ours.dtype)) else float("inf")
    return float((ours.double() - theirs).abs().max()) / torch.finfo(ours.dtype).eps


def interpreted() -> dict[str, float]:
    """How far the kernels are from their twins, which compute in float64 from the same numbers."""
    draw, key = torch.Generator().manual_seed(1), torch.tensor([2**62 + 3, 8])
    fused._draw = lambda *_: key

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    def wide(given: Any) -> Any:
        return given.double() if isinstance(given, Tensor) and given.is_floating_point() else given

    found: dict[str, float] = {}

    def compare(name: str, *given: Any, kind: str = "") -> Any:
        ours, theirs = getattr(fused, f"_{name}_gpu"), getattr(twins, name)
        ours, theirs = ours(*given), theirs(*map(wide, given))
        for number, (a, b) in enumerate(zip(*(out if isinstance(out, tuple) else (out,) for out in (ours, theirs)),
                                            strict=True)):
            if name.endswith("backward") and a.dim() > 1 and number == len(ours) - 1:
                a, b = a.sum(0), b.sum(0)  # parts of sums
            found[f"{name} {number} {kind}"] = error(a, b)
        return ours

    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    for kind, dtype, p in (("plain", fp32, 0.0), ("omega", bf16, 0.25), ("alpha", fp32, 0.25), ("other", fp16, 0.25),
                           ("rms", fp32, 0.0)):
        branch, x, grad = (random(ROWS, WIDTH, dtype=dtype) for _ in range(3))
        omega = random(WIDTH, dtype=dtype) if kind == "omega" else None
        other = random(ROWS, WIDTH, dtype=dtype) if kind == "other" else None
        weight, bias = random(WIDTH, dtype=dtype), None if kind == "rms" else random(WIDTH, dtype=dtype)
        rest = 1.7 if kind == "alpha" else 1.0, weight
        total = compare("add_norm", branch, x, other, omega, *rest, bias, 1e-5, p, kind=kind)[0]
        parts = compare("add_norm_backward", grad, total, x, omega, *rest, bias is not None, 1e-5, p, key, kind=kind)[2]
        compare("column_sums", parts, dtype, kind=kind)
        compare("drop", x, other, 0.25, None, kind=kind)
    compare("relu_backward", random(ROWS, WIDTH, dtype=bf16), random(ROWS, WIDTH, dtype=bf16).relu())
    beams, heads, filled, longest = 3, 2, 70, 80  # more slots than a block
    for dtype, given, of in ((fp32, beams, beams), (fp16, beams, beams), (fp32, 1, beams), (fp32, 1, 1)):
        kind = f"{given} of {of} {dtype}"
        start, stop = (0 if given < of else filled), (0 if given < of else filled) + of
        packed = random(2, given, 3 * WIDTH, dtype=dtype)
        past = random(2, 3, heads, longest, WIDTH // heads, dtype=dtype)[:, :2]  # as after a selection of sentences
        lineage = torch.where(torch.rand(2, of, longest, generator=draw) < 0.5, 0.0, -torch.inf).to(dtype)
        lineage[..., start:stop] = torch.full((of, of), -torch.inf).fill_diagonal_(0.0)
        visible = None if of == 1 else lineage[:, None, :given, :stop]
        exact = past.double()
        ours = fused._attend_step_gpu(packed, past, visible, heads, start, stop)
        theirs = twins.attend_step(packed.double(), exact, wide(visible), heads, start, stop)
        found[f"attend_step {kind}"], found[f"attend_step past {kind}"] = error(ours, theirs), error(past, exact)
    counts, targets = torch.ones(ROWS), torch.randint(VOCAB, (ROWS,), generator=draw)
    counts[1] = 0.0
    for dtype in (fp32, bf16):
        logits = torch.zeros(ROWS, VOCAB + 20, dtype=dtype)[:, :VOCAB]  # rows that are longer than they say
        logits.copy_(4 * random(ROWS, VOCAB, dtype=dtype))
        exact = logits.double()
        ours = fused._cross_entropy_gpu(logits, targets, counts, 0.1, True)
        theirs = twins.cross_entropy_(exact, targets, counts.double(), 0.1, True)
        found[f"cross_entropy_ {dtype}"] = error(ours, theirs)
        found[f"cross_entropy_ gradient {dtype}"] = error(logits, exact)
    return found


def compiled() -> dict[str, dict[str, int]]:
    """Registers and bytes spilled of each kernel, of width 512 in bf16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    block, warps = kernels._block(512)
    norm = {"block": block, "dropping": True}
    made: list[tuple[Any, dict[str, Any], int]] = [
        (kernels.drop, {"block": block}, warps), (kernels.add_norm, norm, warps),
        (kernels.add_norm_backward, {**norm, "centred": True, "lines": 3}, warps),
        (kernels.relu_backward, {"block": 1024}, 4), (kernels.column_sums, {"block": 32, "lines": 32}, 4),
        (kernels.cross_entropy_, {"block": 4096, "gradient": True}, 8),
        (kernels.attend_step, {"block": 64, "rows": 16, "slots": 64}, 4),
    ]
    types = {"targets": "*i64", "counts": "*fp32", "parts": "*fp32", "seed": "i64", "offset": "i64", "scale": "fp32",
             "alpha": "fp32", "eps": "fp32", "smoothing": "fp32",
             **dict.fromkeys(("dropped", "rows", "width", "vocab", "stride", "filled", "given", "beams", "heads",
                              "past_part", "past_sentence", "past_head", "visible_sentence", "visible_row"), "i32")}
    found: dict[str, dict[str, int]] = {}
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for kernel, constants, warps in made:
        names = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(names.items())
                   if kind[0] == "*" or name in ("width", "stride", "past_part", "past_sentence", "past_head")}
        for architecture in ARCHITECTURES:
            source = ASTSource(fn=kernel, signature=names, constexprs=constants, attrs=aligned)
            done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
            cubin = Path(sys.argv[2]) / "kernel.cubin"
            cubin.write_bytes(done.asm["cubin"])
            used = subprocess.run([disassembler, "-res-usage", cubin], capture_output=True, text=True, check=True)
            registers, stack, local = (int(re.findall(rf"{word}:(\d+)", used.stdout)[0])
                                       for word in ("REG", "STACK", "LOCAL"))
            found[f"{kernel.__name__} sm_{architecture}"] = {
                "registers": registers, "spilled": stack + local, "wide": done.asm["ptx"].count("ld.global.v4.b32")}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(globals()[sys.argv[1]]()))
