"""The pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_index_lists_every_page_and_every_place_that_it_names_is_there() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", index)}
    assert all(page.exists() for page in linked)
    assert {page for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"} <= linked
    places = re.findall(r"`((?:asyncsgd|analysis)/[^`]+)`", index)
    assert places
    assert all((ROOT / place).exists() for place in places)
