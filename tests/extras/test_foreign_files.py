"""Files from elsewhere, changed at random: read, or refused in one sentence, in bounded time and memory.

A seeded loop over recipes, DeepSpeed JSONs, Admin profiles, logs, prepared data, every file of a checkpoint, models of
Marian and fairseq, exported models and the records of `deepnmt get`. Half of the changed folders are sealed again, with
hashes that fit: a hash protects from damage, not from a person. 800 changes;
`DEEPNMT_MUTATIONS=24000` makes more, `DEEPNMT_SEED` others. Arguments of the Python API are odd values in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from foreign_models import fairseq_folder, opus_folder
from peaks import begin_peak, peak
from refusals import contents

import deepnmt
from deepnmt.api import Run
from deepnmt.checkpoint.average import average_weights
from deepnmt.checkpoint.checkpoint import load_model, load_state, newest_checkpoint, read_scores, verify
from deepnmt.config import Corpus, Translate, dump_recipe, load, load_recipe, with_settings
from deepnmt.data.batching import Stream, collate
from deepnmt.data.prepared import PreparedData, publish
from deepnmt.errors import UserError
from deepnmt.extras.export.imports import import_run
from deepnmt.extras.export.job import export_run
from deepnmt.extras.export.searcher import load_exported
from deepnmt.extras.fetch.fetch import Text, is_there, read_record
from deepnmt.files import read_log
from deepnmt.model.admin_profile import AdminProfile
from deepnmt.model.blocks import SIDES
from deepnmt.parallel.ds_config import layout_of
from deepnmt.training.log import Monitor
from deepnmt.training.resume import changes_since

MUTATIONS = int(os.environ.get("DEEPNMT_MUTATIONS", "800"))
SEED = int(os.environ.get("DEEPNMT_SEED", "1"))
SECONDS = 20  # of CPU time for one file
GROWTH = 600 * 2**10  # KiB of memory for all
ODD: list[Any] = [None, True, -1, 0, 7, 10**8, 10**12, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "x",
                  "../../x", "/dev/zero", "\x1b[2J", "é" * 999, [], [[]], {}, {"a": {}}, [1] * 999, "9" * 5000]
WORDS = [b"\x00", b"\xff\xfe", b"null", b"{", b"[" * 3000, b"}", b"\n", b"&a [*a, *a]", b"*a", b"<<: *a", b": ", b"- ",
         b"1e999", b"9" * 400, b"!!python/object/apply:os.system [id]", b"${HOME}", b"\x1b]0;x\x07", b"\xe2\x80\xa8"]


# -- changes -----------------------------------------------------------------------------------------------------------


def change(data: bytes, draw: random.Random) -> bytes:
    """One change: of bits, of bytes, or of a value in JSON."""
    kinds: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, repeat, insert, number]
    try:
        tree = json.loads(data)
    except ValueError:
        return draw.choice(kinds)(data, draw)
    return draw.choice([*kinds, *[lambda _data, draw: value(tree, draw)] * 5])(data, draw)


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data or b"x")
    for _ in range(draw.choice([1, 1, 1, 8, 64])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return draw.choice([data[:start], data[stop:], data[:start] + data[stop:]])


def repeat(data: bytes, draw: random.Random) -> bytes:
    start, stop = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:stop] + data[start:stop] * draw.choice([1, 2, 30]) + data[stop:]


def insert(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice(WORDS) + data[place:]


def number(data: bytes, draw: random.Random) -> bytes:
    """A number written in the text becomes another."""
    places = [match.span() for match in re.finditer(rb"\d+", data)]
    if not places:
        return insert(data, draw)
    start, stop = draw.choice(places)
    return data[:start] + draw.choice([b"0", b"-1", b"100000000", b"1000000000000", b"9" * 30, b"1.5"]) + data[stop:]


def value(tree: Any, draw: random.Random) -> bytes:
    """A value somewhere in a tree becomes another, or goes away, or a new one comes."""
    holders = [tree]
    for holder in holders:
        children = holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()
        holders += [child for child in children if isinstance(child, (dict, list)) and child]
    holder, odd = draw.choice(holders), draw.choice(ODD)
    if not isinstance(holder, (dict, list)):
        return json.dumps(odd).encode()
    keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    action = draw.choice(["set", "set", "set", "drop", "add"]) if keys else "add"
    if action == "set":
        holder[draw.choice(keys)] = odd
    elif action == "drop":
        del holder[draw.choice(keys)]
    elif isinstance(holder, dict):
        holder[draw.choice(["x", "../x", "\x1b[31m", "sha256", ""])] = odd
    else:
        holder.append(odd)
    return json.dumps(tree).encode()


def header(data: bytes, draw: random.Random) -> bytes:
    """A change in the header of a safetensors file, whose length then fits."""
    size = struct.unpack("<Q", data[:8])[0]
    text = change(data[8:8 + size], draw)
    length = draw.choice([len(text)] * 9 + [2**63, 2**40, 90 * 2**20])
    return struct.pack("<Q", length) + text + data[8 + size:]


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, data, a log, and single files."""
    folder = tmp_path_factory.mktemp("original")
    run = folder / "run"
    recipe = tiny_run.recipe_of(run)
    for update in (10, 20):
        tiny_run.write(recipe, update, skipped=1, target_tokens=9, seconds=2.5, data_fingerprint="f", processes=1,
                       validations=[{"update": update, "value": 2.0, "loss": 2.0}], interval={"loss": 1.0})
    monitor = Monitor(run, True, 0, 20)
    for update in range(20):
        monitor.event(update, "something happened", figure=update / 7)
    monitor.close()
    shutil.copytree(prepared / "data", folder / "data")
    shutil.copy(prepared / "recipe.yaml", folder / "recipe.yaml")
    (folder / "zero.json").write_text((Path(__file__).parents[2] / "ds_configs" / "zero1.json").read_text())
    AdminProfile([1.0, 1.5], [1.0, 1.2, 1.4], {"data": "f"}).save(folder / "profile.json")
    opus_folder(folder / "opus")
    fairseq_folder(folder / "fairseq", pre=False)
    (folder / "text.source.json").write_text(json.dumps({
        "origin": {"mtdata": ["Mine-more-1-eng-deu"]}, "lines": 3, "sha256": ["a" * 64, "b" * 64],
        "downloads": {"http://a/more.tsv": {"bytes": 9, "sha256": "c" * 64}}}))
    recipe = tiny_run.recipe_of(folder / "other", model={name: {"layers": 1, "block": "pre_ln"} for name in SIDES})
    tiny_run.write(recipe, 10)
    (folder / "other" / "recipe.yaml").write_text(dump_recipe(recipe))
    texts = [folder / "other" / name for name in ("text.en", "text.de")]
    for text in texts:
        text.write_text("the small dog sees a red house\n")
    export_run(recipe, "ctranslate2", text=",".join(map(str, texts)))
    return folder


