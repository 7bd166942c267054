"""Reading recipes, and the message for each fault."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from refusals import user_error

from deepnmt.config import Parallel, Recipe, check_recipe, dump_recipe, load_recipe, with_settings
from deepnmt.config.choices import ACTIVATIONS, BLOCKS, OPTIMIZERS, SCHEDULES, SEARCHES
from deepnmt.config.fields import either
from deepnmt.errors import UserError

SMALL = """
run: runs/x
data:
  folder: data/x
  src_lang: en
  trg_lang: de
  train: {src: train.en, trg: train.de}
  valid: {src: [valid.en], trg: [valid.de]}
train:
  updates: 10
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


def changed(**settings: Any) -> dict[str, Any]:
    """The small recipe's tree with settings changed (`model__width=3`); None removes a setting."""
    tree: dict[str, Any] = copy.deepcopy(yaml.safe_load(SMALL))
    for key, value in settings.items():
        *parents, name = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            del node[name]
        else:
            node[name] = value
    return tree


def faults_of(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_recipe(tree, "r.yaml")
    head, *lines = str(caught.value).split("\n")
    assert head == ("r.yaml has a fault:" if len(lines) == 1 else f"r.yaml has {len(lines)} faults:")
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


def test_what_yaml_reads_as_no_text() -> None:
    """The code of Norwegian, and years, as values and as names."""
    said = "must be a valid string; YAML reads it as that, write it in quotes"
    files = {"src": "a", "trg": "b"}
    for setting, value, fault in (("src_lang", False, "src_lang: is False"), ("folder", 2014, "folder: is 2014"),
                                  ("train", {False: files, "sv": files}, "train.corpora.False: is False"),
                                  ("test", {2014: files}, "test.2014: is 2014")):
        assert f"data.{fault}, {said}" in faults_of(changed(**{f"data__{setting}": value}))


def test_a_small_recipe_takes_the_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.data.train.src == ["train.en"]  # one name stands for a list of one
    assert (recipe.model.width, recipe.model.encoder.block, recipe.optimizer.lr) == (512, "admin", 5e-4)
    with pytest.raises(ValidationError):
        recipe.seed = 2


def test_dumped_recipe_loads_equal(recipe_file: Path, tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-3", "model.decoder.block=b2t", "data.test.news={tsv: n.tsv, columns: [2, 1]}",
                 "train.epochs=3", "run=Läufe/x"]
    recipe = load_recipe(recipe_file, overrides)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    moved = with_settings(recipe, {"run": str(run)})
    assert load_recipe(run) == moved  # the folder of a run serves as its recipe, wherever it was moved
    assert load_recipe(run / "recipe.yaml") == recipe
    assert "label_smoothing: 0.1" in dump_recipe(recipe) and "Läufe/x" in dump_recipe(recipe)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-3", ".1e-2", "+1e-3"])
def test_numbers_in_any_notation_are_numbers(recipe_file: Path, text: str) -> None:
    assert load_recipe(recipe_file, [f"optimizer.lr={text}"]).optimizer.lr == 0.001


def test_overrides_are_applied_in_order_and_make_missing_groups(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["model.encoder.layers=3", "model.encoder.layers=18", "train.updates=300"])
    assert (recipe.model.encoder.layers, recipe.train.updates) == (18, 300)
    assert load_recipe(recipe_file, ["parallel.ds_config=null"]).parallel.ds_config is None
    assert load_recipe(recipe_file, ["run=a=b"]).run == "a=b"


def test_environment_variables_are_expanded(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNMT_TEST_TEXTS", "some/where")
    recipe = load_recipe(recipe_file, ["data.train.src=['${DEEPNMT_TEST_TEXTS}/a', b]", "data.train.trg=[a, b]"])
    assert recipe.data.train.src == ["some/where/a", "b"]
    with_default = ["data.folder=${DEEPNMT_TEST_TEXTS:-else/where}/x"]
    assert load_recipe(recipe_file, with_default).data.folder == "some/where/x"
    monkeypatch.setenv("DEEPNMT_TEST_TEXTS", "")
    assert load_recipe(recipe_file, with_default).data.folder == "else/where/x"
    monkeypatch.delenv("DEEPNMT_TEST_TEXTS")
    assert load_recipe(recipe_file, with_default).data.folder == "else/where/x"


STAGED = {"a": {"src": "a.en", "trg": "a.de"}, "b": {"src": "b.en", "trg": "b.de"}}
FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__widht": 64}, ["model.widht: unknown setting; did you mean model.width?"]),
    ({"modle": {}}, ["modle: unknown setting; did you mean model?"]),
    ({"batch__zzz": 1}, ["batch.zzz: unknown setting; known: tokens, accumulation, update_tokens"]),
    ({"data__test__news": {"tsv": "a", "colums": [1, 2]}},
     ["data.test.news.colums: unknown setting; did you mean data.test.news.columns?"]),
    ({"model__width": "big"}, ["model.width: is 'big', must be a valid integer"]),
    ({"model__width": 64.0}, ["model.width: is 64.0, must be a valid integer"]),
    ({"seed": True}, ["seed: is True, must be a valid integer"]),
    ({"train__max_failed_saves": 0}, ["train.max_failed_saves: is 0, must be greater than or equal to 1"]),
    ({"train__keep_every": 150, "train__save_every": 100},
     ["train: keep_every (150) must be a multiple of save_every (100), such as 200; or set it to 0"]),
    ({"model__dropout": 1.0}, ["model.dropout: is 1.0, must be less than 1"]),
    ({"model__encoder__block": "re_zero"},
     ["model.encoder.block: is 're_zero', must be one of ...; did you mean rezero?"]),
    ({"translate__length_penalty": "Aver-age"},
     ["translate.length_penalty: is 'Aver-age', must be one of ...; did you mean average?"]),
    ({"train__ema": 1.0, "train__freeze": "encoder", "train__grow": "stakc", "train__init_from": ""},
     ["train.init_from: is '', must have at least 1 character",
      "train.grow: is 'stakc', must be one of stack, interleave; did you mean stack?",
      "train.freeze: is 'encoder', must be a valid list", "train.ema: is 1.0, must be less than 1"]),
    ({"train__grow": "stack"},
     ["train.grow (stack) needs train.init_from, whose layers it repeats; remove train.grow"]),
    ({"train__init_from": "runs/a", "admin__profile": "omega.json"},
     ["admin.profile (omega.json) has no effect with train.init_from (runs/a), which has trained ω; remove one of "
      "them"]),
    ({"optimizer__lr_factors": {"decoder": 1e-320}, "vocab__model": 3},  # 1 / 1e-320 overflows
     ["vocab.model: is 3, must be a valid string; YAML reads it as that, write it in quotes",
      f"optimizer.lr_factors.decoder: is 1e-320, must be greater than or equal to {1e-30:.30f}"]),
    ({"vocab__kind": 3, "vocab__character_coverage": 0.95},
     ["vocab.kind: is 3, must be one of ...",
      "vocab.character_coverage: is 0.95, must be greater than or equal to 0.98"]),
    ({"admin__method": "inplace", "admin__count_padding": "some"},
     ["admin.method: is 'inplace', must be one of in_place, separate; did you mean in_place?",
      "admin.count_padding: is 'some', must be a valid boolean"]),
    ({"model__ffn": 7, "model__decoder__block": "looks_linear"},
     ["model: ffn (7) must be even with block: looks_linear: half of it mirrors the other half"]),
    ({"model__encoder__init": "publish"},
     ["model.encoder.init: is 'publish', must be one of auto, xavier, xavier_separate, depth_scaled, published, "
      "fairseq; did you mean published?"]),
    ({"model__encoder__output_change": "one"},
     ["model.encoder.output_change: is 'one', must be one of log, constant, linear"]),
    ({"model__encoder__output_change": "linear"},
     ["model.encoder: output_change (linear) needs block: admin_closed_form, but block is admin; remove "
      "output_change, or set it to log"]),
    ({"model__encoder__history_window": -1, "model__decoder__history_softmax": 1},
     ["model.encoder.history_window: is -1, must be greater than or equal to 0",
      "model.decoder.history_softmax: is 1, must be a valid boolean"]),
    ({"model__encoder__history_window": 3, "model__encoder__history_softmax": True},
     ["model.encoder: history_window (3) needs block: dlcl or dlcl_post, but block is admin; remove history_window, "
      "or set it to 0",
      "model.encoder: history_softmax (true) needs block: dlcl or dlcl_post, but block is admin; remove "
      "history_softmax, or set it to false"]),
    ({"model__encoder__ramp": 5, "train__init_from": "runs/a"},
     ["model.encoder.ramp (5) would begin with a trained model (train.init_from: runs/a) without its layers; set it "
      "to 0"]),
    ({"model__decoder__ramp": 5, "parallel__compile": True},
     ["parallel.compile cannot be combined with ramp, which would have the layers compiled anew in every update; set "
      "parallel.compile: false, or ramp: 0"]),
    ({"model__encoder__streams": 2, "model__decoder__mix": "identity", "model__decoder__residual_blocks": 4},
     ["model.encoder: streams (2) needs block: hyper or mhc, but block is admin; remove streams, or set it to 4",
      "model.decoder: residual_blocks (4) needs block: block_attn_res, but block is admin; remove residual_blocks, "
      "or set it to 8",
      "model.decoder: mix (identity) needs block: mhc, but block is admin; remove mix, or set it to sinkhorn"]),
    ({"batch": 5}, ["batch: is 5, must be a group of settings; known: tokens, accumulation, update_tokens"]),
    ({"data__train__mtdata": ["a"], "data__train__sacrebleu": "wmt14/full"},
     ["data.train: give either 'mtdata' or 'sacrebleu', not both"]),
    ({"data__train__translated_by": "runs/a", "data__train__mtdata": ["a"]},
     ["data.train: 'translated_by' needs 'src' and 'trg', and nothing else that makes them; remove one of the two"]),
    ({"data__train__translate": {"method": "sample"}},
     ["data.train: 'translate' has no effect without 'translated_by', the model that translates; name it, or remove "
      "it"]),
    ({"data__train__src": "a.gz", "data__train__mtdata": ["a"]},
     ["data.train: 'mtdata' and 'sacrebleu' are fetched into two plain files; name one in 'src' and one in 'trg'"]),
    ({"train__trackers": ["wandb", "tensorboard"]},
     ["train.trackers.1: is 'tensorboard', must be one of ..."]),
    ({"data__test": "x"}, ["data.test: is 'x', must be a valid mapping"]),
    ({"optimizer__betas": [0.9]}, ["optimizer.betas: is [0.9], must have at least 2 items, not 1"]),
    ({"train__updates": None}, ["train.updates: is missing; this setting has no default"]),
    ({"parallel__device": "gpu"}, ["parallel.device: is 'gpu', must be one of auto, cuda, cpu; did you mean cpu?"]),
    ({"train__deterministic": "always"}, ["train.deterministic: is 'always', must be a valid boolean"]),
    ({"parallel__compile": "layers"}, ["parallel.compile: is 'layers', must be a valid boolean"]),
    ({"parallel__start_timeout": 0}, ["parallel.start_timeout: is 0, must be greater than or equal to 1"]),
    ({"parallel__same_paths": "sometimes"}, ["parallel.same_paths: is 'sometimes', must be a valid boolean"]),
    ({"train__checkpoint_form": "shard"},
     ["train.checkpoint_form: is 'shard', must be one of auto, one_file, shards; did you mean shards?"]),
    ({"data": None}, ["data: is missing; this setting has no default"]),
    ({"data__train": {"src": "a"}}, ["data.train: give 'src' and 'trg' files, or 'tsv' files"]),
    ({"data__valid__tsv": "a"}, ["data.valid: give either 'tsv' or 'src' and 'trg', not both"]),
    ({"data__train": {"src": ["a", "b"], "trg": "c"}},
     ["data.train: 'src' names 2 files and 'trg' 1; give as many of one as of the other"]),
    ({"model__width": 65, "model__heads": 4},
     ["model: width (65) must be a multiple of heads (4)",
      "model: width (65) must be even: positions are half sines, half cosines"]),
    ({"translate__precision": "int8"},
     ["translate: precision (int8) needs backend: ctranslate2, but backend is torch; set precision: fp32"]),
    ({"translate__backend": "ctranslate2"},
     ["translate: backend (ctranslate2) searches with finish: best and a patience, but finish is any and patience "
      "null; set finish: best and patience: 1.0"]),
    ({"translate__backend": "ctranslate2", "translate__method": "sample"},
     ["translate: backend (ctranslate2) needs method: beam or greedy, but method is sample; set backend: torch"]),
    ({"translate__nbest": 6}, ["translate: nbest (6) must not be above beam (5)"]),
    ({"translate": {"method": "greedy", "nbest": 2}},
     [f"translate: nbest (2) needs method: {either([name for name in SEARCHES if name != 'greedy'])}, but method is "
      "greedy; set nbest: 1"]),
    ({"translate": {"method": "mbr", "samples": 2, "nbest": 3}},
     ["translate: nbest (3) must not be above samples (2)"]),
    ({"translate": {"top_k": 5, "top_p": 0.9, "epsilon": 0.02}},
     ["translate: top_k (5) needs method: sample or mbr, but method is beam; remove top_k, or set it to 0",
      "translate: top_p (0.9) needs method: sample or mbr, but method is beam; remove top_p, or set it to 1",
      "translate: epsilon (0.02) needs method: sample or mbr, but method is beam; remove epsilon, or set it to 0"]),
    ({"translate": {"method": "sample", "top_p": 0.0, "epsilon": 1.0, "no_repeat_ngram": -1, "ensemble": "median"}},
     ["translate.top_p: is 0.0, must be greater than 0", "translate.epsilon: is 1.0, must be less than 1",
      "translate.no_repeat_ngram: is -1, must be greater than or equal to 0",
      "translate.ensemble: is 'median', must be one of arithmetic, geometric"]),
    ({"translate__temperature": 0.7},
     ["translate: temperature (0.7) needs method: sample or mbr, but method is beam; remove temperature, "
      "or set it to 1"]),
    ({"translate__samples": 64},
     ["translate: samples (64) needs method: mbr, but method is beam; remove samples, or set it to 32"]),
    ({"translate": {"method": "greedy", "patience": 1.0, "temperature": 2.0}},
     ["translate: temperature (2) needs method: sample or mbr, but method is greedy; remove temperature, "
      "or set it to 1",
      "translate: patience (1) needs method: beam, but method is greedy; remove patience, or set it to null"]),
    ({"run": ""}, ["run: is '', must have at least 1 character"]),
    ({"data__folder": ""}, ["data.folder: is '', must have at least 1 character"]),
    ({"optimizer__lr": float("inf"), "data__filters__max_ratio": float("nan")},
     ["data.filters.max_ratio: is nan, must be a finite number", "optimizer.lr: is inf, must be a finite number"]),
    ({"vocab__shared": False},
     ["model.tied: all needs vocab.shared: true (one embedding cannot serve two vocabularies); "
      "set model.tied: decoder"]),
    ({"model__max_length": 100},
     ["data.filters.max_tokens (250) must be below model.max_length (100), to leave room for eos"]),
    ({"batch__tokens": 250},
     ["batch.tokens (250) must be above data.filters.max_tokens (250), to hold the longest sentence with its eos"]),
    ({"train": {"updates": 5, "best_by": "bleu", "valid_bleu": False}},
     ["train.best_by: bleu needs train.valid_bleu: true"]),
    ({"schedule": {"name": "linear", "warmup": 10}},
     ["schedule.warmup (10) must be below train.updates (10) with schedule.name: linear"]),
    ({"optimizer": {"weight_decay": 0.1}},
     ["optimizer: weight_decay (0.1) needs decay_norms_and_biases: true (every parameter) or false (matrices alone)"]),
    ({"optimizer": {"decay_norms_and_biases": False}},
     ["optimizer: decay_norms_and_biases: false has no effect because weight_decay is 0; set it to null"]),
    ({"optimizer": {"unrectified": "skip"}},
     ["optimizer: unrectified (skip) needs name: radam or radamw, but name is adam; remove unrectified, "
      "or set it to momentum"]),
    ({"schedule": {"count_from": 2}}, ["schedule.count_from: is 2, must be less than or equal to 1"]),
    ({"schedule": {"start": 1e-3}},
     ["schedule.start (0.001) must not be above optimizer.lr (0.0005), the rate at the end of the warm-up"]),
    ({"schedule": {"start": 1e-7, "warmup": 0}},
     ["schedule: start (1e-07) needs a warm-up, but warmup is 0; remove start"]),
    ({"schedule": {"name": "inverse_sqrt_decay", "decay_period": 0}},
     ["schedule.decay_period: is 0, must be greater than or equal to 1"]),
    ({"optimizer": {"weight_decay": 1e39, "decay_norms_and_biases": True}},  # PyTorch would raise in the first update
     ["optimizer.weight_decay: is 1e+39, must be less than or equal to 1000000000"]),
    ({"train": {"updates": 10, "r_drop": -1.0}}, ["train.r_drop: is -1.0, must be greater than or equal to 0"]),
    ({"train": {"updates": 10, "r_drop": 5.0}, "model__dropout": 0.0},
     ["train.r_drop (5) has no effect because model.dropout and all other dropout is 0; set train.r_drop to 0, or a "
      "dropout"]),
    ({"plugins": ["gone.py"]},
     ["plugins: there is no file gone.py; give the path of a plug-in"]),
    ({"task": "singing"}, ["task: is 'singing', must be one of ..."]),
    ({"train": {"updates": 10, "guided_alignment": 0.05}},
     ["train.guided_alignment (0.05) needs word alignments; name their files in data.train.alignments, or set "
      "train.guided_alignment to 0"]),
    ({"train": {"updates": 10, "guided_alignment": 0.05, "guided_layer": 9},
      "data__train__alignments": "links", "parallel__pipeline_stages": 2},
     ["parallel.pipeline_stages (2) cannot be combined with train.guided_alignment (0.05): the last stage computes the "
      "loss, and the guided attention may be on another; set parallel.pipeline_stages: 0",
      "train.guided_layer (9) must not be above model.decoder.layers (6)"]),
    ({"model__encoder__layer_drop": 1.0}, ["model.encoder.layer_drop: is 1.0, must be less than 1"]),
    ({"translate__alpha": 11.0}, ["translate.alpha: is 11.0, must be less than or equal to 10"]),
    ({"translate__temperature": 0.0}, ["translate.temperature: is 0.0, must be greater than or equal to 0.000001"]),
    ({"model__norm": "rmsnorm"},
     ["model.norm: is 'rmsnorm', must be one of ...; did you mean rms_norm?"]),
    ({"model__positions": "rope"}, ["model.positions: is 'rope', must be one of ..."]),
    ({"model__decoder__width": 256},
     ["model: tied: all needs one width, but the encoder's is 512 and the decoder's 256; set tied: decoder"]),
    ({"model__decoder__heads": 7}, ["model: width (512) must be a multiple of decoder.heads (7)"]),
    ({"model__decoder__ffn": 0}, ["model.decoder.ffn: is 0, must be greater than or equal to 1"]),
    ({"model__positions": "rotary", "model__width": 18, "model__heads": 6},
     ["model: width (18) divided by heads (6) must be even with positions: rotary, which turns pairs of a head's "
      "dimensions"]),
    ({"model__activation": "swiglu", "model__decoder__block": "fixup"},
     ["model: activation (swiglu) has a gate, for which decoder.block: fixup has no rule; set activation to "
      f"{either(ACTIVATIONS.where(lambda row: not row.gated))}, or choose another block"]),
    ({"model__encoder__word_dropout": 1.0}, ["model.encoder.word_dropout: is 1.0, must be less than 1"]),
    ({"translate__min_length": -1}, ["translate.min_length: is -1, must be greater than or equal to 0"]),
    ({"translate": {"method": "sample", "finish": "best"}},
     ["translate: finish (best) needs method: beam, but method is sample; remove finish, or set it to any"]),
    ({"optimizer": {"name": "sgd", "betas": [0.9, 0.99], "eps": 1e-8}},
     [f"optimizer: betas ([0.9, 0.99]) needs name: {either(OPTIMIZERS.with_option('betas'))}, but name is sgd; remove "
      "betas, or set it to [0.9, 0.98]",
      f"optimizer: eps (1e-08) needs name: {either(OPTIMIZERS.with_option('eps'))}, but name is sgd; remove eps, or "
      "set it to 1e-09"]),
    ({"schedule": {"final": 1e-5, "step_factor": 0.5}},
     [f"schedule: final (1e-05) needs name: {either(SCHEDULES.with_option('final'))}, but name is inverse_sqrt; remove "
      "final, or set it to 0",
      "schedule: step_factor (0.5) needs name: step or plateau, but name is inverse_sqrt; remove step_factor, or set "
      "it to 0.1"]),
    ({"schedule": {"name": "cosine", "warmup": 10}},
     ["schedule.warmup (10) must be below train.updates (10) with schedule.name: cosine"]),
    ({"schedule": {"name": "wsd", "warmup": 3, "decay": 8}},
     ["schedule.warmup (3) and schedule.decay (8) must not be above train.updates (10) together"]),
    ({"schedule": {"name": "plateau", "patience": 2}, "train": {"updates": 10, "patience": 2}},
     ["schedule.patience (2) must be below train.patience (2), or the run ends before its rate drops"]),
    ({"schedule": {"name": "step", "warmup": 0, "step_epoch": 50}, "train": {"updates": 10, "epochs": 3}},
     ["schedule.step_epoch (50) must not be above train.epochs (3), the run's end"]),
    ({"schedule": {"name": "step", "warmup": 0, "step_update": 400}},
     ["schedule.step_update (400) must not be above train.updates (10), the run's end"]),
    ({"admin__profile": "omega.json", "model__encoder__block": "post_ln", "model__decoder__block": "b2t"},
     ["admin.profile (omega.json) needs block: admin, but model.encoder.block is post_ln and model.decoder.block is "
      "b2t; remove it"]),
    ({"data__modify": {"upper": 0.6, "lower": 0.5}},
     ["data.modify: upper, title and lower are 1.1 together, must be at most 1; a pair has one of them"]),
    ({"data__modify": {"subwords": True}, "data__subword_variants": 2},
     ["data: subword_variants (2) keeps segmentations that modify would not; set subword_variants: 0, and "
      "modify.subwords: true"]),
    ({"data__modify": {"subwords": True}, "data__subword_alpha": 0.0},
     ["data.modify.subwords with vocab.kind: bpe and data.subword_alpha: 0 would draw the same segmentation every "
      "time; set data.subword_alpha to 0.1"]),
    ({"data__modify": {"terms": 0.1}},
     ["data: modify.terms (0.1) needs word alignments; name their files in data.train.alignments, or set it to 0"]),
    ({"data__modify": {"typos": 1.0}}, ["data.modify.typos: is 1.0, must be less than 1"]),
    ({"data__stages": [{"mix": {"news": 1}}, {"mix": {"news": 1}}]},
     ["data: stages.0.mix: data.train has no corpus 'news'; it has one without a name, which needs no stages",
      "data: stages.0 has no end, but another stage comes after it; give it an until, such as {epochs: 2}, {updates: "
      "10000} or {patience: 5}",
      "data: stages.1.mix: data.train has no corpus 'news'; it has one without a name, which needs no stages"]),
    ({"data__train": STAGED, "data__stages": [{"mix": {"a": 0.0}}]},
     ["data.stages.0.mix.a: is 0.0, must be greater than 0"]),
    ({"data__train": STAGED, "data__stages": [{"mix": {}}]},
     ["data.stages.0.mix: is {}, must have at least 1 item, not 0"]),
    ({"data__train": STAGED, "data__stages": [{"mix": {"a": 1, "c": 1}, "until": {"epochs": 2}}]},
     ["data: stages.0.mix: data.train has no corpus 'c'; it has a, b",
      "data: stages.0 is the last stage, which goes on until the run ends; remove its until, and set train.updates, "
      "train.epochs or train.patience"]),
    ({"data__train": {"a": STAGED["a"] | {"weight": 2.0}, "b": STAGED["b"], "temperature": 5.0},
      "data__stages": [{"mix": {"a": 1}}]},
     ["data: data.train.a.weight, data.train.temperature would have no effect, since data.stages gives the shares of "
      "corpora; remove one of the two"]),
    ({"data__train": STAGED, "data__stages": [{"mix": {"a": 1}, "until": {"patience": 3}}, {"mix": {"b": 1}}],
      "train": {"updates": 10, "patience": 3}},
     ["train.patience (3) must be above the patience of every stage (3), or the run would end with it"]),
    ({"data__subword_variants": 2, "data__subword_alpha": 0.0},
     ["data.subword_variants with vocab.kind: bpe and data.subword_alpha: 0 would prepare the same segmentation "
      "several times; set data.subword_alpha to 0.1"]),
    ({"data__subword_variants": 2, "vocab__kind": "word"},
     ["data.subword_variants with vocab.kind: word would prepare the same segmentation several times; remove it"]),
    ({"model__tuned_at": {"width": 64}},
     ["model.tuned_at: width (64) needs heads and ffn beside it, those of the model that was tuned"]),
    ({"model__tuned_at": {"width": 64, "heads": 3, "ffn": 128}, "model__encoder": {"block": "pre_ln"},
      "model__decoder": {"block": "pre_ln"}},
     ["model.tuned_at: width (64) must be a multiple of heads (3)"]),
    ({"model__tuned_at": {"encoder_layers": 3}, "model__decoder__block": "pre_ln"},
     ["model: tuned_at is known for block: pre_ln or peri_ln, but encoder.block is admin; change one of them"]),
    ({"model__tuned_at": {"encoder_layers": 3}, "model__encoder": {"block": "pre_ln", "init": "fairseq"},
      "model__decoder": {"block": "peri_ln"}},
     ["model: tuned_at scales the initial weights of xavier, but encoder.init is fairseq; set it to auto"]),
    ({"model__tuned_at": {"encoder_layers": 3}, "model__encoder": {"block": "pre_ln"},
      "model__decoder": {"block": "peri_ln"}, "optimizer": {"name": "radam"}},
     [f"model.tuned_at is known for optimizer.name: {either(OPTIMIZERS.where(lambda row: row.scale_free))}, whose "
      "steps do not grow with the gradient, but it is radam; change one of them"]),
    ({"model__tuned_at": {"encoder_layers": 3}, "model__encoder": {"block": "pre_ln"},
      "model__decoder": {"block": "peri_ln"}, "train__grow": "stack", "train__init_from": "runs/a",
      "optimizer": {"weight_decay": 0.1, "decay_norms_and_biases": False}},
     ["model.tuned_at needs a weight decay that shrinks the weights themselves, but optimizer.weight_decay (0.1) with "
      "adam is a part of the gradient; set optimizer.name to adamw",
      "train.grow (stack) copies layers, whose branches model.tuned_at makes smaller in a deeper stack; remove one of "
      "them"]),
]


@pytest.mark.parametrize(("settings", "sentences"), FAULTS, ids=["+".join(settings) for settings, _ in FAULTS])
def test_each_fault_has_its_message(settings: dict[str, Any], sentences: list[str]) -> None:
    def without_names(lines: list[str]) -> list[str]:
        return [re.sub(r"must be one of [^;]*", "must be one of ...", line) for line in lines]

    assert without_names(faults_of(changed(**settings))) == without_names(sentences)


def test_the_names_that_a_setting_may_have_are_those_of_the_table() -> None:
    [fault] = faults_of(changed(model__encoder__block="mine"))
    assert fault == f"model.encoder.block: is 'mine', must be one of {', '.join(BLOCKS)}; did you mean admin?"


def test_all_faults_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values, a missing setting, an unset variable, settings of a section that contradict each other; those of
    different sections once nothing is missing."""
    monkeypatch.delenv("DEEPNMT_TEST_NONE", raising=False)
    tree = changed(run=None, modle=1, model__encoder__layers=-1, model__width=66, model__heads=4, vocab__shared=False,
                   data__folder="${DEEPNMT_TEST_NONE}/x", data__train={"src": "a"}, batch__tokens=20,
                   data__filters__max_tokens=600, data__test__news={"tsv": [1]}, train={"best_by": "bleu"},
                   train__valid_bleu=False)
    assert sorted(line.split()[0] for line in faults_of(tree)) == sorted([
        "run:", "modle:", "model.encoder.layers:", "model:", "data.folder:", "data.train:",
        "data.test.news.tsv.0:", "train.updates:"])
    tree |= {"run": "x", "data": changed(data__filters__max_tokens=600)["data"],
             "train": {"updates": 5, "best_by": "bleu", "valid_bleu": False}}
    assert sorted(line.split()[0] for line in faults_of(tree)) == sorted([
        "modle:", "model.encoder.layers:", "model:", "model.tied:", "batch.tokens", "data.filters.max_tokens",
        "train.best_by:"])


def test_a_default_that_replaces_a_faulty_value_causes_no_further_fault() -> None:
    """max_tokens 600 is too much for the default max_length, but the user's max_length is only of the wrong type."""
    tree = changed(data__filters__max_tokens=600, model__max_length="1024", model__heads="3", model__width=63)
    assert [line.split(":")[0] for line in faults_of(tree)] == ["model.heads", "model.max_length", "model"]
    tree = changed(train__updates=None, schedule={"name": "linear", "warmup": 4000})
    assert faults_of(tree) == ["train.updates: is missing; this setting has no default"]


def test_every_missing_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPNMT_TEST_NONE", raising=False)
    monkeypatch.delenv("DEEPNMT_TEST_NEITHER", raising=False)
    lines = faults_of(changed(run="${DEEPNMT_TEST_NONE}/r", data__folder="${DEEPNMT_TEST_NEITHER}"))
    assert lines == [
        "run: is '${DEEPNMT_TEST_NONE}/r', but the environment variable DEEPNMT_TEST_NONE is not set; "
        "export DEEPNMT_TEST_NONE=FOLDER, or give the setting on the command line as run=PATH",
        "data.folder: is '${DEEPNMT_TEST_NEITHER}', but the environment variable DEEPNMT_TEST_NEITHER is not set; "
        "export DEEPNMT_TEST_NEITHER=FOLDER, or give the setting on the command line as data.folder=PATH",
    ]
    lines = faults_of(changed(run="${DEEPNMT_TEST_NONE}/r", data__folder="${DEEPNMT_TEST_NONE}/d"))
    assert len(lines) == 1 and lines[0].startswith("run (and data.folder): is '${DEEPNMT_TEST_NONE}/r', but the")


@pytest.mark.parametrize(("override", "message"), [
    ("train.updates", "'train.updates' is not of the form key.key=value, for example train.updates=300"),
    ("=3", "'=3' is not of the form key.key=value"),
    ("train.updates=[1", "'[1' is not a YAML value"),
    ("seed.low=1", "seed is a value, not a group of settings"),
    ("train.updats=1", "train.updats: unknown setting; did you mean train.updates?"),
    ("updates=5", "updates: unknown setting; did you mean train.updates?"),
    ("layers=6", "layers: unknown setting; did you mean model.encoder.layers or model.decoder.layers?"),
    ("quickly=yes", "quickly: unknown setting; known: run, seed,"),
    ("data.test=&a [*a]", "'&a [*a]' is not a YAML value"),
])
def test_faulty_overrides(recipe_file: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, ["seed=1", override])
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("seed: 1\nseed: 2\n", "is not valid YAML: line 2: key 'seed' is given twice"),
    ("model: {heads: 2, heads: 4}\n", "key 'heads' is given twice"),
    ("a: [1\n", "is not valid YAML: line 2: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence "
                "in line 1)"),
    ("? [a]\n: 1\n", "is not valid YAML"),
    ("- 1\n", "must be a mapping of settings, not list"),
    ("", "must be a mapping of settings, not NoneType"),
    ("1: 2\n", "1:"),
    ("model: &a {encoder: *a}\n", "is not valid YAML: groups are nested more than 50 deep; check for an alias "
                                      "(*name) inside its own anchor"),
    ("a: " + 1000 * "[", "groups are nested more than 50 deep"),
    ("a: " + 60 * "[" + 60 * "]", "groups are nested more than 50 deep"),
    ("a: 2026-13-01\n", "is not valid YAML: month must be in 1..12"),
    ("run: !!python/object/apply:os.system [touch harmed]\n",
     "is not valid YAML: line 1: could not determine a constructor"),
    # nine to the ninth values, by aliases of lists, of merged mappings, and of lists of them
    ("".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)),
     "it has more than 100,000 values, those of aliases (*name) counted"),
    ("".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}' if i else '{x: 1}'] * 9)}]}}\n" for i in range(9)),
     "it has more than 100,000 values"),
    ("a: &a [" + "x," * 40_000 + "]\nb: [" + "*a," * 40_000 + "]\n", "it has more than 100,000 values"),
    ("a: '" + "x" * 2**18 + "'\n", "has more than 262,144 bytes, so it is no recipe; give another file"),
    ("model: {encoder: {layers: 100000000}}\n", "model.encoder.layers: is 100000000, must be less than or equal to"),
    ("model: {width: 4000000}\n", "model.width: is 4000000, must be less than or equal to 65536"),
    ("model: {max_length: 1000000000000}\n", "model.max_length: is 1000000000000, must be less than or equal to"),
    ('"\\e[2J": 1\n', "\\x1b[2J: unknown setting"),
])
def test_faulty_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    started = time.process_time()
    with pytest.raises(UserError) as caught:
        load_recipe(file)
    assert message in str(caught.value) and str(file) in str(caught.value)
    assert time.process_time() - started < 20, "seconds of this process, whoever else has the cores"
    assert str(caught.value).replace("\n", "").isprintable() and len(str(caught.value)) < 9000


