"""The figures of a dry run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Refused
from tiny_engines import options
from torch.autograd.graph import saved_tensors_hooks

from deepnmt.batch import TRANSLATION, Batch
from deepnmt.checkpoint.saving import in_shards
from deepnmt.cli import main
from deepnmt.config import Model, load_recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.data.batching import plan_epoch
from deepnmt.data.prepared import PreparedData
from deepnmt.model.init import new_model
from deepnmt.parallel.build import partition_of
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks
from deepnmt.training.dry_run import check_memory, count_parameters, describe, memory_estimate


@pytest.mark.parametrize("tied", ["all", "none"])
@pytest.mark.parametrize(("block", "settings"), [
    *((block, {"init": init}) for block in BLOCKS for init in ("auto", "published")),
    *(("dlcl", {"init": init, "history_window": window, "history_softmax": init == "published"})
      for init in ("auto", "published") for window in (1, 2, 3, 9))])
def test_parameters_are_counted_without_building_all_layers(block: str, settings: dict[str, Any], tied: str) -> None:
    model = Model.model_validate({"width": 8, "heads": 2, "ffn": 12, "max_length": 4, "tied": tied,
                                  "encoder": {"block": block, "layers": 5, **settings},
                                  "decoder": {"block": block, "layers": 4, **settings}})
    target = 20 if tied == "all" else 30
    built = new_model(model, 20, target, 1)
    assert count_parameters(model, 20, target) == sum(p.numel() for p in built.parameters())


def test_a_pipelines_stages_are_those_of_training(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process prints the figures for as many processes as stages."""
    monkeypatch.delenv("RANK", raising=False)
    recipe = load_recipe(prepared / "recipe.yaml", [
        "parallel.ds_config=ds_configs/zero1.json", "parallel.pipeline_stages=3", "batch.accumulation=4"
    ])
    data = PreparedData.open(recipe.data.folder)
    train, size = data.split("train"), data.vocabs()[0].size
    ratio = float(train.src_lengths.mean() / train.trg_lengths.mean())  # the ratio that training balances for
    table, other = (partition_of(recipe, size, size, r).table(4) for r in (ratio, 1.0))
    assert table != other
    output = describe(recipe)
    assert "pipeline of 3 stages on 3 process(es)" in output
    assert output.endswith("\n".join(f"# {line}" for line in table.splitlines()))
    assert "expected bubble with 4 micro-batches" in output
    held = [int(row.split()[-3].replace(",", "")) for row in table.splitlines()[1:-1]]
    estimate = memory_estimate(recipe, layout_of(recipe, 3), 0, size, "cpu", partition_of(recipe, size, size, ratio))
    assert len(held) == 3 and estimate["weights"] == 4 * max(held)


def figures(text: str) -> dict[str, str]:
    """The lines below the recipe, by name."""
    return dict(re.findall(r"^# (.+?)  +(.+)$", text, flags=re.MULTILINE))


def test_the_figures_are_those_of_the_recipe(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a GPU takes larger chunks of logits
    recipe = load_recipe(prepared / "recipe.yaml", ["batch.accumulation=3", "batch.tokens=16384"])
    data = PreparedData.open(recipe.data.folder)
    train, vocab = data.split("train"), data.vocabs()[0].size
    found = figures(describe(recipe))
    assert found["model"] == "2L-2L, admin / admin, width 16"
    assert found["tokens per update"].startswith("49,152 at most, padding included (1 process(es) x 3 micro-batch(es)")
    plan = plan_epoch(train.src_lengths, train.trg_lengths, 16384, recipe.seed, 0)
    assert found["updates per epoch"] == f"{len(plan) / 3:.1f} (padding {100 * plan.waste:.1f} %)"
    parameters = sum(p.numel() for p in new_model(recipe.model, vocab, vocab, 1).parameters())
    assert found["parameters"] == f"{parameters:,}" and found["layout"] == "plain PyTorch, fp32"
    assert found["checkpoints"] == (f"in one file, {12 * parameters / 1e6:,.0f} MB with the moments; the first process "
                                    "holds all of it while it writes")
    # weights, gradients and two moments of 4 bytes; 2 x 27 tensors of width 16 and 4 of FFN 32 a token, 4 at the ends
    held = {"weights": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters,
            "activations": 16384 * 4 * (16 * (2 * 27 + 4) + 4 * 32), "loss": 4 * (2**22 + 16 * vocab),
            "checkpoint copy": 12 * parameters}
    assert memory_estimate(recipe, layout_of(recipe, 1), parameters, vocab, "cpu") == held
    parts = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in held.items())
    assert found["memory per process"] == f"about {sum(held.values()) / 2**20:,.0f} MiB + libraries ({parts})"


