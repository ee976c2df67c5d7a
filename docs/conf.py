"""Sphinx: the pages of this folder, README, CONTRIBUTING and NOTES, and the API from its docstrings, as one site.

`python -m sphinx -W --keep-going -b html docs build/site` needs the extra ``docs`` and no network. The site loads
nothing from other hosts.
"""

import os
import re
from itertools import pairwise
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import asyncsgd

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "asyncsgd"
author = "the authors of asyncsgd"
version = asyncsgd.__version__
release = version

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
root_doc = "index"
myst_heading_anchors = 4  # as the forge gives them, so that one link works on both
highlight_language = "text"
smartquotes_action = "D"  # of what stands between words: quotes and dots stay, in equations above all

html_theme = "furo"
html_title = f"asyncsgd {version}"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_copy_source = False

default_role = "py:obj"  # `name` in a docstring is a link where the site has the name, and code elsewhere
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # a method that a rule overrides is explained at `Rule`, once
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("npt.ArrayLike", "Array", "Floats", "Indices", "Schedule")}
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88

SECTIONS = Config(napoleon_use_param=False, napoleon_use_rtype=False)
ABOVE = {"site/readme.md": "README.md", "site/contributing.md": "CONTRIBUTING.md", "site/notes.md": "NOTES.md"}
"""Pages of the site whose text lies above this folder, where Sphinx does not look for pages."""
ALIAS = re.compile(r"TypeAliasForwardRef\('([\w.]+)'\)")
LINK = re.compile(r"(?<=\]\()[^)\s#:]+")
LISTED = re.compile(r"^(?:\d+\.|-) \[(.+?)\]\((\S+?\.md)\)", re.MULTILINE)


def with_links_of_the_site(text: str, original: Path, page: Path) -> str:
    """The text of `original` with its links to files as they are seen from `page`."""
    pages = {ROOT / source: DOCS / name for name, source in ABOVE.items()}

    def seen_from_page(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(original.parent / link.group()))
        if not target.exists():
            return link.group()  # code that looks like a link
        return Path(os.path.relpath(pages.get(target, target), page.parent)).as_posix()

    return LINK.sub(seen_from_page, text)


def menu(text: str) -> str:
    """What Sphinx makes its menu of: the pages that a page lists."""
    entries = [f"{title} <{page}>" for title, page in LISTED.findall(text)]
    return "\n".join(["", "```{toctree}", ":hidden:", "", *entries, "```", ""])


def read_page(app, docname: str, source: list[str]) -> None:
    """Give Sphinx the text of a page: of those in `ABOVE` it is that of the file above this folder."""
    page = DOCS / f"{docname}.md"
    original = page
    above = ABOVE.get(f"{docname}.md")
    if above is not None:
        original = ROOT / above
        source[0] = original.read_text("utf-8")
    text = with_links_of_the_site(source[0], original, page)
    if page.name == "index.md":
        text += menu(text)
    source[0] = text


def with_equations(lines: list[str]) -> list[str]:
    """A docstring in which every indented paragraph outside of Args, Returns, ... is shown as it is written."""
    shown = lines[:1]
    last = lines[0]
    for before, line in pairwise(lines):
        if not before and line.startswith("    ") and not last.startswith(" "):
            shown.extend(["::", ""])
        shown.append(line)
        last = line or last
    return shown


def read_docstring(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Give Sphinx a docstring as reStructuredText."""
    if what == "data":  # its docstring stands below it in its module
        short = name.removeprefix("asyncsgd.")
        module = ModuleAnalyzer.for_module(f"asyncsgd.{asyncsgd._HOME[short]}")
        lines[:] = module.find_attr_docs()["", short]
    text = str(GoogleDocstring(with_equations(lines), SECTIONS)).replace("** -- ", "**: ")
    lines[:] = re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`docs/\1.md </\1>`", text).splitlines()


def read_signature(app, what: str, name: str, obj, options, signature: str | None, returns: str | None):
    """Give Sphinx a signature that it can take apart, with names for long types and for defaults that are made anew."""
    if signature is None:
        return None
    named = [ALIAS.sub(r"\1", part or "").replace("<factory>", "...") for part in (signature, returns)]
    return named[0], named[1] or None


def setup(app) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
