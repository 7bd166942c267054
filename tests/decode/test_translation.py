"""Two real processes translate one file."""

from __future__ import annotations

import json
from pathlib import Path

from ranks import run_on_ranks

from deepnmt import config
from deepnmt.checkpoint.checkpoint import TrainingState, save_checkpoint
from deepnmt.data.vocab import train_vocabulary
from deepnmt.decode.translate import translate_files
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.launch import processes

SENTENCES = ["the small dog sees a red house", "a cat runs to the old tree", "two birds sing in the green garden"]
SETTINGS = config.Translate(beam=3, nbest=2, max_ratio=1.0, max_extra=4)


def translate_together(folder: str, source: str, target: str) -> None:
    """What each process runs."""
    with processes() as ranks:
        written = translate_files(Path(folder), source, target, SETTINGS, form="jsonl", ranks=ranks)
        assert written == (7 if ranks.first else 0)


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    vocab = train_vocabulary(SENTENCES * 3, config.Vocab(size=45))
    corpus, stack = config.Corpus(src="train.en", trg="train.de"), config.Stack(layers=1)
    recipe = config.Recipe(
        run="run", data=config.Data(folder="data", src_lang="en", trg_lang="de", train=corpus, valid=corpus),
        model=config.Model(width=16, heads=2, ffn=16, max_length=300, encoder=stack, decoder=stack),
        train=config.Train(updates=1),
    )
    weights = dict(Transformer(recipe.model, 45, 45, seed=2).named_parameters())
    folder = save_checkpoint(tmp_path / "run", 1, weights, {}, TrainingState(1, 0, 1, 1, None, {}),
                             config.dump_recipe(recipe), vocab, vocab)
    source = tmp_path / "in"
    source.write_text("\n".join([*SENTENCES, "", "the dog", "a", "birds in the tree"]) + "\n", encoding="utf-8")
    translate_files(folder, str(source), str(tmp_path / "one"), SETTINGS, form="tsv")
    run_on_ranks(2, "test_translation:translate_together", str(folder), str(source), str(tmp_path / "two"))
    one = [line.split("\t") for line in (tmp_path / "one").read_text(encoding="utf-8").splitlines()]
    two = [json.loads(line) for line in (tmp_path / "two").read_text(encoding="utf-8").splitlines()]
    flat = [(o["line"], rank, h["text"]) for o in two for rank, h in enumerate(o["hypotheses"], start=1)]
    assert flat == [(int(n), int(r), text) for n, r, _, text in one]
