"""Post-LN encoders of `task: masked_lm` to and from Hugging Face's BertForMaskedLM, with equal logits.

Both compute the same function, so weights only change their names. The exported folder has config.json and
model.safetensors for transformers, and the SentencePiece model src.spm, whose ids are the model's: bos is [CLS], eos
[SEP], `<mask>` [MASK]. An imported WordPiece vocabulary (vocab.txt) becomes a SentencePiece model of the same pieces,
which splits off punctuation, and lower-cases, as BERT does. It prefers few pieces to long first ones, so that some
words are segmented otherwise; an id means the same.

`V` vocabulary.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepnmt import folders
from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import (
    check_ramp,
    find_checkpoint,
    first_difference,
    load_state,
    shapes_by_name,
    weights_of,
)
from deepnmt.config import Recipe, check_recipe, dump_recipe
from deepnmt.config.encoders import EncoderModel, EncoderRecipe
from deepnmt.data.vocab import SPACE, Vocabulary
from deepnmt.errors import UserError
from deepnmt.extras.export.exported import KIND, require_replaceable
from deepnmt.extras.export.imports import (
    SPECIAL,
    joined,
    name_special,
    sentencepiece_model,
    weights_in,
    write_import,
)
from deepnmt.model.sublayers import ACTIVATIONS
from deepnmt.tokens import BOS, EOS, PAD, UNK
from deepnmt.training.encoders import load_encoder

TASK = "masked_lm"
LARGEST_DIFFERENCE = 1e-5  # allowed between the logits of the two models
_SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")  # WordPiece's, in the order of ours
_OURS = (*SPECIAL, "<mask>")
_OUTER = {
    "embeddings.tokens": "bert.embeddings.word_embeddings",
    "encoder.input.positions": "bert.embeddings.position_embeddings",
    "encoder.input.segments": "bert.embeddings.token_type_embeddings",
    "encoder.input.norm": "bert.embeddings.LayerNorm", "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
_INNER = {"self_attn.out": "attention.output.dense", "rule.norms.0": "attention.output.LayerNorm",
          "ffn.fc1": "intermediate.dense", "ffn.fc2": "output.dense", "rule.norms.1": "output.LayerNorm"}
# Settings of the model, their names in config.json, and the values that transformers takes where it has none.
_OTHERS = (("norm_eps", "layer_norm_eps", 1e-12), ("dropout", "hidden_dropout_prob", 0.1),
           ("attention_dropout", "attention_probs_dropout_prob", 0.1), ("initial_std", "initializer_range", 0.02))
_DROPPED = ("bert.pooler.", "cls.seq_relationship.", "cls.predictions.decoder.", "bert.embeddings.position_ids")
_SAMPLE = (4, 24)  # sequences and their length, on which the two are compared


def export_bert(recipe: Recipe, checkpoint: str | None, output: str | None) -> str:
    """Exports a run's model; returns a line on what was written and how exact it is.

    Args:
        checkpoint: a checkpoint or run folder to export instead; None: the run's average, else its newest.
        output: the output folder; None: `bert` in the run folder.

    Raises:
        UserError: the model is none of BERT's, see `check_ramp`, the folder holds something else, or the logits
            differ. Nothing is kept.
    """
    _require_bert(recipe)
    folder = Path(output) if output is not None else Path(recipe.run) / "bert"
    place = Path(os.path.realpath(folder))
    require_replaceable(folder)
    source = find_checkpoint(Path(checkpoint or recipe.run))
    warn_if_outdated(source)
    model, trained, vocab = load_encoder(source, _build)
    _require_bert(trained)
    check_ramp(source, trained.model, load_state(source).update)
    assert isinstance(trained, EncoderRecipe)
    folders.recover(place)
    with folders.new_folder(place, KIND) as temporary:
        with folders.reporting(place, KIND):
            save_file(to_bert(dict(model.named_parameters()), trained.model), temporary / "model.safetensors",
                      {"format": "pt"})
            config = json.dumps(_config(trained.model, vocab), indent=1)
            (temporary / "config.json").write_text(config, encoding="utf-8")
            (temporary / "src.spm").write_bytes(vocab.bytes)
            (temporary / "recipe.yaml").write_text(dump_recipe(trained), encoding="utf-8")
        difference, largest = _compare(model, temporary, vocab.size)
        if not difference <= LARGEST_DIFFERENCE:  # also where it is not a number
            raise UserError(f"the logits of the model for transformers differ by {difference:.1e} from those of "
                            f"{source}; nothing was kept. Report it")
        facts = {"format": "bert", "checkpoint": str(source), "weights": weights_of(source),
                 "proof": {"largest_difference": difference, "largest_logit": largest}}
        folders.publish(temporary, place, folders.entries_of(temporary, place, KIND), facts, KIND)
    return f"{folder}: BertForMaskedLM; logits differ by at most {difference:.1e} (the largest is {largest:.1f})"


def _build(recipe: Recipe, vocab: int) -> Any:
    """What builds the model of a recipe; the task may not be there."""
    from deepnmt.tasks.masked_lm.model import build_of

    return build_of(recipe, vocab)  # type: ignore[arg-type]


def _require_bert(recipe: Recipe) -> None:
    """Raises `UserError` if a recipe's model is none that BertForMaskedLM computes."""
    if recipe.task != TASK or not isinstance(recipe.model, EncoderModel):
        raise UserError(f"--to bert is for task: {TASK}, but the run's task is {recipe.task}; choose another program")
    model, why = recipe.model, ""
    if model.encoder.block != "post_ln":
        why = f"model.encoder.block is {model.encoder.block}, not post_ln"
    elif not model.input_norm:
        why = "model.input_norm is false"
    elif model.norm != "layer_norm":
        why = f"model.norm is {model.norm}, not layer_norm"
    elif model.activation not in ("gelu", "relu", "silu"):
        why = f"model.activation is {model.activation}"
    if why:
        raise UserError(f"{why}, which BertForMaskedLM of transformers does not compute; use the checkpoint with "
                        "deepnmt")


