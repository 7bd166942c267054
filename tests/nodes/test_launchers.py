"""Every launcher on two machines: it trains to one machine's losses, and whatever ends it, the run is saved and nothing
is left behind. The files of recipes/launch are what is run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from machines import REPO, Machines
from node_runs import (
    ENDLESS,
    GONE,
    LAUNCH,
    LONG,
    Expected,
    assert_same,
    finish,
    hostfile,
    newest,
    stood,
    text,
    torchrun,
    wait_for,
    words,
)
from warm import Warm

from deepnmt.cli import main

# -- Slurm -------------------------------------------------------------------------------------------------------------

PLACE = """
import os, psutil, torch
from deepnmt.processes.process_group import processes
with processes() as ranks:
    print("place", ranks.rank, ranks.world, ranks.local_rank, ranks.local_world, os.uname().nodename,
          torch.get_num_threads(), ranks.sum([1.0]), flush=True)
    listening = {to.laddr.ip for to in psutil.Process().net_connections("tcp") if to.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "10.77.0.1", "10.77.0.2"}, listening
"""


@pytest.mark.parametrize(("form", "places"), [
    # rank, world, local rank, local world, machine, threads
    ("--nodes=2 --ntasks=3", ["0 3 0 2 n1 1", "1 3 1 2 n1 1", "2 3 0 1 n2 1"]),
    ("--ntasks=2 --nodelist=n1", ["0 2 0 2 n1 1", "1 2 1 2 n1 1"]),
    ("--nodes=2 --ntasks-per-node=1 --cpus-per-task=2", ["0 2 0 1 n1 2", "1 2 0 1 n2 2"]),
])
def test_srun(form: str, places: list[str], machines: Machines) -> None:
    """Nothing is said about where to meet, and they listen there alone; a task that is bound to cores of its own takes
    all of them."""
    script = machines.shared / "place.py"
    script.write_text(PLACE)
    # a task that has just ended may hold a core for a moment, and Slurm would place these around it
    wait_for(lambda: {*machines.run("n1", "sinfo --noheader --Node --format=%T")[1].split()} == {"idle"}, 100,
             lambda: machines.run("n1", "sinfo --long --Node")[1])
    code, said = machines.run("n1", f"srun {form} python {script}")
    found = sorted(line.removeprefix("place ") for line in said.splitlines() if line.startswith("place"))
    world = places[0].split()[1]
    assert code == 0 and found == [f"{place} [{world}.0]" for place in places], said


def test_sbatch_is_stopped_requeued_and_resumes_to_the_same_bits(
        machines: Machines, prepared: Path, expected: Expected) -> None:
    """The signal that Slurm sends before the time limit comes in the middle of the run."""
    run, log = machines.shared / "sbatch", machines.shared / "sbatch.log"
    code, said = machines.run("n1", f"sbatch --parsable --nodes=2 --ntasks-per-node=1 --gpus-per-node=0 "
                              f"--cpus-per-task=1 --output={log} {LAUNCH}/train.sbatch {words(prepared, run, *LONG)}",
                              VENV=sys.prefix, DS_ACCELERATOR="cpu")
    assert code == 0, said
    job = re.findall(r"^\d+$", said, re.M)[0]

    def show() -> str:
        return text(log) + machines.run("n1", f"scontrol show job {job}")[1]

    wait_for(lambda: "update 20/" in text(log), 100, show)
    assert machines.run("n1", f"scancel --signal=TERM {job}")[0] == 0
    wait_for(lambda: stood(run) == "finished", 150, show)
    wait_for(lambda: "JobState=COMPLETED" in show(), 100, show)
    assert "stopped by SIGTERM to rank " in text(log) and "resuming from" in text(log), text(log)
    assert "Restarts=1" in show()
    assert_same(run, expected, 300)


def test_arrays_prepare_a_text_and_translate_one(machines: Machines, prepared: Path, expected: Expected) -> None:
    """In parts, on both machines; the bytes are those of one call."""
    data, log, run = machines.shared / "parts", machines.shared / "array.log", expected(20)
    settings = ("data.shard_pairs=150", "vocab.size=80")

    def array(name: str, line: str, *options: str) -> str:
        code, said = machines.run("n1", f"sbatch --parsable --array=1-3 --cpus-per-task=1 --mem=0 --gpus-per-task=0 "
                                  f"--output={log} {' '.join(options)} {LAUNCH}/{name}.sbatch {line}",
                                  VENV=sys.prefix, DS_ACCELERATOR="cpu")
        assert code == 0, said
        return re.findall(r"^\d+$", said, re.M)[0]

    line = shlex.join([str(prepared / "recipe.yaml"), f"data.folder={data}", *settings])
    first = array("prepare", line)
    second = array("prepare", line, f"--dependency=afterok:{first}")
    wait_for(lambda: (data / "manifest.json").exists(), 150, lambda: text(log))
    wait_for(lambda: second not in machines.run("n1", "squeue --noheader --format=%A")[1], 150, lambda: text(log))
    alone = machines.shared / "alone"
    assert main("prepare", [str(prepared / "recipe.yaml"), f"data.folder={alone}", *settings]) == 0
    assert files_of(data) == files_of(alone)

    output, whole = machines.shared / "made.de", machines.shared / "whole.de"
    source = prepared / "text" / "valid.en"
    array("translate", shlex.join([str(run), "--input", str(source), "--output", str(output)]))
    wait_for(output.exists, 150, lambda: text(log))
    assert main("translate", [str(run), "--input", str(source), "--output", str(whole)]) == 0
    assert output.read_bytes() == whole.read_bytes()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# -- deepspeed with a hostfile -----------------------------------------------------------------------------------------


def test_whatever_ends_the_hostfile_run_it_saves_on_both_machines(
        machines: Machines, prepared: Path, expected: Expected, warm: Warm) -> None:
    """One run, which every start resumes. DeepSpeed's own exit code after pdsh was killed is 0, so the script asks the
    run."""
    run = machines.shared / "hostfile"
    assert end(machines, prepared, run, "pdsh", signal.SIGKILL) == 75
    assert end(machines, prepared, run, "deepspeed", signal.SIGINT) == 1
    assert end(machines, prepared, run, "deepspeed", signal.SIGKILL) == 137
    finish(warm, prepared, run, expected, newest(run) // 100 * 100 + 100)


def end(machines: Machines, prepared: Path, run: Path, target: str, number: int) -> int:
    """Starts the run, ends a part of the launcher once it trains, and returns the script's exit code."""
    before = newest(run)
    script, said = hostfile(machines, 29600 + before, words(prepared, run, *ENDLESS), f"hostfile-{before}.txt")
    wait_for(lambda: f"update {before + 20}/" in text(said), 100, lambda: text(said))
    assert ("resuming from" in text(said)) == (before > 0), text(said)
    (process,) = [process for process in machines.processes(f"run={run}")
                  if target in (process.name(), process.cmdline()[0])]
    process.send_signal(number)
    code = script.wait(GONE)
    wait_for(lambda: not machines.processes(f"run={run}"), GONE, lambda: f"left behind\n{text(said)}")
    stopped = json.loads((run / "STATUS.json").read_text())
    # at SIGINT DeepSpeed also sends all processes SIGTERM, by pkill, which may come before the end is noticed
    causes = ("has ended (n", "SIGTERM to rank")[: 2 if number == signal.SIGINT else 1]
    assert stopped["status"] == "preempted" and any(cause in stopped["cause"] for cause in causes), (
        stopped, text(said))
    assert before + 20 <= stopped["update"] == newest(run)
    return code


