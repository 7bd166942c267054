"""Language models of transformers: what is exported has its logits, what is imported ours; others are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import truncate, user_error
from safetensors.torch import load_file, save_file
from small_disk import small_disk
from small_text import recipe, write_texts

from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.model.init import new_model
from deepnmt.tasks.language_model.huggingface import export_model, import_model
from deepnmt.tasks.language_model.model import Loaded, load
from deepnmt.tasks.language_model.text import PreparedText
from deepnmt.tokens import BOS, EOS, PAD

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu"}, "fairseq": {"positions": "fairseq", "tied": "none"},
    "llama": {"norm": "rms_norm", "positions": "rotary", "activation": "swiglu"}}


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("vocab")
    write_texts(folder)
    PreparedText.prepare(recipe(folder))
    return PreparedText.open(recipe(folder)).vocab


def stirred(vocab: Vocabulary, folder: Path, **model: Any) -> Loaded:
    """A model of which no weight is without effect."""
    made = recipe(folder, model={"dropout": 0.2, "attention_dropout": 0.05, **model})
    weights = new_model(made.model, vocab.size, vocab.size, 1).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in weights.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return Loaded(weights, vocab, made, 0, folder)


def logs(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    return loaded.model.log_probabilities(loaded.model.decode(ids, None, None))


@torch.no_grad()
@pytest.mark.parametrize("kind", SHAPES)
def test_there_and_back(kind: str, vocab: Vocabulary, tmp_path: Path) -> None:
    """The logits of transformers are ours to 1e-5, and the imported model's are, too, by the commands."""
    loaded = stirred(vocab, tmp_path, **SHAPES[kind])
    folder, run = tmp_path / "exported", tmp_path / "imported"
    export_model(loaded, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(PAD + 1, vocab.size, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = EOS
    expected = logs(loaded, ids)
    torch.testing.assert_close(theirs(input_ids=ids).logits.log_softmax(-1), expected, rtol=1e-5, atol=1e-5)
    assert main("import", [str(folder), str(run)]) == 0
    torch.testing.assert_close(logs(load(run, torch.device("cpu")), ids), expected, rtol=1e-5, atol=1e-5)
    old, new = loaded.recipe.model, load_recipe(run).model
    assert (new.dropout, new.attention_dropout) == (0.0 if kind == "llama" else old.dropout, old.attention_dropout)
    assert main("sample", [str(run), "--prompt", "the dog", "--tokens", "3"]) == 0
    with pytest.raises(UserError, match="exists already"):
        export_model(loaded, folder)


@torch.no_grad()
def test_a_llama_of_transformers_is_imported(vocab: Vocabulary, tmp_path: Path) -> None:
    """Random weights without biases, as Llama has them, and one table for input and output."""
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=vocab.size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=True)).eval()
    theirs.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.model").write_bytes(vocab.bytes)
    import_model(tmp_path / "llama", tmp_path / "run")
    ids = torch.randint(PAD + 1, vocab.size, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = EOS  # before a text; there it is bos
    ours = logs(load(tmp_path / "run", torch.device("cpu")), ids)
    ids[:, 0] = BOS
    torch.testing.assert_close(theirs(input_ids=ids).logits.log_softmax(-1), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model", "said"), [
    ({"decoder": {"block": "b2t", "layers": 2}}, "model.decoder.block is b2t, not pre_ln"),
    ({"decoder": {"block": "pre_ln", "layers": 2, "ramp": 3}}, "model.decoder.ramp is 3, so its 2 layers"),
    ({"bands": [8]}, "model.bands is"), ({"norm": "rms_norm"}, "model.norm is rms_norm, not layer_norm"),
    ({"positions": "rotary"}, "model.norm is layer_norm, not rms_norm; model.activation is relu, not swiglu")])
def test_what_transformers_cannot_compute(model: dict[str, Any], said: str, vocab: Vocabulary, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        export_model(stirred(vocab, tmp_path, **model), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_full_disk_leaves_no_part_of_a_model(vocab: Vocabulary, tmp_path: Path) -> None:
    loaded, folder = stirred(vocab, tmp_path), tmp_path / "out" / "exported"
    with small_disk(5_000), user_error(f"^exported model folder {folder} cannot be written: .*too large"):
        export_model(loaded, folder)
    assert not folder.parent.exists()
    export_model(loaded, folder)


@pytest.mark.parametrize(("changes", "said"), [
    ({"activation_function": "gelu_new"}, "activation_function is 'gelu_new', but deepnmt computes relu, gelu or silu"),
    ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"), ({"n_layer": 3}, "does not hold a whole gpt2 model"),
    ({"n_layer": 1}, "has the weight transformer.h.1.attn.c_attn.bias, which its config.json does not describe"),
    ({"infinite": True}, "has weights that are no numbers, in decoder.norm.bias"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ({"cut": True}, "does not hold a whole gpt2 model"), ({"learned": True}, "has learned position vectors")])
def test_what_deepnmt_cannot_compute(changes: dict[str, Any], said: str, vocab: Vocabulary, tmp_path: Path) -> None:
    changes = dict(changes)
    folder = tmp_path / "exported"
    export_model(stirred(vocab, tmp_path), folder)
    if changes.pop("learned", False):
        weights = load_file(folder / "model.safetensors")
        weights["transformer.wpe.weight"] += 0.01
        save_file(weights, folder / "model.safetensors")
    if changes.pop("infinite", False):
        weights = load_file(folder / "model.safetensors")
        weights["transformer.ln_f.bias"][3] = float("inf")
        save_file(weights, folder / "model.safetensors")
    if changes.pop("cut", False):
        truncate(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=said):
        import_model(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rotary_positions_of_another_type_are_refused(kind: str, vocab: Vocabulary, tmp_path: Path) -> None:
    """As transformers 5 writes them."""
    folder = tmp_path / "exported"
    export_model(stirred(vocab, tmp_path, **SHAPES["llama"]), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"rope_type is '{kind}', but deepnmt computes default alone"):
        import_model(folder, tmp_path / "run")
