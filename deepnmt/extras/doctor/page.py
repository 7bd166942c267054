"""Presents a diagnosis: a short table, a folder of pictures, and one HTML page with all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from deepnmt.extras.doctor import plots
from deepnmt.extras.doctor.outcome import OUTCOMES, WORDS
from deepnmt.extras.doctor.variants import BF16
from deepnmt.extras.doctor.verdict import SURE, expected_rank
from deepnmt.model.blocks import SIDES
from deepnmt.pages import folded, page, picture

Findings = Mapping[str, Any]
_SHOWN = 5  # changes
_SOMETIMES = ("trial", "places", "last_ffn", "moved")  # pictures that not every diagnosis has
_NO_RULE = "none: this version has no verdict rule; fit one with python -m studies verdict-runs and give it with --rule"
UNKNOWABLE = (
    "how good the translations get: a model that has begun to read its source counts as translating",
    "a divergence, a loss of numbers to fp16 or overfitting long after the trial",
    "whether another seed ends otherwise, where two outcomes are about equally probable",
    "a fault in the text that the trial's first batches do not show",
)


def summary(findings: Findings) -> str:
    """The table for the terminal, one line for each finding."""
    rows = _rows(findings)
    wide = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{wide}}  {text}" for title, text in rows)


def _rows(findings: Findings) -> list[tuple[str, str]]:
    about, gradients, update = findings["about"], findings["gradients"], findings["change"]["update"]
    rows = [("model", f"encoder {about['encoder']}; decoder {about['decoder']}; width {about['width']}, "
                      f"{about['parameters']:,} parameters"),
            ("weights", about["checkpoint"] or "initial"),
            ("batch", f"{about['sentences']} sentences, {about['target tokens']:,} target tokens, {about['device']}"),
            ("loss", f"{gradients.loss:.3f} nats a target token")]
    for side in SIDES:
        shares = [row[-1] ** 2 for row in findings["dependency"][side][1:]]
        rows.append((f"{side} dependency",
                     f"share of an output that comes from its own branch: β_ii² {shares[0]:.2f} at the first "
                     f"sub-layer, {shares[-1]:.2f} at the last, sum {sum(shares):.1f} over {len(shares)}"))
    for side in SIDES:
        low, *_, high = gradients.of_stack(side)
        ratio = low / high if high else math.inf
        rows.append((f"{side} gradients", f"lowest sub-layer's output {low:.3g}, highest {high:.3g}: {ratio:.3g} "
                                          "times"))
    for kind, lines in findings["growth"].items():
        words = []
        for side, growth in lines.items():
            text = (f"{side} {growth.changes[0]:.2g} at {growth.depths[0]} layer(s), {growth.changes[-1]:.2g} at "
                    f"{growth.depths[-1]}")
            if math.isfinite(growth.linear.r2):
                text += f" (R² to N {growth.linear.r2:.2f}, to log N {growth.logarithmic.r2:.2f})"
            words.append(text)
        rows.append((f"change, {kind}", "; ".join(words)))
    rows.append(("one update",
                 f"at rate {update['rate']:.3g} moves the encoder's output by {update['encoder']:.3g} of its variance, "
                 f"the decoder's by "
                 f"{update['decoder']:.3g}; loss {update['loss_before']:.3f} to {update['loss_after']:.3f}"))
    for side in SIDES:
        cosine = round(findings["likeness"][side][-1][0], 2) + 0.0  # no -0.00
        rows.append((f"{side} similarity", f"cosine of first and last layer's outputs {cosine:.2f}"))
    name, worst = max(findings["ranges"].items(), key=lambda item: item[1]["largest"])
    half = findings["half"]
    fp16 = (f"largest magnitude {worst['largest']:.3g} in {name} ({worst['where']}), 65,504 is "
            f"{worst['headroom']:.3g} times that; at loss scale {half['scale']:g}")
    if half["asked"] > half["scale"]:
        fp16 += f" (gradients overflow at {half['asked']:g})"
    fp16 += f" up to {100 * max(half['lost'], 0.0):.2f} % of a layer's gradients vanish"
    if not half["finite"]:
        fp16 += "; GRADIENTS OVERFLOW at this scale"
    rows.append(("fp16", fp16))
    pairs = findings.get("moved")
    if pairs:
        gradient = fmean(min(pair["gradients"].values()) for pair in pairs)
        moved = fmean(min(pair["updates"].values()) for pair in pairs)
        rows.append(("updates", f"over {len(pairs)} pairs of checkpoints the smallest attention matrix has "
                                f"{gradient:.3g} of the largest one's gradient, and {moved:.3g} of its update"))
    outcome = findings.get("outcome")
    if outcome:
        rows.append(("outcome", f"{WORDS[outcome['outcome']]}: validation loss {outcome['own']:.3f} nats a target "
                                f"token, {outcome['gain']:+.3f} with shuffled sources; the tokens' frequencies alone "
                                f"have {outcome['frequencies']:.3f}"))
        use = outcome["source"]
        rows.append(("source", f"{100 * use['encoder_common']:.0f} % of the encoder's output is one common vector; "
                               f"cross-attention has {100 * use['cross_attention_entropy']:.0f} % of its largest "
                               "entropy"))
    rows.append(("faults", "; ".join(findings["faults"]) or "none of those that are looked for"))
    verdict = findings.get("verdict")
    if verdict:
        text = f"after {verdict['updates']:,} updates: {_probabilities(verdict['probabilities'])}"
        if verdict["fp16"]:
            text = f"predicted to fail in fp16: {verdict['fp16']} (the rule alone, {text})"
        if verdict["outside"]:
            text += "; unlike the runs that the rule was fitted on"
        rows.append(("verdict", text))
        better = [*verdict["best"]]
        if verdict["fp16"]:
            better.insert(0, BF16)
        for name in better:
            rows.append(("better", f"{name}: {_probabilities(verdict['instead'][name])}"))
    elif "verdict" in findings:
        rows.append(("verdict", _NO_RULE))
    return rows


def _probabilities(probabilities: Mapping[str, float]) -> str:
    """The outcomes with their probabilities, the most probable one first."""
    names = sorted(OUTCOMES, key=lambda name: -probabilities[name])
    return ", ".join(f"{WORDS[name]} {probabilities[name]:.2f}" for name in names)


def _changes(verdict: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Changes that were rated, the most promising first; before them bf16, if fp16 is what fails."""
    return sorted(verdict["instead"].items(), key=lambda item: (item[0] != BF16, -expected_rank(item[1])))


