"""`deepnmt check-cluster`: whether the machines of a run fit together, before it costs hours to find out.

The cheap parts, versions and devices, are compared at every start of several processes (`handshake.py`). Here they
are shown, and clocks, folders and the network are tried as well.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepnmt.config import Recipe
from deepnmt.errors import UserError, enough_memory
from deepnmt.files import make_run_folder, sha256, table
from deepnmt.processes.agreement import fault_of_shared
from deepnmt.processes.handshake import MUST_MATCH, SHOULD_MATCH, Facts, decide_on_rank0, differences, differing, facts
from deepnmt.processes.ranks import Ranks

_CLOCKS = 1.0  # seconds that two clocks may differ
_SLOW = 0.5  # of the median: a connection below this is named
_REPEATS = 5
_SENT = 16 * 2**20  # bytes by which a connection is timed


def check_cluster(recipe: Recipe, ranks: Ranks, megabytes: int) -> tuple[str, list[str]]:
    """A table of the machines, and a sentence for each difference and fault, on every process. Collective.

    Args:
        recipe: its run and data folders are tried. The run folder is made if it does not exist.
        megabytes: the size of the all-reduce that is timed.
    """
    if ranks.store is None:
        raise UserError("check-cluster was started as one process, so there is nothing to compare; start it as you "
                        "start training, for example srun deepnmt check-cluster my.yaml")
    own = facts(ranks.device)
    own["gpus"] = torch.cuda.device_count() if ranks.device.type == "cuda" else 0
    own["clock"] = _clock(ranks)
    prepared = "folder" in type(recipe.data).model_fields  # some tasks have nothing to prepare
    own |= _folders(Path(recipe.run), Path(recipe.data.folder) if prepared else None, ranks)
    own["seconds"] = _all_reduce_seconds(ranks, megabytes * 2**20)
    links = decide_on_rank0(ranks.store, ranks.rank, ranks.world, "links", {"machine": own["machine"]},
                            lambda reports: {"machines": [report["machine"] for report in reports]})
    own["link"] = _link(ranks, links["machines"])
    judged = decide_on_rank0(ranks.store, ranks.rank, ranks.world, "the cluster", own,
                             lambda reports: judge(reports, megabytes))
    return judged["text"], judged["faults"]


# -- measuring ---------------------------------------------------------------------------------------------------------


def _clock(ranks: Ranks) -> float:
    """Seconds by which this machine's clock is ahead of the first one's, to within the time of a barrier."""
    offsets = []
    for _ in range(_REPEATS):
        ranks.barrier()
        now = time.time()
        offsets.append(now - ranks.sum([now if ranks.first else 0.0])[0])
    return statistics.median(offsets)


def _folders(run: Path, data: Path | None, ranks: Ranks) -> Facts:
    """What this process sees of the run folder and of the prepared data, if there are any."""
    name = ranks.broadcast_bytes(f".tmp-check-{secrets.token_hex(4)}".encode()).decode()
    mine = run / f"{name}-{ranks.rank}"
    fault = ""
    missing = []
    try:
        try:
            if ranks.first:
                make_run_folder(run)
                (run / name).write_text(name, encoding="utf-8")
        except (UserError, OSError) as error:
            fault = str(error)
        ranks.barrier()
        if not fault:
            fault = _try_folder(run, name, mine)
        ranks.barrier()
        if ranks.first:
            missing = [rank for rank in range(ranks.world) if not (run / f"{name}-{rank}").exists()]
        ranks.barrier()
    finally:
        for file in (mine, run / name):
            with suppress(OSError):
                file.unlink(missing_ok=True)
    fingerprint = ""
    if data is not None:
        try:
            fingerprint = sha256(data / "manifest.json")[:8]
        except OSError as error:
            fingerprint = f"missing ({error.strerror})"
    return {"run": fault or "shared", "data": fingerprint, "not_seen": missing}


def _try_folder(run: Path, name: str, mine: Path) -> str:
    """Reads what rank 0 wrote and writes a file beside it; "" or the fault."""
    fault = fault_of_shared(run, name)
    if fault:
        return fault
    try:
        mine.write_text("", encoding="utf-8")
    except OSError as error:
        return f"not writable ({error.strerror})"
    return ""


def _all_reduce_seconds(ranks: Ranks, size: int) -> float:
    """The time of an all-reduce of `size` bytes on the slowest process, the best of some."""
    with enough_memory("give a smaller --mb"):
        tensor = torch.zeros(size // 4, device=ranks.device)
    times = []
    for _ in range(_REPEATS):
        ranks.barrier()
        started = time.monotonic()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(ranks.max([time.monotonic() - started])[0])
    return min(times)


def _link(ranks: Ranks, machines: Sequence[str]) -> float | None:
    """Bytes a second from rank 0 to this process, if it is the first one of another machine than rank 0's."""
    tensor = torch.zeros(_SENT // 4, device=ranks.device)
    speed = None
    for rank, machine in enumerate(machines):
        if machine in machines[:rank] or machine == machines[0]:
            continue
        for _ in range(_REPEATS):
            ranks.barrier()
            started = time.monotonic()
            if ranks.first:
                dist.send(tensor, rank)
            elif ranks.rank == rank:
                dist.recv(tensor, 0)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
                speed = max(speed or 0.0, _SENT / (time.monotonic() - started))
    return speed


# -- judging -----------------------------------------------------------------------------------------------------------


_SOFTWARE = {"deepnmt": "deepnmt", "torch": "PyTorch", "deepspeed": "DeepSpeed", "python": "Python",
             "driver": "driver"}


def judge(everything: Sequence[Facts], megabytes: int) -> dict[str, Any]:
    """The table and the faults, from what all processes told."""
    nodes: dict[str, list[Facts]] = {}
    for report in everything:
        nodes.setdefault(report["machine"], []).append(report)
    world = len(everything)
    first = everything[0]
    rows = [["machine", "processes", "device", "cores", "clock", "run folder", "data", f"from {first['node']}"]]
    for group in nodes.values():
        node = group[0]
        cores: set[int] = set()
        for report in group:
            cores.update(report["cores"])
        gpus = f"{len(group)} of {node['gpus']} " if node["gpus"] else ""
        link = f"{node['link'] / 1e9:.2f} GB/s" if node["link"] else ""
        rows.append([node["node"], str(len(group)), f"{gpus}{node['gpu'] or node['device']}", str(len(cores)),
                     f"{node['clock']:+.2f} s", node["run"], node["data"], link])
    bus = 2 * (world - 1) / world * megabytes * 2**20 / first["seconds"] / 1e9
    common = [f"{name} {first[key]}" for key, name in _SOFTWARE.items() if first[key]]
    lines = [table(rows), f"\n{first['node']} has {', '.join(common)}",
             f"all-reduce of {megabytes} MiB over {world} processes: {first['seconds'] * 1e3:.1f} ms, "
             f"{bus:.2f} GB/s in and out of each"]
    return {"text": "\n".join(lines), "faults": _faults(everything, list(nodes.values()))}


def _faults(everything: Sequence[Facts], groups: Sequence[Sequence[Facts]]) -> list[str]:
    """A phrase for each difference between the machines, and for each thing that would go wrong."""
    names = [report["node"] for report in everything]
    first = everything[0]
    faults = differences(everything, MUST_MATCH | SHOULD_MATCH)
    faults.append(differing("the data's fingerprint", [report["data"] for report in everything], names))
    counts = [str(len(group)) for group in groups]
    faults.append(differing("the number of processes", counts, [group[0]["node"] for group in groups]))
    if first["data"].startswith("missing"):
        faults.append(f"{first['node']} has no prepared data")
    for group in groups:
        node = group[0]
        if abs(node["clock"]) > _CLOCKS:
            faults.append(f"the clock of {node['node']} is {node['clock']:+.1f} s off that of {first['node']}")
        if node["run"] != "shared":
            faults.append(f"the run folder on {node['node']}: {node['run']}; all machines must read and write the same")
    unseen = {names[rank] for rank in first["not_seen"] if everything[rank]["run"] == "shared"}
    if unseen:
        faults.append(f"{first['node']} does not see what {', '.join(sorted(unseen))} wrote into the run folder")
    links = {group[0]["node"]: group[0]["link"] for group in groups if group[0]["link"]}
    if len(links) > 2:
        usual = statistics.median(links.values())
        for node, speed in links.items():
            if speed < _SLOW * usual:
                faults.append(f"{node} gets {speed / 1e9:.2f} GB/s from {first['node']}, the median is "
                              f"{usual / 1e9:.2f}")
    return [phrase for phrase in faults if phrase]
