"""The device that computes: which it is, what is set on it before the first tensor, and what it has.

Only this module asks. Where the model computes otherwise on a GPU it asks `on_gpu`, which tests replace, so that they
also run a GPU's branches on a CPU.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import Tensor

from deepnmt.errors import UserError

Wanted = Literal["auto", "cuda", "cpu"]  # values of `parallel.device`

_DEVICES = Path("/dev")
_HANDED_OUT = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES")  # to this job
_NONE = ("", "-1", "NoDevFiles")  # values of these that mean no GPU
# Set by DeepSpeed's launch.py, which numbers its processes in CUDA_VISIBLE_DEVICES on a machine without GPUs, too.
_DEEPSPEED = "CROSS_RANK"

# Bytes of a card that are not PyTorch's: CUDA's context, NCCL's buffers, and what no block fits into.
RESERVED = 2.5 * 2**30
CARDS = {  # usable memory by name, in GiB
    "t4-16": 14.6, "v100-16": 15.8, "v100-32": 31.7, "rtx4090-24": 23.6, "a100-40": 39.4, "a6000-48": 47.4,
    "l40s-48": 44.4, "a100-80": 79.2, "h100-80": 79.1, "h200-141": 139.8, "b200-192": 178.4,
}

_PER_CORE = 16  # threads or processes of one core above which a number is a mistake


def on_gpu(tensor: Tensor) -> bool:
    """Whether this tensor is computed as on a GPU: no check of its values, which would make the host wait."""
    return tensor.is_cuda


# -- before the first tensor -------------------------------------------------------------------------------------------


def choose(wanted: Wanted = "auto") -> Literal["cuda", "cpu"]:
    """The device of this process, which DeepSpeed is told in DS_ACCELERATOR; a GPU is prepared for training.

    A GPU that the machine has or the job was given, but that cannot be used, is no reason to train on the CPU.

    Raises:
        UserError: a GPU is wanted, or there, but cannot be used; or DS_ACCELERATOR contradicts `wanted`.
    """
    named = os.environ.get("DS_ACCELERATOR")
    if wanted == "cuda" and named == "cpu":
        raise UserError("parallel.device is cuda, but DS_ACCELERATOR is cpu; unset it, or set parallel.device=auto")
    kind: Literal["cuda", "cpu"] = "cpu"
    if wanted != "cpu" and named != "cpu":
        usable = torch.cuda.is_available() or (named == "cuda" and torch.cuda.device_count() > 0)
        if wanted == "cuda":
            reason = "parallel.device is cuda"
        elif named == "cuda":
            reason = "DS_ACCELERATOR is cuda"
        else:
            reason = _sign_of_a_gpu()
        if not usable and reason:
            raise UserError(f"{reason}, but PyTorch cannot use a GPU: {_cause()}; mend that, or set "
                            "parallel.device=cpu to compute on the CPU")
        kind = "cuda" if usable else "cpu"
    os.environ["DS_ACCELERATOR"] = kind
    if kind == "cuda":
        _prepare()
    return kind


def _sign_of_a_gpu() -> str:
    """Why this process should see a GPU; "" if nothing says so."""
    if any(os.environ.get(name) in _NONE for name in _HANDED_OUT):  # none was given, whatever the machine has
        return ""
    for name in _HANDED_OUT:
        numbers_processes = name == "CUDA_VISIBLE_DEVICES" and _DEEPSPEED in os.environ
        if name in os.environ and not numbers_processes:
            return f"{name} is {os.environ[name]}"
    devices = sorted(_DEVICES.glob("nvidia[0-9]*"))
    return f"this machine has {devices[0]}" if devices else ""


def _cause() -> str:
    """Why PyTorch sees no GPU."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # no driver, one that is too old, no device
        return str(error).splitlines()[0].rstrip(".")
    return f"PyTorch {torch.__version__} sees {torch.cuda.device_count()} devices"


