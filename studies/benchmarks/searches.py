"""Measures deepnmt's own search beside CTranslate2's with the same model, in one interleaved run.

Seconds are those of the process's CPU time, so that other work on the machine counts less. Every row takes texts and
gives texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import sacrebleu
import torch

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.config import Translate
from deepnmt.data.text import read_lines
from deepnmt.decode.models import load_models
from deepnmt.decode.translate import translate_lines
from deepnmt.extras.export.searcher import FORMATS, load_exported
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status

SAME_RULE = {"finish": "best", "patience": 1.0}  # CTranslate2's beam search


def compare_searches(run: Path, source: Path, reference: Path, count: int, rounds: int) -> str:
    """Times every way to search, in turns, and returns a Markdown table.

    Args:
        run: whose recipe's `translate` section holds, and whose folder `ctranslate2` has the exported model.
        source, reference: texts, of which the first `count` lines are taken.
        rounds: of all rows, after one that is not timed.
    """
    loaded = load_model(run)
    plain = loaded.recipe.translate.model_copy(update={"method": "beam", "backend": "torch", "min_length": 1})
    lines, references = (list(read_lines(file))[:count] for file in (source, reference))
    vocabs = loaded.vocabs
    names = vocabs[0].names()
    ids = {piece: number for number, piece in enumerate(vocabs[1].names())}

    def own(**changes: object) -> Callable[[], list[str]]:
        settings = Translate.model_validate(plain.model_dump() | changes)
        models = load_models(loaded.folder, settings, Ranks.alone())
        return lambda: [best[0].text for best in translate_lines(models.all[0], vocabs, lines, settings)]

    def raw(precision: str, beam: int) -> Callable[[], list[str]]:
        folder = load_exported(loaded, plain.model_copy(update={"precision": precision}), "cpu").folder
        translator = ctranslate2.Translator(str(folder), compute_type=FORMATS[precision], inter_threads=1,
                                            intra_threads=torch.get_num_threads())

        def translate() -> list[str]:
            pieces = [[names[i] for i in vocabs[0].encode(line)] for line in lines]
            results = translator.translate_batch(
                pieces, beam_size=beam, length_penalty=plain.alpha, batch_type="tokens",
                max_batch_size=plain.batch_tokens // beam)
            return [vocabs[1].decode([ids[piece] for piece in result.hypotheses[0]]) for result in results]

        return translate

    rows: dict[str, Callable[[], list[str]]] = {"beam, deepnmt, defaults": own()}
    for method, rule, beam in (("beam", SAME_RULE, plain.beam), ("greedy", {}, 1)):
        rows[f"{method}, deepnmt"] = own(method=method, **rule)
        rows[f"{method}, deepnmt bf16"] = own(method=method, precision="bf16", **rule)
        for precision in ("fp32", "int8"):
            rows[f"{method}, backend {precision}"] = own(
                method=method, backend="ctranslate2", precision=precision, **rule)
            rows[f"{method}, CTranslate2 {precision}"] = raw(precision, beam)
    texts = {name: row() for name, row in rows.items()}
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(1, rounds + 1):
        for name, row in rows.items():
            started = time.process_time()
            row()
            seconds[name].append(time.process_time() - started)
        print_status(f"round {number} of {rounds}")
    return _table(texts, seconds, references)


def _table(texts: dict[str, list[str]], seconds: dict[str, list[float]], references: list[str]) -> str:
    found = ["| search | sentences per CPU second | × CTranslate2 fp32 | BLEU | as deepnmt's |",
             "|---|---|---|---|---|"]
    for name, taken in seconds.items():
        method = name.split(",")[0]
        rates = [len(references) / each for each in taken]
        ratio = statistics.median(seconds[f"{method}, CTranslate2 fp32"]) / statistics.median(taken)
        same = sum(a == b for a, b in zip(texts[name], texts[f"{method}, deepnmt"], strict=True))
        bleu = sacrebleu.corpus_bleu(texts[name], [references]).score
        found.append(f"| {name} | {statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f}) | {ratio:.2f} "
                     f"| {bleu:.2f} | {same} of {len(references)} |")
    return "\n".join(found)
