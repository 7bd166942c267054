"""The recipe's sections: every setting with its type, its default and its checks.

To add a setting, add it here with a description and a default that changes nothing, because older recipes, data and
runs are read with that default. Also add a line to recipes/demo/admin_18l-18l.yaml, which explains every setting.
Beside its type a setting says what else is to be known of it, see `Fact` and `For` in fields.py. Names that a setting
may have are rows of choices.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from glob import has_magic
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from deepnmt.config.choices import (
    ACTIVATIONS,
    BLOCKS,
    INITS,
    LANGUAGE_IDS,
    METRICS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITIONS,
    SCHEDULES,
    SEARCHES,
    TASKS,
    TYINGS,
    VOCAB_KINDS,
    BlockFacts,
    Use,
    facts_of,
)
from deepnmt.config.fields import COMPRESSED, FILE_NAME, By, Fact, Fault, For, Section, either, values_of
from deepnmt.config.plugins import as_mapping, have_run, known
from deepnmt.errors import nearest

OWN_FIGURES = (  # what a validation or a score has besides, so no names for metrics of users
    "loss", "perplexity", "best", "signature", "sentences", "score", "mbr",
    "type", "update", "value", "metrics", "training_seconds",
    "source_gain", "encoder_common", "decoder_common", "cross_attention_entropy",
)
SEARCHING = ("translate", "score", "evaluate")  # what is done with a trained model
READY = "evaluate --hypotheses"  # which scores translations without a model
Precision = Literal["fp32", "bf16", "fp16"]
# Counts have bounds above which they can only be a mistake. Where less is too much for a machine, that machine says so:
# `device.require_cores`, and whatever runs out of memory.
Count = Annotated[int, Field(ge=1, le=10**9)]  # of what takes no room by itself, or runs out of text: updates, tokens
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Cores = Annotated[int, Field(ge=0, le=2**14)]
Layers = Annotated[int, Field(ge=0, le=100_000)]
Length = Annotated[int, Field(ge=0, le=2**17)]  # of a sentence
Hypotheses = Annotated[int, Field(ge=1, le=10_000)]  # of a sentence
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Folder = Annotated[str, Field(min_length=1)]
Part = Annotated[str, Field(min_length=1)]  # of a model; optim/groups.py, `is_in`
Files = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), WithJsonSchema(
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}), Fact.PATH]


class Corpus(Section):
    """A parallel corpus: either `src` and `trg` files of equal length, or `tsv` files."""

    src: Files = Field(default_factory=list)
    """Files of source sentences, one a line; plain, .gz, .xz, .zst or .bz2. Here and in `trg` and `tsv`, a folder is
    all files in it, and a pattern such as `news.*.de.gz` those that fit, in the order of their names."""
    trg: Files = Field(default_factory=list)
    """Files of their translations, line by line, as many files as in `src`."""
    tsv: Files = Field(default_factory=list)
    """Files with columns, instead of `src` and `trg`: separated by tabs, JSON lines (.jsonl), Parquet (.parquet), or a
    folder that Hugging Face's `datasets` has saved. The last two need `pip install 'deepnmt[pyarrow]'`."""
    columns: list[Count | Annotated[str, Field(min_length=1)]] = Field(default=[1, 2], min_length=2, max_length=2)
    """The columns of source and target in the `tsv` files, counted from 1, or by name, such as `[translation.de,
    translation.en]`; of tab-separated text with names the first line has these."""
    tag: Annotated[Annotated[str, Field(pattern=r"^\S+$")] | None, Fact.EPOCH] = None
    """A tag in front of every source sentence, such as `<2de>` for a target language or `<BT>` for back-translation.
    It is one piece of the vocabulary, and no translation contains it."""
    mtdata: list[str] = Field(default_factory=list)
    """Corpora that `deepnmt get` fetches into `src` and `trg`, by mtdata's names, such as
    `Statmt-europarl_wmt13-7-deu-eng`."""
    sacrebleu: str | None = None
    """The test set that `deepnmt get` fetches into `src` and `trg`, by SacreBLEU's name, such as `wmt14/full`."""
    translated_by: Annotated[Folder | None, Fact.PATH] = None
    """The model, a run or its recipe, whose translations `deepnmt run` writes into one of the files: into `trg` if it
    translates as this recipe does (distillation), into `src` if the other way round (back-translation)."""
    translate: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Settings of that model's `translate` section to change for it, as in `{method: sample}`."""
    references: Files = Field(default_factory=list)
    """Files of real translations, line by line as what is translated, for `translate: {choose: chrf}`."""

    @property
    def annotations(self) -> dict[str, list[str]]:
        """The files of each annotation that the corpus has, by its setting."""
        files = {name: getattr(self, name) for name in type(self).model_fields if self.is_marked(name, Fact.ANNOTATION)}
        return {name: named for name, named in files.items() if named}

    def faults(self) -> Iterator[Fault]:
        if self.tsv and (self.src or self.trg):
            yield Fault(("tsv", "src", "trg"), "give either 'tsv' or 'src' and 'trg', not both")
        elif not self.tsv and not (self.src and self.trg):
            yield Fault(("src", "trg", "tsv"), "give 'src' and 'trg' files, or 'tsv' files")
        elif len(self.src) != len(self.trg) and (
                self.translated_by or not any(map(has_magic, (*self.src, *self.trg)))):
            yield Fault(("src", "trg"), f"'src' names {len(self.src)} files and 'trg' {len(self.trg)}; give as many "
                        "of one as of the other")
        if self.mtdata and self.sacrebleu:
            yield Fault(("mtdata", "sacrebleu"), "give either 'mtdata' or 'sacrebleu', not both")
        elif self.mtdata or self.sacrebleu:
            files = [*self.src, *self.trg]
            if len(set(files)) != 2 or any(file.endswith(COMPRESSED) for file in files):
                yield Fault(("src", "trg"), "'mtdata' and 'sacrebleu' are fetched into two plain files; name one in "
                            "'src' and one in 'trg'")
        if self.translated_by and (self.tsv or self.mtdata or self.sacrebleu):
            yield Fault(("translated_by",), "'translated_by' needs 'src' and 'trg', and nothing else that makes them; "
                        "remove one of the two")
        if self.translate and not self.translated_by:
            yield Fault(("translate", "translated_by"), "'translate' has no effect without 'translated_by', the model "
                        "that translates; name it, or remove it")
        if self.references and (not self.translated_by or len(self.references) != len(self.src)):
            yield Fault(("references", "translated_by"), "'references' are for 'translated_by', a file for each in "
                        "'src'; give as many, or remove them")


class ScoredCorpus(Corpus):
    """A parallel corpus that is scored."""

    trg_lang: str | None = None
    """The target language, by which SacreBLEU tokenises; null: `data.trg_lang`."""


class AlignedCorpus(Corpus):
    """A parallel corpus that may have word alignments."""

    alignments: Annotated[Files, Fact.ANNOTATION, By("alignment")] = Field(default_factory=list)
    """Files of word alignments, line by line as the corpus: `0-0 1-2` links word 0 of the source with word 0 of the
    target, and 1 with 2. Words are what spaces separate, without the `tag`. For `train.guided_alignment`, and in the
    validation text for the alignment error."""


class Cleaning(Section):
    """Which pairs of a corpus are left out for their text; by default none."""

    # The filters themselves: data/filters.py.
    scripts: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=2)
    """The scripts of source and target, each the first word of its letters' names in Unicode, such as
    `[Latin, Cyrillic]`; that of Chinese is `CJK`. A pair is left out if fewer than half of the letters of a side are of
    its script."""
    same_digits: bool = False
    """Leave out pairs whose sides have different numbers in digits, each counted as often as it stands there, in any
    order; 1,000 is two numbers, 1 and 000."""
    max_length_ratio: Positive | None = None
    """A pair whose longer side has more than this many times the characters of the shorter is left out."""
    min_letters: Rate = 0.0
    """A pair is left out if fewer than this share of the characters of a side, spaces aside, are letters."""
    drop_same_letters: bool = False
    """Leave out pairs whose sides differ in case, punctuation and spaces alone."""
    score: Count | Annotated[str, Field(min_length=1)] | None = None
    """The column of the `tsv` files that has a score of each pair, by its number or name as in `columns`."""
    min_score: float | None = None
    """A pair is left out if its `score` is lower."""
    language_id: Annotated[str | None, LANGUAGE_IDS] = None
    """What tells the language of a sentence: a function of a plug-in, which gives a label or a score a sentence."""
    languages: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=2)
    """The labels that `language_id` gives to sentences of the source and of the target, such as `[deu_Latn, eng_Latn]`;
    empty: `data.src_lang` and `data.trg_lang`. A pair is left out if a side has another label."""
    min_language_score: float = 0.5
    """Where `language_id` gives scores, a pair is left out if that of a side is lower."""
    drop_near_duplicates: bool = False
    """Leave out pairs that differ from an earlier one, of any corpus, in case, digits, punctuation and spaces alone;
    also if `data.filters` then leave out that one for its length in tokens, since this is done before."""

    def faults(self) -> Iterator[Fault]:
        for name, what in (("scripts", "script"), ("languages", "language")):
            if len(getattr(self, name)) == 1:
                yield Fault((name,), f"'{name}' names one {what}; give that of the source and that of the target")

    def beside(self, common: Cleaning) -> Cleaning:
        """These settings, and where one is not given that of `common`."""
        return common.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


