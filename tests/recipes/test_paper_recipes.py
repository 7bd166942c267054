"""The recipes of the papers: their batches, and the comments and command lines at their head."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from deepnmt.config import load_recipe
from deepnmt.device import CARDS, RESERVED
from deepnmt.parallel.ds_config import layout_of
from deepnmt.training.dry_run import count_parameters, largest_micro_batch, memory_estimate

ROOT = Path(__file__).resolve().parents[2]

# Task and depth: tokens of an update (Admin, Appendix D: GPUs x largest batch of each, for En-Fr x the micro-batches of
# its script; B2T, Tables 7, 8: 128 x 3584, for headlines 64 or 144), updates or epochs, peak rate and warm-up, the
# optimizer, beam.
PAPERS = {
    "iwslt14_de_en/6l-6l": (4000, 90, 7e-4, 6000, "radamw", 5),
    "wmt14_en_de/6l-6l": (4 * 8196, 100, 1e-3, 8000, "radam", 4),
    "wmt14_en_de/12l-12l": (4 * 8196, 100, 1e-3, 8000, "radam", 4),
    "wmt14_en_de/18l-18l": (4 * 8196, 100, 1e-3, 8000, "radam", 4),
    "wmt14_en_de/36l-36l": (128 * 3584, 50000, 1e-3, 4000, "adam", 4),
    "wmt14_en_de/50l-50l": (128 * 3584, 50000, 1e-3, 4000, "adam", 4),
    "wmt14_en_de/60l-12l": (128 * 3584, 50000, 1e-3, 4000, "adam", 4),
    "wmt14_en_de/100l-100l": (4 * 8196, 100, 1e-3, 8000, "radam", 4),
    "wmt14_en_fr/6l-6l": (8 * 10 * 8000, 50, 7e-4, 8000, "radam", 5),
    "wmt14_en_fr/60l-12l": (16 * 16 * 5000, 50, 7e-4, 8000, "radam", 5),
    "gigaword/6l-6l": (64 * 3584, 50000, 1e-3, 4000, "adam", 4),
    "gigaword/18l-18l": (144 * 3584, 50000, 1e-3, 4000, "adam", 4),
}
every_paper = pytest.mark.parametrize("name", PAPERS)


def file_of(name: str) -> Path:
    return ROOT / "recipes" / f"{name}.yaml"


def head_of(name: str) -> list[str]:
    return file_of(name).read_text(encoding="utf-8").partition("\nrun:")[0].splitlines()


def commands(name: str) -> list[str]:
    """The indented lines of the head; lines that end in a backslash are joined to the next."""
    lines = [line.removeprefix("#   ") for line in head_of(name) if line.startswith("#   ")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def test_every_recipe_of_a_paper_is_listed() -> None:
    folders = {name.partition("/")[0] for name in PAPERS}
    assert {f"{p.parent.name}/{p.stem}" for f in folders for p in (ROOT / "recipes" / f).glob("*.yaml")} == set(PAPERS)


@every_paper
def test_settings_are_the_papers(name: str) -> None:
    recipe = load_recipe(file_of(name))
    tokens, length, rate, warmup, optimizer, beam = PAPERS[name]
    [stated] = [re.fullmatch(r"# Batch: (\d+) GPUs? x (\d+) x (\d+) tokens = (\d+) an update, as in .*", line)
                for line in head_of(name) if line.startswith("# Batch: ")]
    assert stated is not None
    gpus, accumulation, per_gpu, product = map(int, stated.groups())
    assert (accumulation, per_gpu) == (recipe.batch.accumulation, recipe.batch.tokens)
    assert gpus * accumulation * per_gpu == product == tokens
    assert length == (recipe.train.epochs or recipe.train.updates)
    assert (recipe.optimizer.lr, recipe.schedule.warmup, recipe.optimizer.name) == (rate, warmup, optimizer)
    assert (recipe.schedule.name, recipe.translate.beam, recipe.average_last) == ("inverse_sqrt", beam, 10)
    assert recipe.train.keep_last >= recipe.average_last


@pytest.mark.parametrize(("name", "gpus", "card"), [
    ("wmt14_en_de/60l-12l", 8, "h100-80"), ("wmt14_en_de/36l-36l", 8, "h100-80"), ("wmt14_en_de/50l-50l", 8, "h100-80"),
    ("wmt14_en_de/100l-100l", 1, "a100-40"), ("wmt14_en_fr/60l-12l", 16, "h100-80"),
])
def test_deep_recipes_fill_todays_cards(name: str, gpus: int, card: str) -> None:
    """A micro-batch of 28k tokens or more keeps the GPU busy, and fits. That it multiplies to the paper's tokens of an
    update: `test_settings_are_the_papers`."""
    recipe = load_recipe(file_of(name))
    layout, vocab = layout_of(recipe, gpus), recipe.vocab.size
    parameters = count_parameters(recipe.model, vocab, vocab)
    most = CARDS[card] * 2**30 - RESERVED
    largest = largest_micro_batch(recipe, layout, parameters, vocab, None, most)
    assert 28_000 <= recipe.batch.tokens <= largest
    needed = memory_estimate(recipe, layout, parameters, vocab, "cuda")
    assert sum(needed.values()) < most
    rest = {part: size for part, size in needed.items() if part not in ("activations", "loss")}
    assert sum(rest.values()) + needed["activations"] * (largest + 256) / recipe.batch.tokens > most - 2**30


@every_paper
def test_what_the_papers_leave_out_is_as_published(name: str) -> None:
    """RAdam without its first five updates, and fairseq's counting, scale and search; the profile of Admin's code, the
    initial weights of B2T's and the dropout of its README."""
    recipe = load_recipe(file_of(name))
    admin = recipe.model.encoder.block == "admin"
    assert recipe.optimizer.unrectified == ("skip" if admin else "momentum")
    assert (recipe.schedule.start, recipe.schedule.count_from, recipe.optimizer.eps) == (1e-7, 0, 1e-8)
    window, floor = (256, 0.03125) if admin else (2**14 // 8 // 16, 1e-4)  # 8 GPUs, --update-freq 16
    assert (recipe.parallel.precision, recipe.loss_scale.initial_power) == ("fp16", 7)
    assert (recipe.loss_scale.window, recipe.loss_scale.floor) == (window, floor)
    assert (recipe.translate.finish, recipe.translate.patience, recipe.translate.min_length) == ("best", 1.0, 1)
    words = {stack.word_dropout for stack in (recipe.model.encoder, recipe.model.decoder)}
    shallow = name == "gigaword/6l-6l"  # which the README trains with less
    assert (recipe.train.clip, words) == ((0.0, {0.0}) if admin else (0.1, {0.0} if shallow else {0.1}))
    assert admin or recipe.model.dropout == (0.3 if shallow else 0.5)
    assert (recipe.admin.method, recipe.admin.count_padding) == ("in_place", admin)
    assert {stack.init for stack in (recipe.model.encoder, recipe.model.decoder)} == {"auto" if admin else "published"}
    assert recipe.model.positions == "fairseq"


SOURCE = re.compile(r"(Appendix [A-D]|Table \d|Figure \d|section \d(\.\d)*|the same)\b|"
                    r"(script|README|fairseq|ours): \S|not said: .{15}|[\w/-]+\.(sh|py): \S")
OPTION = re.compile(r"(?:--?[a-z][\w-]+ |[A-Z_]+=)([\d.]+(?:e-?\d+)?)(?![\d^])")


@every_paper
def test_every_value_has_its_source(name: str) -> None:
    """A comment names it, and an option that it quotes as the source has the value of the recipe."""
    body = "run:" + file_of(name).read_text(encoding="utf-8").partition("\nrun:")[2]
    quoted = 0
    for line in filter(None, body.splitlines()):
        setting, _, comment = line.partition(" # ")
        value = yaml.safe_load(setting.partition(":")[2])
        if value is None:
            continue  # a group
        assert SOURCE.match(comment), line
        option = OPTION.search(comment)
        if option and isinstance(value, (int, float)) and not isinstance(value, bool) and "(" not in comment:
            assert float(option[1]) == float(value), line
            quoted += 1
    assert quoted >= 8


@every_paper
def test_the_head_explains_what_is_reproduced_and_how(name: str) -> None:
    head = "\n".join(head_of(name))
    assert re.search(r"Table \d|Figure \d|No row of a table", head)
    assert "no command below was run" in head
    for word in ("Data", "prepare_data.py", "--hostfile hosts", "sbatch", "average_checkpoints.py", "evaluate.py"):
        assert word in head, word
    assert ("wmt14/full" in head) == name.startswith("wmt14")
    assert all(len(line) <= 120 for line in file_of(name).read_text(encoding="utf-8").splitlines())


@every_paper
def test_files_named_in_the_commands_exist(name: str) -> None:
    recipe = load_recipe(file_of(name))
    text = "\n".join(commands(name))
    tools, recipes = re.findall(r"tools/\w+\.py", text), re.findall(r"recipes/\S+?\.yaml", text)
    assert tools and all((ROOT / tool).is_file() for tool in tools)
    assert set(recipes) == {f"recipes/{name}.yaml"}
    assert set(re.findall(r"runs/[\w-]+", text)) == {recipe.run}
    for folder in set(re.findall(r"data/\w+/text", text)):
        assert recipe.data.train.src[0].startswith(folder) and recipe.data.valid.trg[0].startswith(folder)


@every_paper
def test_the_overrides_in_the_head_are_valid(name: str) -> None:
    """In lines with overrides only, in brackets and in the line about other blocks."""
    lines = [line for line in commands(name) if re.match(r"[a-z]+\.[a-z_.]+=", line)]
    prose = " ".join(line for line in head_of(name) if line.startswith(("# (", "# Other blocks")))
    lines.append(" ".join(re.findall(r"[a-z]+\.[a-z_.]+=[\w./-]+", prose)).rstrip("."))
    assert lines[-1]
    for line in lines:
        changed = load_recipe(file_of(name), shlex.split(line))
        assert changed != load_recipe(file_of(name))
        for stack in (changed.model.encoder, changed.model.decoder):
            assert stack.init in {"admin": ["auto"], "b2t": ["published"], "t_fixup": ["published"]}.get(
                stack.block, ["auto", "published"]), line


def test_recipes_of_a_task_share_their_data() -> None:
    for task in ("wmt14_en_de", "wmt14_en_fr", "gigaword"):
        trees = [yaml.safe_load(file_of(name).read_text(encoding="utf-8")) for name in PAPERS if name.startswith(task)]
        assert all((tree["data"], tree["vocab"]) == (trees[0]["data"], trees[0]["vocab"]) for tree in trees)
