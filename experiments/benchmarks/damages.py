"""What `resume` does to the folder of a killed run before it goes on, and what the run has to say then."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOREIGN = ("best.pt", "notes.txt", "README", "999999999999.pt/notes.txt")
"""A user's own files. The last one lies in a folder that is called as a checkpoint is."""
_HASHES = ("events_sha256", "settings", "previous", "description_sha256")
"""What earlier versions did not write."""


def descriptions(run: Path) -> list[Path]:
    """Of the checkpoints of a run, the newest first."""
    return sorted((run / "checkpoints").glob("*.json"), reverse=True)


def content(run: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def put_back(run: Path, files: Mapping[str, bytes]) -> None:
    """Let a run have these files and no others."""
    shutil.rmtree(run)
    for name, text in files.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def _flip(path: Path, draw: random.Random) -> None:
    text = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(text))
    text[bit // 8] ^= 1 << bit % 8
    path.write_bytes(text)


def one_bit(run: Path, draw: random.Random) -> list[str]:
    """A flipped bit in the newest description."""
    newest = descriptions(run)[0]
    _flip(newest, draw)
    return [newest.stem]


def one_bit_of_the_state(run: Path, draw: random.Random) -> list[str]:
    """A flipped bit in the newest state."""
    newest = descriptions(run)[0]
    _flip(newest.with_suffix(".pt"), draw)
    return [newest.stem]


def swapped(run: Path, draw: random.Random) -> list[str]:
    """The two newest descriptions, each at the other's place."""
    newest, before = descriptions(run)[:2]
    one, other = newest.read_bytes(), before.read_bytes()
    newest.write_bytes(other)
    before.write_bytes(one)
    return [newest.stem, before.stem]


def _edited(run: Path, key: str, change: Callable[[Any], object], *, earlier: bool) -> list[str]:
    newest = descriptions(run)[0]
    for path in descriptions(run) if earlier else ():
        kept = {name: value for name, value in json.loads(path.read_bytes()).items() if name not in _HASHES}
        path.write_text(json.dumps(kept, indent=2) + "\n")
    said = json.loads(newest.read_bytes())
    newest.write_text(json.dumps(said | {key: change(said[key])}, indent=2) + "\n")
    return [newest.stem]


def other_seconds(run: Path, draw: random.Random) -> list[str]:
    """The newest description says other seconds, which nothing but its hash can tell."""
    return _edited(run, "train_seconds", lambda seconds: seconds + 1.0, earlier=False)


def records_that_end_earlier(run: Path, draw: random.Random) -> list[str]:
    """The newest description points 7 bytes before the end of its records."""
    return _edited(run, "events_bytes", lambda number: number - 7, earlier=False)


def records_that_end_earlier_without_hashes(run: Path, draw: random.Random) -> list[str]:
    """The same in the descriptions of an earlier version."""
    return _edited(run, "events_bytes", lambda number: number - 7, earlier=True)


def no_totals(run: Path, draw: random.Random) -> list[str]:
    """The newest description has no totals."""
    return _edited(run, "totals", lambda totals: None, earlier=False)


def no_totals_without_hashes(run: Path, draw: random.Random) -> list[str]:
    """The same in the descriptions of an earlier version."""
    return _edited(run, "totals", lambda totals: None, earlier=True)


def foreign_files(run: Path, draw: random.Random) -> list[str]:
    """A user's files beside the checkpoints, which stay."""
    for name in FOREIGN:
        path = run / "checkpoints" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    return []


def learning_rate(run: Path, draw: random.Random) -> list[str]:
    """Another learning rate in settings.yaml; no checkpoint is of a run with it."""
    path = run / "settings.yaml"
    path.write_text(re.sub(r"(?m)^learning_rate: .*$", "learning_rate: 0.00077", path.read_text()))
    return [path.stem for path in descriptions(run)]


Damage = Callable[[Path, random.Random], list[str]]
"""Is given the folder of a run, and returns the names of the checkpoints that the run must not go on from."""
Begin = Callable[[], tuple[int | None, str]]
"""Lets a run go on to its end; the exit code, and what is written to stderr."""

DAMAGES: tuple[Damage, ...] = (
    one_bit,
    one_bit_of_the_state,
    swapped,
    other_seconds,
    records_that_end_earlier,
    records_that_end_earlier_without_hashes,
    no_totals,
    no_totals_without_hashes,
    foreign_files,
    learning_rate,
)


def go_on(run: Path, damage: Damage, number: int, begin: Begin) -> tuple[int | None, list[str]]:
    """Damage a killed run and let it go on. If it is refused, put back what was there and let it go on again.

    Args:
        number: of the trial; says which bit is flipped.
        begin: starts the command that goes on.

    Returns:
        The exit code of the last command, and which promises were broken.
    """
    before, names = content(run), {path.stem for path in descriptions(run)}
    damaged = damage(run, random.Random(number))
    there = content(run)
    code, said = begin()
    wrong = []
    if names <= {*damaged}:
        if code != 2 or not said.startswith("error: ") or said.count("\n") != 1:
            wrong.append(f"exit code {code}, promised 2 and one line: {said.strip()[-300:]}")
        if content(run) != there:
            wrong.append("a refused resume has changed the folder")
        put_back(run, before)
        code, _ = begin()
    else:
        after = content(run)
        said = after["console.log"].removeprefix(before.get("console.log", b"")).decode()
        wrong += [f"{name} was changed" for name in there.keys() - before.keys() if after.get(name) != there[name]]
    unnamed = [name for name in damaged if name not in said and "learning_rate" not in said]
    return code, wrong + [f"does not name {name}" for name in unnamed]