def _faults_of_cleaning(corpus: Corpus, cleaning: Cleaning, where: str) -> Iterator[Fault]:
    """Settings of cleaning that do not fit each other or the corpus, whose own are those of the section `where`."""
    if cleaning.min_score is not None and cleaning.score is None:
        yield Fault((f"{where}.min_score", f"{where}.score"), f"{where}.min_score ({cleaning.min_score:g}) needs "
                    "'score', the column that has the scores; name it, or set min_score: null")
    if cleaning.score is not None and cleaning.min_score is None:
        yield Fault((f"{where}.score", f"{where}.min_score"), f"{where}.score ({cleaning.score}) has no effect without "
                    "'min_score'; set it, or score: null")
    if cleaning.score is not None and cleaning.min_score is not None and not corpus.tsv:
        yield Fault((f"{where}.score", "tsv"), f"{where}.score ({cleaning.score}) is a column of 'tsv' files, but this "
                    "corpus is 'src' and 'trg'; give it as 'tsv', or set score and min_score to null")
    if cleaning.languages and cleaning.language_id is None:
        yield Fault((f"{where}.languages", f"{where}.language_id"), f"{where}.languages has no effect without "
                    "'language_id'; name one of a plug-in, or set languages: []")


class WeightedCorpus(AlignedCorpus):
    """One of several parallel corpora of a training text."""

    cleaning: Cleaning = Cleaning()
    """Which of its pairs are left out; a setting that is not given here is that of `data.train.cleaning`."""
    weight: Annotated[Positive, Fact.EPOCH] = 1.0
    """How often the corpus is used: 3 is as if it were given three times."""


class AlignedScoredCorpus(ScoredCorpus, AlignedCorpus):
    """One of several parallel corpora of a validation text."""


def _names_are_corpora(schema: dict[str, Any]) -> None:
    """Lets editors complete `{news: {...}, bt: {...}}`, too; see `_Corpora`."""
    if "corpora" in schema["properties"]:
        schema["additionalProperties"] = schema["properties"]["corpora"]["additionalProperties"]


class _Corpora(AlignedCorpus):
    """One parallel corpus, or several by name."""

    model_config = ConfigDict(json_schema_extra=_names_are_corpora)

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, tree: Any) -> Any:
        """`{news: {...}, bt: {...}}` is short for `{corpora: {news: {...}, bt: {...}}}`."""
        if not isinstance(tree, dict):
            return tree
        named = {key: value for key, value in tree.items() if key not in cls.model_fields and isinstance(value, dict)}
        if not named:
            return tree
        corpora = tree.get("corpora") or {}
        if not isinstance(corpora, dict) or not all(isinstance(corpus, dict) for corpus in corpora.values()):
            return tree
        corpora = dict(corpora)
        for name, corpus in named.items():  # both forms at once: a run's recipe with a setting of the command line
            corpora[name] = {**corpora.get(name, {}), **corpus}
        return {**{key: value for key, value in tree.items() if key not in named}, "corpora": corpora}

    def faults(self) -> Iterator[Fault]:
        corpora = getattr(self, "corpora", {})
        if not corpora:
            yield from super().faults()
        elif own := [name for name in type(self).model_fields if name not in ("corpora", "cleaning", "temperature")
                     and getattr(self, name) != self.default(name)]:
            yield Fault(("corpora", *own), f"give either one corpus ({', '.join(own)}), or corpora by name "
                        f"({', '.join(corpora)}), not both")
        for name in corpora:
            if not re.fullmatch(FILE_NAME, name):
                yield Fault(("corpora",), f"corpora.{name}: a corpus's name has letters, digits, '_', '-' and '.' only")


class TrainText(_Corpora):
    """The training text: one parallel corpus, or several by name, as in `train: {news: {...}, bt: {...}}`."""

    corpora: dict[str, WeightedCorpus] = Field(default_factory=dict)
    """Several corpora by name, instead of `src`, `trg` or `tsv`."""
    cleaning: Cleaning = Cleaning()
    """Which pairs are left out. Of several corpora, each may have settings of its own instead of some of these."""
    temperature: Annotated[Positive, Fact.EPOCH] = 1.0
    """Above 1, small corpora are used more often and large ones less: shares become their power 1/temperature. Only
    with several corpora."""

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        for name, corpus in self.corpora.items():
            yield from _faults_of_cleaning(corpus, corpus.cleaning.beside(self.cleaning), f"corpora.{name}.cleaning")
        if not self.corpora:
            yield from _faults_of_cleaning(self, self.cleaning, "cleaning")

    @model_validator(mode="after")
    def _clean_in_common(self) -> TrainText:
        for name, corpus in self.corpora.items():
            self.corpora[name] = corpus.model_copy(update={"cleaning": corpus.cleaning.beside(self.cleaning)})
        return self

    @model_serializer(mode="wrap")
    def _cleaning_of_its_own(self, dump: SerializerFunctionWrapHandler) -> Any:
        """Of each corpus what it has of its own, so that a change of the common settings reaches it."""
        tree = dump(self)
        for corpus in tree.get("corpora", {}).values():
            common = tree.get("cleaning", {})
            own = corpus.get("cleaning", {})
            corpus["cleaning"] = {name: value for name, value in own.items() if value != common.get(name)}
        return tree


class ValidText(_Corpora, AlignedScoredCorpus):
    """The validation text: one parallel corpus, or several by name. Several are scored one by one, and the BLEU that
    decides about the best checkpoint is their mean."""

    corpora: dict[str, AlignedScoredCorpus] = Field(default_factory=dict)
    """Several corpora by name, instead of `src`, `trg` or `tsv`."""


class Filters(Section):
    """Which training pairs are left out. Lengths are in subword tokens, without bos and eos."""

    # The filters themselves: data/filters.py, `TEXT_FILTERS` and `LENGTH_FILTERS`.
    max_tokens: Count = 250
    """A pair with more subword tokens than this on either side is left out."""
    max_ratio: Positive = 9.0
    """A pair whose longer side has more than this many times the tokens of the shorter is left out."""
    drop_duplicates: bool = True
    """Leave out the second and later copies of a pair."""
    drop_identical: bool = True
    """Leave out pairs whose source and target are equal."""
    drop_overlap: bool = False
    """Leave out pairs that have a sentence of the validation or a test text; else they are counted, with a warning."""


class Modify(Section):
    """How the training text is modified when it is read, anew in every epoch. Words are what spaces separate. Case and
    copies change both sides, all else the source alone."""

    upper: Rate = 0.0
    """The share of pairs all in capitals."""
    title: Rate = 0.0
    """The share of pairs whose words begin with a capital."""
    lower: Rate = 0.0
    """The share of pairs without capitals."""
    typos: Rate = 0.0
    """The share of words with a typo: a character is left out, doubled, replaced or exchanged with the next."""
    copies: Rate = 0.0
    """The share of words, of those that stand once on each side (names, numbers), that become another, made up, the
    same on both, so that the model learns to copy."""
    terms: Rate = 0.0
    """The share of words with one translation, by `alignments`, that are replaced by it, so that the model learns to
    keep words of the target language."""
    insert_words: Rate = 0.0
    """The share of words after which another word of the sentence is put."""
    drop_words: Rate = 0.0
    """The share of words that are left out."""
    swap_words: Rate = 0.0
    """The share of words that are exchanged with the next."""
    subwords: bool = False
    """Draw the segmentation of every sentence (BPE-dropout or unigram sampling, `data.subword_alpha`), in place of
    `data.subword_variants`, which keeps some of them on the disk."""

    def faults(self) -> Iterator[Fault]:
        if (cases := self.upper + self.title + self.lower) > 1.0:
            yield Fault(("upper", "title", "lower"), f"upper, title and lower are {cases:g} together, must be at most "
                        "1; a pair has one of them")


class Until(Section):
    """When a stage ends; of several, what comes first. All count from its beginning."""

    epochs: Count | None = None
    """After so many epochs."""
    updates: Count | None = None
    """After so many updates."""
    patience: Count | None = None
    """When so many validations in a row were no better than its best."""


class Stage(Section):
    """A part of the training with a mixture of corpora of its own."""

    mix: dict[str, Positive] = Field(min_length=1)
    """The corpora of `data.train` that are used, and their shares of the sentence pairs, in proportion to these
    numbers, whatever their sizes. An epoch of the stage has as many pairs as these corpora together."""
    until: Until = Until()
    """When the stage ends and the next begins; the last has no end of its own."""


