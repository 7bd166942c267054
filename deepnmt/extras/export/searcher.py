"""A model that was exported to CTranslate2: its search and its scores.

CTranslate2's beam search is that of `translate.finish: best` with a patience. It takes token texts, adds the source's
eos by itself, and has one length limit for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ctranslate2
import torch

from deepnmt.checkpoint.checkpoint import LoadedModel, weights_of
from deepnmt.config import Translate
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import Candidate
from deepnmt.errors import UserError
from deepnmt.extras.export.exported import FACTS, read_exported
from deepnmt.folders import locate
from deepnmt.tokens import BOS, EOS

# CTranslate2's names of the number formats
FORMATS = {"fp32": "float32", "bf16": "bfloat16", "int16": "int16", "int8": "int8"}


def load_exported(loaded: LoadedModel, settings: Translate, device: torch.device | str) -> CTranslate2:
    """The model in the folder `ctranslate2` of a checkpoint's run.

    Raises:
        UserError: there is none, or it is damaged (see `read_exported`) or of other weights.
    """
    nearby = [parent / "ctranslate2" for parent in (loaded.folder, *loaded.folder.resolve().parents[:2])]
    folder = next((folder for folder in map(locate, nearby) if (folder / FACTS).is_file()), None)
    if folder is None:
        raise UserError(f"translate.backend is ctranslate2, but there is no exported model in {nearby[-1]} or "
                        f"{nearby[-2]}; run deepnmt export RUN --to ctranslate2, or set translate.backend=torch")
    facts = read_exported(folder)
    if facts["format"] != "ctranslate2":
        raise UserError(f"{folder} holds a model for {facts['format']}; export the run with --to ctranslate2")
    if facts.get("weights") != weights_of(loaded.folder):
        raise UserError(f"{folder} was exported from {facts.get('checkpoint')}, which is not what {loaded.folder} "
                        "holds; export the run again, or name that checkpoint")
    precision = facts.get("precision")
    if precision not in ("fp32", settings.precision):
        raise UserError(f"{folder} holds weights in {precision}, but translate.precision is {settings.precision}; "
                        "export the run in fp32, which serves every precision, or set "
                        f"translate.precision={precision}")
    return CTranslate2(folder, loaded.vocabs, settings.precision, device)


class CTranslate2:
    """A model in CTranslate2's format, on a device and as many threads as PyTorch takes.

    Args:
        folder: as `deepnmt export` writes it.
        vocabs: source and target.
        precision: the number format to compute in.
        device: a GPU, or the CPU.

    Raises:
        UserError: CTranslate2 cannot load the folder or compute in this format.
    """

    def __init__(
        self, folder: Path, vocabs: tuple[Vocabulary, Vocabulary], precision: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.folder = folder
        self._src, self._trg = (vocab.names() for vocab in vocabs)
        self._ids = {piece: number for number, piece in enumerate(self._trg)}
        device = torch.device(device)
        try:
            self._translator = ctranslate2.Translator(
                str(folder), device=device.type, device_index=device.index or 0, compute_type=FORMATS[precision],
                inter_threads=1, intra_threads=torch.get_num_threads())
        except (RuntimeError, ValueError) as error:
            raise UserError(f"CTranslate2 cannot take {folder} in {precision}: {error}; export the run again, or give "
                            "another precision (translate.precision, in deepnmt export --precision)") from None

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probability of each target token and of eos, for sources and targets without eos."""
        scored = self._translator.score_batch([self._pieces(source) for source in sources],
                                              [[self._trg[i] for i in target] for target in targets])
        return [result.log_probs[: len(target) + 1] for result, target in zip(scored, targets, strict=True)]

    def search(
        self, sources: Sequence[Sequence[int]], limits: Sequence[int], settings: Translate, barred: Sequence[int]
    ) -> list[list[Candidate]]:
        """The best hypotheses of a batch, as `beam_search` and `decode_independently` return them.

        A sentence whose search came to its own limit, and went on because others in the batch have a higher one, is
        searched again by itself. To tell, CTranslate2 returns all hypotheses that it ended with, not the best alone.

        Args:
            sources: token ids with eos.
            limits: of each sentence, the most tokens of a hypothesis.
            settings: method beam or greedy.
            barred: tokens that no hypothesis may contain, besides bos.
        """
        beam = settings.beam if settings.method == "beam" else 1
        # CTranslate2 refuses to end with fewer hypotheses than it returns, and what it cannot count.
        patience = min(max(settings.patience or 1.0, settings.nbest / beam), 1e6)
        penalty = LengthPenalty(settings.length_penalty, settings.alpha)
        results = self._translator.translate_batch(
            [self._pieces(source[:-1]) for source in sources],
            beam_size=beam,
            patience=patience,
            num_hypotheses=max(settings.nbest, int(beam * min(patience, 1.0))),
            length_penalty=settings.alpha if settings.length_penalty == "average" else 0.0,
            min_decoding_length=min(settings.min_length, max(limits) - 1),
            no_repeat_ngram_size=settings.no_repeat_ngram,
            max_decoding_length=max(limits),
            max_input_length=0,
            suppress_sequences=[[self._trg[i]] for i in (BOS, *barred)],
            return_scores=True,
            return_end_token=True,
        )
        by_sentence = []
        for source, limit, result in zip(sources, limits, results, strict=True):
            candidates = []
            for pieces, score in zip(result.hypotheses, result.scores, strict=True):
                tokens = [self._ids[piece] for piece in pieces]
                divisor = penalty.divisor(len(tokens)) if tokens else 1.0
                ended = tokens[-1:] == [EOS]
                candidates.append(Candidate(tokens[:-1] if ended else tokens, score, score * divisor, ended))
            if limit < max(limits) and any(len(one.tokens) + one.ended >= limit for one in candidates):
                candidates = self.search([source], [limit], settings, barred)[0]
            by_sentence.append(candidates[: settings.nbest])
        return by_sentence

    def _pieces(self, source: Sequence[int]) -> list[str]:
        return [self._src[i] for i in source]