def test_factors_of_settings_that_carry_over_are_listed(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["model.encoder.block=pre_ln", "model.decoder.block=pre_ln"]
    assert "factors, by parameter" not in describe(load_recipe(prepared / "recipe.yaml", words))
    found = describe(load_recipe(prepared / "recipe.yaml", [*words, "model.tuned_at={encoder_layers: 1}"]))
    assert "#  initial     rate      eps    decay  factors, by parameter" in found
    assert ("#      0.5      0.5        1        2  encoder.layers.*.self_attn.out.weight, "
            "encoder.layers.*.self_attn.out.bias, encoder.layers.*.ffn.fc2.weight, encoder.layers.*.ffn.fc2.bias"
            in found)


def test_the_micro_batch_is_fitted_to_a_named_card(
        prepared: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    """As a command, of a recipe for eight GPUs; what it prints fits, and 256 tokens more do not."""
    deep = ["parallel.ds_config=ds_configs/zero1.json", "parallel.precision=bf16", "model.width=512", "model.heads=8",
            "model.ffn=2048", "model.encoder.layers=60", "model.decoder.layers=12", "data.folder=none"]
    assert main("train", [str(prepared / "recipe.yaml"), "--dry-run", "--card", "a100-40", *deep]) == 0
    found = figures(capsys.readouterr().out)
    largest = int(re.match(r"batch\.tokens=(\d+) on a100-40", found["largest micro-batch"])[1])  # type: ignore[index]
    assert "batch.tokens (256) is below 16,384" in found["small micro-batch"] and "MiB" in found["disk"]
    for tokens, fits in ((largest, True), (largest + 256, False)):
        options = [*deep, f"batch.tokens={tokens}"]
        rows = figures(describe(load_recipe(prepared / "recipe.yaml", options), "a100-40"))
        assert ("too much memory" not in rows) == fits and "small micro-batch" not in rows
    none = describe(load_recipe(prepared / "recipe.yaml", [*deep, "model.width=8192"]), "t4-16")
    assert "none fits on t4-16" in none
    assert "must be one of t4-16" in refused("train", prepared / "recipe.yaml", "--dry-run", "--card", "h100")
    assert "no effect without --dry-run" in refused("train", prepared / "recipe.yaml", "--card", "h100-80")
    layout = tmp_path / "misspelt.json"
    shipped = Path(__file__).parents[2] / "ds_configs" / "zero1.json"
    layout.write_text(shipped.read_text().replace("overlap_comm", "overlapp_comm"))
    assert "zero_optimization.overlapp_comm: Extra" in refused(
        "train", prepared / "recipe.yaml", f"parallel.ds_config={layout}", "--dry-run")


def test_the_form_of_checkpoints_is_named(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    options = ["parallel.ds_config=ds_configs/zero1.json", "train.checkpoint_form=shards"]
    found = figures(describe(load_recipe(prepared / "recipe.yaml", options)))
    size = 3 * int(found["parameters"].replace(",", "")) / 1e6
    assert found["checkpoints"] == f"in 4 shard(s) of {size:,.0f} MB; each process holds a copy of its own"


@pytest.mark.parametrize(("form", "parameters", "processes", "expected"), [
    ("auto", 83_333_333, 2, False), ("auto", 83_333_334, 2, True), ("auto", 10**10, 1, False),
    ("one_file", 10**10, 64, False), ("shards", 1, 1, True),
])
def test_the_form_goes_by_size_and_processes(
    form: str, parameters: int, processes: int, expected: bool, prepared: Path
) -> None:
    """Adam keeps 12 bytes a parameter; 1 GB of them and several processes make shards."""
    recipe = load_recipe(prepared / "recipe.yaml", [f"train.checkpoint_form={form}"])
    assert in_shards(recipe, parameters, processes) == expected


@pytest.mark.parametrize(("layout", "weights", "gradients", "optimizer"), [
    ("zero0_fp32", 4, 4, 8), ("zero0_bf16", 2, 4, 12), ("zero1_fp32", 4, 4, 3), ("zero1_bf16", 2, 4, 3),
    ("zero2_bf16", 2, 1, 3), ("zero3_bf16", 0.5, 1, 3),
])
def test_what_a_layout_shares(layout: str, weights: float, gradients: float, optimizer: float, prepared: Path) -> None:
    """Bytes a parameter on four processes, as the table of docs/guide/which_layout.md has them."""
    recipe = load_recipe(prepared / "recipe.yaml", options(layout))
    found = memory_estimate(recipe, layout_of(recipe, 4), 1000, 300, "cpu")
    assert [found[part] / 1000 for part in ("weights", "gradients", "optimizer")] == [weights, gradients, optimizer]


@pytest.mark.parametrize(("layout", "form", "stages", "bytes_each"), [
    ("local", "auto", 0, 12), ("zero1_fp32", "shards", 0, 3), ("zero0_bf16", "shards", 0, 3),
    ("zero3_bf16", "one_file", 0, 3 + 12), ("zero1_fp32", "auto", 0, 3 + 12), ("zero1_fp32", "shards", 4, 12 / 2),
])
def test_the_copy_of_a_checkpoint(
    layout: str, form: str, stages: int, bytes_each: float, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes a parameter, weights and Adam's moments in fp32: of what each of four processes owns, and of the whole
    where the first puts them together. The fullest of the stages has half of them here, and one process."""
    recipe = load_recipe(prepared / "recipe.yaml", [*options(layout, stages), f"train.checkpoint_form={form}"])
    partition = partition_of(recipe, 300, 300, 1.0) if stages else None
    if partition is not None:
        monkeypatch.setattr(type(partition), "parameters", lambda self, stage: 500)
    found = memory_estimate(recipe, layout_of(recipe, 1 if layout == "local" else 4), 1000, 300, "cpu", partition)
    assert found["checkpoint copy"] == 1000 * bytes_each
    found = memory_estimate(recipe, layout_of(recipe, 1 if layout == "local" else 4), 1000, 300, "cuda", partition)
    assert "checkpoint copy" not in found, "it is in the machine's memory, not in the GPU's"


@pytest.mark.parametrize(("form", "gigabytes"), [("shards", 1.9), ("one_file", 1.9 + 120)])
def test_the_copy_of_10_billion_parameters(form: str, gigabytes: float, prepared: Path) -> None:
    """On 64 processes, the table of studies/results/reliability.md: each copies its share, or the first all."""
    recipe = load_recipe(prepared / "recipe.yaml", [*options("zero1_fp32"), f"train.checkpoint_form={form}"])
    found = memory_estimate(recipe, layout_of(recipe, 64), 10**10, 300, "cpu")
    assert found["checkpoint copy"] / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", [{}, {"ffn": 256}, {"activation": "gelu"}, {"activation_dropout": 0.1}], ids=str)
def test_activations_are_what_autograd_keeps(change: dict[str, object], precision: str, prepared: Path) -> None:
    overrides = [f"model.{name}={value}" for name, value in {"width": 64, "ffn": 128, **change}.items()]
    recipe = load_recipe(prepared / "recipe.yaml", [*overrides, *options(f"zero1_{precision}")])
    model = new_model(recipe.model, 64, 64, 1, 0.1).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    kept = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)  # so that its memory is not reused
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    src, trg = torch.randint(4, 64, (2, 16, 16))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(Batch(dict(zip(TRANSLATION, (src, torch.full((16,), 16), trg, trg))), key=0, tokens=256))
    estimate = memory_estimate(recipe, layout_of(recipe, 1), 0, 64, "cpu")
    assert estimate["activations"] == pytest.approx(sum(kept.values()), rel=0.05)


@pytest.mark.parametrize(("setting", "accelerator"), [("auto", "cpu"), ("cpu", "")])
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu(
    setting: str, accelerator: str, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    found = figures(describe(load_recipe(prepared / "recipe.yaml", [f"parallel.device={setting}"])))
    assert "checkpoint copy" in found["memory per process"] and "small micro-batch" not in found


def test_what_cannot_fit_is_refused(
    prepared: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is built: in seconds, and without the memory."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    recipe = prepared / "recipe.yaml"
    for change, part, way in (
        (["model.encoder.layers=500", "model.width=16384"], "checkpoint copy", "model.width or its layers"),
        (["batch.tokens=100000000"], "activations", "batch.tokens, or set parallel.recompute_layers"),
        (["model.width=65536", "model.max_length=131072", "model.encoder.layers=1", "model.decoder.layers=1"],
         "checkpoint copy", "model.width or its layers"),
    ):
        said = refused("train", recipe, f"run={tmp_path / 'run'}", *change)
        assert re.search(rf"needs about [\d,.]+ GiB of memory per process, [\d,.]+ of it for the {part}, but a process "
                         rf"can have [\d,.]+ GiB; lower {way}", said), said
        assert "too much memory" in figures(describe(load_recipe(recipe, change)))
        assert not (tmp_path / "run" / "checkpoints").exists()
    small = load_recipe(recipe)
    sizes = (300, 300)
    needed = memory_estimate(small, layout_of(small, 1), count_parameters(small.model, *sizes), 300, "cpu")
    most = sum(needed.values()) + 8 * 64 * 16 - 1  # and the positions, twice
    monkeypatch.setattr("deepnmt.training.dry_run.memory", lambda *_: most)
    capsys.readouterr()
    check_memory(small, layout_of(small, 1), sizes, 1.0, Ranks.alone())
    assert "lower batch.tokens" in capsys.readouterr().err, "a warning, since the estimate may be wrong"
    monkeypatch.setattr("deepnmt.training.dry_run.memory", lambda *_: most + 1)
    check_memory(small, layout_of(small, 1), sizes, 1.0, Ranks.alone())
    assert capsys.readouterr().err == "" and "too much memory" not in figures(describe(small))