class Data(Section):
    """The texts, the folder they are prepared into, and how."""

    folder: Annotated[Folder, Fact.PATH]
    """The folder that `deepnmt prepare` writes and training reads."""
    src_lang: Annotated[str, For("evaluate", READY)]
    """The source language, such as `de`."""
    trg_lang: Annotated[str, For("evaluate", READY)]
    """The target language, such as `en`; it also decides how SacreBLEU tokenises. A run whose `best_by` is `bleu`
    keeps it to its end."""
    train: TrainText
    """The training text."""
    valid: ValidText
    """The validation text, for the loss and the BLEU during training."""
    test: Annotated[dict[str, ScoredCorpus], For("evaluate", READY)] = Field(default_factory=dict)
    """Test sets by name, for `deepnmt evaluate`."""
    modify: Annotated[Modify, Fact.FIXED, By("modify")] = Modify()
    """How the training text is modified when it is read."""
    stages: Annotated[list[Stage], Fact.FIXED] = Field(default_factory=list)
    """Mixtures of the corpora of `train`, one after the other; see docs/guide/several_corpora.md."""
    filters: Annotated[Filters, Fact.FIXED, Fact.PREPARED] = Filters()
    """Which training pairs are left out."""
    shard_pairs: Annotated[CountOrZero, Fact.PREPARED] = 0
    """Lines of a corpus that a shard of the prepared training text is made from, such as 1000000. Text in shards is
    prepared in parts (`deepnmt prepare --part`), and training plans and holds a window of it at a time. 0: one piece,
    for up to some 30 million pairs."""
    window_pairs: Annotated[Count, Fact.FIXED] = 2_000_000
    """Pairs that are planned together, where the training text is in shards: some 130 bytes a pair of each process."""
    reuse: Files = Field(default_factory=list)
    """Folders of prepared data in shards; the vocabulary is that of the first, and shards that would be the same are
    taken from there."""
    workers: Cores = 0
    """Processes that segment the text; 0: one per core."""
    subword_variants: Annotated[int, Field(ge=0, le=1000), Fact.FIXED, Fact.PREPARED, Fact.SEEN] = 0
    """Sampled segmentations of the training text, used in turn by the epochs (BPE-dropout or unigram sampling);
    0: none, every epoch sees the best segmentation."""
    subword_alpha: Annotated[float, Field(ge=0.0, le=1.0), Fact.FIXED, Fact.PREPARED] = 0.1
    """How much sampled segmentations vary: with bpe the probability of skipping a merge; with unigram the exponent
    of a segmentation's probability (smaller: more variation)."""

    def faults(self) -> Iterator[Fault]:
        corpora = self.train.corpora
        if self.reuse and not self.shard_pairs:
            yield Fault(("reuse", "shard_pairs"), f"reuse ({', '.join(self.reuse)}) has no effect on a text in one "
                        "piece; set shard_pairs as it was there, or remove it")
        if self.subword_variants and self.modify != Modify():
            yield Fault(("modify", "subword_variants"), f"subword_variants ({self.subword_variants}) keeps "
                        "segmentations that modify would not; set subword_variants: 0, and modify.subwords: true")
        if self.modify.terms and not any(one.alignments for one in (self.train, *corpora.values())):
            yield Fault(("modify", "train"), f"modify.terms ({self.modify.terms:g}) needs word alignments; name their "
                        "files in data.train.alignments, or set it to 0")
        for number, stage in enumerate(self.stages):
            name, last = f"stages.{number}", number == len(self.stages) - 1
            for corpus in stage.mix:
                if corpus not in corpora:
                    yield Fault(("stages", "train"), f"{name}.mix: data.train has no corpus {corpus!r}; it has "
                                f"{', '.join(corpora) or 'one without a name, which needs no stages'}")
            if not last and stage.until == Until():
                yield Fault(("stages",), f"{name} has no end, but another stage comes after it; give it an until, such "
                            "as {epochs: 2}, {updates: 10000} or {patience: 5}")
            if last and stage.until != Until():
                yield Fault(("stages",), f"{name} is the last stage, which goes on until the run ends; remove its "
                            "until, and set train.updates, train.epochs or train.patience")
        ignored = [f"data.train.{corpus}.weight" for corpus, one in corpora.items() if one.weight != 1.0]
        ignored += ["data.train.temperature"] * (self.train.temperature != 1.0)
        if self.stages and ignored:
            yield Fault(("stages", "train"), f"{', '.join(ignored)} would have no effect, since data.stages gives the "
                        "shares of corpora; remove one of the two")


class Vocab(Section):
    """The SentencePiece vocabularies. Ids: unk 0, bos 1, eos 2, pad 3."""

    model: Annotated[Folder | None, Fact.PATH] = None
    """A vocabulary that there is already, to fine-tune a model: the folder of a run, a checkpoint or prepared data, or
    a SentencePiece file; null: one is trained. `kind` must say what it is; `size`, `byte_fallback`,
    `character_coverage` and `max_sentences` then have no effect."""
    kind: Annotated[str, VOCAB_KINDS, Fact.PREPARED] = "bpe"
    """The SentencePiece model."""
    size: Annotated[int, Field(ge=8, le=1_000_000), Fact.PREPARED] = 8000
    """Pieces, the four special ones (unk, bos, eos, pad) and tags included."""
    tags: Annotated[list[Annotated[str, Field(pattern=r"^\S+$")]], Fact.PREPARED] = Field(default_factory=list)
    """Tags that source sentences begin with in the text itself, a space after them. Those of `tag` need not be
    listed."""
    shared: Annotated[bool, Fact.PREPARED] = True
    """One vocabulary for both languages."""
    byte_fallback: Annotated[bool, Fact.PREPARED] = False
    """Encode characters that have no piece as bytes, instead of as unk."""
    character_coverage: Annotated[float, Field(ge=0.98, le=1.0), Fact.PREPARED] = 1.0
    """The share of the text's characters that are in the vocabulary; SentencePiece takes none below 0.98."""
    max_sentences: Annotated[Count, Fact.PREPARED] = 2_000_000
    """At most this many sentences of the training text are read for training the vocabulary."""


LEAST_SHARES = 8  # micro-batches that an update of a fixed size has at least, over all processes


class Batch(Section):
    """The micro-batches."""

    tokens: Annotated[Count, Fact.MICRO_BATCH] = 4096
    """Size of a micro-batch: its sentences times its longest sentence, on either side, padding included; above
    `data.filters.max_tokens`."""
    accumulation: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Micro-batches per process and update."""
    update_tokens: Annotated[Count | None, Fact.FIXED] = None
    """Target tokens of an update, about, whatever the number of processes and the size of a micro-batch; it is divided
    into 8 micro-batches or more. null: `accumulation` says how large an update is."""

    def faults(self) -> Iterator[Fault]:
        if self.update_tokens is not None and self.accumulation > 1:
            yield Fault(("accumulation",), f"accumulation is {self.accumulation}, but update_tokens "
                        f"({self.update_tokens}) already says how large an update is; remove one of the two")

    def entries(self, ranks: int) -> int:
        """Entries of the plan that an update of so many data-parallel ranks takes."""
        return ranks * self.accumulation if self.update_tokens is None else 1

    def per_rank(self, ranks: int) -> int:
        """Micro-batches per data-parallel rank and update; with `update_tokens` an estimate."""
        if self.update_tokens is None:
            return self.accumulation
        return -(-max(LEAST_SHARES, -(-self.update_tokens // self.tokens)) // ranks)


class Shape(NamedTuple):
    """The sizes of one side of the model."""

    width: int
    heads: int
    ffn: int


class Stack(Section):
    """A stack of layers, one side of the model."""

    block: Annotated[str, BLOCKS] = "admin"
    """The residual block of every layer; a text is the name of one in a plug-in."""
    layers: Layers = 6
    """Number of layers; 0: the model lacks this side, which only some tasks allow. `encoder: null` or `decoder: null`
    is short for it."""
    init: Annotated[str, INITS, Fact.TRAINING_ONLY] = "auto"
    """Initial weights of matrices. `xavier` divides Xavier's bound of query, key and value by √2 (not with deepnorm);
    `xavier_separate` does not; `depth_scaled` is `xavier` with every matrix times layers^-1/2. `auto` is
    `depth_scaled` for b2t and b2t_no_ln and `xavier` for the others. `published` is what the code of the block's
    authors does, scalars and biases included. `fairseq` is `xavier` but for what fairseq 0.12.2 leaves to PyTorch: FFN
    matrices and the biases of query, key, value and FFN, uniform in ±1/√columns. post_ln learns faster with it from few
    tokens."""
    output_change: Annotated[Literal["log", "constant", "linear"], Fact.SEEN] = "log"
    """How the output's change grows with depth at first (with admin_closed_form only): with its logarithm, not at all,
    or in proportion."""
    history_window: Annotated[Layers, Fact.SEEN] = 0
    """Outputs below a layer that it sums, the last ones (with dlcl and dlcl_post only); 0: all."""
    history_softmax: Annotated[bool, Fact.SEEN] = False
    """Whether the weights of these sums go through a softmax (with dlcl and dlcl_post only)."""
    residual_blocks: Annotated[int, Field(ge=1, le=100_000), Fact.SEEN] = 8
    """Sums of sub-layers that later ones attend to, at most (with block_attn_res only)."""
    streams: Annotated[int, Field(ge=2, le=64), Fact.SEEN] = 4
    """Residual streams side by side (with hyper and mhc only)."""
    mix: Annotated[Literal["sinkhorn", "identity"], Fact.SEEN] = "sinkhorn"
    """How a layer mixes its streams (with mhc only): by a doubly stochastic matrix, or not at all."""
    ramp: Annotated[int, Field(ge=0, le=10**9), Fact.TRAINING_ONLY, Fact.SEEN] = 0
    """ProRes, with any block: layer l, from 1, has the full weight of its sub-layers after this many updates times l,
    and proportionally less before; 0: from the start."""
    input_gain: Annotated[bool, Fact.SEEN] = False
    """A trainable vector on the stack's input, 1 at first; a folded model keeps its first ω there."""
    word_dropout: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.0
    """Word dropout in training: the probability with which a token's embedding is replaced by zeros; its position
    stays, and so does bos."""
    layer_drop: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.0
    """LayerDrop in training: the probability with which a layer is passed by. It regularises, and saves no time."""
    width: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Width of this side; null: `model.width`. Two widths need `tied: decoder` or `none`."""
    heads: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Attention heads of this side; null: `model.heads`."""
    ffn: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Inner width of this side's feed-forward sub-layers; null: `model.ffn`."""

    @property
    def facts(self) -> BlockFacts:
        """What is to be known of the block."""
        return facts_of(self.block)

    @property
    def as_published(self) -> bool:
        """Whether the block is built as its authors' code has it, which then differs."""
        return self.init == "published" and self.facts.published

    def changes_for(self, block: str) -> dict[str, object]:
        """The settings that give the stack another block: its name, and no options that it does not know."""
        other = self.model_copy(update={"block": block})
        return {"block": block, **{name: self.default(name) for name in other.misplaced("block")}}


