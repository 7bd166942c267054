"""Exported models equal deepnmt's own, load without deepnmt, and a wrong one is not kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiny_run
import torch
import yaml
from refusals import Refused, user_error
from test_folding import as_trained, shapes

import deepnmt
from deepnmt import config
from deepnmt.checkpoint.checkpoint import Contents, LoadedModel, load_model
from deepnmt.cli import main
from deepnmt.config.choices import BLOCKS
from deepnmt.data.vocab import Vocabulary, train_vocabulary
from deepnmt.extras.export import job, post_ln, targets
from deepnmt.extras.export.card import model_card, script_of
from deepnmt.extras.export.plain import Plain, to_plain
from deepnmt.extras.export.proof import Native, Proof
from studies.__main__ import main as main_of_studies

LIBRARIES = {"ctranslate2": "ctranslate2", "huggingface": "transformers", "onnx": "onnxruntime"}
VOCAB = Vocabulary(tiny_run.VOCAB)


def target(name: str) -> job.Target:
    for library in (LIBRARIES[name], *(["onnx"] if name == "onnx" else [])):
        pytest.importorskip(library, reason=f"{library} is not installed; pip install 'deepnmt[export]'")
    return job.TARGETS[name]()


@pytest.fixture(scope="module")
def run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Admin over DeepNorm, trained for long enough that ω_1 is a vector and translations end."""
    run = tmp_path_factory.mktemp("export") / "run"
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", "model.decoder.block=deepnorm",
                          "model.width=32", "train.updates=60", "train.save_every=60", "train.validate_every=60",
                          "train.valid_bleu=false", "optimizer.lr=1e-2", "parallel.threads=1"]) == 0
    return run


def loaded_of(model: config.Model, tmp_path: Path) -> LoadedModel:
    """A random model as if it had been loaded."""
    module = as_trained(model)
    with torch.no_grad():  # without norms, weights as large would give logits in the thousands
        for name, parameter in module.named_parameters():
            if (model.encoder.facts.norm_free or model.decoder.facts.norm_free) and "norms" not in name:
                parameter.mul_(0.5)
    recipe = tiny_run.recipe_of(tmp_path / "run", model=model.model_dump())
    return LoadedModel(module, VOCAB, VOCAB, recipe, tiny_run.state_of(10), tmp_path)


def difference(to: job.Target, loaded: LoadedModel, folder: Path) -> float:
    """The largest difference of a token's log-probability on random sentences."""
    folder.mkdir()
    to.write(loaded, folder, "fp32")
    draw = torch.Generator().manual_seed(3)
    sources, targets = ([torch.randint(4, 40, (n,), generator=draw).tolist() for n in sizes]
                        for sizes in ((3, 7, 11, 1), (5, 2, 9, 8)))
    sources = [[*source, 2] for source in sources]
    scores = [engine.score(sources, targets) for engine in (Native(loaded.model), to.engine(loaded, folder, "fp32"))]
    return max(abs(a - b) for ours, theirs in zip(*scores, strict=True) for a, b in zip(ours, theirs, strict=True))


def test_each_target_has_its_function() -> None:
    assert set(targets.EXPORTERS.where(lambda target: not target.checkpoint and not target.encoder)) == set(job.TARGETS)


def test_the_page_says_which_blocks_fold() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "blocks.md").read_text(encoding="utf-8")
    sentence = " ".join(page.split()).partition("into `RUN/folded`. It takes")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == post_ln.REWRITES.keys()


