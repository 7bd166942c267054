"""The site of docs/, built by Sphinx with `make docs` into build/docs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generate  # noqa: E402

from deepnmt import __version__  # noqa: E402

project = "deepnmt"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = [".ipynb_checkpoints"]
myst_heading_anchors = 4
default_role = "code"  # of `words` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
python_use_unqualified_type_names = True
add_module_names = False
smartquotes_action = "De"  # dashes, and quotes as they are written
napoleon_use_ivar = True
html_theme = "furo"
html_title = f"deepnmt {__version__}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["tables.css"]


def notebook_as_markdown(notebook: str) -> str:
    """The cells of a Jupyter notebook as one Markdown page: text as it is, code and printed output fenced. Nothing is
    executed, so a page shows what was saved with the notebook."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            printed = output.get("text") or data.get("text/plain", "")
            if "image/png" in data:
                parts.append(f"![a figure](data:image/png;base64,{''.join(data['image/png'].split())})")
            elif printed := "".join(printed).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts)


def _read(app: Sphinx, document: str, content: list[str]) -> None:
    file = app.env.doc2path(document)
    if file.suffix == ".ipynb":
        content[0] = notebook_as_markdown(content[0])
    content[0] = generate.filled(document, content[0])

    def link(match: re.Match[str]) -> str:
        """MyST takes every link to Markdown for a page of the site, unless it is marked as a file to download, in
        which no heading can be linked to."""
        inside = (file.parent / match[1]).resolve().is_relative_to(app.srcdir)
        return match[0] if inside else f"](path:{match[1]})"

    content[0] = re.sub(r"\]\(((?:\.\./)+[^)#]+\.md)(?:#[^)]*)?\)", link, content[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