# -- torchrun ----------------------------------------------------------------------------------------------------------


def test_torchrun_trains_to_one_machines_losses(
        machines: Machines, prepared: Path, expected: Expected) -> None:
    run = machines.shared / "torchrun"
    agents, said = torchrun(machines, 29800, words(prepared, run), "torchrun")
    assert [agent.wait(120) for agent in agents] == [0, 0], "\n".join(map(text, said))
    assert_same(run, expected, 12)


# -- a container -------------------------------------------------------------------------------------------------------


def test_the_first_process_of_a_container_hands_the_signal_on(machines: Machines, prepared: Path) -> None:
    """The container's own script as PID 1 of a PID namespace, which is what a container is to signals."""
    run, said = machines.shared / "container", machines.shared / "container.txt"
    (entry,) = json.loads(re.findall("^ENTRYPOINT (.*)$", text(LAUNCH / "Containerfile"), re.M)[0])
    script = REPO / Path(entry).relative_to("/deepnmt")
    container = machines.start("n1", f"PROCESSES=2 unshare --pid --fork --mount-proc {script} "
                               + words(prepared, run, *LONG), said)
    wait_for(lambda: "update 20/" in text(said), 100, lambda: text(said))
    (first,) = [process for process in machines.processes("torchrun", f"run={run}")
                if process.parent() is not None and process.parent().name() == "unshare"]
    first.send_signal(signal.SIGTERM)
    assert container.wait(GONE) != 0, text(said)
    assert stood(run) == "preempted" and machines.run("n1", f"deepnmt status {run}")[0] == 75, text(said)


# -- check-cluster -----------------------------------------------------------------------------------------------------


def test_check_cluster_names_the_machine_that_differs(machines: Machines, prepared: Path) -> None:
    """n2 has another version of the code and another folder under the run's name; its clock cannot be set here."""
    run, other = machines.shared / "checked", machines.shared / "other"
    line = f"check-cluster {words(prepared, run)} --mb 1"
    code, said = machines.run("n1", f"srun --nodes=2 --ntasks=2 deepnmt {line}")
    assert code == 0 and "the machines fit together" in said, said
    assert re.search(r"^n2 .* shared .* GB/s$", said, re.M), said
    shutil.copytree(REPO / "deepnmt", other / "deepnmt", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "deepnmt" / "version.py").open("a") as file:
        file.write('__version__ = "9.9.9"\n')
    on_n2 = f"if [ $(hostname) = n2 ]; then export PYTHONPATH={other}; mount -t tmpfs tmpfs {run}; fi"
    task = f"unshare --mount bash -c '{on_n2}; exec deepnmt {{}}'"
    code, said = machines.run("n1", f"srun --nodes=2 --ntasks=2 {task.format(line)}")
    found = [told for told in said.splitlines() if told.startswith("difference: ")]
    assert code == 2 and len(found) == 2, said
    assert re.fullmatch(r"difference: deepnmt's version and code is .* on n1, but 9.9.9 \(.*\) on n2", found[0]), said
    assert "the run folder on n2: not the first machine's folder" in found[1]
    code, said = machines.run("n1", f"srun --nodes=2 --ntasks=2 {task.format('train ' + words(prepared, run))}")
    refused = [told for told in said.splitlines() if told.startswith("deepnmt: ")]
    assert code == 2 and len(refused) == 1 and "9.9.9" in refused[0] and "on n2; make them the same" in refused[0], said
