"""Decoder-only translation: pairs joined by a separator, a loss on the target or on both, and the search."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
import yaml
from small_text import recipe as of_one_side
from small_text import tree as tree_of_one_side
from tiny_engines import parallel
from torch import Tensor
from torch.nn import functional as F
from warm import Warm

from deepnmt.api import load
from deepnmt.cli import main
from deepnmt.config import Recipe, check_recipe, dump_recipe, load_recipe
from deepnmt.data.batching import START
from deepnmt.decode.models import load_models
from deepnmt.decode.steppers import PromptStepper
from deepnmt.decode.translate import translate_lines
from deepnmt.errors import UserError
from deepnmt.files import read_log
from deepnmt.model.init import new_model
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.language_model.task import TASK
from deepnmt.tasks.language_model.text import Blocks, PreparedText, blocks_of
from deepnmt.tokens import BOS, EOS, PAD

CPU = torch.device("cpu")
WORDS = ("ape", "bee", "cat", "dog", "eel", "fox")


def write_pairs(folder: Path, count: int = 40) -> None:
    """Sources, and their words in capitals as targets."""
    draw = random.Random(5)
    for name, lines in (("train", count), ("valid", 12)):
        sources = [" ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 6))) for _ in range(lines)]
        (folder / f"{name}.src").write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
        (folder / f"{name}.trg").write_text("".join(f"{line.upper()} .\n" for line in sources), encoding="utf-8")


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe for these pairs; `changes` are updates of its sections."""
    texts = {name: {side: str(folder / f"{name}.{side}") for side in ("src", "trg")} for name in ("train", "valid")}
    data = {"src_lang": "xx", "trg_lang": "yy", **texts, "test": {"held": texts["valid"]}, "block": 16}
    changes["data"] = {**data, **changes.get("data", {})}
    made = {"vocab": {"kind": "word", "size": 17}, "batch": {"tokens": 100}, **changes}
    made["model"] = {"max_length": 32, **changes.get("model", {})}
    return tree_of_one_side(folder, **made)


