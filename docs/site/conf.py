"""The site: the Markdown pages of this repository as they are, and a reference made of the code and the command line.

sphinx-build -W --keep-going -b html -c docs/site . out/site
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fa3verify

# Lists of pages by the page that they are appended to.
LISTS = {"README": "navigation.md", "reports/README": "results.md"}

project = html_title = "fa3verify"
version = release = fa3verify.__version__
project_copyright = "the authors of fa3verify"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/site/*.md", "reference/*.md", "reports/*.md", "reports/**/*.md"]
exclude_patterns = [*(f"docs/site/{name}" for name in LISTS.values()), "**/validation.md"]  # those stay files
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx_click"]
html_theme = "furo"
html_show_sourcelink = html_copy_source = False
myst_heading_anchors = 4
numpydoc_show_class_members = False
suppress_warnings = ["myst.header"]  # sections that begin a level below the title
# A link to a folder, which a repository shows, is its text here. That folders exist is for the tests of pages.
nitpick_ignore_regex = [("myst", r"(?:[\w.-]+/)*[\w-]+")]


def with_its_list(app: Any, name: str, source: list[str]) -> None:
    """Append to a page the list of those below it."""
    if name in LISTS:
        source[0] += "\n" + Path(__file__).with_name(LISTS[name]).read_text(encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", with_its_list)
