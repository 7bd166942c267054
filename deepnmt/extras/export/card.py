"""The page that an exported model comes with: what it is, how to load it, what it scores."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from deepnmt.checkpoint.checkpoint import LoadedModel
from deepnmt.config import Recipe, dump_recipe
from deepnmt.config.load import yaml_line
from deepnmt.data.vocab import Vocabulary
from deepnmt.extras.export.exported import never_written
from deepnmt.extras.export.proof import Proof
from deepnmt.version import __version__

_SCRIPTS = {
    "ctranslate2": """\
import ctranslate2, sentencepiece
source, target = (sentencepiece.SentencePieceProcessor(f"{folder}/{side}.spm") for side in ("src", "trg"))
never = [[target.id_to_piece(i)] for i in NEVER]
translator = ctranslate2.Translator(folder)
pieces = [source.encode(line, out_type=str) for line in lines]
results = translator.translate_batch(pieces, beam_size=5, length_penalty=1, suppress_sequences=never)
translations = [target.decode([target.piece_to_id(p) for p in r.hypotheses[0]]) for r in results]
""",
    "huggingface": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSeq2SeqLM.from_pretrained(folder)
batch = tokenizer(lines, return_tensors="pt", padding=True)
tokens = model.generate(**batch)
translations = tokenizer.batch_decode(tokens, skip_special_tokens=True)
""",
    "onnx": """\
import numpy, onnxruntime, sentencepiece
encoder, decoder = (onnxruntime.InferenceSession(f"{folder}/{name}.onnx") for name in ("encoder", "decoder"))
source, target = (sentencepiece.SentencePieceProcessor(f"{folder}/{side}.spm") for side in ("src", "trg"))
translations = []
for line in lines:
    src = numpy.array([source.encode(line) + [2]])
    known = {"src_lengths": numpy.array([src.shape[1]])}
    known["source"] = encoder.run(None, {"src": src, **known})[0]
    past, tokens = known["source"][:, :, :, :, :0], [1]
    while tokens[-1] != 2 and len(tokens) <= 2 * src.shape[1] + 20:
        logits, past = decoder.run(None, {"tokens": numpy.array(tokens[-1:]), "past": past, **known})
        logits[0, NEVER] = -numpy.inf
        tokens.append(int(logits[0].argmax()))
    translations.append(target.decode(tokens))
""",
}

_ENCODE = """\
tags = {tags}
def encode(line):  # a tag in front is a piece of its own
    first, _, rest = line.partition(" ")
    return [first, *encode(rest)] if first in tags else source.encode(line, out_type=str)
"""


def script_of(to: str, src_vocab: Vocabulary, trg_vocab: Vocabulary) -> str:
    """How an exported model with these vocabularies is used without deepnmt."""
    tags = src_vocab.tags
    script = _SCRIPTS[to].replace("NEVER", str(never_written(trg_vocab)))
    if not tags or to == "huggingface":  # its tokenizer knows them
        return script
    script = script.replace("source.encode(line, out_type=str)", "encode(line)")  # of CTranslate2
    script = script.replace("source.encode(line)", "source.piece_to_id(encode(line))")  # of ONNX
    opened = next(line for line in script.splitlines(keepends=True) if line.startswith("source, target"))
    return script.replace(opened, opened + _ENCODE.format(tags=list(tags)))


def model_card(
    to: str, loaded: LoadedModel, recipe: Recipe, proof: Proof, licence: str, precision: str = "fp32"
) -> str:
    """The README.md of an exported model, whose weights have this precision and this proof; its head is the metadata
    that Hugging Face reads."""
    data, model = loaded.recipe.data, loaded.recipe.model
    run = recipe.run
    if not loaded.folder.resolve().is_relative_to(Path(run).resolve()):  # --checkpoint names that of another run
        run = loaded.recipe.run
    languages = list(dict.fromkeys((data.src_lang, data.trg_lang)))
    library = {"huggingface": "transformers"}.get(to, to)
    stacks = " and ".join(f"{model.stack(side).layers} {side} layers ({model.stack(side).block})"
                          for side in ("encoder", "decoder"))
    rows = [f"| {name} | {value:.2f} | `{signature}` |" for name, value, signature in _scores(loaded, recipe)]
    rows.append(f"| BLEU, {proof.lines} lines of the text it was compared on | {proof.bleu:.2f} | "
                f"`{proof.signature}` |")
    return "\n".join([
        "---", f"license: {yaml_line(licence)}", "language:", *(f"- {yaml_line(name)}" for name in languages),
        f"library_name: {library}", "pipeline_tag: translation", "tags:", "- translation", "- deepnmt", "---", "",
        f"# {Path(run).resolve().name}: {data.src_lang} to {data.trg_lang}", "",
        f"A translation Transformer of width {model.width} with {stacks}, trained for {loaded.state.update:,} updates "
        f"with deepnmt {__version__}.", "", f"Licence: {licence}.", "", "## Scores", "",
        "| metric and text | score | SacreBLEU's signature |", "|---|---|---|", *rows, "",
        f"Compared with deepnmt's own model, weights in {precision}: {proof.sentence()}.", "", "## Use", "",
        "`folder` is this folder, `lines` a list of sentences. deepnmt is not needed.", "", "```python",
        script_of(to, *loaded.vocabs).rstrip(), "```", "",
        "## Recipe", "", "```yaml", dump_recipe(loaded.recipe).rstrip(), "```", ""])


def _scores(loaded: LoadedModel, recipe: Recipe) -> list[tuple[str, float, str]]:
    """What `deepnmt evaluate` has found for this checkpoint alone: metric and test set, score, signature. Scores of
    weights that its folder held before, of other updates, are not its own. Where there are several of one text, as with
    other settings of the search, the names of their files say which is which."""
    rows = []
    own = loaded.state.update, loaded.state.extra.get("averaged_updates", [])
    for file in sorted(Path(recipe.run).glob("scores*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # it is another program's
            report = json.loads(file.read_bytes())
            if "ensemble" in report or Path(report["checkpoint"]).resolve() != loaded.folder.resolve():
                continue
            if (report["update"], report["averaged_updates"]) != own:
                continue
            for test, scores in report["sets"].items():
                for metric in ("bleu", "chrf", "ter"):
                    if f"{metric}_signature" in scores:
                        rows.append((f"{metric}, {test}", file.stem, float(scores[metric]),
                                     scores[f"{metric}_signature"]))
    counts = Counter(what for what, *_ in rows)
    return [(f"{what} ({name})" if counts[what] > 1 else what, *rest) for what, name, *rest in rows]
