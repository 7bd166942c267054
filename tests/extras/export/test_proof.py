"""The comparison of an exported model: ties are counted apart, other differences are faults."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import tiny_run

from deepnmt.config import Translate
from deepnmt.data.vocab import Vocabulary
from deepnmt.extras.export.proof import Ids, Proof, compare

VOCAB = Vocabulary(tiny_run.VOCAB)
PAIRS = [(text, text) for text in tiny_run.SENTENCES]


class Copies:
    """Translates by copying; says token `odd` in place of the last one of the first sentence, and is `off` in scores.
    Whoever scores it finds tokens 5 and 6 equally likely. A beam search leaves out the ends of the sentences `cut`."""

    def __init__(self, odd: int | None = None, off: float = 0.0, cut: int = 0) -> None:
        self.odd, self.off, self.cut = odd, off, cut

    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        return [[self.off - (2.0 if token in (5, 6) else token) for token in [*target, 2]] for target in targets]

    def search(self, sources: Ids, limit: int, settings: Translate) -> list[list[int]]:
        if settings.method == "beam":
            ends = [VOCAB.encode(text) for text, _ in TEXT[:self.cut]]
            return [list(source[:-3] if list(source[:-1]) in ends else source[:-1]) for source in sources]
        return [self._changed(source[:-1]) for source in sources]

    def _changed(self, tokens: Sequence[int]) -> list[int]:
        first = VOCAB.encode(PAIRS[0][0])
        return [*tokens[:-1], self.odd] if self.odd is not None and list(tokens) == first else list(tokens)


SOURCES = [" ".join(words) for words in itertools.islice(itertools.permutations(PAIRS[0][0].split()), 60)]
TEXT = [(text, text if number % 2 else text[::-1]) for number, text in enumerate(SOURCES)]


def test_a_beam_that_parts_at_near_ties_is_no_fault_but_another_search_is() -> None:
    """Half of the references are right, so that BLEU has an interval."""
    found = {cut: compare(Copies(), Copies(cut=cut), (VOCAB, VOCAB), TEXT, 100, "en") for cut in (2, 60)}
    assert 0.1 < found[2].own_bleu - found[2].bleu < found[2].interval and not list(found[2].faults())
    bleu, interval, own = (f"{value:.2f}" for value in (found[2].bleu, found[2].interval, found[2].own_bleu))
    assert f"BLEU {bleu} ± {interval} (deepnmt {own})" in found[2].sentence()
    fault, = found[60].faults()
    assert re.fullmatch(r"BLEU is [\d.]+ ± [\d.]+, the interval of 95 %, in place of [\d.]+", fault)


def proof(own: Copies, other: Copies) -> Proof:
    return compare(own, other, (VOCAB, VOCAB), [*PAIRS, ("", "empty")], 100, "en")


def test_equal_models_pass() -> None:
    found = proof(Copies(), Copies(off=5e-5))
    assert (found.lines, found.identical, found.ties, list(found.faults())) == (3, 3, 0, [])
    assert math.isclose(found.difference, 5e-5, rel_tol=0.1) and found.bleu == found.own_bleu > 99


def test_ties_are_no_faults_but_other_differences_are() -> None:
    tie, other = proof(Copies(odd=5), Copies(odd=6)), proof(Copies(odd=5), Copies(odd=9))
    assert (tie.identical, tie.ties) == (2, 1) and "2 of 3 lines identical, 1 part at a tie" in tie.sentence()
    assert not [fault for fault in tie.faults() if "greedy" in fault]
    assert (other.identical, other.ties) == (2, 0) and "1 of 3 greedy translations differ" in list(other.faults())


def test_scores_that_differ_or_are_no_numbers_are_faults() -> None:
    for off in (2e-4, -2e-4, math.nan):
        assert "log-probability differs by" in next(proof(Copies(), Copies(off=off)).faults())
