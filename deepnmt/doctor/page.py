"""What the doctor found, for people: a short table, a folder of pictures, and one HTML page that holds them all."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from deepnmt.doctor import plots
from deepnmt.doctor.change import Growth
from deepnmt.doctor.verdict import plainly, told

Findings = Mapping[str, Any]
_NO_RULE = "none: no rule comes with this version; fit one with python -m studies verdict-grid and give it with --rule"
_SIDES = ("encoder", "decoder")

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem;border-top:1px solid #ddd;padding-top:1rem}
img{max-width:100%}table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0}
td,th{text-align:left;vertical-align:top}
.verdict{padding:.8rem 1rem;border-left:.4rem solid #767676;background:#f5f5f5}.yes{border-color:#009E73}
.no{border-color:#D55E00}li{margin:.1rem 0}"""


def summary(found: Findings) -> str:
    """The table for the terminal, a line a finding."""
    rows = [(title, text) for title, text in _rows(found)]
    wide = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{wide}}  {text}" for title, text in rows)


def _rows(found: Findings) -> list[tuple[str, str]]:
    about, gradients = found["about"], found["gradients"]
    rows = [("model", f"encoder {about['encoder']}; decoder {about['decoder']}; width {about['width']}, "
                      f"{about['parameters']:,} parameters"),
            ("weights", about["checkpoint"] or "as training begins"),
            ("batch", f"{about['sentences']} sentences, {about['target tokens']:,} target tokens, {about['device']}"),
            ("loss", f"{gradients['loss']:.3f} nats a target token")]
    for side in _SIDES:
        rows.append((f"{side} dependency", _dependency_words(found["dependency"][side])))
    for side in _SIDES:
        rows.append((f"{side} gradients", _gradient_words(gradients["outputs"], side)))
    rows += [(f"change, {kind}", "; ".join(f"{side} {_growth_words(growth)}" for side, growth in lines.items()))
             for kind, lines in found["growth"].items()]
    update = found["change"]["update"]
    rows.append(("one update",
                 f"at rate {update['rate']:.3g} moves the encoder's output by {update['encoder']:.3g} of its variance, "
                 f"the decoder's by "
                 f"{update['decoder']:.3g}; loss {update['loss_before']:.3f} to {update['loss_after']:.3f}"))
    rows += [(f"{side} layers alike", f"cosine of first and last layer's outputs "
              f"{round(found['likeness'][side][-1][0], 2) + 0.0:.2f}")
             for side in _SIDES]
    rows.append(("fp16", _half_words(found)))
    if found.get("moved"):
        rows.append(("updates", _moved_words(found["moved"])))
    if "verdict" in found:
        rows.append(("verdict", _verdict_words(found["verdict"]) if found["verdict"] else _NO_RULE))
    return rows


def _dependency_words(rows: Sequence[Sequence[float]]) -> str:
    own = [row[-1] for row in rows[1:]]
    return (f"share of an output that its own branch made: β_ii² {own[0] ** 2:.2f} at the first sub-layer, "
            f"{own[-1] ** 2:.2f} at the last, sum {sum(beta * beta for beta in own):.1f} over {len(own)}")


def _gradient_words(outputs: Mapping[str, float], side: str) -> str:
    own = [value for name, value in outputs.items() if name.startswith(f"{side}.")]
    ratio = own[0] / own[-1] if own[-1] else math.inf
    return f"lowest sub-layer's output {own[0]:.3g}, highest {own[-1]:.3g}: {ratio:.3g} times"


def _growth_words(growth: Growth) -> str:
    words = f"{growth.changes[0]:.2g} at {growth.depths[0]} layer(s), {growth.changes[-1]:.2g} at {growth.depths[-1]}"
    if math.isfinite(growth.linear.r2):
        words += f" (R² to N {growth.linear.r2:.2f}, to log N {growth.logarithmic.r2:.2f})"
    return words


