"""The plug-in of docs/guide/add_a_block.md, read from that page, through all that a block of deepnmt goes through; and
plug-ins that are gone, changed, faulty or not named, whose code is never run."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import torch
from refusals import Refused, user_error
from safetensors.torch import load_file, save_file
from tiny_engines import VOCAB, batches, export_state, parallel, recipe_with, step
from warm import Warm

from deepnmt import api
from deepnmt.checkpoint.checkpoint import list_checkpoints
from deepnmt.cli import main
from deepnmt.config import check_recipe, load_recipe, plugins
from deepnmt.files import read_log
from deepnmt.model.blocks import BLOCKS, Block
from deepnmt.optim.schedules import learning_rate
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.training.task import find_task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "add_a_block.md"


def code_of_the_page(number: int = 0) -> str:
    """A plug-in in docs/guide/add_a_block.md: the first has one stream, the second two."""
    codes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(codes) == 2
    return codes[number]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: no plug-in was named, none has run."""
    monkeypatch.setattr(plugins, "_plugins", {})


def test_the_page_keeps_its_promise() -> None:
    for number, most in enumerate((15, 25)):
        assert len([line for line in code_of_the_page(number).splitlines() if line.strip()]) <= most


# ---- in every layout


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: one update without momentum at rate 1, whose change of the weights is the gradient."""
    with processes(threads=1, group=True) as ranks:
        stages = 2 if layout.startswith("pipeline") else 0
        recipe = recipe_with(
            plugins=[f"{folder}/my_block.py", f"{folder}/my_streams.py"],
            batch={"accumulation": max(2, stages) * max(1, stages) // ranks.world},
            model={"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2, "encoder": {"block": "sandwich", "layers": 3},
                   "decoder": {"block": "memory", "layers": 2}},
            optimizer={"name": "sgd", "lr": 1.0}, parallel=parallel(layout.removeprefix("pipeline_"), stages))
        engine = start_engine(recipe, layout_of(recipe, ranks.world), (VOCAB, VOCAB), ranks)
        before = {state.name: state.weight for state in export_state(engine)}
        assert any(type(module).__name__ in ("Sandwich", "Memory") for module in engine.module.modules())
        step(engine, batches(1, 2), ranks, rate=1.0)
        found = {state.name: before[state.name] - state.weight for state in export_state(engine)}
        engine.close()
        if ranks.first:
            save_file({name: tensor.contiguous() for name, tensor in found.items()}, f"{folder}/{layout}")


def test_its_gradients_are_the_same_in_every_layout(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "my_block.py").write_text(code_of_the_page(), encoding="utf-8")
    (tmp_path / "my_streams.py").write_text(code_of_the_page(1), encoding="utf-8")
    warm.run(1, "test_new_block:trial", tmp_path, "local")
    local = load_file(tmp_path / "local")
    assert {"encoder.layers.2.rule.after.1.weight", "decoder.layers.1.rule.a"} <= local.keys()
    assert all(bool(g.any()) for g in local.values())
    for layout in ("zero3_fp32", "pipeline_zero1_fp32"):
        warm.run(2, "test_new_block:trial", tmp_path, layout)
        ours = load_file(tmp_path / layout)
        assert ours.keys() == local.keys()
        for name, gradient in local.items():
            torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# ---- a run


def test_a_run_from_training_to_translation(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, fresh: None
) -> None:
    """It trains, resumes, is averaged, translates and is diagnosed; gone or changed, it is refused by name and hash."""
    own, run, said = tmp_path / "own", tmp_path / "run", tmp_path / "has_run"
    own.mkdir()
    plugin, recipe = own / "my_block.py", own / "my.yaml"
    code = f"open({str(said)!r}, 'w').close()\n{code_of_the_page()}"
    plugin.write_text(code, encoding="utf-8")
    sha256 = hashlib.sha256(code.encode()).hexdigest()
    text = (prepared / "recipe.yaml").read_text(encoding="utf-8")
    recipe.write_text(f"{text}\nplugins: [my_block.py]\n", encoding="utf-8")
    words = [f"run={run}", "model.encoder.block=sandwich", "model.decoder.block=sandwich", "train.save_every=4",
             "train.validate_every=8", "train.valid_bleu=false", "parallel.threads=1"]
    monkeypatch.chdir(tmp_path)
    assert main("prepare", [str(recipe), *words]) == 0
    assert main("train", [str(recipe), *words, "train.updates=4"]) == 0 and said.exists()
    assert main("train", [str(recipe), *words, "train.updates=8"]) == 0  # resumed
    assert load_recipe(run).plugins == {str(plugin): sha256} and len(list_checkpoints(run / "checkpoints")) == 2
    named = f"plugins=[{plugin}]"
    assert main("average", [str(run), "--last", "2", named]) == 0
    output = tmp_path / "out.de"
    translate = [str(run), "--input", str(prepared / "text" / "test.en"), "--output", str(output), "parallel.threads=1"]
    assert main("translate", [*translate, named]) == 0 and len(output.read_text().splitlines()) == 20
    assert main("diagnose", [str(run), named, "--tokens", "60", "parallel.threads=1"]) == 0
    assert any(record.get("update") == 8 for record in read_log(run / "log.jsonl"))

    # what a run or a checkpoint names is not run
    plugins._plugins.clear()
    said.unlink()
    by_name = f"was trained with the plug-in {plugin} of SHA-256 {sha256}"
    assert f"{by_name}; deepnmt runs the code of a plug-in only if you name it: add plugins=[{plugin}]" in refused(
        "translate", *translate)
    assert by_name in refused("translate", run / "recipe.yaml", *translate[1:])
    published = tmp_path / "published"  # as a container has it
    shutil.copytree(run / "averaged", published / "averaged")
    shutil.copy(run / "recipe.yaml", published)
    for model in (published, published / "recipe.yaml"):
        assert by_name in refused("translate", model, *translate[1:])
        assert "only if you name it" in refused("translate", model, *translate[1:], 'plugins.x=""')
        assert "plug-in" in refused("evaluate", model) and "plug-in" in refused("serve", model)
    with user_error("deepnmt runs the code of a plug-in only if you name it"):
        api.load(run)
    assert not said.exists()
    assert api.load(run, plugins=[plugin]).translate(["the old dog sees the house"], beam=2) and said.exists()

    plugin.write_text(code + "# changed\n", encoding="utf-8")
    now = hashlib.sha256(plugin.read_bytes()).hexdigest()
    assert f"plugins.{plugin}: {sha256} -> {now}\nrestore them, or train into another folder" in refused(
        "train", recipe, *words, "train.updates=12")
    assert f"{by_name}, but it is now {now}; restore that file" in refused("translate", *translate, named)
    plugin.unlink()
    assert "plugins: there is no file my_block.py, neither here nor beside the recipe; give the path of a plug-in" in (
        refused("train", recipe, *words))


@pytest.mark.parametrize(("recipe", "mark"), [
    ("pub/recipe.yaml", "pub/models/best/manifest.json"), ("pub/other.yaml", "pub/a/b/c/d/manifest.json"),
    ("pub/model.yaml", "pub/manifest.json"), ("pub/a/b/x.yaml", "pub/deepnmt.json"), ("pub/x.yaml", "pub/r/log.jsonl"),
    ("pub/x.yaml", "pub/r/checkpoints/none"),
])
def test_a_recipe_beside_a_model_runs_no_code(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch,
                                              refused: Refused, recipe: str, mark: str) -> None:
    """However deep the model lies, and whatever the recipe is called; with the hash of the code or without."""
    monkeypatch.chdir(tmp_path)
    for file in (Path(recipe), Path(mark)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    said, evil = tmp_path / "has_run", Path(recipe).with_name("evil.py")
    evil.write_text(f"open({str(said)!r}, 'w').close()\n{code_of_the_page()}", encoding="utf-8")
    text = (prepared / "recipe.yaml").read_text(encoding="utf-8")
    train = ("train", recipe, "--dry-run", "model.encoder.block=sandwich", f"run={tmp_path}/run")
    for named in ("[evil.py]", f"{{evil.py: {hashlib.sha256(evil.read_bytes()).hexdigest()}}}"):
        Path(recipe).write_text(f"{text}\nplugins: {named}\n", encoding="utf-8")
        message = refused(*train)
        if "{" not in named:
            assert f"and runs only if you name it on the command line, because {recipe} lies with " in message
            assert f"{mark.removesuffix('/none')}: add plugins=[{evil}], or move the recipe" in message
        assert "plugins=" in message and "plugins" in refused(*train, 'plugins.x=""')
        refused("translate", recipe, "--input", recipe)
        with user_error("plugins"):
            api.read_recipe(recipe, {"plugins.x": "", "model.encoder.block": "sandwich"}).plugins and api.train(recipe)
    assert not said.exists()
    assert "there is no file evil.py; give the path" in refused(*train, "plugins=[evil.py]")  # not the one beside it
    assert main(train[0], [*train[1:], f"plugins=[{evil}]"]) == 0 and said.exists()


def test_a_recipe_beside_its_own_run_names_its_code_from_the_start(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Else it would train, and be refused when it resumes."""
    monkeypatch.chdir(tmp_path)
    Path("my_block.py").write_text(code_of_the_page(), encoding="utf-8")
    text = (prepared / "recipe.yaml").read_text(encoding="utf-8")
    Path("my.yaml").write_text(f"{text}\nplugins: [my_block.py]\n", encoding="utf-8")
    words = ["--dry-run", "model.encoder.block=sandwich"]
    assert "because my.yaml lies with its run runs/my: add plugins=[my_block.py]" in refused(
        "train", "my.yaml", *words, "run=runs/my")
    assert main("train", ["my.yaml", *words, "run=runs/my", "plugins=[my_block.py]"]) == 0
    assert main("train", ["my.yaml", *words, f"run={tmp_path.parent}/elsewhere"]) == 0
    for number in range(2):
        Path(str(number)).mkdir()
    monkeypatch.setattr(plugins, "MOST_FOLDERS", 1)
    assert "lies with more than 1 folders" in refused("train", "my.yaml", *words, f"run={tmp_path.parent}/elsewhere")


