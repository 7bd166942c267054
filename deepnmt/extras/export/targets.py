"""The programs that models are exported for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from deepnmt.config.choices import Choice, Choices


@dataclass(frozen=True, kw_only=True)
class ExporterFacts(Choice):
    """`precisions`: the number formats it writes; the first is the one that is proven. `checkpoint`: what it writes is
    a checkpoint of deepnmt's. `encoder`: it writes an encoder alone, and no model that translates."""

    precisions: tuple[str, ...] = ("fp32",)
    checkpoint: bool = False
    encoder: bool = False


# job.py, `TARGETS`
EXPORTERS = Choices({
    "ctranslate2": ExporterFacts(line="CTranslate2", precisions=("fp32", "bf16", "int16", "int8")),
    "huggingface": ExporterFacts(line="Hugging Face transformers"),
    "onnx": ExporterFacts(line="ONNX"),
    "bert": ExporterFacts(line="Hugging Face's BERT, of a masked language model", encoder=True),
    "post_ln": ExporterFacts(line="a Post-LN model of deepnmt", checkpoint=True),
})