def _names(layers: int) -> Iterator[tuple[str, str]]:
    """deepnmt's names and BERT's of all weights but query, key and value and the output's bias."""
    for ours, theirs in _OUTER.items():
        yield f"{ours}.weight", f"{theirs}.weight"
        if "embeddings" not in theirs or theirs.endswith("LayerNorm"):
            yield f"{ours}.bias", f"{theirs}.bias"
    for layer in range(layers):
        for ours, theirs in _INNER.items():
            for part in ("weight", "bias"):
                yield f"encoder.layers.{layer}.{ours}.{part}", f"bert.encoder.layer.{layer}.{theirs}.{part}"


def to_bert(weights: Mapping[str, Tensor], model: EncoderModel) -> dict[str, Tensor]:
    """A model's weights under BERT's names, fp32."""
    renamed = {theirs: weights[ours] for ours, theirs in _names(model.encoder.layers)}
    for layer in range(model.encoder.layers):
        for part in ("weight", "bias"):
            three = weights[f"encoder.layers.{layer}.self_attn.qkv.{part}"].chunk(3)
            for name, tensor in zip(("query", "key", "value"), three, strict=True):
                renamed[f"bert.encoder.layer.{layer}.attention.self.{name}.{part}"] = tensor
    renamed["cls.predictions.bias"] = weights["head.bias"]
    return {name: tensor.detach().float().clone() for name, tensor in renamed.items()}


