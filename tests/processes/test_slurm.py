"""What srun says in every form of a job step. The first five were read from Slurm 22.05, the others from its manual."""

from __future__ import annotations

import os

import pytest

from deepnmt.processes.process_group import rank_from_environment
from deepnmt.processes.slurm import first_node, meeting_point, place, tasks_per_node

STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "41", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2"}
# the form; what the task gets beside STEP; rank, world, local rank, local world
FORMS = {
    "--ntasks=2": ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
                    "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}, (1, 2, 1, 2)),
    "-N2 --ntasks=3": ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
                        "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1"}, (2, 3, 0, 1)),
    "--gpus-per-task=1": ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
                           "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "1"},
                          (3, 4, 1, 2)),
    "--gpu-bind=single:1": ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "1",
                             "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2",
                             "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "1"}, (1, 4, 1, 2)),
    "a step of two tasks in a job of sixteen": (
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (0, 2, 0, 1)),
    "--ntasks=32 on four nodes": ({"SLURM_STEP_NUM_TASKS": "32", "SLURM_PROCID": "19", "SLURM_LOCALID": "3",
                                   "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, (19, 32, 3, 8)),
    "an uneven end": ({"SLURM_STEP_NUM_TASKS": "27", "SLURM_PROCID": "26", "SLURM_LOCALID": "2", "SLURM_NODEID": "3",
                       "SLURM_STEP_TASKS_PER_NODE": "8(x3),3"}, (26, 27, 2, 3)),
    "an old Slurm": ({"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"},
                     (9, 16, 1, 8)),
}
ALONE = {
    "no Slurm": {},
    "one task": {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    "the batch script of eight tasks": {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    "an interactive step in a job of eight tasks": {
        "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_step(form: str) -> None:
    env, expected = FORMS[form]
    assert place({**STEP, **env}) == expected


@pytest.mark.parametrize("form", ALONE)
def test_what_is_no_step_of_several_tasks(form: str) -> None:
    assert place(ALONE[form]) is None


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x4)") == [8] * 4
    assert tasks_per_node("2,1") == [2, 1]
    assert tasks_per_node("4(x2),3,1(x2)") == [4, 4, 3, 1, 1]


@pytest.mark.parametrize(("nodes", "first"), [
    ("n1", "n1"), ("n1,m2", "n1"), ("n[07-09,12],m1", "n07"), ("gpu-[3,5]", "gpu-3"), ("r[1-2]n[1-4]", "r1n1"),
    ("a100-[001-128]-ib.cluster", "a100-001-ib.cluster")])
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_where_tasks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the step's first node, and not where another job's tasks meet; what the user has set stays."""
    found = meeting_point(STEP)
    assert found["MASTER_ADDR"] == "n1" and 10_000 <= int(found["MASTER_PORT"]) < 30_000
    assert meeting_point({**STEP, "SLURM_JOB_ID": "42"})["MASTER_PORT"] != found["MASTER_PORT"]
    assert meeting_point({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != found["MASTER_PORT"]
    assert meeting_point({**STEP, "SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    for name, value in {**STEP, **FORMS["--ntasks=2"][0], "MASTER_ADDR": "mine"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert rank_from_environment() == (1, 2, 1, 2)


    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("mine", found["MASTER_PORT"])