def read_recipe(folder: Path) -> None:
    load_recipe(folder / "recipe.yaml")


def read_layout(folder: Path) -> None:
    layout_of(with_settings(tiny_run.recipe_of(folder), {"parallel.ds_config": str(folder / "zero.json")}), 1)


def read_profile(folder: Path) -> None:
    AdminProfile.load(folder / "profile.json", tiny_run.recipe_of(folder, model={
        "encoder": {"layers": 1, "block": "admin"}, "decoder": {"layers": 1, "block": "admin"}}).model)


def read_run_log(folder: Path) -> None:
    read_log(folder / "run" / "log.jsonl")
    monitor = Monitor(folder / "run", True, 10, 20)
    monitor.event(10, "resuming")
    monitor.close()
    assert read_log(folder / "run" / "log.jsonl")[-1]["message"] == "resuming"


def read_data(folder: Path) -> None:
    data = PreparedData.open(folder / "data")
    data.verify()
    for name in data.splits:
        split = data.split(name)
        Stream(split, 256, 1).epoch_size(0)
        collate(split, np.arange(min(3, len(split))), 0, torch.device("cpu"))
        if name != "train":
            assert len(split.src_text()) == len(split.trg_text()) == len(split)


def read_checkpoint(folder: Path) -> None:
    """As translating, averaging and resuming do, each of which may refuse it."""
    checkpoints = folder / "run" / "checkpoints"
    newest = checkpoints / "update-00000020"
    readers: list[Callable[[], object]] = [
        lambda: newest_checkpoint(checkpoints, lambda why: None), lambda: verify(newest), lambda: load_state(newest),
        lambda: read_scores(checkpoints), lambda: load_model(newest),
        lambda: average_weights([newest, checkpoints / "update-00000010"]),
        lambda: changes_since(newest, tiny_run.recipe_of(folder / "run"), ["f"], 1)]
    refusals = []
    for reader in readers:
        try:
            reader()
        except UserError as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]


