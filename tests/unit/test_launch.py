"""Where a process runs."""

from __future__ import annotations

import pytest
import torch

from deepnmt.errors import UserError
from deepnmt.parallel.launch import processes


def test_a_process_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "9"), ("LOCAL_RANK", "8"), ("LOCAL_WORLD_SIZE", "9")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="9 processes were started on this machine, but 1 GPU can be seen"):
        with processes():
            pass


def test_ds_accelerator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with processes(1) as ranks:
        assert ranks.device == torch.device("cpu")
