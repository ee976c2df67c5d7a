"""A log that is not the run's is found out: changed, swapped or cut."""

import contextlib
import io
import json
import math
import shutil

import pytest

from replay import main as replay
from simulate import main as simulate


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of three workers, and the lines of its log."""
    parent = tmp_path_factory.mktemp("runs")
    words = ["--workers", "3", "--samples", "24", "--problem", "heterogeneous", "--evaluations", "3"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert simulate([*words, "--runs-dir", str(parent)]) == 0
    (folder,) = parent.iterdir()
    return folder, (folder / "events.jsonl").read_text().splitlines()


def nudged(line):
    """With the next larger loss."""
    return edited(line, loss=math.nextafter(json.loads(line)["loss"], math.inf))


def edited(line, **fields):
    record = json.loads(line) | fields
    return json.dumps({name: value for name, value in record.items() if value != "removed"})


@pytest.mark.parametrize(
    ("code", "said", "damage"),
    [
        (0, "identical", lambda lines, at: lines),
        (0, "identical", lambda lines, at: ['{"kind":"newer"}', *[edited(line, newer=[1]) for line in lines]]),
        (1, "the loss of dispatch", lambda lines, at: [*lines[:at], nudged(lines[at]), *lines[at + 1 :]]),
        (1, "which is not in flight", lambda lines, at: [*lines[:at], lines[at], *lines[at:]]),
        (1, "different", lambda lines, at: [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]),
        (1, "the log ends after", lambda lines, at: lines[:at]),
        (1, "it has read version 99", lambda lines, at: [*lines[:at], edited(lines[at], read_version=99)]),
        (2, "line 9 is no record", lambda lines, at: [*lines[:8], edited(lines[at], read_version="removed")]),
        (2, "line 9 is no record", lambda lines, at: [*lines[:8], edited(lines[at], batches=[[0, 1]]), *lines[8:]]),
    ],
)
def test_a_log_is_the_runs_or_is_found_out(code, said, damage, recorded, tmp_path, capsys):
    folder, lines = recorded
    shutil.copytree(folder, tmp_path / "run")
    arrivals = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"]
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(damage(lines, arrivals[8])) + "\n")
    assert replay([str(tmp_path / "run")]) == code
    shown = capsys.readouterr()
    assert said in (shown.err if code == 2 else shown.out)
    assert ("identical" in shown.out) == (code == 0)
