"""A checkpoint knows its records and itself, and a summary knows its records: what a disk has changed is found out."""

import hashlib
import importlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from doors import UsageError, asyncsgd
from stopped_runs import SAMPLES, checkpointed, log, sealed, sha256, train

find = importlib.import_module("asyncsgd.core.checkpoints").find
read_summary = importlib.import_module("asyncsgd.run.choose_folder").read_summary
status_of = importlib.import_module("asyncsgd.studies.runner").status_of
sync = os.fsync


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped, with two checkpoints at least."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(folder, stop_at=150, checkpoint_every=40)
    return folder


@pytest.fixture
def damaged(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def described(path, **changes):
    description = json.loads(path.read_text()) | changes
    del description["description_sha256"]
    path.write_text(sealed(description))


def test_no_flipped_bit_of_a_description_is_used(damaged):
    *_, before, newest = sorted((damaged / "checkpoints").glob("*.json"))
    assert find(damaged).checkpoint.name == newest.stem
    content = newest.read_bytes()
    draw = random.Random(0)
    flips = [(place, draw.randrange(8)) for place in range(0, len(content), 7)]
    seal = content.index(b"description_sha256")
    flips += [(place, 7) for place in range(seal, seal + 18)]  # no text any more
    for place, bit in flips:
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        newest.write_bytes(flipped)
        found = find(damaged)
        assert found.checkpoint.name == before.stem, place
        assert len(found.notes) == 1, place


def lines_of(content):
    return content.splitlines(keepends=True)


def one_digit(content):
    at = next(place for place in range(len(content) // 8, len(content)) if content[place : place + 1] == b"1")
    return content[:at] + b"2" + content[at + 1 :]


def zeros(content):
    return content[:4096] + b"\0" * 512 + content[4608:]


def swapped(content):
    lines = lines_of(content)
    lines[3], lines[4] = lines[4], lines[3]
    return b"".join(lines)


def doubled(content):
    """A line twice and another one not at all, with the length of before."""
    lines = lines_of(content)
    first, second = next((a, b) for a in range(2, 20) for b in range(a + 1, 20) if len(lines[a]) == len(lines[b]))
    lines[second] = lines[first]
    return b"".join(lines)


def lost(content):
    lines = lines_of(content)
    return b"".join([*lines[:4], *lines[5:]])


@pytest.mark.parametrize("damage", [one_digit, zeros, swapped, doubled, lost])
def test_records_that_were_changed_before_a_checkpoint_are_found_out(damage, damaged):
    events = damaged / "events.jsonl"
    content = events.read_bytes()
    events.write_bytes(damage(content))
    with pytest.raises(UsageError, match=r"is damaged and not used: events\.jsonl (was changed|ends) before it"):
        find(damaged)


def test_records_that_were_changed_after_the_checkpoint_before_leave_that_one(damaged, capsys):
    names = [path.stem for path in sorted((damaged / "checkpoints").glob("*.json"))]
    events = damaged / "events.jsonl"
    length = json.loads((damaged / "checkpoints" / f"{names[-2]}.json").read_text())["events_bytes"]
    content = bytearray(events.read_bytes())
    content[length + 40] ^= 1
    events.write_bytes(content)
    train(damaged, resume=True)
    assert log(damaged, "resume")[-1]["total_samples"] == int(names[-2])
    train(damaged.parent / "whole")
    assert sha256(damaged) == sha256(damaged.parent / "whole")


@pytest.mark.parametrize("name", ["../../victim", "/tmp/victim", "../victim", ""])
def test_a_description_cannot_name_files_outside(name, damaged):
    victims = [damaged.parent / "victim.pt", damaged.parent / "victim.json", damaged / "victim.pt"]
    for victim in victims:
        victim.write_text("not yours")
    oldest = sorted((damaged / "checkpoints").glob("*.json"))[0]
    described(oldest, name=name)
    train(damaged, resume=True, checkpoint_every=20)
    assert checkpointed(damaged)[-1] == SAMPLES
    assert [victim.read_text() for victim in victims] == ["not yours"] * 3


@pytest.mark.parametrize("changes", [{"total_samples": "many"}, {"policy": [1]}, {"events_bytes": None}, {"totals": 3}])
def test_odd_types_in_a_description_are_a_damage(changes, damaged):
    *_, before, newest = sorted((damaged / "checkpoints").glob("*.json"))
    described(newest, **changes)
    assert find(damaged).checkpoint.name == before.stem


class Foreign:
    """A class that no state of ours holds."""


@pytest.mark.parametrize("content", [{"state": Foreign()}, {"other": 1}, [1, 2]])
def test_a_foreign_state_is_refused_without_advice_to_run_it(content, damaged):
    newest = sorted((damaged / "checkpoints").glob("*.pt"))[-1]
    torch.save(content, newest)
    described(newest.with_suffix(".json"), sha256=hashlib.sha256(newest.read_bytes()).hexdigest())
    with pytest.raises(UsageError, match="cannot be read back") as refused:
        find(damaged).load()
    assert "weights_only" not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks up the files of descriptors in /proc")
@pytest.mark.parametrize("more", [{}, {"keep_best": True}, {"checkpoint_every": 80}], ids=str)
def test_a_summary_gets_its_name_when_records_and_models_outlive_a_power_cut(more, tmp_path, monkeypatch):
    """By the order of system calls: what was not synced is not there after a power cut."""
    durable = {}
    wrong = []
    path = tmp_path / "run"
    replace = os.replace

    def synced(descriptor):
        durable[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        sync(descriptor)

    def renamed(old, new):
        if Path(new).name == "summary.json":
            models = [file for name in ("model", "best_model") for file in (path / name).rglob("*")]
            for file in [path / "events.jsonl", *models]:
                if durable.get(str(file)) != file.stat().st_size:
                    wrong.append(file.name)
            wrong.extend(str(folder) for folder in (path, path.parent) if str(folder) not in durable)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    run = train(path, **more)
    assert run.status == "DONE"
    assert wrong == []
    assert (path / "best_model").is_dir() == ("keep_best" in more)


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-40], zeros, None])
def test_a_run_whose_records_are_lost_is_not_done(damage, tmp_path):
    path = tmp_path / "run"
    train(path)
    events = path / "events.jsonl"
    content = events.read_bytes()
    assert read_summary(path)["status"] == "DONE"
    if damage is None:
        events.unlink()
    elif damage is zeros:
        events.write_bytes(content[:-200] + b"\0" * 199 + b"\n")
    else:
        events.write_bytes(damage(content))
    assert read_summary(path)["status"] == "UNREADABLE"
    (run,) = asyncsgd.load(tmp_path).runs.itertuples()
    assert run.status == "UNREADABLE"
    assert run.usable is False
    assert run.left_out.startswith("UNREADABLE: events.jsonl") or "the last line of events.jsonl" in run.left_out


@pytest.mark.parametrize("name", ["settings.yaml", "environment.json"])
def test_a_study_makes_a_finished_run_again_whose_settings_or_environment_are_torn(name, tmp_path):
    path = tmp_path / "run"
    train(path)
    assert status_of(path) == "DONE"
    file = path / name
    file.write_bytes(file.read_bytes()[:-9].rstrip() + b": [")
    assert status_of(path) == "UNREADABLE"
    (run,) = asyncsgd.load(tmp_path).runs.itertuples()
    assert run.status == "UNREADABLE"


def test_a_summary_of_an_earlier_version_is_read_as_it_is(tmp_path):
    train(tmp_path / "run")
    file = tmp_path / "run" / "summary.json"
    summary = json.loads(file.read_text())
    del summary["events_bytes"], summary["last_record_sha256"]
    file.write_text(json.dumps(summary))
    assert read_summary(tmp_path / "run")["status"] == "DONE"
    assert asyncsgd.load(tmp_path).runs["usable"].all()
