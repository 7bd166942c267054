"""Checks at the start, before any collective: the processes of a run tell each other on which machine each is, and
with which software. Differences that would train wrongly, or hang, are refused with the names of the machines.

Everything goes through the store, so it works where the collectives would not. To have more compared, call `agree`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepnmt.device import driver
from deepnmt.errors import UserError
from deepnmt.processes.host import address_towards
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.version import PACKAGE, __version__

_AGREE = timedelta(minutes=10)  # for processes that have met
NOTICE = timedelta(minutes=1)  # after which a process says that it waits: who has not come may never come

_SUBJECT = "the machines"
_NAMED = 5  # differences that a message names

Facts = dict[str, Any]  # what a process tells, in JSON's types
Decide = Callable[[Sequence[Facts]], Facts]  # from all reports, in rank order, to what all processes get

# What must be the same on all machines, by the key in `facts`.
MUST_MATCH = {
    "device": "the device that computes",
    "deepnmt": "deepnmt's version and code",
    "torch": "PyTorch's version",
    "deepspeed": "DeepSpeed's version",
}
# What may differ; a start says so.
SHOULD_MATCH = {"python": "Python's version", "gpu": "the GPU", "driver": "the GPU's driver"}


def facts(device: torch.device) -> Facts:
    """What this process tells about itself and its machine."""
    own = {
        "node": socket.gethostname(),
        "machine": f"{socket.gethostname()} {_first_line('/proc/sys/kernel/random/boot_id')}",  # names may be the same
        "address": address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")),
        "cores": sorted(os.sched_getaffinity(0)),
        "device": device.type,
        "deepnmt": f"{__version__} ({code_hash()[:8]})",
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "python": platform.python_version(),
        "gpu": "",
        "driver": "",
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        slices = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # of a GPU that is split, which may have one UUID
        if "MIG" not in slices:
            slices = ""
        own |= {"gpu": gpu.name, "driver": driver(),
                "gpu_id": f"{getattr(gpu, 'uuid', device.index)} {slices}"}
    return own


def code_hash() -> str:
    """The SHA-256 of deepnmt's modules, names and contents."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _first_line(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""


# -- telling and deciding ----------------------------------------------------------------------------------------------


def decide_on_rank0(
    store: dist.Store, rank: int, world: int, subject: str, report: Facts, decide: Decide, wait: timedelta = _AGREE
) -> Facts:
    """Sends all processes' reports to rank 0, which decides; returns the decision on every process. Collective.

    Args:
        subject: a name that no other call of the run has.
        wait: how long to wait for the last process.

    Raises:
        UserError: on every process, if the decision has an entry "refused", the message; or if a process did not come.
    """
    store.set(f"{subject}/{rank}", json.dumps(report))
    if rank == 0:
        reports, absent = _collect(store, world, subject, wait)
        decision = {"refused": absent} if absent else decide(reports)
        store.set(f"{subject}/decision", json.dumps(decision))
        if decision.get("refused"):
            _let_read(store, world, timedelta(seconds=5), subject)
    else:
        try:
            store.wait([f"{subject}/decision"], wait + timedelta(seconds=30))
            decision = json.loads(store.get(f"{subject}/decision"))
            store.add(f"{subject}/read", 1)
        except RuntimeError:
            raise UserError(f"process 0 has ended, or does not answer, while the processes compare {subject}; its own "
                            "message says why; start all of them again") from None
    if decision.get("refused"):
        raise UserError(decision["refused"])
    return decision


def _collect(store: dist.Store, world: int, subject: str, wait: timedelta) -> tuple[list[Facts], str]:
    """All reports, and a sentence about those that did not come within `wait`."""
    keys = [f"{subject}/{rank}" for rank in range(world)]
    waited = min(NOTICE, wait)
    came = _come(store, keys, waited)
    if not came and waited < wait:
        rest = wait - waited
        print_status(f"{_absent(store, keys, waited)}; waiting up to {rest.total_seconds():g} s more; if one of them "
                     "has ended, stop all and start them again")
        came = _come(store, keys, rest)
        waited = wait
    if not came:
        return [], (f"{_absent(store, keys, waited)}; see what the launcher says of the others' machines, and start "
                    "all of them again")
    return [json.loads(store.get(key)) for key in keys], ""


