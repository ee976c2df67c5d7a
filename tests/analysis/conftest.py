"""Studies that many tests only look at: made and computed once a session."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scenarios import results_of, words
from synthetic import SyntheticArm, example_study, planned, write_plan, write_run


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory):
    return example_study(tmp_path_factory.mktemp("example"))


@pytest.fixture(scope="session")
def example(example_folder):
    return results_of(example_folder)


@pytest.fixture(scope="session")
def empty(tmp_path_factory):
    """The least there is: one planned run that was killed, nothing to compare, nothing to draw."""
    folder = tmp_path_factory.mktemp("empty")
    arm = SyntheticArm("async", 2, "measured", None)
    write_plan(folder, [arm], [planned("one", "test", arm.name, 0)])
    write_run(folder / "one", arm, [], status=None)
    (folder / "one" / "events.jsonl").write_text('{"schema": 1}\n{"kind": "eva')
    return results_of(folder)


@pytest.fixture
def approved(request):
    """Compare a text, or the words of a study, with the approved file of its test or case; --approve writes it."""
    name = re.sub(r"^test_|.*\[|\]$", "", request.node.name)
    file = Path(__file__).parent / "approved" / f"{name}.txt"

    def check(found):
        text = found if isinstance(found, str) else words(found)
        if request.config.getoption("--approve"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.is_file(), f"{file.name} is not there: run this test with --approve and read what it writes"
        assert text == file.read_text(encoding="utf-8"), "run this test with --approve if the words are better"

    return check
