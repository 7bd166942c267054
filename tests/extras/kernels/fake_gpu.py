"""A GPU that is not there: PyTorch's CPU build traces tensors of the device "cuda", which have shapes but no memory.

Needs `before_torch`, in a process of its own. `tracing` counts what a real GPU would do: kernels, bytes, and whatever
makes the host wait for it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

torch.set_num_threads(1)
nn.utils.skip_init = torch.nn.utils.init.skip_init = lambda kind, *args, **named: kind(*args, **named)
aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[3]
CARD = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, uuid="fake",
                       multi_processor_count=132)


# -- what torch.cuda says ----------------------------------------------------------------------------------------------


class _Done:
    """An event or a stream: all of it has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Done:
        return self
    def __exit__(self, *_: object) -> None: ...
    def query(self) -> bool:
        return True
    def elapsed_time(self, _: Any) -> float:
        return 1.0
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _pretend() -> None:
    """Makes `torch.cuda` one H100 of a machine with eight."""
    generator = SimpleNamespace(manual_seed=lambda seed: None)
    said: dict[str, Any] = {
        "is_available": True, "device_count": 8, "current_device": 0, "is_bf16_supported": True,
        "get_device_properties": CARD, "get_device_capability": (9, 0), "mem_get_info": (78 * 2**30, 80 * 2**30),
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0,
        "memory_cached": 0, "max_memory_cached": 0, "memory_stats": Counter(), "set_device": None, "synchronize": None,
        "empty_cache": None, "reset_peak_memory_stats": None, "reset_max_memory_cached": None,
        "reset_max_memory_allocated": None, "current_stream": _Done(), "default_stream": _Done(),
        "stream": nullcontext(),
    }
    for name, value in said.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.cuda.Stream = torch.cuda.Event = _Done  # type: ignore[assignment, misc]
    torch.cuda.default_generators = (generator,)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: 0  # type: ignore[attr-defined]
    torch.cuda.memory._set_allocator_settings = lambda _: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign, assignment]
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment]


# -- modules and attention ---------------------------------------------------------------------------------------------


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """`Module._apply`, which refuses tensors without memory."""
    for part in module.modules():
        for p in part._parameters.values():
            if p is not None and (new := change(p.data)) is not p.data:
                p.data = new
        part._buffers.update({name: b if b is None else change(b) for name, b in part._buffers.items()})
    return module