def from_bert(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The inverse of `to_bert`, fp32. Raises `UserError` if a weight is missing or there is one too many."""
    theirs = {name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): tensor
              for name, tensor in weights.items()}
    table = theirs.get("bert.embeddings.word_embeddings.weight")
    tied = theirs.get("cls.predictions.decoder.weight")
    if tied is not None and (table is None or not torch.equal(tied, table)):
        raise UserError("the model's output table is not its input table, as deepnmt's is; give a tied model")

    def take(name: str) -> Tensor:
        if name not in theirs:
            raise UserError(f"the model has no weight {name}, as BertForMaskedLM has; give the folder of one")
        return theirs.pop(name).float()

    renamed = {ours: take(name) for ours, name in _names(layers)}
    for layer in range(layers):
        for part in ("weight", "bias"):
            three = [take(f"bert.encoder.layer.{layer}.attention.self.{name}.{part}")
                     for name in ("query", "key", "value")]
            renamed[f"encoder.layers.{layer}.self_attn.qkv.{part}"] = joined(three, f"encoder.layer.{layer}.attention")
    renamed["head.bias"] = take("cls.predictions.bias")
    rest = [name for name in sorted(theirs) if not name.startswith(_DROPPED)]
    if rest:
        raise UserError(f"the model has a weight {rest[0]}, for which deepnmt's has no place; give a plain "
                        "BertForMaskedLM")
    return renamed


def _config(model: EncoderModel, vocab: Vocabulary) -> dict[str, Any]:
    width, heads, ffn = model.shape("encoder")
    return {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": width, "num_attention_heads": heads,
        "intermediate_size": ffn, "num_hidden_layers": model.encoder.layers, "hidden_act": model.activation,
        "max_position_embeddings": model.max_length, "type_vocab_size": 2, "vocab_size": vocab.size,
        "layer_norm_eps": model.norm_eps, "hidden_dropout_prob": model.dropout, "tie_word_embeddings": True,
        "attention_probs_dropout_prob": model.attention_dropout, "initializer_range": model.initial_std,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "mask_token_id": vocab.tags["<mask>"],
    }


@torch.inference_mode()
def _compare(ours: Any, folder: Path, vocab: int) -> tuple[float, float]:
    """The largest difference of logits on random sequences, some of them padded and in two segments, in fp64, and the
    largest logit."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # beside deepnmt's own lines
    theirs = transformers.BertForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    rows, length = _SAMPLE[0], min(_SAMPLE[1], ours.encoder.input.positions.num_embeddings)
    src = torch.randint(PAD + 1, vocab, (rows, length), generator=generator)
    lengths = torch.tensor([length, *[max(2, length - 2 * n) for n in range(1, rows)]])
    keep = torch.arange(length) < lengths[:, None]
    segments = (torch.arange(length) >= length // 2).long().expand(rows, -1)
    logits = bert_logits(ours.double(), src, lengths, segments)
    expected = theirs(input_ids=src, attention_mask=keep.long(), token_type_ids=segments).logits
    return float((logits - expected)[keep].abs().max()), float(expected[keep].abs().max())


def bert_logits(model: Any, src: Tensor, lengths: Tensor, segments: Tensor) -> Tensor:
    """deepnmt's logits [B, S, V] at every position."""
    from deepnmt.batch import Batch

    hidden = model.encode(Batch({"src": src, "src_lengths": lengths, "segments": segments}, 0, src.numel()))
    return model.head(hidden, model.table)


def import_bert(folder: Path, run: Path, config: Mapping[str, Any]) -> str:
    """Writes a run with the BertForMaskedLM of a folder as its average; returns a line that describes it.

    Args:
        config: what config.json holds.

    Raises:
        UserError: the folder holds no such model, or one that deepnmt does not compute.
    """
    try:
        sizes = {"width": int(config["hidden_size"]), "heads": int(config["num_attention_heads"]),
                 "ffn": int(config["intermediate_size"]), "max_length": int(config["max_position_embeddings"])}
        layers = int(config["num_hidden_layers"])
        others = {ours: float(config.get(theirs, default)) for ours, theirs, default in _OTHERS}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{folder}/config.json has no number for {error}, as that of a BERT model has") from None
    activation = str(config.get("hidden_act"))
    if activation == "swish":
        activation = "silu"
    if activation not in ACTIVATIONS:
        raise UserError(f"{folder}/config.json has hidden_act {activation}, which deepnmt does not have")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"{folder}/config.json has position_embedding_type {config['position_embedding_type']}; "
                        "deepnmt imports absolute positions")
    vocab, order = _vocabulary(folder)
    recipe = check_recipe({
        "run": str(run), "task": TASK,
        "data": {"folder": f"data/{run.name}", "train": ["train.txt"], "valid": ["valid.txt"],
                 "length": min(128, sizes["max_length"])},
        "vocab": {"model": str(run), "kind": Vocabulary(vocab).kind},
        "model": {**sizes, **others, "activation": activation, "encoder": {"block": "post_ln", "layers": layers},
                  "decoder": None},
        "train": {"updates": 1},
    }, f"the model in {folder}")
    assert isinstance(recipe, EncoderRecipe)
    weights = from_bert(weights_in(folder), layers)
    for name in ("embeddings.tokens.weight", "head.bias"):
        if weights[name].shape[:1] != (len(order),):
            raise UserError(f"{folder} has {name} of shape {list(weights[name].shape)}, but {len(order)} pieces; give "
                            "the model's own vocabulary")
        weights[name] = weights[name][order]
    shapes = shapes_by_name(_build(recipe, len(order)))
    difference = first_difference(shapes, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if difference:
        raise UserError(f"{folder} does not hold the model that it describes: {difference}; give the whole folder")
    write_import(folder, run, weights, recipe, (vocab, vocab))
    return f"{run}: BERT with {layers} layers of width {sizes['width']}, {len(order):,} pieces"


def _vocabulary(folder: Path) -> tuple[bytes, list[int]]:
    """A SentencePiece model, and for each of its ids that of the model in the folder. Raises `UserError`."""
    if (folder / "src.spm").is_file():
        vocab = Vocabulary.load(folder / "src.spm")
        return vocab.bytes, list(range(vocab.size))
    try:
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}/vocab.txt cannot be read ({error}); give a folder with vocab.txt, BERT's "
                        "vocabulary") from None
    missing = [piece for piece in _SPECIAL if piece not in pieces]
    if missing:
        raise UserError(f"{folder}/vocab.txt has no {missing[0]}, so it is none of BERT's; give the model's own")
    kinds = sentencepiece_model.ModelProto.SentencePiece
    model = sentencepiece_model.ModelProto()
    order, names = [pieces.index(piece) for piece in _SPECIAL], set(_OURS)
    for number, name in enumerate(_OURS):
        model.pieces.add(piece=name, score=0.0, type=kinds.UNKNOWN if number == UNK else kinds.CONTROL)
    for number, piece in enumerate(pieces):
        if number in order[:len(_SPECIAL)]:
            continue
        name = piece[2:] if piece.startswith("##") and len(piece) > 2 else f"{SPACE}{piece}"
        used = name not in names and not (piece.startswith("[unused") and piece.endswith("]"))
        names.add(name)
        unused = name if used else f"[{number}]"
        model.pieces.add(piece=unused, score=-1.0, type=kinds.NORMAL if used else kinds.UNUSED)
        order.append(number)
    model.trainer_spec.model_type = model.trainer_spec.UNIGRAM
    name_special(model)
    model.normalizer_spec.CopyFrom(_normalizer(_is_uncased(folder, pieces)))
    made: bytes = model.SerializeToString()
    Vocabulary(made)
    return made, order