def _come(store: dist.Store, keys: list[str], wait: timedelta) -> bool:
    """Whether all reports come within this time."""
    try:
        store.wait(keys, wait)
    except RuntimeError:
        return False
    return True


def _absent(store: dist.Store, keys: Sequence[str], waited: timedelta) -> str:
    """Which processes have not come, and where the others are."""
    absent: list[int] = []
    nodes: Counter[str] = Counter()
    for rank, key in enumerate(keys):
        if store.check([key]):
            nodes[json.loads(store.get(key)).get("node", "?")] += 1
        else:
            absent.append(rank)
    there = ", ".join(f"{count} on {node}" for node, count in nodes.items())
    return (f"{len(absent)} of {len(keys)} processes did not come within {waited.total_seconds():g} s: "
            f"{_ranks(absent)}; there are {there}")


def _let_read(store: dist.Store, world: int, wait: timedelta, subject: str) -> None:
    """Waits, at most `wait`, until all have read the decision: the store ends with this process."""
    until = time.monotonic() + wait.total_seconds()
    while store.add(f"{subject}/read", 0) < world - 1 and time.monotonic() < until:
        time.sleep(0.02)


def _ranks(numbers: Sequence[int]) -> str:
    """"ranks 3, 4, 5, ..." of at most eight."""
    shown = list(map(str, numbers[:8]))
    if len(numbers) > 8:
        shown.append("...")
    word = "ranks" if len(numbers) > 1 else "rank"
    return f"{word} {', '.join(shown)}"


def agree(ranks: Ranks, subject: str, items: Mapping[str, str], remedy: str) -> None:
    """Raises `UserError` on every process, naming item, values and machines, if `items` are not the same on all.
    Collective.

    Args:
        subject: a name that no other call of the run has.
        items: values by the name that the message gives them.
        remedy: the end of the message.
    """
    if ranks.store is None:
        return

    def decide(reports: Sequence[Facts]) -> Facts:
        names: dict[str, None] = {}  # in order, each once
        for report in reports:
            names |= dict.fromkeys(report["items"])
        nodes = [report["node"] for report in reports]
        phrases = []
        for name in names:
            values = [report["items"].get(name, "not set") for report in reports]
            phrase = differing(name, values, nodes)
            if phrase:
                phrases.append(phrase)
        if not phrases:
            return {"refused": ""}
        if len(phrases) > _NAMED:
            phrases[_NAMED:] = [f"{len(phrases) - _NAMED} more differ"]
        return {"refused": "; ".join([*phrases, remedy])}

    report = {"node": socket.gethostname(), "items": dict(items)}
    decide_on_rank0(ranks.store, ranks.rank, ranks.world, subject, report, decide)


def differing(what: str, values: Sequence[str], nodes: Sequence[str]) -> str:
    """A phrase such as "PyTorch's version is 2.13.0 on n1, 2.11.0 on n2", or "" if all values are the same.

    Args:
        values, nodes: value and machine of every process, in rank order.
    """
    if len(set(values)) < 2:
        return ""
    values_of: dict[str, set[str]] = {}
    for value, node in zip(values, nodes):
        values_of.setdefault(node, set()).add(value)
    places: dict[str, list[str]] = {}
    for rank, (value, node) in enumerate(zip(values, nodes)):
        place = f"rank {rank} of {node}" if len(values_of[node]) > 1 else node
        if place not in places.setdefault(value, []):
            places[value].append(place)
    most = max(places, key=lambda value: len(places[value]))
    parts = []
    for value, where in places.items():
        listed = ", ".join(where)
        if value == most and len(where) > 4 and len(places) > 1:
            listed = f"the {len(where)} others"
        parts.append(f"{value or 'none'} on {listed}")
    return f"{what} is " + ", but ".join(parts)


