"""Starting the processes of a run: devices, ports, errors and ends."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from refusals import Refused, user_error
from warm import Warm, kill, waiting

import deepnmt
from deepnmt.cli import COMMANDS, main
from deepnmt.errors import UserError
from deepnmt.processes import handshake, process_group
from deepnmt.processes.process_group import free_port, processes


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of nine processes where there is one GPU, and no other process."""
    monkeypatch.setattr(process_group, "_TELLING", timedelta(0))
    monkeypatch.setattr("deepnmt.device._prepare", lambda: None)  # it sets what later tests in this process would find
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "9"), ("LOCAL_RANK", "8"), ("LOCAL_WORLD_SIZE", "9")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_process_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)
    with user_error("9 processes were started on .*, but 1 GPU can be seen"):
        with processes():
            pass


def test_ds_accelerator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with processes(1) as ranks:
        assert ranks.device == torch.device("cpu")


@pytest.mark.parametrize(("rank", "world"), [("1", None), ("2", "2"), ("first", None)])
def test_a_rank_that_no_launcher_has_set(rank: str, world: str | None, prepared: Path,
                                         monkeypatch: pytest.MonkeyPatch, refused: Refused, tmp_path: Path) -> None:
    """Rank 1 of one process trained without a word, and failed at its first checkpoint."""
    monkeypatch.setenv("RANK", rank)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as if there were other machines, which want to know
    said = refused("train", str(prepared / "recipe.yaml"), f"run={tmp_path / 'run'}")
    assert f"RANK is {rank}, but WORLD_SIZE is {world or 'missing'}" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "first"), ("LOCAL_WORLD_SIZE", "-1"),
                                             ("MASTER_PORT", "99999"), ("SLURM_STEP_NUM_TASKS", ""),
                                             ("SLURM_JOB_ID", "job")])