def _attention(q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False) -> Any:
    """The kernel that a GPU with compute capability 8 or above takes, cuDNN's being off: flash without a mask and in 16
    bits, else the memory-efficient one, whose mask has the type of the query and rows of a multiple of 8."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert q.device == k.device == v.device and (mask is None or mask.device == q.device)
    if mask is None and q.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal)[0]
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
        assert mask.dtype == q.dtype, (mask.dtype, q.dtype)
        if any(stride % 8 for stride in mask.stride()[:-1]):
            length = mask.size(-1)
            mask = F.pad(mask, (0, -length % 8))[..., :length]
        mask = mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, torch.is_grad_enabled(), dropout, causal)[0]


# -- counting ----------------------------------------------------------------------------------------------------------

# Operations that launch nothing.
_VIEWS = {
    "device", "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
    "split", "chunk", "unbind", "alias", "detach", "as_strided", "reshape", "narrow", "unflatten", "flatten",
    "lift_fresh",
    "split_with_sizes", "_reshape_alias", "diagonal", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "_local_scalar_dense", "set_", "is_pinned", "_pin_memory", "resize_", "record_stream",
}


class Trace(TorchDispatchMode):
    """Counts, and answers what no tensor without memory can: 1 for a number, "all" for a selection.

    Attributes:
        kernels: launches by operation.
        waits: what made the host wait for the GPU, by "operation file:function".
        bytes: read and written, by operation.
        held, peak: bytes of tensors that are alive, and the most there were at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.waits, self.bytes = Counter[str](), Counter[str](), Counter[str]()
        self.held = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if tensors and all(each.device.type == "cpu" for each in tensors):
            fake = name == "_local_scalar_dense" and isinstance(args[0], FakeTensor)
            return self._number(args[0]) if fake else func(*args, **kwargs)
        if name in ("_local_scalar_dense", "equal", "nonzero"):
            self._wait(name)
            x = args[0]
            if name == "nonzero":
                self.kernels[name] += 1
                return x.new_empty((max(1, x.numel()), x.dim()), dtype=torch.int64)
            return False if name == "equal" else self._number(x)
        if func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self._wait("bool index")
            chosen = next(i for i in args[1] if i is not None)
            self.kernels[name] += 1
            return args[0].flatten(0, chosen.dim() - 1).clone()
        out = func(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        for each in made:
            self._hold(each)
        if name not in _VIEWS:
            self.kernels[name] += _grouped(name, args)
            self.bytes[name] += sum(each.numel() * each.element_size() for each in (*tensors, *made))
            if name == "cross_entropy_":  # reads the logits twice, and writes them
                self.bytes[name] += 2 * tensors[0].numel() * tensors[0].element_size()
        devices = {each.device.type for each in (*tensors, *made)}
        if name in ("_to_copy", "copy_") and len(devices) > 1 and not kwargs.get("non_blocking") and not (
                name == "copy_" and len(args) > 2 and args[2]):
            self._wait("copy")
        return out

    def _number(self, tensor: torch.Tensor) -> float | int | bool:
        """The answer for a number that is not there: 1, and 0 where it is the sign of a fault."""
        number = 0 if _caller().rpartition(":")[2] in ("has_overflow", "_allocate_full_model") else 1
        if tensor.dtype == torch.bool:
            return False
        return float(number) if tensor.is_floating_point() else number

    def _wait(self, name: str) -> None:
        self.waits[f"{name} {_caller()}"] += 1

    def _hold(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = size = -(-storage.nbytes() // 512) * 512
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.held -= self._seen.pop(key, 0)

    @property
    def launches(self) -> float:
        return sum(self.kernels.values())

    @property
    def moved(self) -> int:
        return sum(self.bytes.values())

    def clear(self) -> None:
        """Counts from here on; what is held stays."""
        self.kernels.clear()
        self.waits.clear()
        self.bytes.clear()
        self.peak = self.held


def _grouped(name: str, args: Any) -> float:
    """The kernels of an operation: of a long list of tensors CUDA takes some dozen, and 320 blocks of 65,536, in one.
    The last one is not rounded up, so that the number is linear in the layers of a model."""
    lists = [each for each in args if isinstance(each, list | tuple) and isinstance(next(iter(each), 0), torch.Tensor)]
    if not lists or not name.startswith(("cat", "stack", "_foreach", "_fused")):
        return 1
    count = len(lists[0]) - 1
    if name.startswith(("cat", "stack")):
        return 1 + count / 128 if count > 8 else 1
    most = {1: 110, 2: 64, 3: 48, 4: 36}.get(len(lists), 30)
    return 1 + count / most + sum(tensor.numel() // 2**16 for tensor in lists[0]) / 320


def _caller() -> str:
    """The function of deepnmt or DeepSpeed that calls, as file:name."""
    frame: Any = sys._getframe(1)
    while frame:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        for package in ("/deepnmt/", "/deepspeed/"):
            if package in file and not name.startswith("<"):
                return f"{file.rpartition(package)[2]}:{name}"
        frame = frame.f_back
    return "elsewhere"


def _tolist(tensor: torch.Tensor) -> Any:
    """`Tensor.tolist` waits once, and not for each number: ones, false, or what is `known`."""
    if tensor.is_cuda and _running:
        _running[-1]._wait("tolist")
    value: Any = False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    for size in reversed(tensor.shape):
        value = [value] * size
    return getattr(tensor, "known", value)


_running: list[Trace] = []


@contextmanager
def tracing() -> Iterator[Trace]:
    with Trace() as trace:
        _running.append(trace)
        try:
            yield trace
        finally:
            _running.pop()


# -- processes ---------------------------------------------------------------------------------------------------------

collectives: Counter[str] = Counter()


@contextmanager
def world(rank: int, size: int) -> Iterator[Any]:
    """This process as one of several, whose others only seem to be there. Every collective gets contiguous tensors."""
    from deepnmt.processes.ranks import Ranks

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, 0, min(8, size), CUDA)
    finally:
        import deepspeed.comm as comm

        comm.destroy_process_group()


def _check(name: str) -> None:
    call = getattr(dist, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device.type == "cuda" and tensor.is_contiguous(), (name, tensor.device, tensor.stride())
        collectives[name] += 1
        return call(*args, **kwargs)

    setattr(dist, name, checked)


def begin() -> None:
    """Everything above; torch, deepnmt and DeepSpeed see a GPU from here on."""
    _pretend()
    from deepnmt import device
    from deepnmt.processes.ranks import Ranks

    assert device.choose() == "cuda"
    nn.Module._apply = _apply  # type: ignore[method-assign, assignment]
    F.scaled_dot_product_attention = _attention
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "send",
                 "recv", "reduce", "isend", "irecv"):
        _check(name)
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda *_, **__: None  # the numbers of others are not there
    Ranks.gather_bytes = lambda ranks, data: [data] * ranks.world  # type: ignore[method-assign]
    Ranks.raise_everywhere = lambda ranks, call: call()  # type: ignore[method-assign, assignment]
    Ranks.broadcast_bytes = lambda ranks, data: data or b""  # type: ignore[method-assign]
