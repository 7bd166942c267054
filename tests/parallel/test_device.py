"""The device: what is chosen, set and said before the first tensor; and a GPU's branches of the model, on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from refusals import Refused, user_error
from run_files import losses, records
from small_models import VOCAB, batch, batch_of, r_drop_loss, shapes
from torch import Tensor
from torch.nn import functional as F

import deepnmt
from deepnmt import device, new
from deepnmt.cli import main
from deepnmt.model.dropout import Dropout, seed_dropout
from deepnmt.model.init import new_model
from deepnmt.model.loss import label_smoothed_loss
from deepnmt.parallel.deepspeed import supported_precisions
from deepnmt.parallel.engine import LocalEngine
from deepnmt.processes.process_group import count_gpus
from deepnmt.tokens import PAD

CPU = torch.device("cpu")


# -- a GPU's branches --------------------------------------------------------------------------------------------------


def computed(dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, nll and gradients of a small model, without dropout, on sentences with padding."""
    model = new_model(shapes("b2t"), VOCAB, VOCAB, 1, 0.1).to(dtype)
    sums = model(batch_of(*batch([5, 9, 3], [4, 6, 7])))
    sums.loss.backward()
    return sums.loss, sums.nll, {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_a_gpus_branches_compute_the_same(dtype: torch.dtype, near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, attention in 16 bits, the loss's logarithms, its chunks and its sums."""
    loss, nll, gradients = computed(dtype)
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    others = computed(dtype)
    assert torch.allclose(others[0], loss, rtol=near / 10) and torch.allclose(others[1], nll, rtol=near / 10)
    assert gradients.keys() == others[2].keys()
    ours, theirs = (torch.cat([found[name].flatten() for name in gradients]) for found in (gradients, others[2]))
    far = float((ours - theirs).norm() / ours.norm())
    assert far < near and (far > 0 or dtype == torch.float32), "near, but in 16 bits by another branch"


def test_a_gpus_loss_without_a_check_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the target's probability underflows, as well as elsewhere."""
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    hidden = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(30, 8, generator=torch.Generator().manual_seed(2))
    hidden[0] *= 200
    targets = torch.randint(4, 30, (4, 5), generator=torch.Generator().manual_seed(3))
    targets[1, 2:] = PAD
    found = label_smoothed_loss(hidden, weight, targets, 0.1, PAD)
    logits = (hidden.double() @ weight.double().t()).flatten(0, 1)
    for sums, smoothing in ((found.loss, 0.1), (found.nll, 0.0)):
        expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, ignore_index=PAD,
                                   reduction="sum")
        assert sums.double() == pytest.approx(float(expected), rel=1e-5)


def test_a_gpus_r_drop_without_positions_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of the target tokens alone."""
    draw = torch.Generator().manual_seed(4)
    weight, targets = torch.randn(30, 8, generator=draw), torch.randint(4, 30, (4, 5), generator=draw)
    targets[1, 2:] = PAD
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(device, "on_gpu", lambda tensor, on_gpu=on_gpu: on_gpu)
        hidden = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
        table = weight.clone().requires_grad_()
        sums = r_drop_loss(hidden, table, targets, 0.1, 5.0)
        sums.loss.backward()
        assert hidden.grad is not None and not hidden.grad[5, 2:].any()
        found.append([sums.loss, sums.nll, hidden.grad, table.grad])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_gpus_dropout_is_seeded_and_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda tensor: True)
    layer, x = Dropout(0.25).train(), torch.ones(200_000)
    seed_dropout(CPU, 1, 2, "a")
    first = layer(x)
    seed_dropout(CPU, 1, 2, "a")
    assert torch.equal(layer(x), first) and not torch.equal(layer(x), first)
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(first.mean()) == pytest.approx(1.0, abs=0.01)


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without a GPU, whose devices are in a folder; and what is set on a GPU, restored at the end."""
    for name in ("DS_ACCELERATOR", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "CROSS_RANK",
                 "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "unset at the end")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "unset at the end")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(device, "_DEVICES", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    products = torch.backends.cuda.matmul
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    torch.backends.cudnn.allow_tf32 = True
    yield tmp_path
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before


def test_a_machine_without_a_gpu_computes_on_the_cpu(machine: Path) -> None:
    assert device.choose() == "cpu" and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("wanted", "variables", "reason"), [
    ("auto", {}, "this machine has .*/nvidia0"),
    ("auto", {"SLURM_JOB_GPUS": "0,1"}, "SLURM_JOB_GPUS is 0,1"),
    ("auto", {"CUDA_VISIBLE_DEVICES": "GPU-5"}, "CUDA_VISIBLE_DEVICES is GPU-5"),
    ("auto", {"DS_ACCELERATOR": "cuda"}, "DS_ACCELERATOR is cuda"),
    ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "parallel.device is cuda"),
], ids=str)
def test_a_gpu_that_cannot_be_used_is_no_reason_to_compute_on_the_cpu(
        wanted: device.Wanted, variables: dict[str, str], reason: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "nvidia0").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with user_error(rf"^{reason}, but PyTorch cannot use a GPU: PyTorch \S+ was built without CUDA; mend that, or set "
                    "parallel.device=cpu"):
        device.choose(wanted)
    assert device.choose("cpu") == "cpu"


