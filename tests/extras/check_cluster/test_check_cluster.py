"""`deepnmt check-cluster` on two processes of this machine; tests/nodes has two machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import Refused, user_error
from warm import Warm

from deepnmt.cli import main
from deepnmt.extras.check_cluster.check import _all_reduce_seconds, judge
from deepnmt.processes.handshake import core_shares, decide_on_start, differing
from deepnmt.processes.ranks import Ranks

HEALTHY: dict[str, Any] = {
    "device": "cuda", "deepnmt": "0.3.0 (12345678)", "torch": "2.13.0", "deepspeed": "0.19.8", "python": "3.11.7",
    "gpu": "H100", "driver": "580.1", "gpus": 2, "clock": 0.01, "run": "shared", "data": "abcd1234", "not_seen": [],
    "seconds": 0.1, "link": None, "address": "10.0.0.1"}


def told(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """What two processes on each of four machines tell; `changes` by the machine's name."""
    return [{**HEALTHY, "node": node, "machine": node, "cores": [2 * local, 2 * local + 1], "gpu_id": f"{node}{local}",
             "link": None if node == "n1" or local else 1e10, **changes.get(node, {})}
            for node in ("n1", "n2", "n3", "n4") for local in (0, 1)]


@pytest.mark.parametrize(("change", "phrase"), [
    ({"deepnmt": "0.3.0 (87654321)"}, "deepnmt's version and code is 0.3.0 (12345678) on n1, n2, n4, but 0.3.0 "
     "(87654321) on n3"),
    ({"torch": "2.11.0"}, "PyTorch's version is 2.13.0 on n1, n2, n4, but 2.11.0 on n3"),
    ({"deepspeed": "0.19.3"}, "DeepSpeed's version is 0.19.8 on n1, n2, n4, but 0.19.3 on n3"),
    ({"driver": ""}, "the GPU's driver is 580.1 on n1, n2, n4, but none on n3"),
    ({"gpu": "A100"}, "the GPU is H100 on n1, n2, n4, but A100 on n3"),
    ({"clock": -7.25}, "the clock of n3 is -7.2 s off that of n1"),
    ({"data": "ffff0000"}, "the data's fingerprint is abcd1234 on n1, n2, n4, but ffff0000 on n3"),
    ({"run": "not writable (Read-only file system)"}, "the run folder on n3: not writable (Read-only file system)"),
    ({"run": "not the first machine's folder"}, "the run folder on n3: not the first machine's folder"),
    ({"link": 1e9}, "n3 gets 1.00 GB/s from n1, the median is 10.00"),
])
def test_each_difference_is_named_by_node(change: dict[str, Any], phrase: str) -> None:
    everything = told(n3=change)
    (found,) = judge(everything, 64)["faults"]
    assert found.startswith(phrase), found
    assert not judge(told(), 64)["faults"]
    refused = decide_on_start(everything)["refused"]
    assert bool(refused) == (change.keys() <= {"deepnmt", "torch", "deepspeed"}) and (not refused or phrase in refused)


def test_what_the_first_machine_does_not_see() -> None:
    everything = [{**one, "not_seen": [4, 5]} for one in told()]
    assert judge(everything, 64)["faults"] == ["n1 does not see what n3 wrote into the run folder"]
    text = judge(told(), 64)["text"]
    assert "2 of 2 H100" in text and "PyTorch 2.13.0" in text and "1.17 GB/s in and out of each" in text


def test_phrases_of_differences() -> None:
    nodes = ["n1", "n1", "n2", "n2"]
    assert differing("x", ["1", "1", "1", "1"], nodes) == ""
    assert differing("x", ["1", "1", "2", "2"], nodes) == "x is 1 on n1, but 2 on n2"
    assert differing("x", ["1", "1", "2", "3"], nodes) == "x is 1 on n1, but 2 on rank 2 of n2, but 3 on rank 3 of n2"
    many = [f"n{number}" for number in range(64)]
    assert differing("x", ["1"] * 63 + ["2"], many) == "x is 1 on the 63 others, but 2 on n63"


def test_each_process_takes_its_part_of_the_cores() -> None:
    """As srun binds them, as deepspeed leaves them, on two machines, and more processes than cores."""
    def shares(*processes: tuple[str, list[int]]) -> list[int]:
        return core_shares([{"machine": machine, "cores": cores} for machine, cores in processes])

    assert shares(("a", [0, 1, 2, 3]), ("a", [4, 5, 6, 7])) == [4, 4], "its own cores are not divided again"
    assert shares(("a", list(range(8))), ("a", list(range(8)))) == [4, 4]
    assert shares(("a", list(range(8))), ("b", list(range(8)))) == [8, 8]
    assert shares(*[("a", [0, 1])] * 3) == [1, 1, 1]
    assert shares(("a", [0, 1, 2, 3]), ("a", [2, 3])) == [3, 1]


def check(recipe: str, *settings: str) -> int:
    """Runs on each rank."""
    return main("check-cluster", [recipe, *settings, "--mb", "1"])


def test_on_this_machine(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    warm.start(2, "test_check_cluster:check", str(prepared / "recipe.yaml"), f"run={tmp_path / 'run'}")
    assert warm.wait() == [0, 0], warm.said()
    said = warm.said()
    assert "shared" in said and "all-reduce of 1 MiB over 2 processes" in said and "the machines fit together" in said
    assert list((tmp_path / "run").iterdir()) == []


def test_a_task_that_prepares_nothing(tmp_path: Path, warm: Warm) -> None:
    texts = [f"data.{part}={tmp_path / 'text.tsv'}" for part in ("train", "valid")]
    warm.start(2, "test_check_cluster:check", "bert/mrpc_12l", f"run={tmp_path / 'run'}", *texts,
               f"train.init_from={tmp_path / 'bert'}")
    assert warm.wait() == [0, 0], warm.said()
    assert "the machines fit together" in warm.said()


def test_it_needs_several_processes(prepared: Path, refused: Refused) -> None:
    assert "there is nothing to compare; start it as you start" in refused("check-cluster", prepared / "recipe.yaml")
    with user_error("there is not enough memory .*; give a smaller --mb"):
        _all_reduce_seconds(Ranks.alone(), 2**60)