def read_import(folder: Path) -> None:
    try:
        import_run(folder, folder.with_name("imported"))
    finally:
        shutil.rmtree(folder.with_name("imported"), ignore_errors=True)


def read_opus(folder: Path) -> None:
    read_import(folder / "opus")


def read_fairseq(folder: Path) -> None:
    read_import(folder / "fairseq")


def read_export(folder: Path) -> None:
    """As `translate.backend=ctranslate2` does."""
    load_exported(load_model(folder / "other"), Translate(), "cpu")


def read_fetched(folder: Path) -> None:
    corpus = Corpus(src=["text"], trg=["text.de"], mtdata=["Mine-more-1-eng-deu"])
    text = Text("data.train", corpus, (folder / "text", folder / "text.de"))
    read_record(text)
    is_there(text)


def seal_checkpoint(folder: Path) -> None:
    """Hashes that fit."""
    checkpoint = folder / "run" / "checkpoints" / "update-00000020"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(checkpoint / "manifest.json", manifest)


def reseal(file: Path, manifest: dict[str, Any]) -> None:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    rest["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(rest))


def seal_data(folder: Path) -> None:
    file = folder / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.unlink()
    publish(folder / "data", folder / "data", {key: manifest[key] for key in ("settings", "inputs", "vocab", "splits")})


CHECKPOINT = "run/checkpoints/update-00000020"
# Files, how they are changed and read, how sealed again, and a share of the changes.
KINDS: list[tuple[list[str], Callable[..., bytes], Callable[[Path], None], Callable[[Path], None] | None, int]] = [
    (["recipe.yaml"], change, read_recipe, None, 3),
    (["zero.json"], change, read_layout, None, 2),
    (["profile.json"], change, read_profile, None, 2),
    (["run/log.jsonl"], change, read_run_log, None, 2),
    (["data/manifest.json"], change, read_data, None, 2),
    (["data/*"], change, read_data, seal_data, 4),
    ([f"{CHECKPOINT}/manifest.json"], change, read_checkpoint, None, 2),
    ([f"{CHECKPOINT}/state.json", f"{CHECKPOINT}/recipe.yaml"], change, read_checkpoint, seal_checkpoint, 4),
    ([f"{CHECKPOINT}/*.safetensors"], header, read_checkpoint, seal_checkpoint, 3),
    ([f"{CHECKPOINT}/*"], change, read_checkpoint, seal_checkpoint, 2),
    (["opus/*"], change, read_opus, None, 3),
    (["opus/*.safetensors"], header, read_opus, None, 1),
    (["fairseq/*"], change, read_fairseq, None, 2),
    (["other/ctranslate2/*.json"], change, read_export, None, 2),
    (["text.source.json"], change, read_fetched, None, 2),
]


@pytest.fixture
def no_hang() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, hang)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.usefixtures("no_hang")
def test_no_change_gives_a_traceback(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = cache(load.parse_yaml)  # most changes leave the recipe as it is, and parsing takes half of the time
    monkeypatch.setattr(load, "parse_yaml", lambda text: deepcopy(parsed(text)))
    work, victim = tmp_path / "in" / "work", tmp_path / "victim"
    victim.write_text("mine")
    work.parent.mkdir()
    shutil.copytree(original, work)
    monkeypatch.chdir(work)
    for _, _, read, _, _ in KINDS:
        assert refusal_of(read, work) is None, "and imports, and memory that stays"
    shutil.rmtree(work)
    shutil.copytree(original, work)
    memory = begin_peak()
    draw = random.Random(SEED)
    counts: dict[str, list[int]] = {}
    shares = [kind for kind in KINDS for _ in range(kind[4])]
    for turn in range(MUTATIONS):
        patterns, mutate, read, seal, _ = shares[turn % len(shares)]
        pattern = draw.choice(patterns)
        file = draw.choice(sorted(work.glob(pattern)))
        before = {path: path.read_bytes() for path in (file.parent.iterdir() if seal else [file]) if path.is_file()}
        data = before[file]
        changed = mutate(data, draw)
        file.write_bytes(changed)
        sealed = seal is not None and draw.random() < 0.5
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            if sealed and seal is not None:
                sealed_if_possible(seal, work)
            refused = refusal_of(read, work)
        except BaseException:
            shutil.copy(file, tmp_path / "culprit")
            print(f"{pattern}: {file.name}, sealed {sealed}, turn {turn} of seed {SEED}: {tmp_path / 'culprit'}")
            raise
        signal.setitimer(signal.ITIMER_PROF, 0)
        tally = counts.setdefault(f"{pattern}{' sealed' if sealed else ''}", [0, 0])
        tally[0] += 1
        tally[1] += refused is not None
        if refused is not None:
            assert "\x1b" not in refused and all(len(line) < 5000 for line in refused.split("\n")), refused
        for path in file.parent.iterdir():
            if path.is_file() and path not in before and seal:
                path.unlink()
        for path, was in before.items():
            path.write_bytes(was)
        if turn % 50 == 0:
            capsys.readouterr()
    with capsys.disabled():
        if "DEEPNMT_MUTATIONS" in os.environ:
            print("\n" + "\n".join(f"{name}: {refused} of {tried} refused" for name, (tried, refused) in
                                   sorted(counts.items())))
    assert sum(tried for tried, _ in counts.values()) == MUTATIONS
    assert victim.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["in", "victim"]
    assert list(work.parent.iterdir()) == [work]
    grown = peak() - memory
    assert grown < GROWTH, f"{grown >> 10} MiB"
    for folder in (work, original):
        shutil.rmtree(folder / "run" / "tensorboard")
    assert contents(work) == contents(original)


def odd_calls(run: Run) -> dict[str, Callable[[Any], Any]]:
    """What the Python API takes, each with one argument left open."""
    return {
        "load": lambda odd: deepnmt.load(odd), "checkpoint": lambda odd: deepnmt.load(run.folder, checkpoint=odd),
        "device": lambda odd: deepnmt.load(run.folder, device=odd),
        "plugins": lambda odd: deepnmt.load(run.folder, plugins=odd),
        "sentences": run.translate, "sentence": lambda odd: run.translate(["a dog", odd]),
        "prefixes": lambda odd: run.translate(["a dog"], prefixes=odd),
        "prefix": lambda odd: run.translate(["a dog"], prefixes=[odd]),
        "seed": lambda odd: run.translate(["a dog"], seed=odd), "beam": lambda odd: run.translate(["a dog"], beam=odd),
        "method": lambda odd: run.translate(["a dog"], method=odd),
        "scored": lambda odd: run.score(odd, odd), "score": lambda odd: run.score(["a dog"], [odd]),
        "top": lambda odd: run.score(["a dog"], ["a cat"], top=odd),
        "ahead": lambda odd: list(run.stream(["a dog"], ahead=odd)),
        "tests": lambda odd: run.evaluate(odd), "train": lambda odd: deepnmt.train(odd),
        "prepare": lambda odd: deepnmt.prepare(odd), "read_recipe": lambda odd: deepnmt.read_recipe(odd),
        "changes": lambda odd: deepnmt.read_recipe(run.recipe, odd),
        "change": lambda odd: deepnmt.read_recipe(run.recipe, {"train.updates": odd, "data.train": odd}),
        "average": lambda odd: deepnmt.average(odd), "last": lambda odd: deepnmt.average(run, last=odd),
        "updates": lambda odd: deepnmt.average(run, updates=odd),
    }


@pytest.mark.usefixtures("no_hang")
def test_no_argument_gives_a_traceback(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument of the Python API as eight odd values: taken, or refused in a sentence."""
    shutil.copytree(original / "other", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # "" and "." are the folder here
    run = deepnmt.load(tmp_path / "run")
    odd = [*[value for value in ODD if value not in ("/dev/zero", 10**8)], b"bytes", "\ud800", ["a"], [None],
           ["\ud800"], {"a": 1}, 3.5, object()]
    draw = random.Random(SEED)
    for name, call in odd_calls(run).items():
        for value in draw.sample(odd, 8):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                call(value)
            except UserError as refusal:
                assert "\x1b" not in str(refusal)
            except BaseException as error:
                raise AssertionError(f"{name}={str(value)[:80]!r}") from error
            signal.setitimer(signal.ITIMER_PROF, 0)


def refusal_of(read: Callable[[Path], None], folder: Path) -> str | None:
    """The message of a refusal."""
    try:
        read(folder)
    except UserError as error:
        return str(error)
    return None


def sealed_if_possible(seal: Callable[[Path], None], folder: Path) -> None:
    """A manifest that is broken itself cannot be sealed."""
    try:
        seal(folder)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return