def _prepare() -> None:
    """Sets what a GPU needs before its first tensor.

    - cuDNN's attention makes a plan for each new shape, in 0.05 to 1 s, and an epoch has some 10,000 of them.
    - cuBLAS may add up parts of a 16-bit product in 16 bits; all sums are to be in fp32. cuDNN rounds what a
      convolution in fp32 multiplies to TF32.
    - Shapes that change all the time fragment memory that cannot grow in place.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # the name that old versions know, too
        if torch.cuda.is_available():  # PyTorch may have read the variable when it was imported
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If wanted, kernels give the same bits every time: the backward pass of attention, and cuBLAS. It costs time."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


# -- what it has -------------------------------------------------------------------------------------------------------


def require_cores(setting: str, wanted: int) -> None:
    """Refuses a number of threads or processes that this machine is too small for: far too many of them use up its
    process ids, and then nothing can be started on it any more."""
    cores = os.cpu_count() or 1
    if wanted > _PER_CORE * cores:
        raise UserError(f"{setting} is {wanted:,}, but this machine has {cores:,} cores; set it to {cores:,}, or to 0, "
                        "which shares them out")


def emulates_bf16(device: torch.device) -> bool:
    """Whether bf16 is computed in fp32 there, and is slower than fp32."""
    if device.type == "cuda":
        return not torch.cuda.is_bf16_supported(including_emulation=False)
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
                or platform.machine() == "aarch64")


def trains_faster_in_bf16() -> bool:
    """Whether this machine's CPU trains faster in bf16 than in fp32: with AMX, or one of AMD with avx512_bf16. Intel's
    avx512_bf16 by itself is slower than fp32 (studies/results/speed.md)."""
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and "AuthenticAMD" in _cpu())


def memory(device: torch.device, processes: int = 1) -> float:
    """Bytes of the GPU, or the share of one of `processes` in the machine's memory or in its control group's limit."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is none
            sizes.append(int(Path(file).read_text()))
    return min(sizes) / processes


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU's tensor to the device, and waits for nothing: from other than pinned memory the host would."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def free_memory(device: torch.device) -> float:
    """Bytes that new tensors can take: of the GPU, what is free and what PyTorch keeps unused; of the machine, what is
    available and within `memory`."""
    if device.type != "cuda":
        return min(memory(device), psutil.virtual_memory().available)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + unused)


def release(device: torch.device) -> None:
    """Gives memory that is kept unused back to the GPU, for tensors of other shapes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def driver() -> str:
    """The version of the GPU's driver; "" if unknown."""
    with suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", Path("/proc/driver/nvidia/version").read_text()):
            return found[0]
    return ""


def describe(device: torch.device, processes: int, local: int, precision: str) -> dict[str, str]:
    """What a run computes on: device, memory, driver, the backend of its communication and its precision.

    Args:
        processes: of the run.
        local: those of this machine.
    """
    if device.type == "cuda":
        name = f"{device}, {torch.cuda.get_device_properties(device).name}"
        software = f"driver {driver() or 'unknown'}, CUDA {torch.version.cuda}"
        backend = "nccl"
    else:
        name = f"cpu, {_cpu_name()}, {torch.get_num_threads()} thread(s)"
        software = "no GPU"
        backend = "gloo"
    if processes == 1:
        backend = "one process"
    if precision == "bf16" and emulates_bf16(device):
        precision = "bf16, which this device emulates: fp32 is faster"
    return {"device": name, "memory": f"{memory(device, local) / 2**30:.1f} GiB", "driver": software,
            "torch": f"PyTorch {torch.__version__}", "backend": backend, "precision": precision}


def _cpu_name() -> str:
    match = re.search(r"^model name\s*: (.+)$", _cpu(), flags=re.MULTILINE)
    return match[1] if match else platform.machine()


def _cpu() -> str:
    """What Linux says of the CPU; "" if it says nothing."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""
