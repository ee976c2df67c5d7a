"""``python -m analysis``: what commands there are."""

from __future__ import annotations

import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import SyntheticArm, straight, write_run

from analysis.__main__ import COMMANDS, main
from analysis.commands import carried_out, rich_console
from asyncsgd.records.events import FAILED, Fault

ANALYSIS = Path(__file__).resolve().parents[2] / "analysis"


def test_every_module_that_can_be_started_is_listed_with_how_it_is_typed(capsys: Any) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [f"analysis.{command}" for command in COMMANDS]
    assert all(line.startswith("python -m analysis.") and ": " in line and line.endswith(".") for line in lines)
    started = {path.stem for path in ANALYSIS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    started |= {path.parent.name for path in ANALYSIS.glob("*/__main__.py")}
    assert started - {"__main__"} == set(COMMANDS)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("report", "type python -m analysis.report"),
        ("raport", "did you mean 'report'?"),
        ("lab-notes", "analysis.lab_notes"),
    ],
)
def test_another_word_is_refused_with_the_nearest_command(typed: str, hint: str, capsys: Any) -> None:
    assert main([typed, "runs"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: python -m analysis takes no arguments, got {typed!r}; ")
    assert hint in error


ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose names, settings, messages and records hold escape sequences."""
    folder = tmp_path_factory.mktemp("hostile") / ESCAPES
    plain = folder.with_name("here")  # a run refuses to make such a folder, so they are renamed
    for algorithm in ("sync", "async"):
        arm = SyntheticArm(algorithm, settings={"model": ESCAPES, "task": ESCAPES})
        for seed in range(3):
            facts = {"task": ESCAPES, "model": ESCAPES, "data": ESCAPES, "rule": f"{algorithm}{ESCAPES}"}
            curve = straight(4.0, 2.0 + 0.1 * seed, seconds=8.0)
            path = write_run(plain / f"{algorithm}-s{seed}", arm, curve, seed=seed, summary=facts)
            path.rename(path.with_name(path.name + ESCAPES))
    failed = write_run(plain / "failed", arm, curve, seed=9, status=FAILED, message=ESCAPES)
    with open(failed / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(vars(Fault(ESCAPES, 1, 1, 8.0))) + "\n")
    damaged = plain / f"damaged{ESCAPES}"
    damaged.mkdir()
    (damaged / "summary.json").write_text(json.dumps({"mode": [ESCAPES]}))
    return plain.rename(folder)


def check_plain(text: str) -> None:
    assert "\\x1b[31mred\\x1b]0" in text
    assert {character for character in text if not character.isprintable()} <= {"\n"}


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_an_escape_sequence_of_what_it_reads(command: str, hostile: Path, capsys: Any) -> None:
    module = importlib.import_module(f"analysis.{command}.__main__" if command == "report" else f"analysis.{command}")
    arguments = [str(hostile / "failed"), "--once"] if command == "watch" else [str(hostile)]
    module.main(arguments)
    said = capsys.readouterr()
    check_plain(said.out + said.err)


def test_a_console_of_rich_keeps_its_own_sequences_and_shows_those_of_a_text(monkeypatch: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")

    def draw() -> None:
        table = Table(ESCAPES, title=ESCAPES)
        table.add_row(Text(ESCAPES, style="bold"))
        rich_console().print(table)

    assert carried_out(draw) == 0
    shown = terminal.getvalue()
    assert "\x1b[1m" in shown
    check_plain(re.sub("\x1b\\[[013]?;?[013]?m", "", shown))
