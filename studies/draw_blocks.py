"""Draws docs/pictures/blocks.svg: for each block the residual stream from a sub-layer's input, below, to its output."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Literal

from deepnmt.config.choices import BLOCKS

WIDTH, HEIGHT, COLUMNS = 150, 150, 6


@dataclass(frozen=True)
class Stream:
    """What is drawn of a block.

    Attributes:
        streams: lines side by side.
        read, write: what stands before and behind the sub-layer F: "LN", a factor, or nothing.
        on: what the residual is multiplied by.
        after: what stands behind the sum.
        inside: whether F has a norm of its own.
        below: what also reads what lower sub-layers have put out, the stream or F.
        summed: whether the residual is added to what F puts out.
    """

    streams: int = 1
    read: str = ""
    write: str = ""
    on: str = ""
    after: str = ""
    inside: bool = False
    below: Literal["", "stream", "F"] = ""
    summed: bool = True


STREAMS: dict[str, Stream] = {
    "post_ln": Stream(after="LN"),
    "pre_ln": Stream(read="LN"),
    "admin": Stream(on="ω", after="LN"),
    "admin_closed_form": Stream(on="ω", after="LN"),
    "b2t": Stream(after="+x, LN"),
    "b2t_no_ln": Stream(on="α", write="β"),
    "deepnorm": Stream(on="α", after="LN"),
    "rezero": Stream(write="a"),
    "rezero_post_ln": Stream(write="a", after="LN"),
    "fixup": Stream(read="−b", write="s"),
    "t_fixup": Stream(),
    "looks_linear": Stream(after="LN"),
    "dlcl": Stream(read="LN", below="stream"),
    "dlcl_post": Stream(after="LN", below="stream"),
    "peri_ln": Stream(read="LN", write="LN"),
    "lns": Stream(read="LN/√l"),
    "keel": Stream(read="LN", on="α", after="LN"),
    "siamese": Stream(streams=2, read="LN", write="1/c"),
    "sub_ln": Stream(read="LN", inside=True),
    "mix_ln": Stream(read="(LN)", after="(LN)"),
    "attn_res": Stream(read="LN", below="F", summed=False),
    "block_attn_res": Stream(read="LN", below="F"),
    "hyper": Stream(streams=4, read="LN", on="A_r"),
    "mhc": Stream(streams=4, read="LN", on="H_res"),
}


def line(*points: tuple[float, float], dashed: bool = False, arrow: bool = True) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    style = (' stroke-dasharray="3 2"' if dashed else "") + (' marker-end="url(#a)"' if arrow else "")
    return f'<polyline points="{path}" fill="none" stroke="#334"{style}/>'


def box(x: float, y: float, text: str, fill: str = "#dde8f7") -> str:
    width = 12 + 6.5 * len(text)
    return (f'<rect x="{x - width / 2:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="4" fill="{fill}" '
            f'stroke="#334"/><text x="{x:g}" y="{y + 4:g}">{escape(text)}</text>')


def panel(name: str, drawn: Stream) -> str:
    """One block, from (0, 0) to (WIDTH, HEIGHT)."""
    xs = [30 + 9 * k for k in range(drawn.streams)]
    right, parts = 105, [f'<text x="{WIDTH / 2}" y="14" font-weight="bold">{name}</text>']
    if drawn.summed:
        parts += [line((x, 146), (x, 24)) for x in xs]
        parts += [line((xs[-1], 134), (right, 134), (right, 62), (xs[-1] + 5, 62)),
                  f'<circle cx="{xs[-1]}" cy="62" r="5" fill="#fff" stroke="#334"/><text x="{xs[-1]}" y="66">+</text>']
    else:
        parts += [line((right, 140), (right, 24))]
    if drawn.below:
        end = right if drawn.below == "F" else xs[-1]
        parts += [line((8, 146), (8, 140), (end, 140), (end, 134), dashed=True, arrow=False)]
    parts += [box(right, 98, "F + LN" if drawn.inside else "F", "#fbe3c0")]
    for text, x, y in ((drawn.read, right, 122), (drawn.write, right, 74), (drawn.on, sum(xs) / len(xs), 98),
                       (drawn.after, xs[-1], 42)):
        parts += [box(x, y, text)] if text else []
    return "\n".join(parts)


def blocks_picture() -> str:
    """The picture; raises KeyError for a block without a drawing."""
    rows = -(-len(BLOCKS) // COLUMNS)
    panels = [f'<g transform="translate({WIDTH * (i % COLUMNS)} {HEIGHT * (i // COLUMNS)})">\n'
              f"{panel(name, STREAMS[name])}\n</g>" for i, name in enumerate(BLOCKS)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * COLUMNS} {HEIGHT * rows}" '
            'font-family="sans-serif" font-size="11" text-anchor="middle">\n'
            "<!-- Drawn by studies/draw_blocks.py, which docs/generate.py runs. -->\n"
            '<defs><marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0 6 3 0 6z" fill="#334"/></marker></defs>\n<rect width="100%" height="100%" fill="#fff"/>\n'
            + "\n".join(panels) + "\n</svg>\n")