def _is_uncased(folder: Path, pieces: Sequence[str]) -> bool:
    """Whether BERT lower-cases a text before it looks for its pieces."""
    with suppress(OSError, ValueError, AttributeError):
        said = json.loads((folder / "tokenizer_config.json").read_bytes()).get("do_lower_case")
        if isinstance(said, bool):
            return said
    return not any(piece != piece.lower() for piece in pieces if not piece.startswith("["))


def _normalizer(uncased: bool) -> Any:
    """SentencePiece's rules that split a text as BERT's tokenizer does (Devlin et al. 2019, their `BasicTokenizer`):
    punctuation and each Chinese character stand alone, control characters go; of an uncased model all is lower-case and
    without accents."""
    rules = []
    for character in map(chr, range(1, sys.maxunicode + 1)):
        kind, becomes = unicodedata.category(character), character
        if kind == "Cs":
            continue
        if character in "\t\n\r" or kind == "Zs":
            becomes = " "
        elif kind in ("Cc", "Cf"):
            becomes = ""
        elif uncased:
            letters = unicodedata.normalize("NFD", character.lower())
            becomes = "".join(letter for letter in letters if unicodedata.category(letter) != "Mn")
        name = unicodedata.name(character, "")
        is_chinese = name.startswith(("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH"))
        is_sign = kind.startswith("P") or (character.isascii() and kind.startswith("S"))
        if is_sign or is_chinese:
            becomes = f" {becomes} "
        if becomes != character:
            codes = " ".join(f"{ord(letter):X}" for letter in becomes)
            rules.append(f"{ord(character):X}\t{codes}\t\n")
    written = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.writelines(rules)
        file.flush()
        sentencepiece.SentencePieceTrainer.train(  # which alone compiles them
            sentence_iterator=iter(["a"]), model_writer=written, vocab_size=8, hard_vocab_limit=False,
            normalization_rule_tsv=file.name, minloglevel=2)
    return sentencepiece_model.ModelProto.FromString(written.getvalue()).normalizer_spec
