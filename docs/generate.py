"""What follows from the code: `python docs/generate.py` writes the table of blocks and the schemas of recipes.

The tables of settings and the commands' `--help` are in no file: conf.py puts them into their pages of the site.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, PICTURES = ROOT / "docs" / "reference", ROOT / "docs" / "pictures"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from deepnmt.cli import COMMANDS, main  # noqa: E402
from deepnmt.config.choices import BLOCKS, BlockFacts  # noqa: E402
from deepnmt.config.sections import Recipe, Section  # noqa: E402
from deepnmt.shipped import SCHEMA  # noqa: E402
from deepnmt.version import PACKAGE  # noqa: E402
from deepnmt.visitors import task_modules  # noqa: E402
from studies import __main__ as studies  # noqa: E402
from studies.draw_blocks import blocks_picture  # noqa: E402

STUDIES = """\
## Studies

The studies support the claims of [the results](../results/index.md). They run from a checkout only.
"""


# -- settings ----------------------------------------------------------------------------------------------------------


def settings() -> str:
    """Every section of a recipe, with a row for each of its settings."""
    paths: dict[type[Section], list[str]] = {}
    for path, section in sections_in("", Recipe):
        paths.setdefault(section, []).append(path)
    headings = {section: ", ".join(there) or "Top level" for section, there in paths.items()}
    first: dict[str, str] = {}
    return "\n".join(part for section in headings for part in _table(section, headings, first))


def sections_in(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """A section and all within it, each with its dotted name."""
    yield path, section
    for name, field in section.model_fields.items():
        if kind := _section_of(field):
            inside = f"{path}.{name}" if path else name
            yield from sections_in(inside if kind is field.annotation else f"{inside}.NAME", kind)


def _section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a setting is, or is a mapping to."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _table(section: type[Section], headings: Mapping[type[Section], str], first: dict[str, str]) -> Iterator[str]:
    """A heading, what the section is, and its settings. `first`: the heading under which a row stood first; there it is
    not repeated."""
    schema = section.model_json_schema()["properties"]
    yield f"## {headings[section]}\n"
    if section is not Recipe:
        yield _reflowed(inspect.getdoc(section) or "") + "\n"
    rows: list[str] = []
    same: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        kind = _section_of(field)
        allowed = values(schema[name]) if kind is None else f"[a section](#{_anchor(headings[kind])})"
        cells = (f"`{name}`", " ".join((field.description or "").split()), allowed, _default(field))
        row = f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        if row in first:
            same.setdefault(first[row], []).append(cells[0])
        else:
            first[row] = headings[section]
            rows.append(row)
    for heading, names in same.items():
        yield _reflowed(f"As in [{heading}](#{_anchor(heading)}): {', '.join(names)}.") + "\n"
    if rows:
        yield "\n".join(["| setting | what it does | values | default |", "|---|---|---|---|", *rows, ""])


def _anchor(heading: str) -> str:
    """As GitHub and MyST have it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, Section) or value in ({}, []) else f"`{json.dumps(value)}`".replace('"', "")


def values(schema: Mapping[str, Any], many: bool = False) -> str:
    """What a setting may be, in words, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(values(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if schema["type"] == "array":
        return f"{'two' if schema.get('maxItems') == 2 else 'list of'} {values(schema['items'], many=True)}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {schema[key]:.10g}" for key, sign in signs.items() if key in schema)
    word = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`",
            "null": "`null`", "object": "mapping"}[schema["type"]]
    return f"{word}{'s' * many} {limits}".strip()


def _reflowed(text: str) -> str:
    """Paragraphs at a page's width."""
    return "\n\n".join(textwrap.fill(part, 100, break_on_hyphens=False) for part in text.split("\n\n"))


# -- commands ----------------------------------------------------------------------------------------------------------


def helps() -> str:
    """The `--help` of every command and study."""
    parts = [_fenced(_help(main)), *_helps(main, COMMANDS, "##"),
             STUDIES, _fenced(_help(studies.main)), *_helps(studies.main, studies.STUDIES, "###")]
    return "\n".join(parts)


def _helps(run: Callable[..., int], commands: Any, level: str) -> Iterator[str]:
    for command in commands:
        yield f"{level} {command}\n"
        yield _fenced(_help(run, command))


def _help(run: Callable[..., int], command: str | None = None) -> str:
    """What a command prints for `--help`."""
    width, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "90"  # as wide as a block of code is on the site
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            run(command, ["--help"])
    finally:
        del os.environ["COLUMNS"]
        if width is not None:
            os.environ["COLUMNS"] = width
    # an option of two names: Python before 3.13 repeats what follows
    return re.sub(r"(--[\w-]+) (\S+), (--[\w-]+) \2", r"\1, \3 \2", printed.getvalue().rstrip())


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def schemas() -> dict[Path, str]:
    """The JSON schemas of recipes, with which editors complete and check settings: that of translation, and one for
    each task whose recipes have sections of their own."""
    own = {PACKAGE / "tasks" / task / SCHEMA.name: module.RECIPE for task, module in task_modules("settings").items()}
    return {file: _schema(recipe) for file, recipe in {SCHEMA: Recipe, **own}.items()}


def _schema(recipe: type[Recipe]) -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **recipe.model_json_schema()}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def by_family(head: tuple[str, ...], cells: Callable[[BlockFacts], tuple[str, ...]]) -> str:
    """A table of all blocks, a row for each family above its own."""
    rows = [" | ".join(head), "|".join(["---"] * len(head))]
    for family in dict.fromkeys(row.family for row in BLOCKS.values()):
        rows.append(" | ".join([f"*{family}*", *[""] * (len(head) - 1)]))
        rows += [" | ".join([f"`{name}`", *cells(row)]) for name, row in BLOCKS.items() if row.family == family]
    return "".join(f"| {row} |\n".replace("| ---", "|---").replace("--- |", "---|") for row in rows)


def blocks_page() -> str:
    """The page on blocks, its two tables of all blocks written anew."""
    page = (REFERENCE / "blocks.md").read_text(encoding="utf-8")
    for new in (by_family(("block", "formula", "factors and starting values", "paper"),
                          lambda row: (row.line, row.start, row.paper)),
                by_family(("block", "costs a layer", "its authors report", "seen here", "take it for"),
                          lambda row: (row.cost, row.claim, row.seen, row.take))):
        head, _, _ = new.partition("\n")
        before, _, rest = page.partition(f"{head}\n")
        page = f"{before}{new}\n{rest.partition(chr(10) * 2)[2]}"
    return page


def generated() -> dict[Path, str]:
    """Every file that this one writes, or a table in it."""
    return {REFERENCE / "blocks.md": blocks_page(), PICTURES / "blocks.svg": blocks_picture(), **schemas()}


# Pages of the site, and what stands in them in place of the line that begins so.
MARK = "*On the site"
ON_THE_SITE = {"reference/recipe": settings, "reference/commands": helps}


def filled(document: str, text: str) -> str:
    """The text of a page as the site has it."""
    if document not in ON_THE_SITE:
        return text
    before, mark, _ = text.partition(MARK)
    assert mark, f"{document} has no line that begins with {MARK}"
    return before + ON_THE_SITE[document]()


if __name__ == "__main__":
    for file, text in generated().items():
        file.write_text(text, encoding="utf-8")