def _absent(value: Any) -> Any:
    """`null` as a side of the model without layers."""
    return {"layers": 0} if value is None else value


class TunedAt(Section):
    """The sizes of the model on which the learning rate, weight decay and eps were tuned, where they differ from this
    model's, which then trains best with the same values (CompleteP; see docs/guide/new_recipe.md). A side with a width
    of its own had it in the same proportion. Only with pre_ln and, as an experiment, peri_ln, and with adam, adamw or
    muon."""

    width: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """`model.width` there; null: as here. It needs `heads` and `ffn`."""
    heads: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """`model.heads` there; null: as here."""
    ffn: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """`model.ffn` there; null: as here."""
    encoder_layers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """`model.encoder.layers` there; null: as here."""
    decoder_layers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """`model.decoder.layers` there; null: as here."""

    def faults(self) -> Iterator[Fault]:
        if self.width and not (self.heads and self.ffn):
            yield Fault(("width", "heads", "ffn"), f"width ({self.width}) needs heads and ffn beside it, those of the "
                        "model that was tuned")
        if self.width and self.heads and self.width % self.heads:
            yield Fault(("width", "heads"), f"width ({self.width}) must be a multiple of heads ({self.heads})")


Side = Annotated[Stack, BeforeValidator(_absent, json_schema_input_type=Stack | None)]


class Model(Section):
    """Shapes, dropout and blocks of the Transformer."""

    width: Annotated[int, Field(ge=1, le=2**16)] = 512
    """Width of the model; even, and a multiple of `heads`. Each side may have its own width, heads and ffn."""
    heads: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Attention heads; they share the width evenly."""
    ffn: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Inner width of the feed-forward sub-layer; even with looks_linear."""
    activation: Annotated[str, ACTIVATIONS, Fact.SEEN] = "relu"
    """Activation of the feed-forward sub-layer. `reglu`, `geglu` and `swiglu` multiply that of the first three by a
    gate, a third matrix of the sub-layer; 2/3 of `ffn` then has as many parameters. Not with fixup and looks_linear."""
    norm: Annotated[str, NORMS, Fact.SEEN] = "layer_norm"
    """The norm of the blocks: LayerNorm, or RMSNorm, which neither centres nor has a bias."""
    positions: Annotated[str, POSITIONS, Fact.SEEN] = "sinusoidal"
    """`sinusoidal`: sines and cosines are added to the embeddings; `fairseq`: those of fairseq, which imported models
    have. `rotary`: nothing is added, but queries and keys of
    the self-attention are rotated by their positions."""
    dropout: Annotated[Rate, Fact.TRAINING_ONLY] = 0.1
    """Dropout on the output of every sub-layer and on the embeddings."""
    attention_dropout: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.0
    """Dropout on the attention weights."""
    activation_dropout: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.0
    """Dropout inside the feed-forward sub-layer."""
    tied: Annotated[str, TYINGS, Fact.SEEN] = "all"
    """Which embeddings are one table: `all` (source, target and output), `decoder` (target and output) or `none`;
    `all` needs `vocab.shared`."""
    bands: Annotated[list[Count], Fact.SEEN] = Field(default_factory=list)
    """Adaptive inputs and adaptive softmax: the ids at which bands of rarer tokens begin, such as [20000, 60000], whose
    vectors are narrower; only without an encoder, and with `tied: all`. None: all have the width of the model."""
    band_factor: Annotated[int, Field(ge=1, le=2**16), Fact.SEEN] = 4
    """How much narrower the vectors of each band are than those of the one before."""
    band_dropout: Annotated[Rate, Fact.TRAINING_ONLY, Fact.SEEN] = 0.0
    """Dropout on the narrow states from which the further bands are predicted."""
    max_length: Annotated[int, Field(ge=1, le=2**17), Fact.TRAINING_ONLY] = 512
    """The longest sentence in tokens, eos included; above `data.filters.max_tokens`."""
    encoder: Side = Stack()
    """The stack that reads the source; null: none, and the decoder has no cross-attention."""
    decoder: Side = Stack()
    """The stack that writes the target; null: none, and the encoder's output is what predicts."""
    tuned_at: Annotated[TunedAt, Fact.TRAINING_ONLY, Fact.SEEN] = TunedAt()
    """Sizes from which the learning rate carries over to these."""

    def stack(self, side: Literal["encoder", "decoder"]) -> Stack:
        """One side of the model."""
        return self.encoder if side == "encoder" else self.decoder

    def shape(self, side: Literal["encoder", "decoder"]) -> Shape:
        """The sizes of one side of the model."""
        stack = self.stack(side)
        return Shape(stack.width or self.width, stack.heads or self.heads, stack.ffn or self.ffn)

    @property
    def sides(self) -> tuple[Literal["encoder", "decoder"], ...]:
        """The sides that there are."""
        both: tuple[Literal["encoder", "decoder"], ...] = ("encoder", "decoder")
        return tuple(side for side in both if self.stack(side).layers)

    @property
    def last(self) -> Literal["encoder", "decoder"]:
        """The side whose output predicts."""
        return self.sides[-1]

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward sub-layer."""
        return 3 if ACTIVATIONS[self.activation].gated else 2

    @property
    def blocks(self) -> str:
        """The blocks, for a sentence on what they cannot do."""
        return " and ".join(f"model.{side}.block is {self.stack(side).block}" for side in self.sides)

    @property
    def block_names(self) -> tuple[str, ...]:
        """The block of each side, for people; what can be done with them say `Stack.facts`."""
        return tuple(self.stack(side).block for side in self.sides)

    @property
    def depths(self) -> str:
        """The layers of each side, for people, as in 18L-6L."""
        return "-".join(f"{self.stack(side).layers}L" for side in self.sides)

    @property
    def profiled(self) -> bool:
        """Whether a stack's ω are measured before the first update, or read from a profile."""
        return any(self.stack(side).facts.profiled for side in self.sides)

    @property
    def tables(self) -> Mapping[Use, str]:
        """The name of the embedding table for each use."""
        inputs = {"src": "encoder", "trg": "decoder", "out": self.last}
        return {use: table for use, table in TYINGS[self.tied].tables.items() if inputs[use] in self.sides}

    def faults(self) -> Iterator[Fault]:
        if not self.sides:
            yield Fault(("encoder", "decoder"), "encoder and decoder are both null, so there is no model; give one of "
                        "them layers")
        yield from dict.fromkeys(fault for side in self.sides for fault in self._faults_of(side))
        yield from self._faults_of_bands()
        yield from self._faults_of_tuning()
        widths = [self.shape(side).width for side in self.sides]
        if TYINGS[self.tied].joint and len(set(widths)) > 1:
            yield Fault(("tied", "width", "encoder.width", "decoder.width"), f"tied: {self.tied} needs one width, "
                        f"but the encoder's is {widths[0]} and the decoder's {widths[1]}; set tied: decoder")

    def _faults_of_bands(self) -> Iterator[Fault]:
        if not self.bands:
            if self.band_dropout:
                yield Fault(("band_dropout", "bands"), f"band_dropout ({self.band_dropout:g}) has no effect without "
                            "bands; remove it")
            return
        if self.sides != ("decoder",):
            yield Fault(("bands", "encoder", "decoder"), f"bands ({self.bands}) are for language models, which have a "
                        "decoder alone; remove bands, or set encoder: null with task: language_model")
        if self.tied != "all":
            yield Fault(("bands", "tied"), f"bands ({self.bands}) need tied: all, since inputs and outputs share their "
                        f"vectors, but tied is {self.tied}")
        if self.bands != sorted(set(self.bands)) or self.bands[0] <= 4:
            yield Fault(("bands",), f"bands ({self.bands}) must rise, and begin above 4, the special pieces")
        if self.shape("decoder").width // self.band_factor ** len(self.bands) < 1:
            yield Fault(("bands", "band_factor", "width"), f"bands ({len(self.bands)}) with band_factor "
                        f"{self.band_factor} leave the last one no width of {self.shape('decoder').width}; set "
                        "band_factor lower, or fewer bands")

    def _faults_of_tuning(self) -> Iterator[Fault]:
        if self.tuned_at == TunedAt():
            return
        for side in ("encoder", "decoder"):
            stack, layers = self.stack(side), getattr(self.tuned_at, f"{side}_layers")
            if side not in self.sides:
                if layers:
                    yield Fault((f"tuned_at.{side}_layers",), f"tuned_at.{side}_layers ({layers}) has no effect "
                                f"without the {side}; remove it")
                continue
            if not stack.facts.branch_ends:
                yield Fault(("tuned_at", f"{side}.block"), f"tuned_at is known for block: "
                            f"{either(BLOCKS.where(lambda row: bool(row.branch_ends)))}, but {side}.block is "
                            f"{stack.block}; change one of them")
            if stack.init not in ("auto", "xavier", "xavier_separate"):
                yield Fault(("tuned_at", f"{side}.init"), f"tuned_at scales the initial weights of xavier, but "
                            f"{side}.init is {stack.init}; set it to auto")
        if self.bands:
            yield Fault(("tuned_at", "bands"), f"tuned_at is not known for bands ({self.bands}); remove one of them")

    def _faults_of(self, side: Literal["encoder", "decoder"]) -> Iterator[Fault]:
        """Faults in the sizes of one side."""
        stack, (width, heads, ffn) = self.stack(side), self.shape(side)
        names = {name: f"{side}.{name}" if getattr(stack, name) else name for name in Shape._fields}
        if width % heads:
            yield Fault((names["width"], names["heads"]),
                        f"{names['width']} ({width}) must be a multiple of {names['heads']} ({heads})")
        elif not POSITIONS[self.positions].added and width // heads % 2:
            yield Fault((names["width"], names["heads"], "positions"), f"{names['width']} ({width}) divided by "
                        f"{names['heads']} ({heads}) must be even with positions: {self.positions}, which turns "
                        "pairs of a head's dimensions")
        if width % 2:
            yield Fault((names["width"],),
                        f"{names['width']} ({width}) must be even: positions are half sines, half cosines")
        if ffn % 2 and stack.facts.halves:
            yield Fault((names["ffn"], f"{side}.block"), f"{names['ffn']} ({ffn}) must be even with block: "
                        f"{stack.block}: half of it mirrors the other half")
        if ACTIVATIONS[self.activation].gated and not stack.facts.gated:
            plain = either(ACTIVATIONS.where(lambda row: not row.gated))
            yield Fault(("activation", f"{side}.block"), f"activation ({self.activation}) has a gate, for which "
                        f"{side}.block: {stack.block} has no rule; set activation to {plain}, or choose another block")