# -- the meeting -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peers:
    """What a process learns in the meeting.

    Attributes:
        cores: of its machine that are this process's own part.
        local_world: processes on its machine.
        peer: an address on another machine, or the loopback's if there is one machine only.
        nodes: the machine's name of every process.
    """

    cores: int
    local_world: int
    peer: str
    nodes: Sequence[str] = ()


def alone() -> Peers:
    """What a process knows that is alone."""
    return Peers(len(os.sched_getaffinity(0)), 1, "127.0.0.1")


def handshake(store: dist.Store, rank: int, world: int, device: torch.device, differ: bool, wait: timedelta) -> Peers:
    """Compares the machines, and waits for all processes. Collective.

    Args:
        differ: go on although the machines differ in what `MUST_MATCH` names, but for the device.
        wait: how long to wait for the last process.

    Raises:
        UserError: on every process; see `decide_on_rank0`.
    """
    decide = partial(decide_on_start, differ=differ)
    decision = decide_on_rank0(store, rank, world, _SUBJECT, facts(device), decide, wait)
    if rank == 0:
        for note in decision["notes"]:
            print_status(f"note: {note}")
    cores, local_world, peer = decision["processes"][rank]
    return Peers(cores, local_world, peer, decision["nodes"])


def tell_fault(store: dist.Store, rank: int, world: int, fault: str, wait: timedelta) -> None:
    """Has every process that comes to the meeting raise `fault`, with which this one is about to end; rank 0 waits for
    them, at most `wait`."""
    store.set(f"{_SUBJECT}/{rank}", json.dumps({"node": socket.gethostname(), "fault": fault}))
    if rank == 0:
        store.set(f"{_SUBJECT}/decision", json.dumps({"refused": fault}))
        _let_read(store, world, wait, _SUBJECT)
    else:
        store.add(f"{_SUBJECT}/read", 1)


def decide_on_start(reports: Sequence[Facts], differ: bool = False) -> Facts:
    """What a start refuses, what it says, and for each process the values of `Peers`."""
    for report in reports:
        if "fault" in report:
            return {"refused": report["fault"]}
    if differ:
        refused = differences(reports, {"device": MUST_MATCH["device"]})
        notes = []
    else:
        refused = differences(reports, MUST_MATCH)
        notes = differences(reports, SHOULD_MATCH)
    if refused:
        refused.append("make them the same on all machines")
    sharing: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if "gpu_id" in report:
            sharing.setdefault(f"{report['machine']} {report['gpu_id']}", []).append(rank)
    for together in sharing.values():
        if len(together) > 1:
            refused.append(f"{_ranks(together)} on {reports[together[0]]['node']} got the same GPU; start one "
                           "process a GPU, and let each see its own GPU or all of them")
    machines = Counter(report["machine"] for report in reports)
    first = reports[0]
    others = [report["address"] for report in reports if report["machine"] != first["machine"]]
    peer_of_first = others[0] if others else "127.0.0.1"
    processes = []
    for report, cores in zip(reports, core_shares(reports), strict=True):
        peer = peer_of_first if report["machine"] == first["machine"] else first["address"]
        processes.append((cores, machines[report["machine"]], peer))
    nodes = [report["node"] for report in reports]
    return {"refused": "; ".join(refused), "notes": notes, "nodes": nodes, "processes": processes}


def differences(reports: Sequence[Facts], items: Mapping[str, str]) -> list[str]:
    """A phrase for each of `items`, phrases by the key in `facts`, that is not the same everywhere."""
    nodes = [report["node"] for report in reports]
    phrases = []
    for key, what in items.items():
        phrase = differing(what, [report.get(key, "") for report in reports], nodes)
        if phrase:
            phrases.append(phrase)
    return phrases


def core_shares(reports: Sequence[Facts]) -> list[int]:
    """Every process's part of the cores that it may use, each of them shared by all processes that may use it.

    A launcher that has bound every process to cores of its own thus leaves it all of them.
    """
    users: Counter[tuple[str, int]] = Counter()
    for report in reports:
        users.update((report["machine"], core) for core in report["cores"])
    shares: list[int] = []
    for report in reports:
        share = sum(1 / users[report["machine"], core] for core in report["cores"])
        shares.append(max(1, int(share + 1e-6)))
    return shares
