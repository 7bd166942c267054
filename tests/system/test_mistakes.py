"""What a user's mistake gets: one sentence, exit code 2, no traceback, and nothing written or lost."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deepnmt.checkpoint import load_model, save_checkpoint
from deepnmt.cli import main
from deepnmt.config import dump_recipe

ROOT = Path(__file__).resolve().parents[2]
Tool = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FIRST, NEWEST = "update-00000003", "update-00000006"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must be refused, and returns what the user reads."""

    def run(command: str, *arguments: object) -> str:
        code = main(command, [str(word) for word in arguments])
        said = capsys.readouterr()
        assert code == 2, said.err
        assert "deepnmt: " in said.err and "Traceback" not in said.err + said.out
        return said.err

    return run


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Commands take the machine's cores; here they run beside other tests."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def trained(prepared: Path, tool: Tool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of updates 3 and 6."""
    run = tmp_path_factory.mktemp("trained") / "run"
    done = tool("train", prepared / "recipe.yaml", f"run={run}", "train.updates=6", "train.valid_bleu=false",
                "train.validate_every=6")
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be spoiled."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_every_fault_of_a_recipe_at_once(prepared: Path, tool: Tool, tmp_path: Path) -> None:
    tree = yaml.safe_load((prepared / "recipe.yaml").read_text(encoding="utf-8"))
    tree["model"] |= {"widht": 16, "heads": 3, "dropout": 1.5}
    tree["vocab"]["size"] = "large"
    tree["data"]["valid"] = {"src": "valid.en"}
    tree["data"]["folder"] = "${DEEPNMT_NOWHERE}/data"
    tree["optimiser"] = {}
    del tree["train"]["updates"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = tool("train", tmp_path / "recipe.yaml", "model.encoder.block=post")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    head, *faults = done.stderr.rstrip("\n").split("\n")
    assert head == f"deepnmt: {tmp_path / 'recipe.yaml'} has 9 faults:"
    for words in ("model.widht: unknown setting; did you mean model.width?",
                  "width (16) must be a multiple of heads (3)",
                  "model.dropout: is 1.5", "vocab.size: is 'large'", "data.valid: give 'src' and 'trg' files",
                  "the environment variable DEEPNMT_NOWHERE is not set", "optimiser: unknown setting; did you mean",
                  "train.updates: missing", "model.encoder.block: is 'post'"):
        assert sum(words in fault for fault in faults) == 1, words
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(("override", "said"), [
    ("modle.width=3", "modle: unknown setting; did you mean model?"),
    ("train.updatse=3", "train.updatse: unknown setting; did you mean train.updates?"),
    ("train.updates", "is not of the form key.key=value, for example train.updates=300"),
    ("seed.value=3", "seed is a value, not a group of settings"),
    ("model.width=[", "'[' is not a YAML value"),
    ("data.folder=${DEEPNMT_NOWHERE}/x", "the environment variable DEEPNMT_NOWHERE is not set; export DEEPNMT_NOWHERE"),
    ("train.updates=0", "train.updates: is 0, must be greater than or equal to 1"),
])
def test_overrides(prepared: Path, refused: Refused, override: str, said: str) -> None:
    for command in ("prepare", "train", "translate", "evaluate", "average", "profile", "benchmark", "demo"):
        assert said in refused(command, prepared / "recipe.yaml", override)


def test_recipes_that_are_none(prepared: Path, refused: Refused, tmp_path: Path, trained: Path) -> None:
    assert f"there is no recipe {tmp_path}/x.yaml" in refused("train", tmp_path / "x.yaml")
    assert "holds no recipe.yaml" in refused("train", tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"run: \xff")
    assert "cannot be read" in refused("train", tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text("run: [1\nseed: 2")
    assert "is not valid YAML" in refused("train", tmp_path / "x.yaml")
    assert "give the folder of the run" in refused("translate", trained / "checkpoints" / NEWEST)


def test_unknown_commands_and_options(prepared: Path, tool: Tool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None, ["trian"]) == 2
    assert "deepnmt COMMAND --help says more" in capsys.readouterr().out
    done = tool("train", prepared / "recipe.yaml", "--dryrun")
    assert done.returncode == 2 and "unrecognized arguments: --dryrun" in done.stderr and "Traceback" not in done.stderr


# -- texts and prepared data -------------------------------------------------------------------------------------------


@pytest.fixture
def text(prepared: Path, tmp_path: Path) -> Path:
    """A folder with a training text of 50 pairs."""
    folder = tmp_path / "text"
    folder.mkdir()
    for side in ("en", "de"):
        lines = (prepared / "text" / f"train.{side}").read_bytes().splitlines(keepends=True)[:50]
        (folder / f"train.{side}").write_bytes(b"".join(lines))
    return folder


def misaligned(folder: Path) -> str:
    with (folder / "train.de").open("a") as file:
        file.write("noch eine Zeile\nund noch eine\n")
    return f"{folder}/train.en has 50 lines and {folder}/train.de has 52"


def not_utf8(folder: Path) -> str:
    lines = (folder / "train.de").read_bytes().split(b"\n")
    lines[16] = "Übergröße".encode("latin-1")
    (folder / "train.de").write_bytes(b"\n".join(lines))
    return f"{folder}/train.de, line 17: not valid UTF-8"


def empty(folder: Path) -> str:
    for side in ("en", "de"):
        (folder / f"train.{side}").write_bytes(b"")
    return "the corpus has 0 lines"


def blank(folder: Path) -> str:
    (folder / "train.en").write_text("\n" * 50)
    return "data.filters leave out all 50 training pairs (empty 50)"


def missing(folder: Path) -> str:
    (folder / "train.en").unlink()
    return f"there is no text file {folder}/train.en"


def small(_: Path) -> str:
    return "vocab.size is 6000, but the training text gives at most"


@pytest.mark.parametrize("spoil", [misaligned, not_utf8, empty, blank, missing, small])
def test_texts(prepared: Path, text: Path, refused: Refused, tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    said, before = spoil(text), contents(text)
    files = f"data.train={{src: {text}/train.en, trg: {text}/train.de}}"
    changes = (files, f"data.folder={tmp_path}/data", "vocab.size=6000")
    assert said in refused("prepare", prepared / "recipe.yaml", *changes)
    assert contents(text) == before and [file.name for file in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda packed: packed[:-20], "is cut off after line"),
    (lambda packed: packed[:40] + b"\0\0\0\0" + packed[44:], "is not a sound .gz file"),
    (lambda packed: gzip.decompress(packed), "is not a sound .gz file after line 0"),
])
def test_packed_texts(prepared: Path, text: Path, refused: Refused, tmp_path: Path,
                      spoil: Callable[[bytes], bytes], said: str) -> None:
    packed = text / "train.en.gz"
    packed.write_bytes(spoil(gzip.compress((text / "train.en").read_bytes())))
    files = f"data.train={{src: {packed}, trg: {text}/train.de}}"
    found = refused("prepare", prepared / "recipe.yaml", f"data.folder={tmp_path}/data", files)
    assert f"{packed} {said}" in found
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


def test_data_of_another_recipe(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, here = prepared / "recipe.yaml", f"run={tmp_path}/run"
    before = contents(prepared / "data")
    for command in ("train", "profile", "prepare"):
        found = refused(command, recipe, here, "vocab.size=200")
        assert f"{prepared}/data was made with vocab.size 300, the recipe says 200; set data.folder" in found
    assert "there is no prepared data in" in refused("train", recipe, here, f"data.folder={tmp_path}/none")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for command in ("train", "prepare"):
        assert "holds no manifest.json" in refused(command, recipe, here, f"data.folder={tmp_path}/notes")
    damaged = Path(shutil.copytree(prepared / "data", tmp_path / "data"))
    truncate(damaged / "train.src.tokens")
    assert "is damaged: train.src.tokens has" in refused("train", recipe, here, f"data.folder={damaged}")
    assert contents(prepared / "data") == before and contents(tmp_path / "notes") == {"mine.txt": b"mine"}
    assert not (tmp_path / "run").exists()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_missing_checkpoints(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, source, output = prepared / "recipe.yaml", tmp_path / "in", tmp_path / "out"
    source.write_text("a dog\n")
    files = ("--input", source, "--output", output)
    assert f"there is no folder {tmp_path}/none" in refused("translate", recipe, f"run={tmp_path}/none", *files)
    found = refused("translate", recipe, f"run={tmp_path}", *files)
    assert f"{tmp_path} is no checkpoint and holds no whole one" in found
    assert "there is no folder" in refused("evaluate", trained, "--checkpoint", tmp_path / "none")
    found = refused("average", recipe, f"run={tmp_path}")
    assert f"there is no checkpoint in {tmp_path}/checkpoints; train first" in found
    assert "9 checkpoints in" in refused("average", trained, "--last", 9)
    assert "there are 2; ask for a number from 1 to that" in refused("average", trained, "--last", 0)
    assert "there is no checkpoint of update 4" in refused("average", trained, "--updates", "3,4")
    assert "--range is '3', must be FROM:TO" in refused("average", trained, "--range", "3")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]
    assert not (trained / "averaged").exists()


@pytest.mark.parametrize("file", ["weights.safetensors", "src.spm", "recipe.yaml", "state.json", "manifest.json"])
def test_truncated_checkpoints(run: Path, refused: Refused, tmp_path: Path, file: str) -> None:
    checkpoint, source = run / "checkpoints" / NEWEST, tmp_path / "in"
    source.write_text("a dog\n")
    truncate(checkpoint / file)
    before = contents(run)
    output = tmp_path / "out"
    for found in (refused("translate", run, "--checkpoint", checkpoint, "--input", source, "--output", output),
                  refused("evaluate", run, "--checkpoint", checkpoint), refused("average", run, "--last", 2)):
        assert f"checkpoint {checkpoint} is damaged: {file}" in found and "copy it anew" in found
    assert contents(run) == before and not output.exists()


def test_foreign_checkpoints(run: Path, refused: Refused, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(run / "checkpoints" / NEWEST, tmp_path / "foreign"))
    (foreign / "manifest.json").write_text('{"format": 9}')
    assert "its format is 9" in refused("translate", run, "--checkpoint", foreign, "--input", foreign / "state.json")
    assert "its format is 9" in refused("average", run, "--checkpoints", foreign)
    (foreign / "manifest.json").unlink()
    found = refused("translate", run, "--checkpoint", foreign, "--input", run / "log.jsonl")
    assert f"{foreign} is no checkpoint" in found
    assert f"{foreign} is damaged: it holds no manifest.json" in refused("average", run, "--checkpoints", foreign)
    before = contents(foreign)
    assert "is there and is no checkpoint" in refused("average", run, "--output", foreign)
    assert contents(foreign) == before


def test_weights_of_another_model(run: Path, refused: Refused, tmp_path: Path) -> None:
    ours = load_model(run / "checkpoints" / NEWEST)
    weights = {name: tensor.detach() for name, tensor in ours.model.named_parameters()}
    weights["encoder.layers.0.ffn.fc1.weight"] = torch.zeros(64, 16)
    other = save_checkpoint(tmp_path, 6, weights, {}, ours.state, dump_recipe(ours.recipe), ours.src_vocab.bytes,
                            ours.trg_vocab.bytes)
    clause = "encoder.layers.0.ffn.fc1.weight is [64, 16] where [32, 16] is expected"
    found = refused("average", run, "--checkpoints", ours.folder, other)
    assert f"{other} is another model than {ours.folder}" in found and clause in found
    found = refused("translate", run, "--checkpoint", other, "--input", run / "log.jsonl", "--output", tmp_path / "out")
    assert f"{other} does not hold the model of its recipe.yaml" in found and clause in found
    assert not (run / "averaged").exists() and not (tmp_path / "out").exists()


# -- going on with a run -----------------------------------------------------------------------------------------------


def put_average(run: Path) -> str:
    assert main("average", [str(run), f"--output={run}/mean"]) == 0
    shutil.rmtree(run / "checkpoints" / NEWEST)
    (run / "mean").rename(run / "checkpoints" / NEWEST)
    return f"{NEWEST} is an average, which training cannot go on from"


def put_unknown(run: Path) -> str:
    for name in (FIRST, NEWEST):
        shutil.rmtree(run / "checkpoints" / name)
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "mine.txt").write_text("mine")
    return "holds no checkpoint that is whole, so the run cannot go on"


def cut_all(run: Path) -> str:
    for name in (FIRST, NEWEST):
        truncate(run / "checkpoints" / name / "moments.safetensors")
    return "holds no checkpoint that is whole, so the run cannot go on"


@pytest.mark.parametrize("spoil", [put_average, put_unknown, cut_all])
def test_runs_that_cannot_go_on(prepared: Path, run: Path, refused: Refused, spoil: Callable[[Path], str]) -> None:
    said, before = spoil(run), contents(run)
    assert said in refused("train", prepared / "recipe.yaml", f"run={run}", "train.updates=9")
    assert contents(run) == before


@pytest.mark.parametrize(("change", "said"), [
    (("model.width=32",), "model.width: 16 -> 32"),
    (("model.encoder.block=b2t", "seed=8"), "model.encoder.block: admin -> b2t\n  seed: 7 -> 8"),
])
def test_another_run_in_its_place(prepared: Path, run: Path, refused: Refused, change: tuple[str], said: str) -> None:
    with (run / "log.jsonl").open("a") as log:  # of an attempt that went further and was killed
        log.write('{"type": "train", "update": 8, "loss": 1.0}\n')
    before = contents(run)
    found = refused("train", prepared / "recipe.yaml", f"run={run}", *change)
    assert said in found and "train into another folder with run=FOLDER" in found
    assert contents(run) == before


def test_run_of_other_text(prepared: Path, run: Path, refused: Refused, tmp_path: Path) -> None:
    other = f"data.train={{src: {prepared}/text/train.en, trg: {prepared}/text/train.de}}"
    folder, valid = f"data.folder={tmp_path}/data", f"data.valid={{src: {prepared}/text/test.en, trg: " \
        f"{prepared}/text/test.de}}"
    assert main("prepare", [str(prepared / "recipe.yaml"), folder, other, valid]) == 0
    before = contents(run)
    found = refused("train", prepared / "recipe.yaml", f"run={run}", folder)
    assert f"{tmp_path}/data was prepared anew from other text since" in found
    assert contents(run) == before


def test_run_folder_that_is_a_file(prepared: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for command in ("train", "profile"):
        for path in (tmp_path / "file", tmp_path / "file" / "run"):
            assert f"run folder {path} cannot be written" in refused(command, prepared / "recipe.yaml", f"run={path}")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_was_moved_is_still_a_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a dog\n\n")
    text = (run / "recipe.yaml").read_text().splitlines()
    (run / "recipe.yaml").write_text("\n".join(["run: runs/where-it-was-trained", *text[1:]]))
    assert main("translate", [str(run), "--input", f"{tmp_path}/in", "--output", f"{tmp_path}/out"]) == 0
    assert len((tmp_path / "out").read_text().splitlines()) == 2


# -- DeepSpeed's JSON --------------------------------------------------------------------------------------------------


def changed(**settings: Any) -> str:
    """The shipped ZeRO-1 configuration with settings changed; None takes one out."""
    tree = json.loads((ROOT / "ds_configs" / "zero1_fp32.json").read_text()) | settings
    return json.dumps({key: value for key, value in tree.items() if value is not None})


@pytest.mark.parametrize(("content", "said"), [
    (changed(gradient_clipping=3.0, gradient_accumulation_steps=4, optimizer={"type": "Adam"}),
     ["gradient_clipping is 3.0, but the recipe's train.clip makes it 1.0", "batch.accumulation makes it 1",
      "optimizer is given, but the recipe's optimizer section owns it"]),
    (changed(gradient_clipping=None, data_types=None),
     ["gradient_clipping must be written: DeepSpeed clips at 1.0", "data_types.grad_accum_dtype must be written"]),
    (changed(zero_optimization={"stage": 0}, bf16={"enabled": True}), ["bf16 with ZeRO stage 0", "use a ZeRO-1"]),
    (changed(zero_optimization={"stage": 0}, fp16={"enabled": True}), ["fp16 with ZeRO stage 0", "use a ZeRO-1"]),
    (changed(bf16={"enabled": True}, fp16={"enabled": True}), ["bf16 and fp16 are both enabled"]),
    (changed(bf16=True), ["bf16 is true, must be an object"]),
    (changed(fp16={"enabled": True, "initial_scale_power": "7"}), ['fp16.initial_scale_power is "7", must be a num']),
    (changed(zero_optimization={"stage": "two"}), ['zero_optimization.stage is "two", must be 0, 1, 2 or 3']),
    (changed(zero_optimization=1), ["zero_optimization.stage must be written"]),
    (changed()[:-1], ["is not valid JSON"]),
    ("[]", ["must hold one JSON object"]),
    (None, ["there is no file", "ds_configs/ holds those that come with deepnmt"]),
])
def test_deepspeed_configurations(prepared: Path, refused: Refused, tmp_path: Path, content: str | None,
                                  said: list[str]) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    found = refused("train", prepared / "recipe.yaml", "--dry-run", f"parallel.ds_config={file}")
    assert str(file) in found and all(words in found for words in said)


def test_deepspeed_configuration_in_training(prepared: Path, tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(changed(gradient_clipping=None))
    done = tool("train", prepared / "recipe.yaml", f"run={tmp_path}/run", f"parallel.ds_config={tmp_path}/ds.json")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "gradient_clipping must be written" in done.stderr and not (tmp_path / "run").exists()


def test_port_of_another_run(prepared: Path, tool: Tool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = tool("train", prepared / "recipe.yaml", f"run={tmp_path}/run",
                    "parallel.ds_config=ds_configs/zero1_fp32.json", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"port {port}, where the processes meet, cannot be opened: Address already in use" in done.stderr


# -- translating, scoring and the rest ---------------------------------------------------------------------------------


def test_translation_files(trained: Path, refused: Refused, tool: Tool, tmp_path: Path) -> None:
    done = tool("translate", trained, "--input", tmp_path / "none", "--output", tmp_path / "out")
    assert done.returncode == 2 and f"there is no input file {tmp_path}/none" in done.stderr
    assert "Traceback" not in done.stderr
    source = tmp_path / "in"
    source.write_bytes(b"a dog\n\xff\n")
    found = refused("translate", trained, "--input", source, "--output", tmp_path / "out")
    assert f"{source}, line 2: not valid UTF-8" in found
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"a dog\n" * 9)[:-9])
    found = refused("translate", trained, "--input", tmp_path / "in.gz", "--output", tmp_path / "out")
    assert f"{tmp_path}/in.gz" in found
    assert "is the input file itself" in refused("translate", trained, "--input", source, "--output", source)
    assert f"output {tmp_path} is a folder" in refused("translate", trained, "--input", source, "--output", tmp_path)
    assert "cannot be written" in refused("translate", trained, "--input", source, "--output", tmp_path / "no" / "out")
    assert "nbest (9) cannot exceed beam (2)" in refused("translate", trained, "--input", source, "translate.nbest=9")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "in.gz"]
    assert source.read_bytes() == b"a dog\n\xff\n"


def test_scoring(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    short, whole = tmp_path / "short", prepared / "text" / "test.de"
    short.write_text("ein Hund\n" * 19)
    scores = ("--output", tmp_path / "scores.json")
    found = refused("evaluate", trained, "--hypotheses", f"ours={short}", *scores)
    assert "ours on held_out has 19 lines, but the reference has 20; give one translation a line" in found
    found = refused("evaluate", trained, "--test", f"mine={short},{whole}", "--hypotheses", f"a={whole}", *scores)
    assert "mine has 19 source lines and 20 reference lines" in found
    assert "near it are held_out" in refused("evaluate", trained, "--test", "held-out", *scores)
    assert "none cannot be read" in refused("evaluate", trained, "--hypotheses", f"a={tmp_path}/none", *scores)
    assert "not of the form SYSTEM=FILE" in refused("evaluate", trained, "--hypotheses", short, *scores)
    found = refused("evaluate", trained, "--hypotheses", f"a={whole}", "--output", short / "x.json")
    assert f"scores cannot be written to {short}/x.json" in found
    assert [file.name for file in tmp_path.iterdir()] == ["short"] and not (trained / "scores.json").exists()


def test_profile_of_another_model(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    recipe, here = prepared / "recipe.yaml", f"run={tmp_path}/run"
    found = refused("train", recipe, here, "model.encoder.layers=3", f"admin.profile={trained}/admin_profile.json")
    assert f"{trained}/admin_profile.json" in found
    assert "admin.profile: " in refused("train", recipe, here, f"admin.profile={tmp_path}/none.json")
    blocks = ("model.encoder.block=post_ln", "model.decoder.block=pre_ln")
    assert "only admin is profiled" in refused("profile", recipe, here, *blocks)


def test_comparing_timing_and_demo(prepared: Path, trained: Path, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    picture = tmp_path / "file" / "x.png"
    assert f"picture {picture} cannot be written" in refused("compare", trained, "--output", picture)
    recipe = prepared / "recipe.yaml"
    assert "--rounds is 0, must be 1 or more" in refused("benchmark", recipe, "--rounds", 0)
    assert "there is no prepared data" in refused("benchmark", recipe, f"data.folder={tmp_path}/none")
    assert "there is no folder" in refused("benchmark", recipe, "--translate", tmp_path / "none")
    assert "data.train names others" in refused("demo", recipe, "data.train={tsv: x.tsv}")
    assert "--pairs is 5, must be 10 or more" in refused("demo", recipe, "--pairs", 5)
    mine = f"data.train={{src: {tmp_path}/train.en, trg: {tmp_path}/train.de}}"
    assert f"{tmp_path} holds something else than a demo corpus" in refused("demo", recipe, mine)
    assert contents(tmp_path) == {"file": b"mine"}