class Admin(Section):
    """The profile of `block: admin`, which sets its initial ω."""

    profile: Annotated[str | None, Fact.PATH] = None
    """A file of ω to start from, only with `block: admin`; null: the run measures them before its first update."""
    tokens: Annotated[int, Field(ge=1, le=65536)] = 8192
    """Target tokens of the batch on which ω are measured."""
    method: Literal["in_place", "separate"] = "in_place"
    """`in_place`: every ω is set before the next sub-layer is measured, as in the paper's published code. `separate`:
    all are measured in one pass with every ω at 1, as the paper words it, and set afterwards."""
    count_padding: bool = False
    """Whether positions of padding count in the variances, as in the published code."""
    input_variance: Literal["measured", "one"] = "measured"
    """The variance of the stack's input in ω_2, ω_3, ...: `measured`, or `one`, as the paper prints the formula. ω_1 is
    1 with either."""


class Optimizer(Section):
    """The optimizer; all come from PyTorch."""

    name: Annotated[str, OPTIMIZERS, Fact.MOMENTS, Fact.SEEN] = "adam"
    """PyTorch's Adam, AdamW, RAdam, RAdam with AdamW's weight decay, SGD, or Muon for the matrices of the layers and
    AdamW for the rest; Muon only without a `ds_config` or with ZeRO 0, since the other stages split matrices."""
    unrectified: Annotated[Literal["momentum", "skip"], Fact.SEEN] = "momentum"
    """What RAdam does in its first updates (five with the default betas), too few to rectify: `momentum` follows the
    running mean of the gradient, as PyTorch does; `skip` leaves out the step, not the decay, as Transformer-Clinic
    does (with radam and radamw only)."""
    lr: Positive = 5e-4
    """Peak learning rate."""
    lr_factors: Annotated[dict[Part, Annotated[float, Field(ge=1e-30)]], Fact.SEEN] = Field(default_factory=dict)
    """Factors of the learning rate for parts of the model, as in `{decoder: 0.1, embeddings: 0.01}`. A part is a name
    of parameters or its beginning (`encoder`, `decoder.layers.0`), with `*` for anything (`*.cross_attn`). Where
    several match, the last counts."""
    lr_factors_until: Annotated[CountOrZero, Fact.SEEN] = 0
    """Updates for which `lr_factors` hold. In as many updates after them they rise to 1 (geometrically): an encoder
    that would collapse in the beginning learns at the whole rate afterwards. 0: they hold to the end."""
    betas: list[Rate] = Field(default=[0.9, 0.98], min_length=2, max_length=2)
    """Decay of the running means of the gradient and of its square (not with sgd)."""
    eps: Positive = 1e-9
    """Added to the denominator (not with sgd)."""
    momentum: Annotated[Rate, Fact.MOMENTS, Fact.SEEN] = 0.0
    """Momentum (with sgd and muon only; muon needs one, 0.95 in its paper)."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1e9), Fact.SEEN] = 0.0
    """Weight decay: adamw, radamw and muon shrink the weights themselves, the others add it to the gradient."""
    decay_norms_and_biases: bool | None = None
    """Whether every parameter is decayed (true) or only matrices (false); required if `weight_decay` is above 0."""

    def faults(self) -> Iterator[Fault]:
        if self.lr_factors_until and not self.lr_factors:
            yield Fault(("lr_factors_until", "lr_factors"), f"lr_factors_until ({self.lr_factors_until}) has no effect "
                        "because lr_factors is empty; set it to 0")
        if self.weight_decay and self.decay_norms_and_biases is None:
            yield Fault(("weight_decay", "decay_norms_and_biases"), f"weight_decay ({self.weight_decay:g}) needs "
                        "decay_norms_and_biases: true (every parameter) or false (matrices alone)")
        if self.decay_norms_and_biases is False and not self.weight_decay:
            yield Fault(("decay_norms_and_biases", "weight_decay"), "decay_norms_and_biases: false has no effect "
                        "because weight_decay is 0; set it to null")


class Schedule(Section):
    """The learning rate over updates: `warmup` updates of linear rise to the peak `optimizer.lr`, then the named curve.

    Without a warm-up, inverse_sqrt falls from update 1 on, to 1 % of the peak at update 10,000. To stay at the peak
    until update n without a warm-up, use `name: step`, `warmup: 0`, `step_update: n`, `step_factor: 1.0`.
    """

    name: Annotated[str, SCHEDULES, Fact.SEEN] = "inverse_sqrt"
    """The curve after the warm-up. `inverse_sqrt_decay` falls as sqrt(P / (P + k)) after k updates, with P =
    `decay_period`. `linear` and `cosine` (half a cosine) fall to `final` at the run's end. `step` is constant until an
    epoch begins or an update is reached; then the rate is multiplied by `step_factor`. `wsd` (warm-up, stable, decay)
    is constant until the last `decay` updates, and falls to `final` in them, linearly. `plateau` is constant until
    `patience` validations in a row bring no new best; then the rate is multiplied by `step_factor`, each time. A text
    is the name of one in a plug-in, which may use any of these settings."""
    warmup: CountOrZero = 4000
    """Updates of linear rise to `optimizer.lr`; below `train.updates` with linear and cosine, below `step_update` with
    step, at most `train.updates` - `decay` with wsd."""
    start: Annotated[float, Field(ge=0.0)] = 0.0
    """The rate from which the warm-up rises, fairseq's `--warmup-init-lr`; at most `optimizer.lr`."""
    count_from: Annotated[int, Field(ge=0, le=1)] = 1
    """What the first update counts as. With 0, as in fairseq, it has the rate `start`, and every later one what the
    update before it has with 1 (with inverse_sqrt, inverse_sqrt_decay, constant and plateau only)."""
    decay_period: Count | None = None
    """P of inverse_sqrt_decay, which needs it."""
    final: Annotated[float, Field(ge=0.0)] = 0.0
    """The rate at the last update (with linear, cosine and wsd only)."""
    decay: Count | None = None
    """Updates in which the rate falls at the end; wsd needs it."""
    patience: Count | None = None
    """Validations in a row without a new best, by `train.best_by`, after which the rate drops; plateau needs it."""
    step_epoch: Annotated[int, Field(ge=2, le=10**9)] | None = None
    """The epoch, counted from 1, at whose beginning the rate drops; step needs this or `step_update`."""
    step_update: Annotated[int, Field(ge=2, le=10**9)] | None = None
    """The update at which the rate drops, instead of `step_epoch`."""
    step_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """What the rate is multiplied by at a drop (with step and plateau only)."""
    after_step: Literal["constant", "inverse_sqrt"] = "inverse_sqrt"
    """The curve after the drop (with step only)."""

    def faults(self) -> Iterator[Fault]:
        given = [step for step in (self.step_epoch, self.step_update) if step is not None]
        if self.name == "step" and len(given) != 1:
            yield Fault(("name", "step_epoch", "step_update"),
                        f"name: step needs either step_epoch or step_update; {len(given)} of them are given")
        if self.start and not self.warmup:
            yield Fault(("start", "warmup"), f"start ({self.start:g}) needs a warm-up, but warmup is 0; remove start")
        if self.name == "step" and self.step_update is not None and self.step_update <= self.warmup:
            yield Fault(("step_update", "warmup"), f"step_update ({self.step_update}) must be above warmup "
                        f"({self.warmup})")

    @property
    def needs(self) -> Mapping[str, str]:
        """The settings that the curve cannot do without, and what they are."""
        return SCHEDULES[self.name].needs if self.name in SCHEDULES else {}


