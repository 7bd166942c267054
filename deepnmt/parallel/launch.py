"""Processes: who am I, how do I talk to the others, and how does everything end cleanly.

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
        threads: of this process; 0 shares the machine's cores among its processes.
        group: open a process group of one as well (DeepSpeed wants one).

    Raises:
        UserError: the environment names a rank but not where the others are; another run has their port; there are
            fewer GPUs than processes.
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
    """Rank, world size, local rank and local world size, as the launcher's environment tells them.

    Raises:
        UserError: srun started several tasks without saying where the first one listens.
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
    """This process's GPU, or the CPU where DS_ACCELERATOR says so: DeepSpeed goes by the same variable."""
    if os.environ["DS_ACCELERATOR"] != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        error = UserError(f"{local_world} processes were started on this machine, but {count} GPU{'s' * (count != 1)} "
                          "can be seen; start one process a GPU, or set DS_ACCELERATOR=cpu to run on the CPU")
        error.reported = local_rank > count  # the first without a GPU says it
        raise error
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def gpus() -> int:
    """GPUs for processes of this machine; 0 where they compute on the CPU."""
    quiet_libraries()
    return torch.cuda.device_count() if os.environ["DS_ACCELERATOR"] == "cuda" else 0


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open_group(rank: int, world: int, local_rank: int, backend: str) -> dist.Store:
    """Returns the store where the processes met."""
    env = os.environ
    address = env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(free_port()))
    env.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank))
    timeout = timedelta(minutes=30)
    listener = None
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process listens there for all
    if rank == 0 and not agent and address in LOOPBACK:  # else the store would listen on every interface
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", int(env["MASTER_PORT"])))
            listener.listen()
        except OSError as error:
            listener.close()
            raise UserError(f"port {env['MASTER_PORT']}, where the processes meet, cannot be opened: {error.strerror}; "
                            "another run has it: give the launcher another --master_port") from None
    store: dist.Store = dist.TCPStore(address, int(env["MASTER_PORT"]), world, rank == 0 and not agent, timeout,
                                      master_listen_fd=listener.detach() if listener else None)
    if agent:  # after a restart the store still has the keys of the attempt before
        store = dist.PrefixStore(f"deepnmt/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return store


def _reported_elsewhere(store: dist.Store, rank: int, message: str) -> bool:
    """Whether another process came first with this message. A mistake that one process alone comes upon is said too."""
    try:
        return store.add(f"said/{hashlib.sha256(message.encode()).hexdigest()}", 1) > 1
    except RuntimeError:  # the store ended with rank 0, which has then said why
        return rank > 0


def _end_with_parent() -> None:
    """Asks the kernel for SIGTERM when the launcher dies: it can otherwise leave its ranks behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
