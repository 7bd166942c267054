"""What `srun` tells a task: its rank, the tasks of its node, and where the tasks can meet."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from deepnmt.errors import UserError

_FIRST_PORT, _PORTS = 10_000, 20_000  # below the ports that Linux gives to outgoing connections


def number_in(env: Mapping[str, str], name: str, default: str, most: float = math.inf) -> int:
    """The whole number in a variable that a launcher sets. Raises `UserError` if it is anything else."""
    text = env.get(name, default)
    if not text.isdecimal() or int(text) > most:
        bound = "" if most == math.inf else f" up to {most}"
        raise UserError(f"the environment variable {name} is {text!r}, must be a whole number{bound}, as launchers set "
                        "it; unset it to start one process, or start several with deepspeed, torchrun or srun")
    return int(text)


def place(env: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Rank, world size, local rank and local world size of a task that srun started beside others, else None.

    Within `sbatch` and `salloc` themselves the variables of the job are set too, but not those of a step.
    """
    world = number_in(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", "1")
    if world < 2 or "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE", "1"))
    node = number_in(env, "SLURM_NODEID", "0")
    local_world = counts[min(node, len(counts) - 1)]
    return number_in(env, "SLURM_PROCID", "0"), world, number_in(env, "SLURM_LOCALID", "0"), local_world


def tasks_per_node(text: str) -> list[int]:
    """[8, 8, 8, 8, 3] for "8(x4),3"."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def meeting_point(env: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR, the first node of the step, and MASTER_PORT, which jobs that share a node do not share."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    address = "127.0.0.1"
    if nodes and env.get("SLURM_STEP_NUM_NODES") != "1":
        address = first_node(nodes)
    job, step = number_in(env, "SLURM_JOB_ID", "0"), number_in(env, "SLURM_STEP_ID", "0")
    port = _FIRST_PORT + (job * 7 + step) % _PORTS
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def first_node(nodes: str) -> str:
    """"n07" of "n[07-09,12],m1": the first node of Slurm's way of writing a list."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