def test_a_variable_that_is_no_number(name: str, value: str, prepared: Path, monkeypatch: pytest.MonkeyPatch,
                                      refused: Refused, tmp_path: Path) -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for other, given in (slurm if "SLURM" in name else {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(other, given)
    monkeypatch.setenv(name, value)
    said = refused("train", str(prepared / "recipe.yaml"), f"run={tmp_path / 'run'}",
                   "parallel.ds_config=ds_configs/zero1.json")
    assert f"the environment variable {name} is '{value}', must be a whole number" in said


def test_a_local_rank_alone_silences_nothing(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "there is no recipe none.yaml" in refused("train", "none.yaml")


def rank_that_waits(voice: int) -> None:
    """Runs in a forked process: starts as one rank of several, as far as possible without the others, then waits."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training run in the parent process may have set a handler
    with suppress(UserError), processes():  # it has no GPU
        pass
    os.write(voice, b"there")
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_rank_ends_with_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is killed with SIGKILL; its waiting rank ends soon after."""
    without_a_gpu(monkeypatch)
    answers, voice = os.pipe()
    launcher = os.fork()
    if not launcher:
        try:
            if not os.fork():
                rank_that_waits(voice)
            time.sleep(60)
        finally:
            os._exit(0)
    os.close(voice)
    assert os.read(answers, 5) == b"there"
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert select.select([answers], [], [], 20)[0] and os.read(answers, 5) == b"", "the rank is still there"
    os.close(answers)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_an_error_on_all_processes_is_reported_once(
        variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "1")
    outputs = []
    for number in ("0", "1"):
        monkeypatch.setenv(variable, number)
        assert main("train", ["none.yaml"]) == 2
        outputs.append(capsys.readouterr().err)
    assert outputs[0].startswith("deepnmt: there is no recipe none.yaml") and outputs[1] == ""
    assert main("train", ["none.yaml", "--dryrun"]) == 2 and capsys.readouterr().err == ""
    monkeypatch.delenv(variable)
    assert main("train", ["none.yaml", "--dryrun"]) == 2
    sentence = "deepnmt: unknown option --dryrun; did you mean --dry-run? see deepnmt train --help\n"
    assert capsys.readouterr().err == sentence


def on_gpus(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], visible: list[str]
            ) -> tuple[list[int], list[str]]:
    """Forks a process for each of `visible`, the GPUs it sees, as `srun` would; exit codes and lines of output."""
    world = str(len(visible))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    step = {"SLURM_STEP_NUM_TASKS": world, "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": world}
    for name, value in {"DS_ACCELERATOR": "cuda", "MASTER_PORT": str(free_port()), **step}.items():
        monkeypatch.setenv(name, value)

    def start(_: list[str]) -> int:
        with processes() as ranks:
            os.write(1, f"{ranks.rank} {ranks.device} {os.environ['LOCAL_RANK']}\n".encode())  # in one piece
            ranks.store.add("done", 1)
            until = time.monotonic() + 100
            while ranks.first and ranks.store.add("done", 0) < len(visible):  # the store ends with this process
                assert time.monotonic() < until
        return 0

    monkeypatch.setitem(COMMANDS, "train", start)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    children = []
    for rank, names in enumerate(visible):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_LOCALID", str(rank))
        uuids = names.split(",")
        monkeypatch.setattr(torch.cuda, "device_count", lambda uuids=uuids: len(uuids))
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda device, uuids=uuids: SimpleNamespace(name="H100", uuid=uuids[device.index]))
        if not (child := os.fork()):
            try:
                code = main("train", [])
                sys.stdout.flush()
                os._exit(code)
            finally:
                os._exit(99)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = capfd.readouterr()  # a fork keeps torch's level of logging, where a start would set it
    told = [line for line in said.err.splitlines() if line.startswith("deepnmt: ")]
    return codes, sorted(said.out.splitlines() + told)


def test_every_task_may_see_its_own_gpu_alone(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As with --gpus-per-task=1 and --gpu-bind=single:1: the third task's only GPU is its device 0."""
    found = on_gpus(monkeypatch, capfd, ["a", "b", "c"])
    assert found == ([0, 0, 0], ["0 cuda:0 0", "1 cuda:0 0", "2 cuda:0 0"])


def test_every_task_may_see_all_gpus(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = on_gpus(monkeypatch, capfd, ["a,b,c"] * 3)
    assert found == ([0, 0, 0], ["0 cuda:0 0", "1 cuda:1 1", "2 cuda:2 2"])


def test_two_tasks_with_the_same_gpu_are_refused(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    codes, (said,) = on_gpus(monkeypatch, capfd, ["a", "b", "a"])
    assert codes == [2, 2, 2] and said.startswith("deepnmt: ranks 0, 2 on ") and "got the same GPU" in said


def test_a_process_without_a_gpu_ends_all_with_one_sentence(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    codes, (said,) = on_gpus(monkeypatch, capfd, ["a,b", "a,b", "a,b"])
    assert codes == [2, 2, 2]
    assert said.startswith("deepnmt: 3 processes were started on") and "but 2 GPUs can be seen" in said


@pytest.mark.parametrize("faulty", [0, 2])
def test_a_mistake_on_one_machine_ends_all(
        faulty: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It is found before the processes meet: a recipe that is missing there. The others come to the meeting later."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3",
                        "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)

    def start(words: list[str]) -> int:
        if words:
            raise UserError("there is no recipe here")
        time.sleep(0.5)
        with processes():
            return 0

    monkeypatch.setitem(COMMANDS, "train", start)
    children = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        if not (child := os.fork()):
            try:
                os._exit(main("train", ["none.yaml"] if rank == faulty else []))
            finally:
                os._exit(99)
        children.append(child)
    begun = time.monotonic()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [2, 2, 2]
    assert time.monotonic() - begun < 60
    assert "deepnmt: there is no recipe here" in capfd.readouterr().err


def test_deepspeeds_warnings_are_hidden_and_its_errors_shown() -> None:
    """Although DeepSpeed sets its logger's level on import, which is after `quiet_libraries`."""
    script = ("from deepnmt.processes.host import quiet_libraries\nquiet_libraries()\n"
              "import deepspeed.utils.logging as found\n"
              "found.logger.warning('of no use')\nfound.logger.error('of use')\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "of use" in done.stdout + done.stderr and "of no use" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--master-port=0", "--standalone"])
def test_processes_meet_under_torchrun(how: str, tmp_path: Path) -> None:
    """The first attempt fails after all have met; torchrun restarts it, and the new attempt sees none of the old keys.
    """
    script = tmp_path / "script.py"
    script.write_text("""
import os
from deepnmt.processes.process_group import processes
with processes(1) as ranks:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    open(f"met-{attempt}-{ranks.rank}", "w").write(str(ranks.sum([ranks.rank + 1.0])))
    ranks.barrier()
    assert attempt == "1"
""")
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1",
                           how.replace("=0", f"={free_port()}"), script], capture_output=True, text=True, timeout=600,
                          check=False, cwd=tmp_path, env={**ours, "PYTHONPATH": str(Path(deepnmt.__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    met = {file.name: file.read_text() for file in tmp_path.glob("met-*")}
    assert met == {f"met-{attempt}-{rank}": "[3.0]" for attempt in (0, 1) for rank in (0, 1)}


def test_a_run_listens_where_it_was_told_and_nowhere_else(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    """The processes of a machine meet at its loopback; so does what they open while they train."""
    pids = warm.train(2, prepared / "recipe.yaml", f"run={tmp_path}", "parallel.ds_config=ds_configs/zero1.json",
                      "train.updates=100000", "train.validate_every=100000", "train.save_every=2")
    for _ in waiting(120, "a checkpoint, whose threads meet too"):
        if "checkpoint of update 2" in warm.said():
            break
    found = [connection.laddr.ip for pid in pids for connection in psutil.Process(pid).net_connections("tcp")
             if connection.status == psutil.CONN_LISTEN]
    for pid in pids:
        kill(pid)
    warm.wait(60)
    assert len(found) > len(pids) and set(found) == {"127.0.0.1"}, found


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_gloo_knows_its_network_beside_nccl(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are gathered by gloo where a GPU trains, too."""
    opened: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: opened.append(backend))
    monkeypatch.setattr(process_group, "interface_to", lambda peer: "eth7")
    monkeypatch.setattr(os, "environ", {})
    process_group._open_group(dist.HashStore(), 0, 2, torch.device(device), 0, "10.0.0.1")
    assert opened == [backend] and os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_store_listens_at_the_given_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = process_group.open_store(0, 2, timedelta(seconds=5))
    assert [found.laddr.ip for found in psutil.Process().net_connections("tcp")
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port] == ["127.0.0.3"]
    with user_error(f"port {port}, where the processes meet, cannot be opened: Address already in use"):
        process_group.open_store(0, 2, timedelta(seconds=5))
    del store


def test_waiting_for_others_is_told_and_ends(
        monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 waits for those that do not come, and another rank for a rank 0 that does not."""
    notice, wait, port = timedelta(seconds=0.2), timedelta(seconds=1.2), free_port()
    monkeypatch.setattr(process_group, "NOTICE", notice)
    monkeypatch.setattr(handshake, "NOTICE", notice)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with user_error(f"127.0.0.1:{port} .* where the processes meet, does not answer on {socket.gethostname()}: "):
        process_group.open_store(1, 3, wait)
    said = capfd.readouterr().err
    assert re.search("does not answer on .*; waiting up to [01] s more; if process 0 has ended, stop all", said)
    assert "frame #" not in said
    store = process_group.open_store(0, 3, wait)
    other = process_group.open_store(2, 3, wait)
    other.set("the machines/2", '{"node": "n2"}')
    with user_error(r"1 of 3 processes did not come within 1.2 s: rank 1; there are 1 on .*, 1 on n2; see what"):
        handshake.handshake(store, 0, 3, torch.device("cpu"), False, wait)
    said = capfd.readouterr().err
    assert "1 of 3 processes did not come within 0.2 s: rank 1; there are 1 on" in said
    assert re.search("waiting up to [01] s more; if one of them has ended, stop all and start them again", said)


@pytest.mark.parametrize(("address", "means", "listens"), [
    ("localhost", "::1", "127.0.0.1"), ("::1", "::1", "::1"), ("node1", "127.0.1.1", None),
    ("node1", "203.0.113.77", None)])
def test_where_an_address_is_not_the_whole_truth(
        address: str, means: str, listens: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian takes a machine's own name for its loopback, and a container has not the address of its host."""
    if listens == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6 on its loopback")
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo",
                        lambda host, *rest, **named: real(means if host == address else host, *rest, **named))
    listener = process_group.listen_at(address, 0)
    assert (listener and listener.getsockname()[0]) == listens
    if listener:
        listener.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory in use")
def test_freed_memory_is_kept_until_given_back() -> None:
    """In a separate process, since settings of malloc last until the end."""
    script = """
import torch
from deepnmt.processes import host
def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1000
def use():
    blocks = [torch.ones(2_000_000) for _ in range(25)]
    return used()
host.quiet_libraries()
host.keep_memory()
host.give_memory_back()
before = used()
found = [use(), used()]
host.keep_memory()
found += [use(), used()]
host.give_memory_back()
print(*(size - before for size in [*found, used()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "DS_ACCELERATOR": "cpu"})
    full, freed, again, kept, back = (float(word) for word in done.stdout.split())
    assert min(full, again, kept) > 190, "megabytes"
    assert max(freed, back) < 20
