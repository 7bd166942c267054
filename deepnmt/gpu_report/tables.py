"""The report's JSON as Markdown tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def markdown(content: dict[str, Any]) -> str:
    """The report of `gpu_report.py` as a page: what was found, then how each part went."""
    parts = content["parts"]
    lines = ["# Accelerator report" + (" (toy sizes: the figures mean nothing)" if content["toy"] else ""), ""]
    facts = _done(parts, "machine")
    if facts:
        lines += _machine(facts)
    rates = [part["figures"] for name, part in parts.items() if name.startswith("60L-12L") and part["figures"]]
    if rates:
        lines += _steps(rates, facts)
    layouts = [part["figures"] for name, part in parts.items() if name.startswith("updates ") and part["figures"]]
    if layouts:
        lines += _layouts(layouts, parts["corpus"]["figures"], facts)
    training = _done(parts, "train")
    if training:
        lines += _training(training, parts["corpus"]["figures"], _done(parts, "score"))
    return "\n".join([*lines, *_parts(content)]) + "\n"


def _done(parts: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = parts.get(name, {}).get("figures", {})
    return found


def _machine(facts: dict[str, Any]) -> list[str]:
    nominal = facts["nominal_tflops"]
    title = f"{facts['device']}, {facts['cores']} cores, torch {facts['torch']}, DeepSpeed {facts['deepspeed']}"
    rows = [[name, " x ".join(map(str, facts["matmul_shapes"][name])), f"{rate:.4g}",
             f"{rate / nominal:.0%}" if nominal else "-"] for name, rate in facts["matmul_tflops"].items()]
    return ["## Machine", "", title, "", *_table(["bf16 product", "shape", "TFLOP/s", "of the nominal peak"], rows)]


def _steps(rates: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """MFU: model FLOPs (`speed.model_flops`) a second over a peak."""
    rows = [[f"{rate['precision']}, ZeRO-{rate['stage']}", f"{rate['parameters']:,}", f"{rate['tokens']:,}",
             f"{1000 * rate['seconds_per_step']:,.1f} ({1000 * rate['fastest']:,.1f} to {1000 * rate['slowest']:,.1f}; "
             f"{rate['steps']})",
             f"{rate['source_tokens_per_second']:,.0f} + {rate['target_tokens_per_second']:,.0f}",
             *_use(rate, facts)] for rate in rates]
    head = ["60L-12L", "parameters", "tokens a side", "ms an update (median, range; how many)",
            "source + target tokens/s", *_USE]
    length = rates[0]["length"]
    return ["## Updates", "", f"Random tokens, sentences of {length}, vocabulary {rates[0]['vocab']:,}; forward, "
            "backward and optimizer.", "", *_table(head, rows)]


_USE = ["model TFLOP/s", "MFU, nominal", "MFU, measured product", "peak GiB"]


def _use(rate: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """The columns `_USE`: of the device's arithmetic and of its memory."""
    peaks = (facts.get("nominal_tflops"), facts["matmul_tflops"]["large"] if facts else None)
    return [f"{rate['model_tflops']:.4g}", *(f"{rate['model_tflops'] / peak:.1%}" if peak else "-" for peak in peaks),
            f"{rate['peak_memory_gib']:.1f}" if rate["peak_memory_gib"] is not None else "-"]


def _layouts(layouts: list[dict[str, Any]], corpus: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Losses in label-smoothed nats a target token; the loss scale at the first logged update, its lowest and last."""
    rows = []
    for run in layouts:
        (first, begun), (last, reached) = run["losses"][0], run["losses"][-1]
        scales = run["loss_scales"]
        rows.append([f"{Path(run['ds_config']).stem}_{run['precision']}"
                     + (f", {run['stages']} stage(s)" if run["stages"] else ""), f"{run['updates']:,}",
                     f"{begun:.3f} (to {first}), {reached:.3f} (to {last})",
                     "-" if run["validation"] is None else f"{run['validation']:.4f}",
                     f"{scales['first']:g}, {scales['lowest']:g}, {scales['last']:g}", f"{run['dropped']:.0f}",
                     f"{run['target_tokens_per_second']:,.0f}", *_use(run, facts)])
    head = ["60L-12L", "updates", "training loss", "validation loss", "loss scale: first, lowest, last", "dropped",
            "target tokens/s", *_USE]
    return ["## Updates on text", "", f"{corpus['name']}, {corpus['pairs']['train']:,} pairs.", "", *_table(head, rows)]


def _training(training: dict[str, Any], corpus: dict[str, Any], scores: dict[str, Any]) -> list[str]:
    last = training["last"] or {}
    rows = [["corpus", f"{corpus['name']}: " + ", ".join(f"{k} {v:,}" for k, v in corpus["pairs"].items())],
            ["settings", ", ".join(f"{k} {v}" for k, v in training["settings"].items())],
            ["training", f"{training['updates']:,} updates, {training['seconds_of_updates']:.0f} s of updates, "
             f"{training['seconds']:.0f} s in all; {training['status']}"]]
    if last:
        rows.append(["at the end", f"epoch {last['epoch']}, {last['target_tokens_per_second']:,.0f} target tokens/s, "
                     f"{last['skipped_updates']} updates dropped"])
    if training["validations"]:
        rows.append(["validation (loss, greedy BLEU)", ", ".join(
            f"{v['update']:,}: {v['loss']:.3f}" + (f" {v['bleu']:.1f}" if "bleu" in v else "")
            for v in training["validations"])])
    if scores:
        rows += [[name, f"{scores[key]:.2f} ({scores[key + '_signature']})"]
                 for name, key in (("**test BLEU**", "bleu"), ("test chrF", "chrf"))]
    return ["## Training", "", *_table(["", ""], rows)]


def _parts(content: dict[str, Any]) -> list[str]:
    rows = [[name, part["status"], f"{part['seconds']:.0f}", part["note"].replace("\n", "<br>")]
            for name, part in content["parts"].items()]
    total = f"{content['seconds']:.0f} of {content['budget']:.0f} s"
    return ["## Parts", "", *_table(["part", "", "seconds", "note"], rows), total]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells] + [""]