# -- pictures and page -------------------------------------------------------------------------------------------------


def write_page(findings: Findings, folder: Path) -> Path:
    """Writes the pictures into `folder`, in place of those of an earlier diagnosis, and `diagnosis.html` with all of
    them; returns the path of the page.

    The page begins with the answer, what to change and the course of the trial. The rest is folded away.
    """
    about, verdict, outcome = findings["about"], findings.get("verdict"), findings.get("outcome")
    for name in _SOMETIMES:
        (folder / f"{name}.png").unlink(missing_ok=True)
    parts = ["<h1>Does it learn to translate?</h1>", f"<p><small>Encoder of {escape(about['encoder'])}; decoder of "
             f"{escape(about['decoder'])}; width {about['width']}, {about['parameters']:,} parameters; peak rate "
             f"{about['learning rate']:g}, warm-up of {about['warm-up']:,} updates</small></p>"]
    if verdict:
        parts.append(_box(verdict["outcome"], _answer(verdict, findings["faults"])))
        parts += [*_remedies(verdict), *_trial(verdict, folder), *_background(verdict)]
    elif outcome:
        answer = _MEASURED[outcome["outcome"]].format(gain=max(outcome["gain"], 0.0))
        parts.append(_box(outcome["outcome"], [answer, *map(_sentence, findings["faults"])]))
    rows = "".join(f"<tr><th>{escape(title)}</th><td>{escape(text)}</td></tr>" for title, text in _rows(findings))
    sections = [f"<table>{rows}</table>"]
    for name, title, text, plot in _sections(findings):
        plot(folder / f"{name}.png")
        sections.append(f"<h2>{title}</h2><p>{escape(text)}</p>{picture(folder / f'{name}.png', title)}")
    parts.append(folded("All measurements of the model, with pictures", sections))
    file = folder / "diagnosis.html"
    file.write_text(page("Diagnosis", parts), encoding="utf-8")
    return file


def _box(outcome: str, sentences: Sequence[str]) -> str:
    first, *rest = map(escape, sentences)
    kind = "yes" if outcome == "translates" else "no"
    return f"<div class='verdict {kind}'><b>{first}</b> {' '.join(rest)}</div>"


_PREDICTED = {
    "stuck": "No: after {updates:,} updates it will probably be stuck or have diverged ({sure}), knowing no more than "
             "how frequent each word is.",
    "target only": "No: after {updates:,} updates it will probably know the target language alone ({sure}), and not "
                   "read its source.",
    "translates": "Yes: after {updates:,} updates it will probably have begun to translate ({sure}).",
}
_MEASURED = {
    "stuck": "No: it is stuck or has diverged, and knows no more than how frequent each word is.",
    "target only": "No: it knows the target language alone; its source is worth {gain:.2g} nats a target token to it.",
    "translates": "Yes: it reads its source, which is worth {gain:.2g} nats a target token to it.",
}


