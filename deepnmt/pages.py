"""The common style of pages: HTML files that hold all they show and need no network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem;border-top:1px solid #ddd;padding-top:1rem}
h3{font-size:1rem;margin-top:1.6rem}img{width:44rem;max-width:100%}p{max-width:44rem}
table{border-collapse:collapse;margin-top:1.5rem}td,th{padding:.15rem .8rem .15rem 0}
td,th{text-align:left;vertical-align:top;overflow-wrap:anywhere}th{min-width:6rem}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;min-width:4rem;white-space:nowrap}
table.sentences{width:100%}table.sentences tr.first td{border-top:1px solid #ddd;padding-top:.5rem}
table.sentences td.label{color:#666;white-space:nowrap;width:6rem}
mark{background:#f9dcc9;color:inherit}small{color:#666}
.verdict{padding:.8rem 1rem;overflow-wrap:anywhere;border-left:.4rem solid #767676;background:#f5f5f5}
.yes{border-color:#009E73}.no{border-color:#D55E00}li{margin:.1rem 0}
code{font-size:.9em;background:#f5f5f5;padding:.1rem .3rem}td.bar{min-width:8rem;white-space:nowrap}
td.bar span{display:inline-block;height:.7rem;margin-right:.4rem;background:#0072B2}
details{border-top:1px solid #ddd;padding:.5rem 0}summary{cursor:pointer}details details{margin-left:1rem}"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of parts, each HTML."""
    return (f"<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
            f"<title>{escape(title)}</title><style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n")


def folded(title: str, parts: Sequence[str]) -> str:
    """Parts, each HTML, of which only the title is shown until a reader opens them."""
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def picture(file: Path, title: str) -> str:
    """An image tag that holds the picture in a PNG file."""
    data = base64.b64encode(file.read_bytes()).decode()
    return f"<img alt='{escape(title)}' src='data:image/png;base64,{data}'>"


def plotted(plot: Callable[[Path], None], title: str) -> str:
    """`picture` of what a function plots into a file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        plot(file)
        return picture(file, title)


def html_table(rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table, the first of whose rows are headings; its cells are text. `numbers`: all but the first column."""
    kind = " class='number'" if numbers else ""
    parts = []
    tag = "th"
    for first, *others in rows:
        parts.append(f"<tr><{tag}>{escape(first)}</{tag}>")
        for cell in others:
            parts.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
        parts.append("</tr>")
        tag = "td"
    return f"<table>{''.join(parts)}</table>"
