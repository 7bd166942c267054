"""The processes of a run: finding this process's rank and device, meeting the others, and ending cleanly.

Works under the `deepspeed` launcher, torchrun, `srun` (one task per process) and as plain `python` (one process).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from deepnmt.device import Wanted, choose, require_cores
from deepnmt.errors import UserError
from deepnmt.processes import heartbeat, slurm
from deepnmt.processes.handshake import NOTICE, alone, handshake, tell_fault
from deepnmt.processes.heartbeat import HeartbeatMonitor
from deepnmt.processes.host import interface_to, keep_memory, quiet_libraries
from deepnmt.processes.launcher import end_with_launcher
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status

_TELLING = timedelta(minutes=1)  # for machines that start later to hear why this one has ended
_ANSWER = timedelta(minutes=10)  # of the store, once it is open
_COLLECTIVE = timedelta(hours=6)  # that processes may wait for each other; heartbeats tell when it is too long


@contextlib.contextmanager
def processes(threads: int = 0, *, group: bool = False, differ: bool = False, device: Wanted = "auto",
              wait: float = 600) -> Iterator[Ranks]:
    """Finds this process's rank, opens the process group where there are several (or `group`), and closes it again.

    Args:
        threads: CPU threads of this process; 0 shares the machine's cores evenly among its processes.
        group: open a process group even for a single process (DeepSpeed needs one).
        differ: go on although the machines differ in what `handshake.MUST_MATCH` names.
        device: see `device.choose`.
        wait: seconds to wait for the last process to come; machines may start minutes apart.

    Raises:
        UserError: another run uses the port; a GPU cannot be used, or there are fewer than processes; a process did
            not come; the machines differ; or this one is too small for the threads.
    """
    rank, world, local_rank, local_world = rank_from_environment()
    require_cores("parallel.threads", threads)
    port_given = "MASTER_PORT" in os.environ
    quiet_libraries()
    if world > 1:
        end_with_launcher()
    store: dist.Store | None = None
    for_all = timedelta(seconds=wait)
    try:
        if world > 1 or group:
            store = open_store(rank, world, for_all)
        try:
            place = _device(local_rank, local_world, device)
        except UserError as error:
            if store is not None:
                tell_fault(store, rank, world, str(error), _TELLING)
            raise
        keep_memory()
        peers = alone()
        if store is not None and world > 1:
            peers = handshake(store, rank, world, place, differ, for_all)
        torch.set_num_threads(threads or peers.cores)
        if store is not None:
            _open_group(store, rank, world, place, local_rank, peers.peer)
        if world > 1:
            heartbeat.current = HeartbeatMonitor(_client(world), rank, peers.nodes)
        yield Ranks(rank, world, local_rank, peers.local_world, place, store=store)
        if heartbeat.current is not None:
            heartbeat.current.shutdown(None)
    except BaseException as error:
        if heartbeat.current is not None:
            heartbeat.current.shutdown(error)
        if not isinstance(error, UserError):
            raise
        if store is not None and error.reported is None:
            error.reported = _reported_elsewhere(store, rank, str(error))
        raise
    finally:
        if dist.is_initialized():
            # DeepSpeed's own way forgets the groups it has made, which its next engine in this process would take
            comm = sys.modules.get("deepspeed.comm")
            if comm is not None and comm.is_initialized():
                comm.destroy_process_group()
            else:
                dist.destroy_process_group()
        if heartbeat.current is not None:
            heartbeat.current.close()
            heartbeat.current = None
        if not port_given:  # a later run in this process takes one that is free then
            os.environ.pop("MASTER_PORT", None)


def end_others(fault: str) -> None:
    """Ends the processes that wait for this one, or soon will, with the sentence with which it ends before it has met
    them. The machines may differ in what they find wrong."""
    with contextlib.suppress(UserError, RuntimeError, OSError):
        rank, world, *_ = rank_from_environment()
        if world > 1:
            store = open_store(rank, world, _TELLING)
            tell_fault(store, rank, world, fault, _TELLING)


def rank_from_environment() -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, from the variables that the launcher sets.

    For the tasks of an `srun` it also sets MASTER_ADDR and MASTER_PORT, where they are missing.

    Raises `UserError` for a rank that is none of a launcher's, or a variable that is no number.
    """
    env = os.environ
    if "RANK" in env:
        world = env.get("WORLD_SIZE", "1")
        if not (env["RANK"].isdecimal() and world.isdecimal() and int(env["RANK"]) < int(world)):
            raise UserError(f"the environment variable RANK is {env['RANK']}, but WORLD_SIZE is "
                            f"{env.get('WORLD_SIZE', 'missing')}, and launchers set both; unset RANK to start one "
                            "process, or start several with deepspeed, torchrun or srun")
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "LOCAL_SIZE"
        local_rank, local_world = slurm.number_in(env, "LOCAL_RANK", "0"), slurm.number_in(env, local_size, world)
        return int(env["RANK"]), int(world), local_rank, local_world
    place = slurm.place(env)
    if place is None:
        return 0, 1, 0, 1
    for name, value in slurm.meeting_point(env).items():
        env.setdefault(name, value)
    return place