def _half_words(found: Findings) -> str:
    name, worst = max(found["ranges"].items(), key=lambda item: item[1]["largest"])
    half = found["half"]
    overflow = f" (gradients overflow at {half['asked']:g})" if half["asked"] > half["scale"] else ""
    words = (f"largest magnitude {worst['largest']:.3g} in {name} ({worst['where']}), 65,504 is "
             f"{worst['headroom']:.3g} times that; at loss scale {half['scale']:g}{overflow} up to "
             f"{100 * max(half['lost'], 0.0):.2f} % of a layer's gradients vanish")
    return words if half["finite"] else f"{words}; GRADIENTS OVERFLOW at this scale"


def _moved_words(moved: Sequence[Mapping[str, Any]]) -> str:
    gradient = fmean(min(pair["gradients"].values()) for pair in moved)
    update = fmean(min(pair["updates"].values()) for pair in moved)
    return (f"over {len(moved)} pairs of checkpoints the smallest attention matrix has {gradient:.3g} of the largest "
            f"one's gradient, and {update:.3g} of its update")


def _verdict_words(verdict: Mapping[str, Any]) -> str:
    words = f"{'trains' if verdict['trains'] else 'does NOT train'} (probability {verdict['probability']:.2f})"
    if verdict["fp16"]:
        words = (f"does NOT train in fp16: {verdict['fp16']} (probability by the rule alone "
                 f"{verdict['probability']:.2f})")
    return f"{words}; outside the runs the rule knows, see the page" if verdict["outside"] else words


# -- pictures and page -------------------------------------------------------------------------------------------------


def write_page(found: Findings, folder: Path) -> Path:
    """Draws the pictures into `folder` and writes `diagnosis.html`, which holds them all; returns its path."""
    about = found["about"]
    parts = [f"<h1>Diagnosis of {html.escape(about['encoder'])} / {html.escape(about['decoder'])}</h1>"]
    if found.get("verdict"):
        parts.append(_verdict_box(found["verdict"]))
    rows = "".join(f"<tr><th>{html.escape(title)}</th><td>{html.escape(text)}</td></tr>"
                   for title, text in _rows(found))
    parts.append(f"<table>{rows}</table>")
    for name, title, text, draw in _sections(found):
        picture = folder / f"{name}.png"
        draw(picture)
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f"<h2>{title}</h2><p>{html.escape(text)}</p><img alt='{html.escape(title)}' "
                     f"src='data:image/png;base64,{data}'>")
    page = folder / "diagnosis.html"
    page.write_text(f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Diagnosis</title><style>{_STYLE}"
                    f"</style><body>{''.join(parts)}</body></html>\n", encoding="utf-8")
    return page


def _verdict_box(verdict: Mapping[str, Any]) -> str:
    rule = verdict["rule"]
    words = _verdict_words(verdict)
    lines = [f"<b>{html.escape(words[0].upper() + words[1:])}.</b>"]
    if "runs" in rule:
        lines.append(f" The rule ({rule['kind']}) was fitted on {rule['runs']} runs of small models and was right on "
                     f"{100 * rule['held_out_accuracy']:.0f} % of {rule['held_out_runs']} others{_splits(rule)}.")
    lines += [f" All its runs had the same {html.escape(plainly(name))} ({told(name, value)}), so of that it knows "
              "nothing." for name, value in rule["unvaried"].items()]
    lines.append(_list("What the rule weighed" if verdict["fp16"] else "Numbers that decided", verdict["reasons"]))
    lines.append(_list("Outside of what the rule was fitted on, so trust it less", verdict["outside"]))
    better = [f"{name}: probability {value:.2f}" for name, value in
              sorted(verdict["instead"].items(), key=lambda item: -item[1])]
    lines.append(_list("The same rule on recipes that differ in one thing", better))
    return f"<div class='verdict {'yes' if verdict['trains'] else 'no'}'>{''.join(lines)}</div>"


def _splits(rule: Mapping[str, Any]) -> str:
    """How right it is on other splits of its runs, where it tells."""
    if (found := rule.get("accuracy_on_random_splits")) is None:
        return ""
    return (f" ({100 * found['mean']:.0f} % on average over other splits, "
            f"{100 * found['least']:.0f} to {100 * found['most']:.0f} %)")


