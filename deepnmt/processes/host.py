"""The process and its machine: how malloc keeps memory, which messages of libraries are hidden, which networks it has.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import warnings

import psutil

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # of malloc.h


def quiet_libraries() -> None:
    """Hides library messages that a user can do nothing about; errors are still shown."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # oneDNN compiles a CPU's 16-bit products for each number of rows; batches have some hundred, times 15 products
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # a level would not outlive DeepSpeed's import
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|torch)(\.|$)")


def keep_memory() -> None:
    """Makes glibc keep freed memory instead of returning it to the kernel after every tensor.

    On a CPU each micro-batch would otherwise fault in its activations page by page, which took 9 to 15 % of a step.
    """
    _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20})


def give_memory_back() -> None:
    """Undoes `keep_memory` for an engine that keeps allocating and freeing whole weights, as ZeRO-3 does.

    The kept blocks do not fit the next weight, so memory grows: 6L-6L at width 512 took 3.1 GiB a process, and takes
    2.0 with this.
    """
    _set_malloc({_MMAP_MAX: 65536, _TRIM_THRESHOLD: 128 * 2**10, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 2**20})


def _set_malloc(settings: dict[int, int]) -> None:
    """Sets parameters of glibc's malloc, if the process uses glibc and a CPU, and returns free memory to the kernel."""
    if sys.platform == "linux" and os.environ["DS_ACCELERATOR"] != "cuda":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            for parameter, value in settings.items():
                libc.mallopt(parameter, value)
            libc.malloc_trim(0)


def address_towards(host: str) -> str:
    """The address of this machine in the network that leads to `host`; "" if there is none. Sends nothing."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_to(host: str) -> str:
    """The network interface that leads to `host`; "" if unknown.

    gloo would take the one that this machine's own name stands for, which on many systems is the loopback.
    """
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if own in [address.address.split("%")[0] for address in addresses]:
            return name
    return ""
