"""What was changed in a checkpoint, or in what it belongs to, is named and not used."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume import SAMPLES, sha256, train, wait_for_checkpoint

from asyncsgd import UsageError, checkpoints
from asyncsgd.checkpoints import Checkpoint, described, find, understood
from asyncsgd.records.events import INTERRUPTED

SMALL = Checkpoint(
    name="000000000040",
    total_samples=40,
    version=10,
    train_seconds=1.5,
    eval_loss=None,
    num_bytes=7,
    sha256="0f",
    events_bytes=99,
    totals={},
    events_sha256="a0",
    settings={"learning_rate": 0.02},
    previous={"000000000020": "b1"},
)


def without_hash(text: bytes) -> bytes:
    """As earlier versions wrote it."""
    content = json.loads(text)
    for key in ("events_sha256", "settings", "previous", "description_sha256"):
        del content[key]
    return json.dumps(content, indent=2).encode() + b"\n"


def test_a_description_with_any_bit_flipped_is_refused() -> None:
    text = described(SMALL).encode()
    written = understood(text, SMALL.name)
    assert written is not None
    assert dataclasses.replace(written, description_sha256=None) == SMALL
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        assert understood(bytes(flipped), SMALL.name) is None, bit


def test_a_description_belongs_to_the_name_of_its_file() -> None:
    assert understood(described(SMALL).encode(), "000000000080") is None
    for name in ("../../../x", "40", ""):
        assert understood(described(dataclasses.replace(SMALL, name=name)).encode(), name) is None


def test_a_description_of_an_earlier_version_is_read_if_its_values_can_be() -> None:
    text = without_hash(described(SMALL).encode())
    read = understood(text, SMALL.name)
    assert read is not None
    assert (read.total_samples, read.description_sha256) == (40, None)
    for key in ("totals", "events_bytes", "version", "policy", "sha256", "began_from"):
        assert understood(json.dumps({**json.loads(text), key: None}).encode(), SMALL.name) is None


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped when it had three checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    run = train(folder, stop_at=150, checkpoint_every=48, also=wait_for_checkpoint, keep=9)
    assert run.status == INTERRUPTED
    assert len(list(folder.glob("checkpoints/*.json"))) == 4
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped_once, tmp_path / "run")
    return tmp_path / "run"


def descriptions(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((folder / "checkpoints").glob("*.json"), reverse=True)


def rewrite(path: Path, **changes: object) -> None:
    """Change a description and give it the right hash again."""
    checkpoint = understood(path.read_bytes(), path.stem)
    assert checkpoint is not None
    path.write_text(described(dataclasses.replace(checkpoint, **changes)))


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_of_a_flipped_bit_the_user_is_told_and_the_checkpoint_before_it_is_used(
    data: st.DataObject, stopped_once: Path
) -> None:
    newest, before = descriptions(stopped_once)[:2]
    text = newest.read_bytes()
    flipped, bit = bytearray(text), data.draw(st.integers(0, 8 * len(text) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        newest.write_bytes(flipped)
        found = find(stopped_once)
    finally:
        newest.write_bytes(text)
    assert found.checkpoint.name == before.stem
    assert found.notes == (f"checkpoint {newest.stem} is damaged and not used: its description was changed",)


def swap(path: Path) -> None:
    newest, before = descriptions(path)[:2]
    for one, other in ((newest, before), (newest.with_suffix(".pt"), before.with_suffix(".pt"))):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)


def other_records(path: Path) -> None:
    """A digit in the records between the two newest checkpoints."""
    newest, before = (json.loads(each.read_bytes())["events_bytes"] for each in descriptions(path)[:2])
    content = bytearray((path / "events.jsonl").read_bytes())
    at = content.index(b'"loss":', before, newest) + len(b'"loss":0.')
    content[at] = ord("1") if content[at] != ord("1") else ord("2")
    (path / "events.jsonl").write_bytes(content)


def other_predecessor(path: Path) -> None:
    """The newest has no state any more, and the one before it another description than it had."""
    newest, before = descriptions(path)[:2]
    newest.with_suffix(".pt").unlink()
    rewrite(before, eval_loss=0.0)


def no_tensors(path: Path) -> None:
    newest = descriptions(path)[0]
    newest.with_suffix(".pt").write_bytes(b"mine")
    rewrite(newest, num_bytes=4, sha256=checkpoints.sha256_of(newest.with_suffix(".pt")))


@pytest.mark.parametrize(
    ("damage", "used", "fault"),
    [
        (lambda path: rewrite(descriptions(path)[0], events_bytes=10**9), 1, "events.jsonl is not what it was"),
        (lambda path: rewrite(descriptions(path)[0], version=1), 1, "events.jsonl is not what it was"),
        (lambda path: descriptions(path)[0].with_suffix(".pt").unlink(), 1, "No such file"),
        (swap, 2, "its description was changed"),
        (other_records, 1, "events.jsonl is not what it was"),
        (other_predecessor, 2, "a newer one came after another description"),
        (no_tensors, 1, "its state cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_is_used(
    damage: Callable[[Path], None], used: int, fault: str, stopped: Path, stopped_once: Path
) -> None:
    damage(stopped)
    found = find(stopped)
    assert found.checkpoint.name == descriptions(stopped_once)[used].stem
    assert len(found.notes) == used
    assert f"is damaged and not used: {fault}" in found.notes[-1]


@pytest.mark.parametrize("cut", [7, 1])
def test_an_earlier_description_that_points_into_a_line_is_not_used(cut: int, stopped: Path) -> None:
    newest, before = descriptions(stopped)[:2]
    for path in (newest, before):
        path.write_bytes(without_hash(path.read_bytes()))
    content = json.loads(newest.read_bytes())
    newest.write_text(json.dumps(content | {"events_bytes": content["events_bytes"] - cut}))
    found = find(stopped)
    assert found.checkpoint.name == before.stem
    assert "events.jsonl is not what it was" in found.notes[0]
    assert f"checkpoint {before.stem} was written by asyncsgd" in found.notes[1]


def test_a_run_of_an_earlier_version_goes_on_with_a_warning(stopped: Path, tmp_path: Path) -> None:
    for path in descriptions(stopped):
        path.write_bytes(without_hash(path.read_bytes()))
    (stopped / "checkpoints" / "latest").write_text("000000000048\n")  # which earlier versions kept
    (note,) = find(stopped).notes
    assert "which kept no hash of its description; nothing can be said of changes to it" in note
    train(stopped, resume=True)
    train(tmp_path / "whole")
    assert sha256(stopped) == sha256(tmp_path / "whole")


def test_a_run_does_not_go_on_with_an_edited_settings_yaml(stopped: Path) -> None:
    path = stopped / "settings.yaml"
    text = path.read_text()
    assert "learning_rate: 0.02\n" in text
    path.write_text(text.replace("learning_rate: 0.02\n", "learning_rate: 0.05\n"))
    with pytest.raises(UsageError, match=r"settings.yaml was changed after checkpoint \d* was taken \(learning_rate"):
        train(stopped, resume=True, learning_rate=0.05)
    path.write_text(text.replace(f"samples: {SAMPLES}\n", "samples: 160\n"))
    with pytest.raises(UsageError, match=r"was taken \(samples 240 -> 160\); put back what it said"):
        train(stopped, resume=True, samples=160)
    path.write_text("# a comment\n" + text)
    train(stopped, resume=True)


def test_every_state_is_described_by_what_a_reader_computes(stopped: Path) -> None:
    before = descriptions(stopped)[1]
    found = find(stopped)
    older = json.loads(before.read_bytes())
    assert found.checkpoint.previous == {before.stem: older["description_sha256"]}
    assert found.checkpoint.settings["learning_rate"] == 0.02
    assert torch.is_tensor(found.load()["server"]["parameters"])
