"""The pages of the API, as they are read without Sphinx, and what looks at the links of the built site."""

import ast
import importlib
import inspect
import re
import textwrap
from collections import Counter
from itertools import pairwise

import pytest
from doors import ROOT, asyncsgd
from site_links import wrong_links

API = ROOT / "docs" / "api"
DOCUMENTED = re.compile(r"^\.\. auto\w+:: ([\w.]+)", re.MULTILINE)


def test_every_public_name_stands_on_one_page_of_the_api_once_and_what_stands_there_exists():
    pages = [page.read_text(encoding="utf-8") for page in API.glob("*.md")]
    documented = Counter(name for page in pages for name in DOCUMENTED.findall(page))
    assert set(documented.values()) == {1}
    assert {f"asyncsgd.{name}" for name in asyncsgd.__all__} - {"asyncsgd.__version__"} <= set(documented)
    for name in documented:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name


def test_the_index_of_the_api_lists_every_page():
    listed = re.findall(r"^- \[.+?\]\((\w+\.md)\)", (API / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in API.glob("*.md") if page.name != "index.md")


def explained_fields(cls):
    """The fields of a class that have a docstring of their own."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    for field, below in pairwise(tree.body[0].body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and is_text:
            yield field.target.id
    for member in tree.body[0].body:
        if isinstance(member, ast.FunctionDef) and ast.get_docstring(member):
            yield member.name


PUBLIC = [getattr(asyncsgd, name) for name in asyncsgd.__all__]
CALLED = [found for found in PUBLIC if getattr(found, "__module__", "").startswith("asyncsgd.")]
CALLED = [found for found in CALLED if not (inspect.isclass(found) and issubclass(found, Exception))]


@pytest.mark.parametrize("called", CALLED, ids=lambda called: called.__name__)
def test_every_parameter_of_what_is_called_is_explained(called):
    explained = set(re.findall(r"\w+", inspect.getdoc(called)))
    if inspect.isclass(called):
        ours = [cls for cls in called.__mro__ if cls.__module__.startswith("asyncsgd.")]
        explained.update(name for cls in ours for name in explained_fields(cls))
    parameters = {name for name in inspect.signature(called).parameters if not name.startswith("_")}
    assert parameters <= explained


def test_links_that_lead_nowhere_what_other_hosts_would_send_and_addresses_are_found(tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><h1 id="top">A</h1><a href="api/rules.html#SSP">good</a><a href="#top">good</a>'
        '<a href="https://pandas.pydata.org">good</a><img src="data:image/png;base64,AAAA">'
        '<a href="api/rules.html#KSync">no such place</a><a href="rules.html">no such page</a>'
        '<script src="https://cdn.example.org/font.js"></script>'
    )
    (tmp_path / "style.css").write_text("")
    (tmp_path / "api" / "rules.html").write_text(
        '<dt id="SSP"></dt><a href="../index.html#top">good</a><img src="x.png">'
        "<p>default = &lt;function at 0x7f76c994de40&gt;</p>"
    )
    assert sorted(wrong_links(tmp_path)) == [
        "api/rules.html links to x.png",
        "api/rules.html says at 0x7f76c994de40",
        "index.html links to api/rules.html#KSync",
        "index.html links to rules.html",
        "index.html loads https://cdn.example.org/font.js",
    ]