# ---- faults


@pytest.mark.parametrize(("code", "fault"), [
    ("x = 1\n", "defines no block, schedule, objective, task or language identifier; write a table of them at its end, "
                'such as BLOCKS = {"sandwich": '),
    ("BLOCKS = {}\n", "defines no block, schedule, objective, task or language identifier"),
    ("BLOCKS = 3\n", "defines no block, schedule, objective, task or language identifier"),
    ("def (\n", "cannot be run: SyntaxError: invalid syntax"),
    ("raise OSError('x')\n", "my.py cannot be run: OSError: x"),
    ("raise SystemExit(3)\n", "my.py cannot be run: SystemExit: 3"),
    ("BLOCKS = {'pre_ln': 1}\n", "defines the block pre_ln, which deepnmt has already; give it another name"),
])
def test_files_that_are_no_plugins(code: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(code, encoding="utf-8")
    with user_error(f"plugins: .*{re.escape(fault)}"):
        recipe_with(plugins=[str(file)])


@pytest.mark.parametrize(("code", "fault"), [
    ("BLOCKS = {'mine': 1}\n", "the block mine of .*my.py is 1, must be a subclass of deepnmt.model.blocks.Block"),
    ("from deepnmt.model.blocks import Admin\nclass Mine(Admin): ...\nBLOCKS = {'mine': Mine}\n",
     "block mine of .*my.py has profiled = True, which only admin may; set profiled = False in its class"),
])
def test_code_that_makes_no_block(code: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(code, encoding="utf-8")
    recipe = recipe_with(plugins=[str(file)], model={"encoder": {"block": "mine"}})
    with user_error(fault):
        BLOCKS[recipe.model.encoder.block]


def test_names_of_no_plugin_and_hashes_that_differ(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(code_of_the_page(), encoding="utf-8")
    file = str(tmp_path / "my.py")
    with user_error("model.encoder.block: is 'sandwch', must be one of .*; did you mean sandwich?"):
        recipe_with(plugins=file, model={"encoder": {"block": "sandwch"}})
    with user_error("has the SHA-256 .*, but abc was asked for"):
        recipe_with(plugins={file: "abc"})
    with user_error("plugins: is 3, must be a valid mapping"):
        recipe_with(plugins=3)
    for named in (["my"], {"sandwiches:Sandwich": ""}):  # the second as runs had plug-ins of installed packages
        with user_error("plugins: .* is no Python file; give a file whose name ends in .py"):
            recipe_with(plugins=named)
    tree = recipe_with(plugins=file, model={"decoder": {"block": "sandwich"}}).model_dump()
    plugins._plugins.clear()
    known = check_recipe(tree, "of a checkpoint", False)  # it is read, but its code is not run
    with user_error("there is no block sandwich in deepnmt or in a plug-in that you named"):
        BLOCKS[known.model.decoder.block]


# ---- schedules, tasks, packages


def test_schedules_and_tasks_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from deepnmt.tasks.translation.task import TASK\n"
                    "def halves(peak, schedule, now):\n    return peak * schedule.step_factor ** (now.update // 10)\n"
                    "SCHEDULES = {'halves': halves}\nTASKS = {'other': TASK}\n", encoding="utf-8")
    recipe = recipe_with(plugins=[str(file)], task="other",
                         schedule={"name": "halves", "warmup": 5, "step_factor": 0.5})
    assert [learning_rate(1.0, recipe.schedule, update, 100) for update in (1, 5, 25)] == [0.2, 1.0, 0.25]
    assert find_task(recipe.task) is find_task("translation")


def test_a_plugin_may_import_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the way to blocks of packages."""
    (tmp_path / "sandwiches.py").write_text(code_of_the_page(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text("from sandwiches import BLOCKS\n", encoding="utf-8")
    recipe = recipe_with(plugins=[str(file)], model={"encoder": {"block": "sandwich"}})
    assert issubclass(BLOCKS[recipe.model.encoder.block], Block)
    plugins.require_same(recipe.plugins, tmp_path)