def _answer(verdict: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    """The verdict and what is wrong, a sentence each."""
    trial, outcome = verdict["trial"], verdict["outcome"]
    if verdict["fp16"]:
        return [f"No: it will probably fail in fp16, because {verdict['fp16']}."]
    sure = f"{100 * verdict['probabilities'][outcome]:.0f} %"
    answer = _PREDICTED[outcome].format(updates=verdict["updates"], sure=sure)
    if faults:
        return [answer, *map(_sentence, faults)]
    return [answer, f"In a trial of {len(trial['losses'])} updates its loss came from {trial['losses'][0]:.2f} to "
                    f"{fmean(trial['losses'][-5:]):.2f} nats a token, and no fault was seen."]


def _sentence(fault: str) -> str:
    """A fault as a sentence of its own, without its keyword."""
    text = fault.partition(": ")[2] or fault
    if "." not in text.split()[0]:  # a name of the model, as it is written
        text = f"{text[0].upper()}{text[1:]}"
    return f"{text}."


def _remedies(verdict: Mapping[str, Any]) -> list[str]:
    """What to change, and how that was rated."""
    if verdict["outcome"] == "translates":
        return []
    own = verdict["probabilities"]
    if verdict["fp16"]:
        own = {"stuck": 1.0, "target only": 0.0, "translates": 0.0}
    enough = expected_rank(own) + 0.05
    better = [(name, rated) for name, rated in _changes(verdict) if expected_rank(rated) > enough]
    if not verdict["instead"]:
        return ["<h2>What to change</h2><p>No other recipe was tried, because there was no time for it; "
                "<code>--minutes 10</code> gives it some.</p>"]
    if not better:
        return [f"<h2>What to change</h2><p>None of {len(verdict['instead'])} changes that were tried was rated "
                "better.</p>"]
    best_first = OUTCOMES[::-1]
    table = "<tr><th>change</th>"
    for outcome in best_first:
        table += f"<th>{escape(WORDS[outcome])}</th>"
    table += "</tr>"
    rows = [(f"<code>{escape(name)}</code>", rated) for name, rated in better[:_SHOWN]]
    for name, rated in [*rows, ("as it is", own)]:
        bars = "".join(_bar(rated[outcome]) for outcome in best_first)
        table += f"<tr><td>{name}</td>{bars}</tr>"
    return [f"<h2>What to change, and what it is worth</h2><p>Each was tried in {len(verdict['trial']['losses'])} "
            "updates of its own, in fp32, but for a change of train.updates or parallel.precision alone, which is "
            f"judged by the trial of the recipe as it is. This is how it will probably end:</p><table>{table}</table>"]


def _bar(share: float) -> str:
    return f"<td class='bar'><span style='width:{4 * share:.2f}rem'></span>{100 * share:.0f} %</td>"


def _trial(verdict: Mapping[str, Any], folder: Path) -> list[str]:
    """The course of the trial, beside that of the most promising change."""
    courses = {"this recipe": verdict["trial"], **verdict["best"]}
    plots.plot_trial(courses, folder / "trial.png")
    return ["<h2>What the model does with its source</h2><p>In the trial. An encoder has collapsed if its output is "
            "one vector that all tokens have in common (1 in the first picture). Attention over it is then as even as "
            "it can be (1 in the second), and the source is worth nothing (0 in the third).</p>"
            f"{picture(folder / 'trial.png', 'The course of the trial')}"]


def _background(verdict: Mapping[str, Any]) -> list[str]:
    """How far to trust the verdict, and all that was rated; folded."""
    rule = verdict["rule"]
    trust: list[str] = []
    if "fresh" in rule:
        fresh = rule["fresh"]
        trust.append(f"On {fresh['runs']} runs that were made after it, it was right on {100 * fresh['right']:.0f} %, "
                     f"and on {100 * fresh['sure_right']:.0f} % of the {fresh['sure']} where it gave an outcome "
                     f"{SURE:g} or more.")
    if {"held_out", "outcomes"} <= rule.keys():
        right, ends = rule["held_out"].values(), rule["outcomes"].values()
        trust.append(f"It is a rule that was fitted on {rule['runs']} runs of small models. On other texts, depths "
                     f"and blocks than those of its fit it was right on {100 * min(right):.0f} to "
                     f"{100 * max(right):.0f} %. Always saying the commonest outcome is right on "
                     f"{100 * max(ends) / sum(ends):.0f} %.")
    tried = [f"{name}: {_probabilities(rated)}" for name, rated in _changes(verdict)]
    course = [f"after {int(number):,}: {_probabilities(rated)}" for number, rated in verdict["course"].items()]
    sections: dict[str, dict[str, Sequence[str]]] = {  # the items by title and the line that leads to them
        "How far to trust this": {
            "": trust, "This recipe is unlike the runs of the fit, so trust the prediction less:": verdict["outside"],
            "What no prediction of this kind can know:": UNKNOWABLE},
        "Every change that was tried, and what was not": {
            "": tried, "Not tried, because time was up; --minutes gives more of it:": verdict["left out"]},
        "The prediction for fewer updates": {"": course},
        "What moves the chance to translate most, in points of a hundred, against an average run": {
            "": verdict["reasons"]},
    }
    parts = []
    for title, groups in sections.items():
        content = []
        for lead, items in groups.items():
            if items:
                bullets = "".join(f"<li>{escape(item)}</li>" for item in items)
                content.append(f"<p>{escape(lead)}</p><ul>{bullets}</ul>")
        if content:
            parts.append(folded(title, content))
    return parts


def _sections(findings: Findings) -> list[tuple[str, str, str, Callable[[Path], None]]]:
    """For each picture: its name, heading, how to read it, and the function that plots it."""
    gradients = findings["gradients"]
    lines = partial(plots.plot_lines, ylabel="gradient norm")
    sections: list[tuple[str, str, str, Callable[[Path], None]]] = [
        ("dependency", "Layer dependency",
         "A row is the input of one branch (the last row: the stack's output). A column is an earlier branch, and the "
         "colour its share of that input, β. With a bright diagonal, every layer depends mostly on the layer just "
         "below it, so a change down there reaches the top undiminished.",
         partial(plots.plot_dependency, findings["dependency"])),
        ("change", "Output change",
         "How far a small change of the weights moves the output, against the number of layers N. A change that grows "
         "like N makes deep models unstable; one that grows like log N does not.",
         partial(plots.plot_growth, findings["growth"],
                 title="How far noise and one update move the output, against depth")),
        ("gradients", "Gradients of sub-layers' outputs",
         "Where a line falls towards the left, the gradient vanishes on its way down: low layers learn little.",
         partial(lines, _by_part(gradients.outputs), xlabel="layer", title="Gradient of every sub-layer's output")),
        ("matrices", "Gradients of matrices",
         "Adam evens out gradients of unequal size, SGD does not.",
         partial(lines, _by_part(gradients.matrices), xlabel="layer", title="Gradient of every matrix")),
    ]
    points = list(gradients.places.values())
    if points:
        shown = sorted({0, len(points) // 2, len(points) - 1})  # the lowest, the middle and the highest layer
        shown_points = {f"layer {index + 1}": points[index] for index in shown}
        sections.append(("places", "Inside a decoder layer",
                         "Points (1) and (2) are before and after the first norm, (3) and (4) before and after the "
                         "second, (5) before the third. A drop to the left from (4) to (3), or from (2) to (1), shows "
                         "a norm that lets little of the gradient through.",
                         partial(lines, {"": shown_points}, xlabel="point of the layer",
                                 title="Gradient at five points of a decoder layer")))
    if "last_ffn" in findings:
        sections.append(("last_ffn", "Last FFN against depth",
                         "The gradient norm of the decoder's last FFN in models of different depth. Xiong et al. 2020: "
                         "constant for Post-LN, falling like 1/√N for Pre-LN.",
                         partial(lines, {"": {"fc2": findings["last_ffn"]["norms"]}},
                                 xs=findings["last_ffn"]["depths"], xlabel="decoder layers N",
                                 title="Gradient of the decoder's last FFN matrix (fc2) against depth")))
    sections += [
        ("likeness", "Similarity of layers",
         "The cosine between the outputs of two layers, averaged over tokens. A bright lower left corner means that "
         "the upper layers add little.",
         partial(plots.plot_similarity, findings["likeness"])),
        ("ranges", "Activations", "Variance of every layer's output, and its largest magnitude. "
         "Above the dashed line, fp16 overflows.",
         partial(plots.plot_ranges, findings["ranges"])),
        ("half", "Gradients lost to fp16",
         "A gradient that is zero in fp16 but not in fp32 was too small: a larger loss scale would keep it.",
         partial(plots.plot_half, findings["half"])),
    ]
    if findings.get("moved"):
        sections.append(("moved", "Updates against gradients",
                         "The gradients of attention matrices differ widely in size; the optimizer's updates do not.",
                         partial(plots.plot_displacements, findings["moved"])))
    return sections


def _by_part(values: Mapping[str, float]) -> dict[str, dict[str, list[float]]]:
    """Values by stack, then by part of a layer, in the order of layers; without the embeddings."""
    groups: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for name, value in values.items():
        if ".layers." in name:
            side, _, _, part = name.split(".", 3)
            groups[side].setdefault(part, []).append(value)
    return groups
