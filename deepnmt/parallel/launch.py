"""The processes of a run: finding this process's rank and device, meeting the others, and ending cleanly.

Works under the `deepspeed` launcher, torchrun, `srun` (one task per process) and as plain `python` (one process).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from deepnmt.errors import UserError
from deepnmt.parallel.host import LOOPBACK, keep_memory, quiet_libraries
from deepnmt.ranks import Ranks


@contextlib.contextmanager
def processes(threads: int = 0, *, group: bool = False) -> Iterator[Ranks]:
    """Finds this process's rank, opens the process group where there are several (or `group`), and closes it again.

    Args:
        threads: CPU threads of this process; 0 shares the machine's cores evenly among its processes.
        group: open a process group even for a single process (DeepSpeed needs one).

    Raises:
        UserError: srun set a rank but MASTER_ADDR is missing; another run uses the port; there are fewer GPUs than
            processes.
    """
    quiet_libraries()
    keep_memory()
    rank, world, local_rank, local_world = rank_from_environment()
    if world > 1:
        _end_with_parent()
    device = _device(local_rank, local_world)
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_world))
    store = None
    if world > 1 or group:
        store = _open_group(rank, world, local_rank, "nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(rank, world, local_rank, local_world, device)
    except UserError as error:
        if store is not None and error.reported is None:
            error.reported = _reported_elsewhere(store, rank, str(error))
        raise
    finally:
        if dist.is_initialized():
            # DeepSpeed's own way forgets the groups it has made, which its next engine in this process would take
            comm = sys.modules.get("deepspeed.comm")
            (comm if comm is not None and comm.is_initialized() else dist).destroy_process_group()


def rank_from_environment() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, from the variables that the launcher sets.

    Raises:
        UserError: srun started several tasks, but MASTER_ADDR is not set.
    """
    env = os.environ
    if "RANK" in env:
        world = int(env.get("WORLD_SIZE", "1"))
        return (int(env["RANK"]), world, int(env.get("LOCAL_RANK", "0")),
                int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", str(world)))))
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        if "MASTER_ADDR" not in env:
            raise UserError("srun started several tasks but MASTER_ADDR is not set; put 'export MASTER_ADDR=$(scontrol "
                            "show hostnames | head -n 1) MASTER_PORT=29500' before srun in the batch script")
        return (int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", "0")),
                int(env.get("SLURM_NTASKS_PER_NODE", "1")))
    return 0, 1, 0, 1


def _device(local_rank: int, local_world: int) -> torch.device:
    """This process's GPU, or the CPU if DS_ACCELERATOR (which DeepSpeed reads too) is not "cuda"."""
    if os.environ["DS_ACCELERATOR"] != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        error = UserError(f"{local_world} processes were started on this machine, but {count} GPU{'s' * (count != 1)} "
                          "can be seen; start one process a GPU, or set DS_ACCELERATOR=cpu to run on the CPU")
        error.reported = local_rank > count  # the first process without a GPU reports it for all
        raise error
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def count_gpus() -> int:
    """The number of GPUs of this machine; 0 if its processes compute on the CPU."""
    quiet_libraries()
    return torch.cuda.device_count() if os.environ["DS_ACCELERATOR"] == "cuda" else 0


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open_group(rank: int, world: int, local_rank: int, backend: str) -> dist.Store:
    """Opens the process group; returns its store."""
    env = os.environ
    address = env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(free_port()))
    env.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank))
    timeout = timedelta(minutes=30)
    listener = None
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process hosts the store
    if rank == 0 and not agent and address in LOOPBACK:  # else the store would listen on every interface
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(env["MASTER_PORT"])))
            listener.listen()
        except OSError as error:
            listener.close()
            raise UserError(f"port {env['MASTER_PORT']}, where the processes meet, cannot be opened: {error.strerror}; "
                            "another run uses it; give the launcher another --master_port") from None
    store: dist.Store = dist.TCPStore(address, int(env["MASTER_PORT"]), world, rank == 0 and not agent, timeout,
                                      master_listen_fd=listener.detach() if listener else None)
    if agent:  # after a restart the store still holds the keys of the previous attempt
        store = dist.PrefixStore(f"deepnmt/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return store


def _reported_elsewhere(store: dist.Store, rank: int, message: str) -> bool:
    """Whether another process has reported this message already, so that each message is printed once."""
    try:
        return store.add(f"reported/{hashlib.sha256(message.encode()).hexdigest()}", 1) > 1
    except RuntimeError:  # the store ended with rank 0, which has reported why
        return rank > 0


def _end_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its launcher dies, so that no rank is orphaned."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