def whole_numbers(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a schema that are whole numbers."""
    if schema.get("type") == "integer":
        yield schema
    for part in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        yield from whole_numbers(part)


def test_every_count_has_an_upper_bound() -> None:
    """And what is above it is refused: a nought too many is no reason to exhaust a machine."""
    schema = Recipe.model_json_schema()
    settings = {f"{section}.{name}": number for section, part in {**schema["$defs"], "": schema}.items()
                for name, setting in part["properties"].items() for number in whole_numbers(setting)}
    assert len(settings) > 50
    assert [name for name, number in settings.items() if not {"maximum", "exclusiveMaximum"} & number.keys()] == []
    for settings in ({"parallel__threads": 10**6}, {"data__workers": 10**6}, {"translate__beam": 10**6},
                     {"batch__accumulation": 10**6}, {"data__subword_variants": 10**6}, {"train__keep_last": 10**12}):
        [name], [value] = settings.keys(), settings.values()
        [fault] = faults_of(changed(**settings))
        assert fault.startswith(f"{name.replace('__', '.')}: is {value}, must be less than or equal to")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with user_error(r"there is no recipe .*none\.yaml; deepnmt new writes a recipe"):
        load_recipe(tmp_path / "none.yaml")
    with user_error(r"holds no recipe\.yaml; give a recipe, or the folder of a run"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("run: Läufe".encode("latin-1"))
    with user_error("cannot be read"):
        load_recipe(tmp_path / "latin.yaml")
    with user_error("recipe /dev/zero has more than 262,144 bytes"):
        load_recipe("/dev/zero")


def test_yaml_anchors_may_be_merged(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(SMALL + "model:\n  encoder: &stack {layers: 3, block: b2t}\n  decoder: {<<: *stack, layers: 2}\n",
                    encoding="utf-8")
    recipe = load_recipe(file)
    assert (recipe.model.decoder.layers, recipe.model.decoder.block) == (2, "b2t")


def test_checking_does_not_change_the_tree() -> None:
    tree = changed(model__heads="x", data__train={"src": "a"})
    before = copy.deepcopy(tree)
    faults_of(tree)
    assert tree == before
    assert isinstance(check_recipe(changed(), "r.yaml"), Recipe)


@pytest.mark.parametrize(("old", "layout", "precision"), [
    ("ds_configs/zero1_bf16.json", "ds_configs/zero1.json", "bf16"),
    ("/opt/share/ds_configs/zero3_offload_fp16.json", "/opt/share/ds_configs/zero3_offload.json", "fp16"),
    ("ds_configs/pipeline_zero0_fp32.json", "ds_configs/zero0.json", "fp32"),
])
def test_layouts_of_version_0_1_are_understood(old: str, layout: str, precision: str, recipe_file: Path) -> None:
    """In a recipe, and as an override of a recipe of today."""
    for lines in ([f"parallel={{ds_config: {old}, pipeline_stages: 2}}"],
                  ["parallel={ds_config: ds_configs/zero1.json, precision: bf16, pipeline_stages: 2}",
                   f"parallel.ds_config={old}"]):
        parallel = load_recipe(recipe_file, lines).parallel
        assert (parallel.ds_config, parallel.precision, parallel.pipeline_stages) == (layout, precision, 2)


def test_ds_config_null_on_the_command_line_means_fp32(recipe_file: Path) -> None:
    lines = ["parallel={ds_config: ds_configs/zero1.json, precision: bf16}", "parallel.ds_config=null"]
    assert load_recipe(recipe_file, lines).parallel == Parallel()


@pytest.mark.parametrize(("lines", "message"), [
    (["parallel.ds_config=ds_configs/zero1_bf16.json", "parallel.precision=fp16"],
     "which is in bf16, but parallel.precision is fp16; set parallel.ds_config=ds_configs/zero1.json"),
    (["parallel.ds_config=ds_configs/pipeline_zero1_bf16.json"], "is for pipelines, but parallel.pipeline_stages is 0"),
    (["parallel.precision=bf16", "parallel.ds_config=null"], "parallel: precision (bf16) needs a ds_config"),
])
def test_layouts_that_contradict_themselves(lines: list[str], message: str, recipe_file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, lines)
    assert message in str(caught.value) and str(caught.value).count("\n") == 1


def test_a_users_file_with_an_old_layouts_name_is_kept(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "zero1_bf16.json").write_text("{}")
    parallel = load_recipe(recipe_file, [f"parallel.ds_config={tmp_path}/zero1_bf16.json"]).parallel
    assert (parallel.ds_config, parallel.precision) == (f"{tmp_path}/zero1_bf16.json", "bf16")


def test_with_settings_checks_the_changed_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    changed = with_settings(recipe, {"model": recipe.model, "model.encoder.layers": 7, "optimizer.lr": 0.5})
    assert (changed.model.encoder.layers, changed.optimizer.lr) == (7, 0.5) and changed.data == recipe.data
    with pytest.raises(ValidationError):
        with_settings(recipe.model, {"width": 7})