def _list(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<p>{title}:</p><ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _sections(found: Findings) -> list[tuple[str, str, str, Callable[[Path], None]]]:
    """Name of the picture, heading, how to read it, and what draws it."""
    gradients = found["gradients"]
    sections: list[tuple[str, str, str, Callable[[Path], None]]] = [
        ("dependency", "Layer dependency",
         "Each row is what enters a branch (the last: the stack's output), each column an earlier branch that it is "
         "made of, the colour how much, β. A bright diagonal means that every layer stands mostly on the one just "
         "below it, and a change there is passed on whole.",
         lambda path: plots.draw_dependency(found["dependency"], path)),
        ("change", "Output change",
         "How far the output moves when the weights move a little, by the number of layers. Growth like N makes deep "
         "models shake; growth like log N does not.",
         lambda path: plots.draw_growth(found["growth"], path, "Output change against depth")),
        ("gradients", "Gradients of sub-layers' outputs",
         "A line that falls towards the left vanishes on its way down: low layers hear little of the loss.",
         lambda path: plots.draw_lines(_by_part(gradients["outputs"]), path, xlabel="layer", ylabel="gradient norm",
                                       title="Gradient of every sub-layer's output")),
        ("matrices", "Gradients of matrices",
         "Unbalanced gradients are evened out by Adam, not by SGD.",
         lambda path: plots.draw_lines(_by_part(gradients["matrices"]), path, xlabel="layer", ylabel="gradient norm",
                                       title="Gradient of every matrix")),
    ]
    if gradients["places"]:
        sections.append(("places", "Inside a decoder layer",
                         "From (1), before the first norm, to (5), before the third. Where a norm lets little through, "
                         "the line drops to its left: between (4) and (3), and between (2) and (1).",
                         lambda path: plots.draw_lines({"five places": _some(gradients["places"])}, path,
                                                       xlabel="place", ylabel="gradient norm",
                                                       title="Gradients inside Post-LN decoder layers")))
    if "last_ffn" in found:
        sections.append(("last_ffn", "Last FFN against depth",
                         "The gradient norm of the decoder's last FFN in models of different depth. Xiong et al. 2020: "
                         "level for Post-LN, falling like 1/√N for Pre-LN.",
                         lambda path: plots.draw_lines({"last FFN": {"fc2": found["last_ffn"]["norms"]}}, path,
                                                       xs=found["last_ffn"]["depths"], xlabel="layers N",
                                                       ylabel="gradient norm", title="Gradient of the last FFN")))
    sections += [
        ("likeness", "Likeness of layers",
         "The cosine between layers' outputs, token by token. A bright lower left corner means that the upper layers "
         "add little.",
         lambda path: plots.draw_likeness(found["likeness"], path)),
        ("ranges", "Activations", "Variance of the outputs and largest magnitudes; fp16 ends at the dashed line.",
         lambda path: plots.draw_ranges(found["ranges"], path)),
        ("half", "Gradients lost to fp16",
         "What is zero in fp16 and not in fp32 was too small for the loss scale.",
         lambda path: plots.draw_half(found["half"], path)),
    ]
    if found.get("moved"):
        sections.append(("moved", "Updates against gradients",
                         "Gradients of attention matrices spread widely, the optimizer's updates little.",
                         lambda path: plots.draw_moved(found["moved"], path)))
    return sections


def _by_part(values: Mapping[str, float]) -> dict[str, dict[str, list[float]]]:
    """Values by stack, then by what they belong to within a layer, in the order of layers; embeddings are left out."""
    groups: dict[str, dict[str, list[float]]] = {side: {} for side in _SIDES}
    for name, value in values.items():
        if ".layers." in name:
            side, _, _, part = name.split(".", 3)
            groups[side].setdefault(part, []).append(value)
    return groups


def _some(places: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The lowest, the middle and the highest layer."""
    names = list(places)
    return {f"layer {index + 1}": places[names[index]] for index in sorted({0, len(names) // 2, len(names) - 1})}