def recipe(folder: Path, **changes: Any) -> Recipe:
    """The same, checked."""
    return check_recipe(tree(folder, **changes), "test")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A folder with prepared pairs."""
    write_pairs(tmp_path)
    PreparedText.prepare(recipe(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs and a run that has learned them by heart."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)
    file = folder / "pairs.yaml"
    file.write_text(yaml.safe_dump(tree(
        folder, batch={"tokens": 400}, model={"width": 32, "ffn": 64, "dropout": 0.0},
        train={"updates": 140, "validate_every": 70, "save_every": 70, "log_every": 70})))
    assert main("prepare", [str(file)]) == 0 and main("train", [str(file), "--dry-run"]) == 0
    assert main("train", [str(file)]) == 0
    return folder


def sentences(folder: Path, name: str, side: str) -> list[str]:
    return (folder / f"{name}.{side}").read_text(encoding="utf-8").splitlines()


# -- what a model reads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["target", "both"])
def test_a_pair_is_source_separator_target_end(on: str, pairs: Path) -> None:
    """The arrays and every micro-batch, against lists put together here."""
    made = recipe(pairs, train={"loss_on": on})
    data = PreparedText.open(made)
    data.verify()
    encode = data.vocab.encode
    wanted = [[*encode(src), BOS, *encode(trg), EOS] for src, trg in zip(
        sentences(pairs, "train", "src"), sentences(pairs, "train", "trg"), strict=True)]
    tokens, documents = data.documents("train")
    assert [tokens[begin:end].tolist() for begin, end in itertools.pairwise(documents)] == wanted
    assert data.counts("train")["words"] == sum(len(line.split()) + 1 for line in sentences(pairs, "train", "trg"))
    stream, position, seen = TASK.stream(made, data), START, []
    for _ in range(int(stream.epoch_size(0))):
        update = stream.update(position, 1, 0, 1, CPU)
        position, [batch] = update.next, update.batches
        assert batch.tokens == update.tokens == int((batch["trg_out"] != PAD).sum())
        for given, target in zip(batch["trg_in"].tolist(), batch["trg_out"].tolist(), strict=True):
            place = given.index(BOS)
            end = target.index(EOS)
            assert given[0] == EOS and set(given[end + 1 :]) <= {PAD} and set(target[end + 1 :]) <= {PAD}
            assert target[place:end] == given[place + 1 : end + 1]
            assert target[:place] == ([PAD] * place if on == "target" else given[1 : place + 1])
            seen.append([*given[1 : end + 1], EOS])
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_brute_force(smoothing: float, pairs: Path) -> None:
    """On the target: PyTorch's cross-entropy of each pair alone, behind its separator. On both: that of any text.
    With gradients."""
    data = PreparedText.open(recipe(pairs))
    tokens, documents = (np.asarray(array, dtype=np.int64) for array in data.documents("train"))
    model = new_model(recipe(pairs).model, data.vocab.size, data.vocab.size, 1, smoothing).eval()

    def with_gradient(loss: Tensor) -> tuple[float, Tensor]:
        [gradient] = torch.autograd.grad(loss, [model.decoder_layers[0].ffn.fc1.weight], retain_graph=True)
        return float(loss.detach()), gradient

    brute: dict[str, list[Tensor]] = {"target": [], "both": []}
    for begin, end in itertools.pairwise(documents):
        pair = torch.from_numpy(tokens[begin:end])
        given = torch.cat([torch.tensor([EOS]), pair[:-1]])
        logits = F.linear(model.decode(given[None], None, None)[0], model.output_weight)
        each = F.cross_entropy(logits, pair, label_smoothing=smoothing, reduction="none")
        brute["both"].append(each.sum())
        brute["target"].append(each[pair.tolist().index(BOS) + 1 :].sum())
    text = Blocks("train", tokens, documents, 16)
    for on, each in brute.items():
        blocks = blocks_of(recipe(pairs, train={"loss_on": on}), data, "train")
        assert len(blocks) == len(text) == 40
        batch = blocks.batch(range(40), 0, CPU)
        loss, gradient = with_gradient(model(batch).loss)
        wanted, theirs = with_gradient(torch.stack(each).sum())
        assert loss == pytest.approx(wanted, rel=1e-6)
        torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-5)
    assert loss == float(model(text.batch(range(40), 0, CPU)).loss)


def test_validation_is_of_the_targets(trained: Path) -> None:
    """With both losses, and its tokens are those of the targets alone."""
    last = [record for record in read_log(trained / "run" / "log.jsonl") if record["type"] == "valid"][-1]
    data = PreparedText.open(load_recipe(trained / "run"))
    targets = sentences(trained, "valid", "trg")
    count = sum(len(data.vocab.encode(line)) + 1 for line in targets)
    assert last["word_perplexity"] == pytest.approx(math.exp(count * math.log(last["perplexity"]) / sum(
        len(line.split()) + 1 for line in targets)))
    for on in ("target", "both"):
        blocks = blocks_of(recipe(trained, train={"loss_on": on}), data, "valid")
        assert blocks.trg_lengths.sum() == count


# -- layouts -----------------------------------------------------------------------------------------------------------


def losses(folder: Path, on: str, layout: str, stages: int, ranks: Ranks) -> list[float]:
    """Of four updates with dropout, and of the validation text after them."""
    made = recipe(folder, model={"dropout": 0.2, "attention_dropout": 0.1, "decoder": {"block": "b2t", "layers": 3}},
                  batch={"tokens": 60, "accumulation": 4 * (stages or 1) // ranks.world},
                  train={"loss_on": on, "label_smoothing": 0.1}, parallel=parallel(layout, stages))
    data, found, position = PreparedText.open(made), [], START
    engine = start_engine(made, layout_of(made, ranks.world), (data.vocab.size, data.vocab.size), ranks)
    stream, count = TASK.stream(made, data), made.batch.entries(engine.data_world)
    for _ in range(4):
        update = stream.update(position, count, engine.data_rank, engine.data_world, ranks.device)
        found.append(engine.train_step(update.batches, update.tokens, 0.01).loss / update.tokens)
        position = update.next
    found.append(TASK.validate(made, data, engine, ranks).loss)
    engine.close()
    return found


def compute(folder: str, layouts: str, stages: str) -> None:
    """Runs on each rank."""
    with processes(threads=1, group=layouts != "local") as ranks:
        found = [losses(Path(folder), on, layout, int(stages), ranks) for layout in layouts.split()
                 for on in ("target", "both")]
        if ranks.first:
            Path(folder, f"losses-{ranks.world}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("layouts", "stages"), [("zero1_fp32 zero3_fp32", 0), ("zero1_fp32", 2)])
def test_losses_are_those_of_one_process(layouts: str, stages: int, pairs: Path, warm: Warm) -> None:
    """The normaliser counts tokens with a loss, of which ranks have different numbers."""
    warm.run(1, "test_lm_pairs:compute", pairs, "local", 0)
    warm.run(2, "test_lm_pairs:compute", pairs, layouts, stages)
    alone, found = (json.loads((pairs / f"losses-{world}.json").read_text()) for world in (1, 2))
    assert alone[0][0] != alone[1][0] and all(each[0] > each[-1] for each in alone)
    for number, each in enumerate(found):
        assert each == pytest.approx(alone[number % 2], rel=1e-6), number


def test_a_run_goes_on_exactly(pairs: Path) -> None:
    ends = []
    for name, ways in (("whole", (12,)), ("broken", (6, 12))):
        for updates in ways:
            file = pairs / f"{name}.yaml"
            file.write_text(yaml.safe_dump(tree(pairs, run=str(pairs / name), train={"updates": updates})))
            assert main("train", [str(file)]) == 0
        ends.append((pairs / name / "checkpoints" / "update-00000012" / "weights.safetensors").read_bytes())
    assert ends[0] == ends[1]


# -- the search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [
    {}, {"decoder": {"block": "b2t", "layers": 3}}, {"decoder": {"block": "dlcl", "layers": 2}},
    {"positions": "rotary", "decoder": {"block": "pre_ln", "layers": 2}},
    {"bands": [7, 12], "band_factor": 2}], ids=str)
def test_cached_decoding_is_the_whole_pass(model: dict[str, Any], tmp_path: Path) -> None:
    """Sources of three lengths, in any order; hypotheses that change places; sentences that are taken out."""
    made = recipe(tmp_path, model=model).model
    ours = new_model(made, 17, 17, seed=1).eval()
    draw = torch.Generator().manual_seed(2)
    lengths = [5, 5, 3, 5, 2, 3]
    src = torch.full((6, 5), PAD)
    for row, length in zip(src, lengths, strict=True):
        row[: length - 1] = torch.randint(4, 17, (length - 1,), generator=draw)
        row[length - 1] = EOS
    beams = 3
    hypotheses = [[[BOS]] * beams for _ in lengths]
    sentences = list(range(6))
    with torch.inference_mode():
        stepper = PromptStepper(ours, src, torch.tensor(lengths), beams, 8)
        for step in range(6):
            found = stepper.step(torch.tensor([h[-1] for each in hypotheses for h in each]))
            for row, (sentence, number) in enumerate((s, k) for s in range(len(sentences)) for k in range(beams)):
                source = src[sentences[sentence], : lengths[sentences[sentence]] - 1].tolist()
                given = torch.tensor([[EOS, *source, *hypotheses[sentence][number]]])
                whole = ours.logits(ours.decode(given, None, None))[0, -1]
                torch.testing.assert_close(found[row], whole, rtol=1e-5, atol=1e-5)
            if step == 2:  # as a search leaves out what is done: the last ones fill the gaps
                stay = [0, 5, 2, 4]
                stepper.select(stay)
                hypotheses, sentences = ([each[s] for s in stay] for each in (hypotheses, sentences))
            parents = torch.randint(0, beams, (len(sentences), beams), generator=draw) if step else torch.arange(
                beams).expand(len(sentences), -1)
            if step:
                stepper.reorder((parents + beams * torch.arange(len(sentences))[:, None]).flatten())
            hypotheses = [[[*hypotheses[s][k], int(torch.randint(4, 17, (1,), generator=draw))] for k in row]
                          for s, row in enumerate(parents.tolist())]


@pytest.mark.parametrize("words", [["translate.method=greedy"], ["translate.beam=4"],
                                   ["translate.beam=4", "translate.batch_tokens=8"]], ids=str)
def test_a_task_learned_by_heart_is_translated(words: list[str], trained: Path, tmp_path: Path) -> None:
    """One line in, one line out; empty ones stay empty."""
    sources, out = tmp_path / "in.txt", tmp_path / "out.txt"
    lines = sentences(trained, "train", "src")
    sources.write_text("\n".join([*lines, "", lines[0]]) + "\n", encoding="utf-8")
    assert main("translate", [str(trained / "run"), "--input", str(sources), "--output", str(out), *words]) == 0
    wanted = sentences(trained, "train", "trg")
    assert out.read_text(encoding="utf-8").splitlines() == [*wanted, "", wanted[0]]


def test_sampling_and_prefixes(trained: Path, tmp_path: Path) -> None:
    sources, begins, out = (tmp_path / name for name in ("in.txt", "prefix.txt", "out.txt"))
    sources.write_text("ape bee\n" * 3, encoding="utf-8")
    begins.write_text("FOX\n\nEEL EEL\n", encoding="utf-8")
    words = [str(trained / "run"), "--input", str(sources), "--output", str(out)]
    assert main("translate", [*words, "--prefix", str(begins), "translate.method=greedy"]) == 0
    found = out.read_text(encoding="utf-8").splitlines()
    assert found[0].startswith("FOX ") and found[2].startswith("EEL EEL")
    said = []
    for seed in ("seed=1", "seed=1", "seed=2"):
        assert main("translate", [*words, "translate.method=sample", "translate.nbest=4",
                                  "translate.temperature=3", "--format", "tsv", seed]) == 0
        said.append(out.read_text(encoding="utf-8"))
    assert said[0] == said[1] != said[2]


def test_an_ensemble_is_of_one_kind(trained: Path, tmp_path: Path) -> None:
    other = tiny_run.write(tiny_run.recipe_of(tmp_path / "run"), 1)
    with pytest.raises(UserError, match="are an encoder-decoder and a decoder alone; an ensemble needs models of one"):
        load_models([trained / "run", other], load_recipe(trained / "run").translate, Ranks.alone(), alone=True)


def test_evaluate_scores_translations(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, train = trained / "run", ",".join(str(trained / f"train.{side}") for side in ("src", "trg"))
    for more in ([], ["--checkpoint", "newest"] * 2):
        assert main("evaluate", [str(run), "--test", f"learned={train}", "--metric", "bleu", *more]) == 0
        assert "100.00" in capsys.readouterr().out
    assert list(run.glob("scores-*update-*update-*.json")), "of an ensemble"
    assert main("evaluate", [str(run)]) == 0
    scores = json.loads((run / "scores.json").read_text())
    assert scores["sets"]["held"]["sentences"] == 12 if "sets" in scores else "held" in json.dumps(scores)
    models = load_models(run, load_recipe(run).translate, Ranks.alone(), alone=True)
    best = translate_lines(models.all[0], models.vocabs, sentences(trained, "valid", "src"), load_recipe(run).translate)
    assert [each[0].text for each in best] == (run / "scores" / "held.hyp").read_text().splitlines()


def test_a_long_source_is_cut_to_half_of_the_model(trained: Path, tmp_path: Path,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    sources, out = tmp_path / "in.txt", tmp_path / "out.txt"
    sources.write_text("ape " * 40 + "\nbee\n", encoding="utf-8")
    assert main("translate", [str(trained / "run"), "--input", str(sources), "--output", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 2
    assert "line 1 has 40 tokens; only its first 15 are translated (half of model.max_length is 16)" in caplog.text


def test_a_prefix_longer_than_the_source_leaves_is_cut_with_a_word(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model's 32 positions the source takes 3."""
    sources, begins, out = (tmp_path / name for name in ("in.txt", "prefix.txt", "out.txt"))
    sources.write_text("ape bee\n" * 2, encoding="utf-8")
    begins.write_text("FOX " * 28 + "\n" + "FOX " * 29 + "\n", encoding="utf-8")
    assert main("translate", [str(trained / "run"), "--input", str(sources), "--output", str(out), "--prefix",
                              str(begins)]) == 0
    assert all(line.startswith("FOX " * 27 + "FOX") for line in out.read_text(encoding="utf-8").splitlines())
    [said] = [message for message in caplog.messages if "prefix" in message]
    assert said == ("the prefix of line 2 has 29 tokens; only its first 28 are used (what the source leaves of "
                    "model.max_length is 29)")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_a_separator_in_the_text_is_text(kind: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    for name in ("src", "trg"):
        file = tmp_path / f"train.{name}"
        file.write_text(file.read_text() + "<s> ape </s> <pad>\n")
    made = recipe(tmp_path, vocab={"kind": kind, "size": 40 if kind == "bpe" else 17}, data={"block": 64},
                  model={"max_length": 64})
    PreparedText.prepare(made)
    data = PreparedText.open(made)
    tokens, documents = data.documents("train")
    assert (tokens == BOS).sum() == (tokens == EOS).sum() == len(documents) - 1 and (tokens == PAD).sum() == 0
    assert len(blocks_of(made, data, "train")) == 41


@pytest.mark.parametrize(("changes", "said"), [
    ({"src": "ape " * 19 + "\n"}, r"train\.trg, line 41: source and target have 23 tokens .* data\.block is 16"),
    ({"src": "\n"}, r"train\.src, line 41: the source is empty"),
    ({"trg": " \n"}, r"train\.trg, line 41: the target is empty"),
    ({"src": ""}, r"train\.src has 40 lines and .*train\.trg has 41"),
    ({"src": "\xff\n"}, r"train\.src, line 41: not valid UTF-8")])
def test_faulty_pairs(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    for side in ("src", "trg"):
        file = tmp_path / f"train.{side}"
        file.write_bytes(file.read_bytes() + {"src": "ape\n", "trg": "APE .\n", **changes}[side].encode("latin-1"))
    with pytest.raises(UserError, match=said):
        PreparedText.prepare(recipe(tmp_path))
    assert not (tmp_path / "data").exists()


def test_a_vocabulary_of_another_text(pairs: Path) -> None:
    """The separator, which every vocabulary has, tells nothing of a text."""
    for side in ("src", "trg"):
        (pairs / f"train.{side}").write_text("ein Hund\nder Hund bellt\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.trg, line 1: the vocabulary has no piece of this line, and"):
        PreparedText.prepare(
            recipe(pairs, vocab={"model": str(pairs / "data")}, data={"folder": str(pairs / "new")}))


def test_prepared_pairs_are_pairs(pairs: Path) -> None:
    with pytest.raises(UserError, match=r"data\.block is 8, but a pair of the train text has 13 tokens"):
        blocks_of(made := recipe(pairs, data={"block": 8}), PreparedText.open(made), "train")
    text = of_one_side(pairs, data={"train": str(pairs / "train.trg"), "valid": str(pairs / "valid.trg")})
    with pytest.raises(UserError, match=r"was made with data\.train pairs, but the recipe has None"):
        PreparedText.open(text)


@pytest.mark.parametrize(("changes", "said"), [
    ({"data": {"valid": "valid.txt"}}, r"data: train has pairs, but valid files of one side"),
    ({"data": {"test": {"held": "valid.txt"}}}, r"data: train has pairs, but test\.held files of one side"),
    ({"data": {"documents": True}}, "documents: true has no effect on pairs"),
    ({"data": {"src_lang": ""}}, "src_lang is of pairs, which need it, such as de"),
    ({"data": {"train": {"src": "a"}}}, r"data\.train: names no files; give some, or pairs"),
    ({"data": {"train": {"src": ["a", "b"], "trg": "c"}}}, "'src' names 2 files and 'trg' 1"),
    ({"data": {"train": {"src": "a", "trg": "b", "tag": "<2en>"}}}, r"data\.train: tag is of task: translation"),
    ({"data": {"train": {"src": "a", "trg": "b", "source": "c"}}}, r"data\.train\.source: unknown setting"),
    ({"data": {"train": 7}}, r"data\.train: is 7, must be a group of settings"),
    ({"train": {"loss_on": "source"}}, r"train\.loss_on: is 'source', must be one of target, both"),
    ({"translate": {"backend": "ctranslate2", "finish": "best", "patience": 1.0}},
     r"translate\.backend \(ctranslate2\) is of translation"),
])
def test_faulty_settings(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        recipe(tmp_path, **changes)


def test_settings_of_pairs_have_no_effect_on_a_text(tmp_path: Path) -> None:
    for changes, said in (({"train": {"loss_on": "both"}}, "loss_on (both) is of pairs, src and trg; remove it"),
                          ({"data": {"src_lang": "de"}}, "src_lang is of pairs, src and trg; remove it"),
                          ({"translate": {"beam": 3}}, "translate has no effect with task: language_model but on")):
        with pytest.raises(UserError, match=re.escape(said)):
            of_one_side(tmp_path, **changes)


def test_a_recipe_is_written_as_it_was_given(tmp_path: Path) -> None:
    for made in (recipe(tmp_path), of_one_side(tmp_path)):
        again = check_recipe(yaml.safe_load(dump_recipe(made)), "again")
        assert again == made
    assert yaml.safe_load(dump_recipe(made))["data"]["train"] == [str(tmp_path / "train.txt")]


def test_commands_refuse_what_they_cannot_do(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "run")
    for command, words, said in (
        ("score", [], "score is of texts of one side, but data.train of the recipe is pairs"),
        ("sample", [], "sample is of texts of one side"),
        ("evaluate", ["--context", "3"], "--context is of texts of one side, but the recipe has pairs"),
        ("evaluate", ["--metric", "wer2"], "--metric is 'wer2', must be one of bleu"),
        ("translate", ["train.updates=3"], "train.updates=3 has no effect here"),
        ("fold", [], "holds a model of the task language_model, must be one of translation"),
    ):
        assert main(command, [run, *words]) == 2
        assert said in capsys.readouterr().err, (command, words)
    with pytest.raises(UserError, match="must be one of translation; deepnmt translate and deepnmt evaluate use it"):
        load(run)