@pytest.mark.parametrize("gpu", [False, True])
def test_deepspeeds_launcher_numbers_processes_not_gpus(
        gpu: bool, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets CUDA_VISIBLE_DEVICES on every machine. Without it the variable alone is a sign of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with user_error("CUDA_VISIBLE_DEVICES is 0,1, but PyTorch cannot use a GPU"):
        device.choose()
    monkeypatch.setenv("CROSS_RANK", "0")
    if gpu:
        (machine / "nvidia0").touch()
        with user_error("this machine has .*/nvidia0, but PyTorch cannot use a GPU"):
            device.choose()
    else:
        assert device.choose() == "cpu"


def test_the_driver_says_why(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")

    (machine / "nvidia3").touch()
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.init", too_old)
    with user_error("nvidia3, but PyTorch cannot use a GPU: The NVIDIA driver on your system is too old .found version "
                    "12020.; mend"):
        device.choose()


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"])
def test_a_job_without_gpus_computes_on_the_cpu(variable: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nvidia0").touch()
    monkeypatch.setenv(variable, "" if variable.startswith("CUDA") else "-1")
    assert device.choose() == "cpu"


def test_a_contradiction_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with user_error("parallel.device is cuda, but DS_ACCELERATOR is cpu"):
        device.choose("cuda")


def test_a_gpu_is_prepared(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", told.append)
    assert device.choose("cpu") == "cpu" and torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.delenv("DS_ACCELERATOR")
    assert device.choose() == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    products = torch.backends.cuda.matmul
    assert not products.allow_bf16_reduced_precision_reduction and not products.allow_fp16_reduced_precision_reduction
    assert not torch.backends.cudnn.allow_tf32
    assert told == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    assert device.choose() == "cuda" and len(told) == 1, "the user's own settings stay"


def test_a_model_on_the_cpu_leaves_the_gpu_to_the_next(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", lambda _: None)
    assert [count_gpus(wanted) for wanted in ("cpu", "auto")] == [0, 2] and "DS_ACCELERATOR" not in os.environ
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert count_gpus() == 0 and os.environ["DS_ACCELERATOR"] == "cpu"


def test_emulated_bf16_is_refused_on_a_gpu_and_told_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Volta:
        device_name, is_bf16_supported, is_fp16_supported = lambda _: "cuda", lambda _: True, lambda _: True

    monkeypatch.setattr("deepnmt.parallel.deepspeed.get_accelerator", Volta)
    for emulated, expected in ((True, ["fp32", "fp16"]), (False, ["fp32", "bf16", "fp16"])):
        monkeypatch.setattr("torch.cuda.is_bf16_supported",
                            lambda including_emulation=True, emulated=emulated: including_emulation or not emulated)
        assert supported_precisions() == expected
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "emulates" in device.describe(CPU, 1, 1, "bf16")["precision"]
    assert device.describe(CPU, 1, 1, "fp32")["precision"] == "fp32"
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    assert device.describe(CPU, 2, 2, "bf16")["precision"] == "bf16"


@pytest.mark.parametrize(("vendor", "amx", "avx512", "faster"), [
    ("GenuineIntel", True, True, True), ("GenuineIntel", False, True, False), ("AuthenticAMD", False, True, True),
    ("AuthenticAMD", False, False, False),
])
def test_which_cpus_train_faster_in_bf16(
    vendor: str, amx: bool, avx512: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr("deepnmt.device._cpu", lambda: f"vendor_id\t: {vendor}\n")
    assert device.trains_faster_in_bf16() is faster
    assert new.machine("cpu")[1] == ("bf16" if faster else "fp32")


def test_no_more_threads_and_processes_than_the_machine_can_mean(
        prepared: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A million threads would use up a machine's process ids."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    recipe = prepared / "recipe.yaml"
    said = "is 33, but this machine has 2 cores; set it to 2, or to 0, which shares them out"
    for command in ("train", "profile"):
        assert f"parallel.threads {said}" in refused(command, recipe, f"run={tmp_path}", "parallel.threads=33")
    assert f"data.workers {said}" in refused("prepare", recipe, "data.workers=33")
    with user_error(f"parallel.threads {said}"):
        deepnmt.train(recipe, {"run": tmp_path, "parallel.threads": 33})
    assert not list(tmp_path.iterdir())
    device.require_cores("parallel.threads", 32)


def test_a_run_says_first_what_it_computes_on(
    prepared: Path, tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `train.deterministic` changes nothing on a CPU, where kernels give the same bits anyway."""
    seen: list[bool] = []
    step = LocalEngine.train_step
    monkeypatch.setattr(LocalEngine, "train_step", lambda *arguments: [
        seen.append(torch.are_deterministic_algorithms_enabled()), step(*arguments)][1])
    for name in ("true", "false"):
        assert main("train", [str(prepared / "recipe.yaml"), f"run={tmp_path / name}", "train.updates=2",
                              "model.encoder.block=b2t", "model.decoder.block=b2t", "train.valid_bleu=false",
                              f"train.deterministic={name}"]) == 0
        assert not torch.are_deterministic_algorithms_enabled()
    assert seen == [True, True, False, False]
    first = records(tmp_path / "true", "event")[0]
    assert first["message"] == "; ".join(first[part] for part in
                                         ("device", "memory", "driver", "torch", "backend", "precision"))
    assert first["device"].startswith("cpu, ") and first["memory"].endswith("GiB") and first["backend"] == "one process"
    assert losses(tmp_path / "true") == losses(tmp_path / "false") and len(losses(tmp_path / "true")) == 2