def _device(local_rank: int, local_world: int, wanted: Wanted) -> torch.device:
    """This process's GPU, or the CPU."""
    if choose(wanted) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    ordinal = local_rank
    if count == 1 and "SLURM_PROCID" in os.environ:  # srun may show every task its own GPU alone
        ordinal = 0
    if ordinal >= count:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        raise UserError(f"{local_world} processes were started on {socket.gethostname()}, but {gpus} can be seen; "
                        "start one process a GPU, or set parallel.device=cpu to run on the CPU")
    device = torch.device("cuda", ordinal)
    torch.cuda.set_device(device)
    return device


def count_gpus(wanted: Wanted = "auto") -> int:
    """The number of GPUs of this machine; 0 if its processes compute on the CPU. Raises `UserError`, see
    `device.choose`, whose choice for one model decides nothing for a later one in this process."""
    quiet_libraries()
    named = os.environ.get("DS_ACCELERATOR")
    try:
        return torch.cuda.device_count() if choose(wanted) == "cuda" else 0
    finally:
        os.environ.pop("DS_ACCELERATOR", None)
        if named is not None:
            os.environ["DS_ACCELERATOR"] = named


def free_port() -> int:
    """A free TCP port of this machine, below those that Linux gives to outgoing connections (32768 to 60999).

    Seconds pass before a launcher opens it; a port that the system chooses may be some connection's by then.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_240, 32_768)))
            return int(probe.getsockname()[1])


def open_store(rank: int, world: int, wait: timedelta) -> dist.Store:
    """Opens the store in which the processes find each other; rank 0 serves it unless torchrun's own process does."""
    env = os.environ
    address, port = env.setdefault("MASTER_ADDR", "127.0.0.1"), slurm.number_in(env, "MASTER_PORT", "0", 65535)
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = None
    if serves:
        listener = listen_at(address, port)
    if "MASTER_PORT" not in env:
        port = listener.getsockname()[1] if listener else free_port()
        env["MASTER_PORT"] = str(port)
    if not serves:
        _wait_for_store(address, int(env["MASTER_PORT"]), wait)
    descriptor = listener.detach() if listener else None
    try:
        store: dist.Store = dist.TCPStore(address, int(env["MASTER_PORT"]), world, serves, _ANSWER,
                                          wait_for_workers=False, master_listen_fd=descriptor)
    except RuntimeError as error:
        raise UserError(f"{_where_they_meet()} cannot be opened on {socket.gethostname()}: "
                        f"{str(error).splitlines()[0]}") from None
    return _of_this_attempt(store)


def _where_they_meet() -> str:
    env = os.environ
    return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']} (MASTER_ADDR and MASTER_PORT), where the processes meet,"


def _wait_for_store(address: str, port: int, wait: timedelta) -> None:
    """Waits until somebody listens: PyTorch's store would wait two to three times as long, and print a traceback."""
    start = time.monotonic()
    _, _, local_rank, _ = rank_from_environment()
    announced = local_rank > 0  # one process of every machine tells
    while True:
        try:
            socket.create_connection((address, port), timeout=10).close()
            return
        except OSError as error:
            waited = time.monotonic() - start
            fault = f"{_where_they_meet()} does not answer on {socket.gethostname()}: {error.strerror or error}"
        if waited > wait.total_seconds():
            raise UserError(f"{fault}; see that process 0 runs, and that its machine has this name and lets the port "
                            "through")
        if not announced and waited > NOTICE.total_seconds():
            announced = True
            print_status(f"{fault}; waiting up to {wait.total_seconds() - waited:.0f} s more; if process 0 has ended, "
                         "stop all and start them again")
        time.sleep(0.2)


def listen_at(address: str, port: int) -> socket.socket | None:
    """A socket that listens at `address` alone, where the store would listen on every interface. None if others know
    this machine by an address that it has not, or does not tell: that of a container's host, say.

    Args:
        port: 0: any free one, for a process alone.
    """
    if address == "localhost":
        address = "127.0.0.1"
    with contextlib.suppress(OSError):
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if place[0] != address and ipaddress.ip_address(place[0]).is_loopback:  # as Debian has a machine's own name
            return None
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise UserError(f"port {port}, where the processes meet, cannot be opened: {error.strerror}; another "
                                "run uses it; give the launcher another --master_port") from None
    return None


def _client(world: int) -> dist.Store:
    """Another connection to the store: what one waits for does not hold up the other."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _of_this_attempt(dist.TCPStore(address, port, world, False, _ANSWER, wait_for_workers=False))


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """After a restart torchrun's store still holds the keys of the previous attempt."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return dist.PrefixStore(f"deepnmt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _open_group(store: dist.Store, rank: int, world: int, device: torch.device, local_rank: int, peer: str) -> None:
    """Opens the process group, over the network that leads to `peer`."""
    # DeepSpeed takes LOCAL_RANK for the number of its GPU
    number = local_rank if device.index is None else device.index
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
    if network := interface_to(peer):  # of gloo, which saves checkpoints in the background where NCCL trains
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_COLLECTIVE)


def _reported_elsewhere(store: dist.Store, rank: int, message: str) -> bool:
    """Whether another process has reported this message already, so that each message is printed once."""
    try:
        return store.add(f"reported/{hashlib.sha256(message.encode()).hexdigest()}", 1) > 1
    except RuntimeError:  # the store ended with rank 0, which has reported why
        return rank > 0