@pytest.mark.parametrize(("encoder", "decoder", "settings"), [
    ("post_ln", "post_ln", {}), ("pre_ln", "pre_ln", {"tied": "none"}), ("pre_ln", "post_ln", {"tied": "decoder"}),
    ("admin", "admin", {}), ("admin_closed_form", "deepnorm", {"tied": "none"}),
    ("rezero_post_ln", "looks_linear", {"activation": "gelu"}), ("rezero", "rezero", {}), ("t_fixup", "post_ln", {}),
    ("post_ln", "fixup", {"tied": "none"}), ("fixup", "admin", {"encoder.init": "published"}),
    ("fixup", "fixup", {"encoder.init": "published", "decoder.init": "published"}),
    ("looks_linear", "admin_closed_form", {"encoder.init": "published", "decoder.init": "published"}),
    ("admin", "rezero", {"tied": "none", "encoder.width": 24, "decoder.heads": 4, "activation": "silu"}),
    ("admin", "pre_ln", {"norm": "rms_norm", "activation": "swiglu"}),
    ("rezero", "deepnorm", {"norm": "rms_norm", "activation": "geglu", "tied": "none"}),
    ("post_ln", "rezero_post_ln", {"activation": "reglu"}), ("lns", "lns", {}), ("lns", "admin", {"norm": "rms_norm"}),
    ("peri_ln", "peri_ln", {}), ("peri_ln", "deepnorm", {"norm": "rms_norm", "activation": "swiglu"}),
    ("rezero", "peri_ln", {"tied": "none"}),
])
def test_every_block_with_a_plain_form_goes_to_ctranslate2(
    encoder: str, decoder: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    loaded = loaded_of(config.with_settings(shapes(encoder, decoder), settings), tmp_path)
    assert difference(target("ctranslate2"), loaded, tmp_path / "out") < 1e-5


@pytest.mark.parametrize(("block", "settings"), [
    ("post_ln", {}), ("pre_ln", {}), ("pre_ln", {"tied": "none"}), ("admin", {}), ("deepnorm", {"tied": "decoder"}),
    ("t_fixup", {}), ("lns", {"encoder.ramp": 1}),
])
def test_pairs_of_one_kind_go_to_huggingface(block: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Admin's ω_1 is a vector: the position table in the file is then another than the class's own."""
    loaded = loaded_of(config.with_settings(shapes(block, block), settings), tmp_path)
    assert difference(target("huggingface"), loaded, tmp_path / "out") < 1e-5


@pytest.mark.parametrize(("encoder", "decoder", "settings"), [
    ("b2t_no_ln", "dlcl", {}), ("peri_ln", "siamese", {}), ("keel", "mhc", {}), ("mix_ln", "block_attn_res", {}),
    ("hyper", "sub_ln", {"norm": "rms_norm"}), ("attn_res", "lns", {}),
    ("dlcl_post", "b2t", {"norm": "rms_norm", "activation": "swiglu", "tied": "none", "decoder.width": 24}),
])
def test_every_block_goes_to_onnx(encoder: str, decoder: str, settings: dict[str, Any], tmp_path: Path) -> None:
    loaded = loaded_of(config.with_settings(shapes(encoder, decoder), settings), tmp_path)
    assert difference(target("onnx"), loaded, tmp_path / "out") < 1e-4


@pytest.mark.parametrize("block", [
    name for name, block in BLOCKS.items()
    if block.exported_as not in ("post_ln", "pre_ln") and name not in post_ln.REWRITES])
def test_what_has_no_plain_form_is_refused(block: str, tmp_path: Path) -> None:
    with user_error(f"^model.decoder.block is {block}, which transformers cannot compute: .* --to onnx"):
        to_plain(loaded_of(shapes("post_ln", block), tmp_path), "transformers")


def test_a_model_that_still_grows_by_prores_is_refused(tmp_path: Path) -> None:
    """Its sub-layers count less than those of its block."""
    loaded = loaded_of(config.with_settings(shapes("admin", "admin"), {"decoder.ramp": 400}), tmp_path)
    with user_error(r"^model.decoder.ramp is 400, so its \d layers are whole from update .* is of update 10; take"):
        to_plain(loaded, "CTranslate2")


def test_modern_pieces_without_a_form_elsewhere_are_refused(tmp_path: Path) -> None:
    for name, value in (("norm", "rms_norm"), ("positions", "rotary"), ("activation", "swiglu")):
        model = config.with_settings(shapes("pre_ln", "pre_ln"), {name: value})
        for to in ("huggingface", *(["ctranslate2"] if value == "rotary" else [])):
            with user_error(f"^model.{name} is {value}, which deepnmt cannot write for "):
                target(to).write(loaded_of(model, tmp_path), tmp_path, "fp32")
    rotary = loaded_of(config.with_settings(model, {"positions": "rotary"}), tmp_path)
    with user_error("^model.positions is rotary, which deepnmt cannot write for ONNX"):
        target("onnx").write(rotary, tmp_path, "fp32")


def test_pairs_of_two_kinds_are_refused_by_huggingface(tmp_path: Path) -> None:
    to = target("huggingface")
    for encoder in ("pre_ln", "t_fixup"):
        with user_error(f"^model.encoder.block is {encoder} and model.decoder.block is post_ln, for which "):
            to.write(loaded_of(shapes(encoder, "post_ln"), tmp_path), tmp_path, "fp32")


def test_a_weight_that_has_no_place_is_refused(tmp_path: Path) -> None:
    plain = Plain({"encoder.layers.0.gate": torch.zeros(1)}, shapes("post_ln", "post_ln"))
    with user_error(r"^encoder.layers.0.gate has no place in a model of X"):
        plain.require_all_used("X")


SCRIPT = """
import json, sys
folder, lines = sys.argv[1], json.loads(sys.argv[2])
{script}
assert not any(name.partition(".")[0] == "deepnmt" for name in sys.modules)
print(json.dumps(translations))
"""


def test_the_card_of_a_norwegian_model(tmp_path: Path) -> None:
    """YAML takes `no` for false. Languages, name and scores are the model's own, whatever run it is exported into, and
    no scores are of weights that were in its folder before."""
    other = loaded_of(config.Model(width=16, heads=2, ffn=32), tmp_path)
    loaded = replace(other, recipe=config.with_settings(other.recipe, {"data.trg_lang": "no", "run": "runs/nordic"}))
    own = {"checkpoint": str(tmp_path), "update": loaded.state.update, "averaged_updates": [],
           "sets": {"t": {"bleu": 40.5, "bleu_signature": "x"}}}
    ensemble = {**own, "sets": {"t": {"bleu": 41.5, "bleu_signature": "x"}}, "ensemble": ["another"]}
    shorter = {**own, "sets": {"t": {"bleu": 42.5, "bleu_signature": "x"}}, "update": loaded.state.update + 1}
    average = {**own, "sets": {"t": {"bleu": 43.5, "bleu_signature": "x"}}, "averaged_updates": [1, 2]}
    run = tmp_path / "run"
    run.mkdir()
    for name, scores in {"": own, "-two": ensemble, "-list": [], "-odd": {"checkpoint": None}, "-before": shorter,
                         "-other": average}.items():
        (run / f"scores{name}.json").write_text(json.dumps(scores))
    card = partial(model_card, "onnx", recipe=other.recipe, proof=Proof(1, 1, 0.0, 1, 0, 1.0, 1.0, 0.0, ""))
    text = card(loaded, licence="mine: #1")
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["language"], head["license"]) == ([loaded.recipe.data.src_lang, "no"], "mine: #1")
    assert f"\n# nordic: {loaded.recipe.data.src_lang} to no\n" in text
    assert "| bleu, t | 40.50 |" in text and not re.search("4[123].5", text)
    (run / "scores-beam_1.json").write_text(json.dumps({**own, "sets": {"t": {"bleu": 39.5, "bleu_signature": "x"}}}))
    assert {"| bleu, t (scores) | 40.50 | `x` |", "| bleu, t (scores-beam_1) | 39.50 | `x` |"} <= {
        *card(loaded, licence="").splitlines()}
    inside = replace(loaded, folder=run / "checkpoints" / "averaged")  # of a run that was renamed
    assert "\n# run: " in card(inside, licence="")


@pytest.mark.parametrize("to", list(LIBRARIES))
def test_a_run_is_exported_and_loads_without_deepnmt(
    to: str, run: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target(to)
    folder = tmp_path / "out"
    assert main("export", [str(run), "--to", to, "--output", str(folder), "--lines", "8"]) == 0
    said = capsys.readouterr().out
    assert "log-probabilities of 8 references within" in said and "of 8 lines identical" in said, said
    facts = json.loads((folder / "deepnmt.json").read_text())
    assert facts["format"] == to and facts["proof"]["fp32"]["difference"] < 1e-5
    card = (folder / "README.md").read_text()
    assert "license: unknown" in card and "- de" in card and "nrefs:1|case:mixed" in card and "vocab:" in card
    script = script_of(to, *load_model(run).vocabs)
    assert script.rstrip() in card

    lines = (prepared / "text" / "test.en").read_text(encoding="utf-8").splitlines()[:6]
    unknown = to == "ctranslate2"  # its softmax is over the tokens that are not suppressed, deepnmt's over all
    if unknown:
        script = script.replace(", suppress_sequences=never", "")
    code = SCRIPT.format(script=script)
    result = subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(lines)], check=False, timeout=600,
                            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    assert result.returncode == 0, result.stderr
    source, output = tmp_path / "in", tmp_path / "translated"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    search = (["translate.method=greedy", "translate.max_extra=22"] if to == "onnx" else
              ["translate.beam=5", "translate.finish=best", "translate.patience=1", "translate.min_length=1",
               "translate.max_ratio=1", "translate.max_extra=200"])
    assert main("translate", [str(run), "--input", str(source), "--output", str(output), "--format", "jsonl",
                              f"translate.unknown={json.dumps(unknown)}", *search]) == 0
    ours = [json.loads(line)["hypotheses"][0] for line in output.read_text(encoding="utf-8").splitlines()]
    same = []
    for one, theirs in zip(ours, json.loads(result.stdout), strict=True):
        if to == "onnx":  # greedily this model goes on until its limit, which is not the same
            same.append(len(theirs) > 9 and (one["text"].startswith(theirs) or theirs.startswith(one["text"])))
        elif one["ended"]:
            same.append(one["text"] == theirs)
    assert all(same) and len(same) >= 3, ours


def test_the_tokenizer_of_huggingface_gives_the_same_ids(run: Path, prepared: Path, tmp_path: Path) -> None:
    to = target("huggingface")
    loaded = load_model(run)
    to.write(loaded, tmp_path, "fp32")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    lines = [*(prepared / "text" / "train.en").read_text(encoding="utf-8").splitlines(), "Zürich „ ½ x", "a  b"]
    assert tokenizer(lines)["input_ids"] == [[*loaded.src_vocab.encode(line.strip()), 2] for line in lines]


@pytest.mark.parametrize("to", list(LIBRARIES))
def test_tags_are_pieces_without_deepnmt_too(to: str, prepared: Path, tmp_path: Path) -> None:
    """SentencePiece itself segments a tag into characters."""
    text = (prepared / "text" / "train.en").read_text(encoding="utf-8").splitlines()
    vocab = Vocabulary(train_vocabulary(text, config.Vocab(size=100), ["<2de>", "<bt>"]))
    other = loaded_of(shapes("post_ln", "post_ln"), tmp_path)
    loaded = replace(other, src_vocab=vocab, trg_vocab=vocab)
    lines = [*text[:3], f"<2de> {text[0]}", f"<2de> <bt> {text[1]}", "<bt>", "a <2de>"]
    wanted = [[*vocab.encode(line), 2] for line in lines]
    if to == "huggingface":
        (tmp_path / "out").mkdir()
        target(to).write(loaded, tmp_path / "out", "fp32")
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer(lines[:-1])["input_ids"] == wanted[:-1]  # tags that stand later are tags there
        return
    script = script_of(to, vocab, vocab)
    assert "source.encode" not in script.partition("    return [first")[2].partition("\n")[2]
    source = sentencepiece.SentencePieceProcessor(model_proto=vocab.bytes)
    known: dict[str, Any] = {"source": source}
    exec(script[script.index("tags = "):script.index("\n", script.index("    return [first"))], known)
    assert [[*source.piece_to_id(known["encode"](line)), 2] for line in lines] == wanted


def test_what_export_did_not_write_is_not_deleted(run: Path, tmp_path: Path, refused: Refused) -> None:
    """A folder is written anew as a whole; what somebody put or changed there would be gone."""
    target("onnx")
    folder = tmp_path / "out"
    again = ["export", str(run), "--to", "onnx", "--output", str(folder), "--lines", "8"]
    assert main(again[0], again[1:]) == 0
    assert main(again[0], again[1:]) == 0
    (folder / "LICENSE").write_text("mine")
    assert f"{folder}/LICENSE would be deleted, which deepnmt export did not write" in refused(*again)
    (folder / "LICENSE").unlink()
    (folder / "README.md").write_text("mine")
    assert f"{folder}/README.md would be written anew, but somebody has changed it" in refused(*again)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize("to", list(LIBRARIES))
def test_no_translation_has_unk(to: str, tmp_path: Path) -> None:
    """As in deepnmt, also of a model that prefers it; other programs leave it out of the text, and words vanish."""
    loaded = loaded_of(shapes("post_ln", "post_ln"), tmp_path)
    with torch.no_grad():
        loaded.model.decoder.layers[-1].rule.norms[2].bias.add_(9.0 * loaded.model.output_weight[0])
    folder = tmp_path / "out"
    folder.mkdir()
    target(to).write(loaded, folder, "fp32")
    for side, vocab in zip(("src", "trg"), loaded.vocabs, strict=True):
        (folder / f"{side}.spm").write_bytes(vocab.bytes)
    lines = ["the small dog", "two birds sing"]
    known: dict[str, Any] = {"folder": str(folder), "lines": lines}
    exec(script_of(to, *loaded.vocabs).replace("**batch", "**batch, max_new_tokens=9"), known)
    assert all(text.strip() and "\u2047" not in text for text in known["translations"]), known["translations"]


def test_a_batch_of_the_backend_searches_each_sentence_as_alone(tmp_path: Path) -> None:
    """Though others in it have higher limits: no hypothesis of the n-best list is longer than its own."""
    to = target("ctranslate2")
    from deepnmt.extras.export.searcher import CTranslate2

    loaded = loaded_of(shapes("post_ln", "post_ln"), tmp_path)
    weight = loaded.model.output_weight[2].detach()
    with torch.no_grad():  # so that hypotheses end now and then
        loaded.model.decoder.layers[-1].rule.norms[2].bias.add_(5.0 * weight / weight.norm() ** 2)
    (tmp_path / "out").mkdir()
    to.write(loaded, tmp_path / "out", "fp32")
    searcher = CTranslate2(tmp_path / "out", loaded.vocabs, "fp32")
    draw, limits, shorter = torch.Generator().manual_seed(3), [4, 8, 30], 0
    for trial in range(24):
        sources = [[*torch.randint(4, 40, (size,), generator=draw).tolist(), 2] for size in (2, 5, 9)]
        settings = config.Translate(beam=5, nbest=1 + trial % 5, finish="best", patience=1.0)
        for source, limit, found in zip(sources, limits, searcher.search(sources, limits, settings, [0]), strict=True):
            (alone,) = searcher.search([source], [limit], settings, [0])
            assert [one.tokens for one in found] == [one.tokens for one in alone] and len(found) == settings.nbest
            assert all(len(one.tokens) + one.ended <= limit for one in found)
            shorter += sum(one.ended for one in found)
    assert shorter


@pytest.mark.parametrize("fault", ["norm", "matrix", "positions", "bias"])
def test_a_wrong_weight_is_caught(
    fault: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """One norm's gain 1 % off, two rows of a matrix swapped, positions without ω_1, one bias off."""
    target("ctranslate2")
    right: Any = getattr(Plain, {"norm": "norm", "matrix": "linear", "bias": "linear", "positions": "positions"}[fault])

    def wrong(self: Plain, name: str, *rest: Any) -> Any:
        found = right(self, name, *rest)
        if fault == "positions":
            return found / self._gain(name)
        first, second = (values.copy() for values in found)
        if fault == "norm" and name == "decoder.layers.1.rule.norms.2":
            first *= 1.01
        if fault == "matrix" and name == "encoder.layers.0.ffn.fc1":
            first[[0, 1]] = first[[1, 0]]
        if fault == "bias" and name == "decoder.layers.0.cross_attn.out":
            second[0] += 0.02
        return first, second

    monkeypatch.setattr(Plain, right.__name__, wrong)
    message = refused("export", run, "--to", "ctranslate2", "--output", tmp_path / "out", "--lines", 8)
    assert "is not the same as that of" in message and "a token's log-probability differs by" in message
    assert not list(tmp_path.iterdir())


def test_int8_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    target("ctranslate2")
    said = {}
    for precision in ("fp32", "int8"):
        assert main("export", [str(run), "--to", "ctranslate2", "--output", str(tmp_path / precision), "--lines", "5",
                               "--precision", precision]) == 0
        said[precision] = capsys.readouterr().out
    assert "weights in int8: log-probabilities of 5 references within" in said["int8"]
    sizes = [(tmp_path / precision / "model.bin").stat().st_size for precision in ("fp32", "int8")]
    assert sizes[1] < 0.7 * sizes[0]
    facts = json.loads((tmp_path / "int8" / "deepnmt.json").read_text())
    assert facts["proof"]["int8"]["difference"] > facts["proof"]["fp32"]["difference"]
    _, _, measured = said["int8"].splitlines()[1].partition("weights in int8: ")
    assert f"Compared with deepnmt's own model, weights in int8: {measured}." in (
        tmp_path / "int8" / "README.md").read_text()
    message = refused("export", run, "--to", "huggingface", "--output", tmp_path / "hf", "--precision", "int8")
    assert "--precision is int8, but --to huggingface writes fp32" in message


def test_the_backend_searches_as_deepnmt_does(
    run: Path, prepared: Path, tmp_path: Path, refused: Refused, threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """In commands and in Python; never by itself; of these weights only. A study times it."""
    target("ctranslate2")
    lines = (prepared / "text" / "test.en").read_text(encoding="utf-8").splitlines()
    (source := tmp_path / "in").write_text("\n".join([*lines[:5], "", *lines[5:]]) + "\n", encoding="utf-8")
    search = ["translate.beam=4", "translate.finish=best", "translate.patience=1", "translate.nbest=2",
              "translate.max_ratio=0.5", "translate.min_length=1"]
    words = ["translate", run, "--input", source, "--format", "jsonl", *search]
    backend = "translate.backend=ctranslate2"
    assert "there is no exported model in" in refused(*words, backend)
    assert main("export", [str(run), "--to", "ctranslate2", "--lines", "4"]) == 0
    found = {}
    for name, extra in (("torch", 20), ("longer", 26), ("ctranslate2", 20)):
        arguments = [str(word) for word in (*words[1:], f"translate.backend={name.replace('longer', 'torch')}",
                                            f"translate.max_extra={extra}", "--output", tmp_path / name)]
        assert main("translate", arguments) == 0
        found[name] = [json.loads(line)["hypotheses"] for line in (tmp_path / name).read_text("utf-8").splitlines()]
    assert found["torch"][5] == found["ctranslate2"][5]  # an empty line
    compared = 0
    for ours, longer, theirs in zip(found["torch"], found["longer"], found["ctranslate2"], strict=True):
        if ours == longer:  # at a length limit the searches differ
            compared += 1
            assert [one["text"] for one in ours] == [one["text"] for one in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one["log_prob"] == pytest.approx(other["log_prob"], rel=0.01)  # barred pieces had a share
                assert one["tokens"] == other["tokens"]
    assert compared >= 3, compared
    short = [backend, *search[:3], "translate.max_extra=2", "translate.min_length=300"]  # if the limit allows
    assert main("translate", [str(run), "--input", str(source), *short, "--output", str(tmp_path / "short")]) == 0
    model = deepnmt.load(run)
    nbest = model.translate_nbest(lines, backend="ctranslate2", beam=4, finish="best", patience=1.0, min_length=1,
                                  max_ratio=0.5, max_extra=20, nbest=2)
    assert [line[0].text for line in nbest] == [line[0]["text"] for line in found["ctranslate2"] if line[0]["tokens"]]
    for patience in (0.1, 1e308):  # CTranslate2 itself refuses these
        found_two = model.translate_nbest(lines[:4], backend="ctranslate2", beam=4, finish="best", patience=patience,
                                          nbest=2)
        assert [len(line) for line in found_two] == [2] * 4
    assert len(model.translate(lines[:2], beam=1)) == 2  # deepnmt's own is as before
    assert main("evaluate", [str(run), backend, *search, "translate.max_extra=20", "--test",
                             f"mine={prepared}/text/test.en,{prepared}/text/test.de",
                             "--output", str(tmp_path / "scores.json")]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["translate"]["backend"] == "ctranslate2"
    kept, = (tmp_path / "scores").glob("*.hyp*")
    assert kept.read_text("utf-8").splitlines() == [line[0].text for line in nbest]
    texts = [str(prepared / "text" / name) for name in ("test.en", "test.de")]
    capsys.readouterr()
    assert main_of_studies("searches", [str(run), *texts, "--lines=2", "--rounds=1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 15 and all(re.fullmatch(r"\| .*, .* \| [\d.]+ \(.*\) \| [\d.]+ \| [\d.]+ \| \d of 2 \|", row)
                                    for row in table[2:])
    other = tmp_path / "other"
    assert main("average", [str(run), "--last", "1", "--output", str(other / "averaged")]) == 0
    (run / "ctranslate2").rename(other / "ctranslate2")
    tiny_run.forge(other / "ctranslate2" / "deepnmt.json", weights={})
    assert "which is not what" in refused(*words, backend, "--checkpoint", other / "averaged")


def test_a_damaged_export_is_not_used(run: Path, tmp_path: Path, refused: Refused) -> None:
    """A flipped bit gave other translations without a word in three of six cases; so would a file of another export."""
    target("ctranslate2")
    from deepnmt.extras.export.searcher import load_exported

    assert main("average", [str(run), "--last", "1", "--output", str(tmp_path / "averaged")]) == 0
    folder, average = tmp_path / "ctranslate2", str(tmp_path / "averaged")
    assert main("export", [str(run), "--to", "ctranslate2", "--lines", "2", "--checkpoint", average,
                           "--output", str(folder)]) == 0
    loaded = load_model(tmp_path / "averaged")
    facts = json.loads((folder / "deepnmt.json").read_text())
    assert facts["files"].keys() == {file.name for file in folder.iterdir()} - {"deepnmt.json"}
    (folder / "README.md").write_text("my own words")
    load_exported(loaded, loaded.recipe.translate, "cpu")
    for name in sorted(facts["files"].keys() - {"README.md"}):
        content = (folder / name).read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 64])
        for damaged, words in (
            (content[:middle] + flipped + content[middle + 1 :], f"the SHA-256 of {name} differs"),
            (content[:-1], f"{name} has {len(content) - 1} bytes, but {len(content)} according to deepnmt.json"),
        ):
            (folder / name).write_bytes(damaged)
            with user_error(f"^exported model {folder} is damaged: {words}.*; export the run again$"):
                load_exported(loaded, loaded.recipe.translate, "cpu")
        (folder / name).write_bytes(content)
    (folder / "source_vocabulary.txt").write_text("of another model")
    with user_error("deepnmt.json does not name source_vocabulary.txt, which is none of the model's files"):
        load_exported(loaded, loaded.recipe.translate, "cpu")
    (folder / "source_vocabulary.txt").unlink()
    whole = (folder / "deepnmt.json").read_text()
    old = {key: value for key, value in facts.items() if key not in ("files", "sha256")} | {"deepnmt": "0.2.0"}
    for text, words in ((whole[:99], "deepnmt.json cannot be read"), ("", "deepnmt.json cannot be read"),
                        ("[1]", "deepnmt.json is not a JSON object"), ("null", "is not a JSON object"),
                        (whole.replace('"update": 60', '"update": 61'), "deepnmt.json has been altered"),
                        (json.dumps(old), "was exported by deepnmt 0.2.0, which kept no hashes of its files")):
        (folder / "deepnmt.json").write_text(text)
        message = refused("translate", run, "--checkpoint", average, "--input", folder / "README.md",
                          "translate.backend=ctranslate2", "translate.finish=best", "translate.patience=1")
        assert words in message and message.strip().endswith("export the run again"), message


def test_an_export_is_replaced_only_by_a_complete_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    target("ctranslate2")
    words = [str(run), "--to", "ctranslate2", "--lines", "2", "--output", str(tmp_path / "out")]
    assert main("export", words) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(job, "model_card", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert f"exported model folder {tmp_path}/out cannot be written: No space left" in refused("export", *words)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_own_export_is_imported_whole_or_not_at_all(
        run: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    target("huggingface")
    folder = tmp_path / "out"
    assert main("export", [str(run), "--to", "huggingface", "--lines", "2", "--output", str(folder)]) == 0
    assert "Loading" not in capsys.readouterr().err  # a progress bar of transformers
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 64
    (folder / "model.safetensors").write_bytes(content)
    assert "the SHA-256 of model.safetensors differs from that in deepnmt.json; export the run again" in refused(
        "import", folder, tmp_path / "run")


def test_mistakes_are_refused(run: Path, tmp_path: Path, refused: Refused) -> None:
    target("ctranslate2")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    export = ("export", run, "--to", "ctranslate2", "--output")
    assert "thesis exists and is no exported model" in refused(*export, tmp_path / "thesis")
    assert "--text is 'a', must be SRC,REF" in refused(*export, tmp_path / "x", "--text", "a")
    assert "--lines is 0, must be 1 or more" in refused(*export, tmp_path / "x", "--lines", 0)
    assert "--licence is empty, must be a name such as" in refused(*export, tmp_path / "x", "--licence", "")
    assert "--lines has no effect with --to post_ln" in refused("export", run, "--to", "post_ln", "--lines", 5)
    assert "model.width=8 has no effect here because a trained model is exported" in refused(
        *export, tmp_path / "x", "model.width=8")


def test_too_little_memory_is_a_sentence(
        run: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name, words in (("extras.export.job.export_run", ("export", run, "--to", "onnx")),
                        ("extras.export.post_ln.fold_run", ("fold", run)),
                        ("extras.export.imports.import_run", ("import", run, "run")),
                        ("tasks.language_model.huggingface.import_model", ("import", tmp_path, "run"))):
        monkeypatch.setattr(f"deepnmt.{name}", lambda *_, **__: torch.empty(2**50))
        assert "there is not enough memory (" in refused(*words), name


def test_post_ln_is_a_target(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("export", [str(run), "--to", "post_ln", "--output", str(tmp_path / "folded")]) == 0
    assert "encoder (admin) and decoder (deepnorm) as post_ln" in capsys.readouterr().out
    assert load_model(tmp_path / "folded").recipe.model.decoder.block == "post_ln"


def test_rezero_post_ln_and_looks_linear_fold(tmp_path: Path) -> None:
    """Written out for one sub-layer each: a times the last matrix; fc1 and its negative."""
    model = shapes("rezero_post_ln", "looks_linear")
    recipe = tiny_run.recipe_of(tmp_path / "run", model=model.model_dump())
    module = as_trained(model)
    tiny_run.save(tmp_path / "run" / "checkpoints", Contents(
        dict(module.named_parameters()), {}, tiny_run.state_of(10), config.dump_recipe(recipe), tiny_run.VOCABS))
    (tmp_path / "run" / "recipe.yaml").write_text(config.dump_recipe(recipe), encoding="utf-8")
    assert main("fold", [str(tmp_path / "run")]) == 0  # which compares the logits
    after = load_model(tmp_path / "run" / "folded").model
    a = module.get_parameter("encoder.layers.1.rule.a")
    for name in ("encoder.layers.1.self_attn.out.weight", "encoder.layers.1.ffn.fc2.bias"):
        torch.testing.assert_close(after.get_parameter(name), a * module.get_parameter(name))
    half = module.get_parameter("decoder.layers.0.ffn.fc1.weight")
    np.testing.assert_array_equal(after.get_parameter("decoder.layers.0.ffn.fc1.weight").detach(),
                                  torch.cat([half, -half]).detach())