class Train(Section):
    """How long a run is, and what it logs, validates and saves."""

    updates: Annotated[Count, Fact.ENDS]
    """The update at which the run ends."""
    epochs: Annotated[Count | None, Fact.ENDS] = None
    """An earlier end, in passes over the training text; null: none."""
    max_seconds: Annotated[Positive | None, Fact.ENDS] = None
    """An earlier end, in seconds of updates, not counting validations and checkpoints; null: none."""
    label_smoothing: Rate = 0.1
    """Probability mass that is spread over the vocabulary. A run whose `best_by` is `loss` keeps it to its end."""
    objective: Annotated[str, OBJECTIVES, Fact.SEEN] = "cross_entropy"
    """What training minimises; a plug-in may have another loss."""
    r_drop: Annotated[float, Field(ge=0.0), Fact.SEEN] = 0.0
    """α of R-Drop: every sentence passes the model twice, with other dropout, and α/4 times the divergence of the two
    predictions, in both directions, is added to their mean loss; the paper takes 5. An update takes twice the time and
    activations. 0: none."""
    guided_alignment: Annotated[float, Field(ge=0.0), Fact.SEEN, By("alignment")] = 0.0
    """Weight of guided alignment: this times the cross-entropy of one cross-attention, from the word alignments of
    `data.train.alignments`, is added to the loss; 0.05 is usual. 0: none. Not in a pipeline."""
    guided_layer: Layers = 0
    """The decoder layer, counted from 1, whose cross-attention is guided; 0: the last but one. Give
    `translate.alignment_layer` the same."""
    clip: Annotated[float, Field(ge=0.0)] = 0.0
    """Largest gradient norm; 0: no clipping."""
    log_every: Count = 50
    """Updates between progress lines."""
    trackers: Annotated[list[Literal["wandb", "mlflow"]], By("trackers")] = Field(default_factory=list)
    """Weights & Biases or MLflow, which get what TensorBoard gets; their own environment variables say where they
    are."""
    probe_every: Annotated[CountOrZero, By("doctor")] = 0
    """Updates between probes of every layer, written to TensorBoard; 0: none."""
    validate_every: Count = 1000
    """Updates between validations."""
    save_every: Count = 1000
    """Updates between checkpoints."""
    checkpoint_form: Literal["auto", "one_file", "shards"] = "auto"
    """How checkpoints hold weights and moments: in one file each, or in shards, one for each process; auto: shards if
    several processes train and the state is 1 GB or more."""
    keep_last: Count = 5
    """How many of the newest checkpoints are kept."""
    keep_best: CountOrZero = 1
    """How many further checkpoints are kept: those with the best validation."""
    keep_every: CountOrZero = 0
    """Updates between checkpoints that are kept to the end, a multiple of `save_every`; 0: none."""
    max_failed_saves: Count = 3
    """Checkpoints in a row that cannot be written after which the run ends, since it would train for nothing. On a full
    disk the oldest that is neither the best nor the newest makes room first, those that are kept to the end last."""
    best_by: Annotated[str, Fact.FIXED] = "loss"
    """What makes a validation the best: the lowest `loss`; the highest `bleu`, which needs `valid_bleu`; or the best
    value of one of `metrics`, which needs its `in_validation`."""
    patience: Annotated[CountOrZero, Fact.ENDS] = 0
    """Validations in a row without a new best after which the run ends; 0: never."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, which costs a GPU some speed; a CPU always does."""
    valid_bleu: bool = True
    """Translate the validation text (greedily) and score it with BLEU."""
    valid_sentences: CountOrZero = 500
    """How many sentences of the validation text, from its beginning, are translated for `valid_bleu`; 0: all.
    A run whose `best_by` goes by the translations keeps it to its end."""
    init_from: Annotated[Folder | None, Fact.PATH, Fact.FIXED, Fact.SEEN] = None
    """A trained model to begin with, for fine-tuning: the folder of a run (its average if it has one, else its newest
    checkpoint), or of any checkpoint, average or folded model. Updates, moments and schedule begin anew."""
    grow: Annotated[Literal["stack", "interleave"] | None, Fact.FIXED, Fact.SEEN] = None
    """How the layers of `init_from` fill a deeper stack of pre_ln, peri_ln, admin or deepnorm: `stack` repeats the
    whole stack, `interleave` every layer; null: the depths must be equal."""
    freeze: Annotated[list[Part], Fact.SEEN] = Field(default_factory=list)
    """Parts of the model that are not trained, named as in `optimizer.lr_factors`: `[encoder, embeddings]`."""
    ema: Annotated[Annotated[float, Field(gt=0.0, lt=1.0)] | None, Fact.MOMENTS, Fact.SEEN] = None
    """Decay of a running average of the weights, such as 0.999; null: none. After every update the average becomes
    ema × average + (1 - ema) × weights. Validations, the best checkpoint, `translate`, `evaluate` and all else that
    loads a checkpoint then use the average; training continues with the weights, and `deepnmt run` averages no
    checkpoints."""

    def faults(self) -> Iterator[Fault]:
        if self.keep_every % self.save_every:
            near = -(-self.keep_every // self.save_every) * self.save_every
            yield Fault(("keep_every", "save_every"), f"keep_every ({self.keep_every}) must be a multiple of "
                        f"save_every ({self.save_every}), such as {near}; or set it to 0")


class Parallel(Section):
    """Processes, device, DeepSpeed and precision."""

    device: Annotated[Literal["auto", "cuda", "cpu"], For(*SEARCHING, READY)] = "auto"
    """Where to compute. `auto`: on the GPUs if there are any, and if they cannot be used the run does not start; else
    on the CPU."""
    ds_config: Annotated[str | None, Fact.PATH] = None
    """A DeepSpeed JSON, such as `ds_configs/zero1.json`; null: plain PyTorch on one process, in fp32."""
    precision: Precision = "fp32"
    """The number format of forward and backward pass, fp32 without a `ds_config`; weights and sums of gradients are
    also kept in fp32."""
    pipeline_stages: Layers = 0
    """Stages of the pipeline that the model is split into; 0: no pipeline."""
    recompute_layers: Layers = 0
    """Activation checkpointing: of each group of this many layers only the input is kept, and the rest is computed
    again in the backward pass, to save memory; 0: all activations are kept."""
    compile: bool = False
    """Whether torch.compile fuses what a layer computes in training; not with ZeRO-3, nor with blocks that keep every
    output (dlcl, dlcl_post, attn_res and block_attn_res). The first update then takes a minute or more. It is meant
    for GPUs; on CPUs nothing was gained. On a GPU dropout draws other masks than without it."""
    overrides: list[str] = Field(default_factory=list)
    """Sets of operations that take the place of PyTorch's own in training and its validations: `triton`, for a GPU
    from Ampere on, where dropout then draws other masks. It has not run on a GPU yet. A CPU ignores it."""
    threads: Annotated[Cores, For(*SEARCHING, READY)] = 0
    """CPU threads per process; 0: the machine's cores, shared among its processes."""
    same_paths: bool = True
    """Whether paths of files and folders must be the same on all machines, as every other setting; false: only what
    they hold is compared."""
    start_timeout: Annotated[int, Field(ge=1, le=10**6)] = 600
    """Seconds that the processes of a start wait for the last one; machines may start minutes apart. They tell after a
    minute for whom they wait. Without it, under a hostfile, they would not notice that one has ended already."""

    def faults(self) -> Iterator[Fault]:
        if self.ds_config is None and self.precision != "fp32":
            yield Fault(("precision", "ds_config"), f"precision ({self.precision}) needs a ds_config, but ds_config "
                        "is null, which means plain PyTorch in fp32; set ds_config: ds_configs/zero1.json, or "
                        "precision: fp32")


class LossScale(Section):
    """The dynamic loss scale of fp16; other precisions have none."""

    initial_power: Annotated[int, Field(ge=0, le=32), Fact.LOSS_SCALE] = 13
    """The loss scale starts at 2 to this power, and is halved after an overflow."""
    window: Count = 256
    """Updates in a row without an overflow after which the scale doubles."""
    floor: Positive = 0.03125
    """The scale never falls below this; at most 2^`initial_power`."""

    def faults(self) -> Iterator[Fault]:
        if self.floor > 2.0**self.initial_power:
            yield Fault(("floor", "initial_power"),
                        f"floor ({self.floor:g}) must not be above 2^initial_power ({2.0**self.initial_power:g})")


class Translate(Section):
    """The search for translations."""

    method: Annotated[str, SEARCHES] = "beam"
    """How translations are searched for; `mbr` takes of many samples the one with the highest mean chrF against all
    of them (minimum Bayes risk)."""
    beam: Hypotheses = 5
    """Hypotheses kept per sentence."""
    length_penalty: Literal["none", "average", "gnmt"] = "average"
    """What the score s (log-probability) of a hypothesis of n tokens is divided by: `none` 1, `average` n^alpha,
    `gnmt` ((5 + n) / 6)^alpha."""
    alpha: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Strength of the length penalty."""
    temperature: Annotated[float, Field(ge=1e-6)] = 1.0
    """Divides the logits before sampling; below 1 likely tokens become likelier (with sample or mbr)."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Sample only from this many of the likeliest tokens; 0: from all (with sample or mbr)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample only from the likeliest tokens that together have this probability (with sample or mbr)."""
    epsilon: Rate = 0.0
    """Sample only tokens of at least this probability; the likeliest always may be (with sample or mbr)."""
    samples: Hypotheses = 32
    """Samples drawn for each sentence (with mbr)."""
    unknown: bool = False
    """Whether a translation may contain the unknown piece `<unk>`, which is written as ⁇."""
    no_repeat_ngram: Length = 0
    """No sequence of this many tokens comes twice in a translation; 0: any may."""
    nbest: Hypotheses = 1
    """Translations per sentence; at most `beam` with beam, `samples` with mbr, 1 with greedy."""
    candidates: Hypotheses = 1
    """Translations per sentence among which `choose` chooses; at most `beam` with beam."""
    choose: str = "score"
    """What the best of the candidates has: the highest `score` of the search; `mbr`, the highest mean chrF against all
    of them; `chrf`, the highest against a translation that is there, of `--references`; or the best number by one of
    `metrics`, a program that gets up to 10,000 sentences' candidates at a time."""
    finish: Literal["any", "best"] = "any"
    """Which hypotheses may end: `any` of those kept, or only those whose end is among the `beam` best extensions of
    the step; at the length limit `best` ends all with eos, where `any` also truncates (with beam only). fairseq's
    search is `best` with `patience: 1` and `min_length: 1`."""
    patience: Positive | None = None
    """A sentence is done when patience × beam hypotheses have ended among its best; null: when no better one can
    follow (with beam only)."""
    min_length: Length = 0
    """A translation has at least this many tokens, if its length limit and `no_repeat_ngram` allow."""
    max_ratio: Positive = 2.0
    """An output has at most max_ratio × source tokens + `max_extra` tokens."""
    max_extra: Length = 20
    """Tokens of output allowed beyond `max_ratio` × source tokens."""
    batch_tokens: Count = 4096
    """Size of a batch: its sentences times beams times its longest source; on a GPU take 65536."""
    alignment_layer: Layers = 0
    """The decoder layer, counted from 1, whose cross-attention gives the alignments that `--alignments` asks for;
    0: the last but one."""
    ensemble: Literal["arithmetic", "geometric"] = "arithmetic"
    """The mean of the models' probabilities where several checkpoints are given."""
    precision: Literal["fp32", "bf16", "int16", "int8"] = "fp32"
    """Number format of the weights; bf16 is faster on a GPU, and on a CPU with AMX or one of AMD with avx512_bf16, and
    slower on others; int16 and int8 with ctranslate2 only."""
    backend: Literal["torch", "ctranslate2"] = "torch"
    """What searches: deepnmt itself, or CTranslate2, with the model that `deepnmt export --to ctranslate2` has written
    into the run folder. CTranslate2's search is greedy, or a beam with `finish: best` and a patience. It is never
    chosen by itself."""

    def faults(self) -> Iterator[Fault]:
        if self.backend == "ctranslate2":
            if self.method not in ("beam", "greedy"):
                yield Fault(("backend", "method"), "backend (ctranslate2) needs method: beam or greedy, but method is "
                            f"{self.method}; set backend: torch")
            elif self.method == "beam" and (self.finish != "best" or self.patience is None):
                patience = "null" if self.patience is None else f"{self.patience:g}"
                yield Fault(("backend", "finish", "patience"), "backend (ctranslate2) searches with finish: best and a "
                            f"patience, but finish is {self.finish} and patience {patience}; set finish: best and "
                            "patience: 1.0")
            if self.length_penalty not in ("average", "none"):
                yield Fault(("backend", "length_penalty"), "backend (ctranslate2) needs length_penalty: average or "
                            f"none, but length_penalty is {self.length_penalty}; set another, or backend: torch")
        elif self.precision in ("int16", "int8"):
            yield Fault(("precision", "backend"), f"precision ({self.precision}) needs backend: ctranslate2, but "
                        "backend is torch; set precision: fp32")
        most = SEARCHES[self.method].most
        if most and self.nbest > getattr(self, most):
            yield Fault(("nbest", most), f"nbest ({self.nbest}) must not be above {most} ({getattr(self, most)})")
        if self.method == "greedy" and self.nbest > 1:
            others = either([name for name in SEARCHES if name != self.method])
            yield Fault(("nbest", "method"),
                        f"nbest ({self.nbest}) needs method: {others}, but method is {self.method}; set nbest: 1")
        yield from self._faults_of_choosing()

    def _faults_of_choosing(self) -> Iterator[Fault]:
        if (self.choose == "score") != (self.candidates == 1):
            yield Fault(("choose", "candidates"), f"choose ({self.choose}) and candidates ({self.candidates}) do not "
                        "fit: give what chooses, such as mbr, and 2 or more to choose among, or neither")
        elif self.choose != "score" and self.method not in ("beam", "sample"):
            yield Fault(("choose", "method"), f"choose ({self.choose}) needs method: beam or sample, but method is "
                        f"{self.method}; set choose: score")
        elif self.method == "beam" and self.candidates > self.beam:
            yield Fault(("candidates", "beam"), f"candidates ({self.candidates}) must not be above beam ({self.beam})")
        elif self.choose != "score" and self.nbest > self.candidates:
            yield Fault(("nbest", "candidates"), f"nbest ({self.nbest}) must not be above candidates "
                        f"({self.candidates})")


class OutsideMetric(Section):
    """A program that scores translations, such as COMET."""

    command: Annotated[str, Field(min_length=1)]
    """The program and its arguments, without a shell; `{src}`, `{hyp}` and `{ref}` stand for files of sources,
    translations and references, a sentence a line. It prints a number for each. It is code: a command in a recipe that
    lies with a run or a model only runs if you also give it on the command line."""
    lower_is_better: bool = False
    """Whether a lower number is a better translation."""
    seconds: Annotated[float, Field(gt=0.0, le=20_000.0)] = 1200.0
    """After this time the program is stopped; at most 1200 with `in_validation`."""
    in_validation: bool = False
    """Score the validation text, too, as far as it is translated (`train.valid_sentences`)."""

    def faults(self) -> Iterator[Fault]:
        try:
            shlex.split(self.command)
        except ValueError as error:
            yield Fault(("command",), f"command ({self.command}) cannot be split into words: {error}; correct it")
        if self.in_validation and self.seconds > 1200:
            yield Fault(("seconds", "in_validation"), f"seconds ({self.seconds:g}) must be at most 1200 with "
                        "in_validation: true, or the other processes take this one for lost")
        if "{hyp}" not in self.command:
            yield Fault(("command",), f"command ({self.command}) has no {{hyp}}, which stands for the file of the "
                        "translations; write it where the program wants that file")


class Recipe(Section):
    """A whole run."""

    run: Annotated[Folder, Fact.PATH, For(*SEARCHING, READY, "average")]
    """The run folder: checkpoints, logs, pictures, scores."""
    seed: Annotated[int, Field(ge=0, lt=2**31), Fact.FIXED, For("translate", "evaluate")] = 1
    """Fixes initial weights, batches and dropout."""
    plugins: Annotated[dict[str, str], BeforeValidator(as_mapping), WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}},
                   {"type": "object", "additionalProperties": {"type": "string"}}]}), Fact.PATH, Fact.FIXED] = Field(
        default_factory=dict)
    """Python files with blocks, schedules, objectives or tasks of your own, from here or from beside the recipe. A
    run's recipe has each with its SHA-256. They run as part of deepnmt, but in a recipe that lies with a run or a model
    only if they are named on the command line, too; see docs/guide/add_a_block.md."""
    task: Annotated[str, TASKS, Fact.FIXED] = "translation"
    """What is trained; a text is the name of a task in a plug-in."""
    data: Data
    """Texts, and how they are prepared."""
    vocab: Annotated[Vocab, Fact.FIXED] = Vocab()
    """The vocabularies."""
    batch: Batch = Batch()
    """The micro-batches."""
    model: Annotated[Model, Fact.FIXED, For(*SEARCHING, "average")] = Model()
    """The Transformer."""
    admin: Annotated[Admin, Fact.FIXED] = Admin()
    """How Admin's ω are measured."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning rate over updates."""
    train: Train
    """Length of the run; what it logs, validates and saves."""
    parallel: Parallel = Parallel()
    """Processes, DeepSpeed and precision."""
    loss_scale: LossScale = LossScale()
    """The loss scale, which fp16 needs."""
    translate: Annotated[Translate, For(*SEARCHING)] = Translate()
    """The search for translations."""
    metrics: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_+-]*$")], OutsideMetric],
                       For("translate", "evaluate", READY), By("outside_metrics")] = Field(default_factory=dict)
    """Programs that score translations, by a name of yours: `{comet: {command: "score.sh {src} {hyp} {ref}"}}`."""
    average_last: Annotated[Count, For("average")] = 5
    """How many of the last checkpoints are averaged for the final scores; at most `train.keep_last`."""

    @property
    def translates(self) -> bool:
        """Whether its model translates text."""
        return self.task == "translation"

    @property
    def model_has_plugins(self) -> bool:
        """Whether a model of it needs a plug-in: whether a name is none of deepnmt's, those for cleaning a text aside.
        """
        return any(name not in choices for key, choices in NAMED.items() if choices is not LANGUAGE_IDS
                   for _, name in values_of(self, key))

    def faults(self) -> Iterator[Fault]:
        yield from self._unknown_names()
        yield from self._faults_of_sizes()
        yield from self._faults_of_training()
        yield from self._faults_of_translation()
        yield from self._faults_of_schedule()
        yield from self._faults_of_beginning()

    def _unknown_names(self) -> Iterator[Fault]:
        """Names that neither deepnmt has nor a plug-in."""
        for key, choices in NAMED.items():
            names = [*choices, *known(str(choices.plugins), self.plugins)]
            for setting, name in values_of(self, key):
                if name is None or name in names or not have_run(self.plugins):
                    continue
                near = nearest(name, names)
                yield Fault((setting,), f"{setting}: is {name!r}, must be one of "
                            f"{', '.join(names) or 'those of a plug-in, which plugins: [FILE.py] names'}"
                            + (f"; did you mean {near}?" if near else ""))

    def _faults_of_sizes(self) -> Iterator[Fault]:
        for side, meaning in (("encoder", "reads the source"), ("decoder", "writes the target")):
            if side not in self.model.sides:
                yield Fault((f"model.{side}.layers", f"model.{side}"), f"model.{side}.layers: is 0, but task: "
                            f"{self.task} needs the {side}, which {meaning}; set it to 1 or more")
        longest = self.data.filters.max_tokens
        if TYINGS[self.model.tied].joint and not self.vocab.shared:
            yield Fault(("model.tied", "vocab.shared"), f"model.tied: {self.model.tied} needs vocab.shared: true "
                        "(one embedding cannot serve two vocabularies); set model.tied: decoder")
        if longest + 1 > self.model.max_length:
            yield Fault(("data.filters.max_tokens", "model.max_length"), f"data.filters.max_tokens ({longest}) must "
                        f"be below model.max_length ({self.model.max_length}), to leave room for eos")
        if longest + 1 > self.batch.tokens:
            yield Fault(("batch.tokens", "data.filters.max_tokens"), f"batch.tokens ({self.batch.tokens}) must be "
                        f"above data.filters.max_tokens ({longest}), to hold the longest sentence with its eos")

    def _faults_of_training(self) -> Iterator[Fault]:
        model, train = self.model, self.train
        if self.parallel.compile and (model.encoder.ramp or model.decoder.ramp):
            yield Fault(("parallel.compile", "model.encoder.ramp", "model.decoder.ramp"), "parallel.compile cannot be "
                        "combined with ramp, which would have the layers compiled anew in every update; set "
                        "parallel.compile: false, or ramp: 0")
        if train.r_drop and not any((model.dropout, model.attention_dropout, model.activation_dropout,
                                     model.encoder.word_dropout, model.decoder.word_dropout)):
            yield Fault(("train.r_drop", "model.dropout"), f"train.r_drop ({train.r_drop:g}) has no effect because "
                        "model.dropout and all other dropout is 0; set train.r_drop to 0, or a dropout")

        if model.tuned_at != TunedAt():
            optimizer = self.optimizer
            if not OPTIMIZERS[optimizer.name].scale_free:
                yield Fault(("model.tuned_at", "optimizer.name"), f"model.tuned_at is known for optimizer.name: "
                            f"{either(OPTIMIZERS.where(lambda row: row.scale_free))}, whose steps do not grow with "
                            f"the gradient, but it is {optimizer.name}; change one of them")
            if optimizer.name == "adam" and optimizer.weight_decay:
                yield Fault(("model.tuned_at", "optimizer.weight_decay"), "model.tuned_at needs a weight decay that "
                            f"shrinks the weights themselves, but optimizer.weight_decay ({optimizer.weight_decay:g}) "
                            "with adam is a part of the gradient; set optimizer.name to adamw")
            if train.grow is not None:
                yield Fault(("model.tuned_at", "train.grow"), f"train.grow ({train.grow}) copies layers, whose "
                            "branches model.tuned_at makes smaller in a deeper stack; remove one of them")

    def _faults_of_translation(self) -> Iterator[Fault]:
        train, stages, text = self.train, self.parallel.pipeline_stages, self.data.train
        kind, alpha = self.vocab.kind, self.data.subword_alpha
        same = way_out = ""
        if not VOCAB_KINDS[kind].samples:
            same, way_out = f"vocab.kind: {kind}", "remove it"
        elif kind == "bpe" and alpha == 0:
            same, way_out = "vocab.kind: bpe and data.subword_alpha: 0", "set data.subword_alpha to 0.1"
        if same and self.data.subword_variants:
            yield Fault(("data.subword_variants", "vocab.kind", "data.subword_alpha"), f"data.subword_variants with "
                        f"{same} would prepare the same segmentation several times; {way_out}")
        if same and self.data.modify.subwords:
            yield Fault(("data.modify", "vocab.kind", "data.subword_alpha"), f"data.modify.subwords with {same} would "
                        f"draw the same segmentation every time; {way_out}")
        if train.guided_alignment and not any(one.alignments for one in (text, *text.corpora.values())):
            yield Fault(("train.guided_alignment", "data.train.alignments"), "train.guided_alignment "
                        f"({train.guided_alignment:g}) needs word alignments; name their files in "
                        "data.train.alignments, or set train.guided_alignment to 0")
        if train.guided_alignment and stages:
            yield Fault(("parallel.pipeline_stages", "train.guided_alignment"),
                        f"parallel.pipeline_stages ({stages}) cannot be combined with train.guided_alignment "
                        f"({train.guided_alignment:g}): the last stage computes the loss, and the guided attention "
                        "may be on another; set parallel.pipeline_stages: 0")
        decoder = self.model.decoder
        if train.guided_layer > decoder.layers:
            yield Fault(("train.guided_layer", "model.decoder.layers"), f"train.guided_layer ({train.guided_layer}) "
                        f"must not be above model.decoder.layers ({decoder.layers})")
        patience = max((stage.until.patience or 0 for stage in self.data.stages), default=0)
        if 0 < train.patience <= patience:
            yield Fault(("train.patience", "data.stages"), f"train.patience ({train.patience}) must be above the "
                        f"patience of every stage ({patience}), or the run would end with it")
        if train.best_by == "bleu" and not train.valid_bleu:
            yield Fault(("train.best_by", "train.valid_bleu"), "train.best_by: bleu needs train.valid_bleu: true")
        yield from self._faults_of_metrics()

    def _faults_of_metrics(self) -> Iterator[Fault]:
        """Faults in what translations are scored and chosen by."""
        by = self.train.best_by
        if taken := [name for name in self.metrics if name in (*METRICS, *OWN_FIGURES)]:
            yield Fault(("metrics",), f"metrics.{taken[0]} has the name of something else; give it another name")
        if by not in ("loss", "bleu", *self.metrics):
            names = either(["loss", "bleu", *self.metrics])
            yield Fault(("train.best_by",), f"train.best_by: is {by!r}, must be {names}, or the name of one of metrics")
        chooses = ["score", "mbr", "chrf", *self.metrics]
        if self.translate.choose not in chooses:
            yield Fault(("translate.choose",), f"translate.choose: is {self.translate.choose!r}, must be "
                        f"{either(chooses)}, or the name of one of metrics")
        if by in self.metrics and not self.metrics[by].in_validation:
            yield Fault(("train.best_by", "metrics"), f"train.best_by: {by} needs metrics.{by}.in_validation: true")

    def _not_offered(self, *names: str) -> Iterator[Fault]:
        """Settings of train that a task lacks."""
        for name in names:
            value = getattr(self.train, name)
            if value != Train.default(name):
                yield Fault((f"train.{name}",), f"train.{name} ({value}) is not offered with task: {self.task}; "
                            "remove it")

    def _without_effect(self, *sections: str) -> Iterator[Fault]:
        """Sections that a task does not read."""
        for name in sections:
            if getattr(self, name) != type(self).default(name):
                yield Fault((name,), f"{name} has no effect with task: {self.task}; remove it")

    def _faults_of_schedule(self) -> Iterator[Fault]:
        schedule, train = self.schedule, self.train
        if schedule.name in SCHEDULES and SCHEDULES[schedule.name].until_end and schedule.warmup >= train.updates:
            yield Fault(("schedule.warmup", "train.updates", "schedule.name"), f"schedule.warmup ({schedule.warmup}) "
                        f"must be below train.updates ({train.updates}) with schedule.name: {schedule.name}")
        if "decay" in schedule.needs and schedule.warmup + (schedule.decay or 0) > train.updates:
            yield Fault(("schedule.warmup", "schedule.decay", "train.updates"), "schedule.warmup "
                        f"({schedule.warmup}) and schedule.decay ({schedule.decay}) must not be above train.updates "
                        f"({train.updates}) together")
        if schedule.patience and 0 < train.patience <= schedule.patience:
            yield Fault(("schedule.patience", "train.patience"), f"schedule.patience ({schedule.patience}) must be "
                        f"below train.patience ({train.patience}), or the run ends before its rate drops")
        if schedule.start > self.optimizer.lr:
            yield Fault(("schedule.start", "optimizer.lr"), f"schedule.start ({schedule.start:g}) must not be above "
                        f"optimizer.lr ({self.optimizer.lr:g}), the rate at the end of the warm-up")
        for step, end, unit in ((schedule.step_epoch, train.epochs, "epoch"),
                                (schedule.step_update, train.updates, "update")):
            if step is not None and end is not None and step > end:
                yield Fault((f"schedule.step_{unit}", f"train.{unit}s"), f"schedule.step_{unit} ({step}) must not be "
                            f"above train.{unit}s ({end}), the run's end")

    def _faults_of_beginning(self) -> Iterator[Fault]:
        """Faults in what the weights begin with."""
        profile, init_from = self.admin.profile, self.train.init_from
        measured = " or ".join(BLOCKS.where(lambda block: block.profiled))
        for side, stack in (("encoder", self.model.encoder), ("decoder", self.model.decoder)):
            if stack.ramp and init_from is not None:
                yield Fault((f"model.{side}.ramp", "train.init_from"), f"model.{side}.ramp ({stack.ramp}) would begin "
                            f"with a trained model (train.init_from: {init_from}) without its layers; set it to 0")
        if self.train.grow is not None and init_from is None:
            yield Fault(("train.grow", "train.init_from"), f"train.grow ({self.train.grow}) needs train.init_from, "
                        "whose layers it repeats; remove train.grow")
        if profile is not None and init_from is not None:
            yield Fault(("admin.profile", "train.init_from"), f"admin.profile ({profile}) has no effect with "
                        f"train.init_from ({init_from}), which has trained ω; remove one of them")
        if profile is not None and not self.model.profiled:
            yield Fault(("admin.profile", "model.encoder.block", "model.decoder.block"),
                        f"admin.profile ({profile}) needs block: {measured}, but {self.model.blocks}; remove it")


# Where a recipe may have a name from a plug-in.
NAMED = {key: choices for key, choices in Recipe.named().items() if choices.plugins}
