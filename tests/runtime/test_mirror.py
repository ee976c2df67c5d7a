"""A mirror has every checkpoint of a run as rank 0 has it, and the run goes on from there."""

import contextlib
import shutil

import pytest
import torch
from tasks import Plane

import asyncsgd
from asyncsgd import InProcess
from asyncsgd.backends.link import Copy, CopyDone, Gone, PartOfFile, Refused
from asyncsgd.backends.mirror import PAIR, Keeper, Sender
from asyncsgd.backends.pair import Pair, Rendezvous
from asyncsgd.core.checkpoints import find
from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import own
from asyncsgd.run.choose_folder import set_aside
from asyncsgd.run.found import Received, received_by
from asyncsgd.run.other_host import left_here

EVERY = 16
SAMPLES = 64


def trained(folder, samples=SAMPLES, resume=False, **more):
    return asyncsgd.train(
        Plane(),
        runtime=InProcess(),
        samples=samples,
        schedule="constant",
        folder=folder,
        resume=resume,
        checkpoint_every=EVERY,
        keep=10,
        quiet=True,
        **more,
    )


@pytest.fixture
def run(tmp_path):
    trained(tmp_path / "run")
    return tmp_path / "run"


def checkpoints_of(folder):
    names = sorted(path.stem for path in (folder / "checkpoints").glob("*.json"))
    return [find_called(folder, name) for name in names]


def find_called(folder, name):
    """The description of a checkpoint, as a run that ended there would find it."""
    alone = folder.parent / f"only-{name}"
    shutil.copytree(folder, alone)
    for path in (alone / "checkpoints").iterdir():
        if path.name.partition(".")[0] > name:
            path.unlink()
    return find(alone).checkpoint


@contextlib.contextmanager
def mirrored(run, copy, said):
    rendezvous = Rendezvous(str(run.parent))
    sender = Sender(Pair(rendezvous, PAIR, serves=True), 1, run, said.append)
    link = Pair(rendezvous, PAIR, serves=False)
    with own(copy) as events:
        keeper = Keeper(link, copy, events)
        keeper.start()
        yield sender, keeper


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_after_each_checkpoint_the_run_goes_on_from_its_copy(run, tmp_path):
    copy = tmp_path / "copy"
    said = []
    states = checkpoints_of(run)
    assert states[0].total_samples == EVERY  # later ones wait until the one before is written
    assert states[-1].total_samples == SAMPLES
    with mirrored(run, copy, said) as (sender, keeper):
        for number, state in enumerate(states, start=1):
            sender.send(state)
            assert (said, keeper.last) == ([], state.name)
            copied = files_of(copy)
            there = files_of(run)
            assert copied.pop("events.jsonl") == there["events.jsonl"][: state.events_bytes]
            known = {name for one in states[:number] for name in (f"{one.name}.pt", f"{one.name}.json")}
            assert copied.keys() == {"settings.yaml", "environment.json"} | {f"checkpoints/{name}" for name in known}
            for name, content in copied.items():
                assert content == there[name]
            assert find(copy).checkpoint == state
    longer = trained(copy, samples=2 * SAMPLES, resume=True)
    expected = trained(run, samples=2 * SAMPLES, resume=True)
    assert longer.summary["parameters_sha256"] == expected.summary["parameters_sha256"]


def test_what_rank_0_no_longer_has_goes_from_the_copy(run, tmp_path):
    copy = tmp_path / "copy"
    states = checkpoints_of(run)
    with mirrored(run, copy, []) as (sender, _):
        sender.send(states[0])
        for suffix in ("json", "pt"):
            (run / "checkpoints" / f"{states[0].name}.{suffix}").unlink()
        sender.send(states[1])
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == [
        f"{states[1].name}.json",
        f"{states[1].name}.pt",
    ]


def test_a_copy_that_cannot_be_written_is_told_and_the_next_one_is_whole(run, tmp_path):
    copy = tmp_path / "copy"
    said = []
    states = checkpoints_of(run)
    in_the_way = copy / "checkpoints" / f"{states[0].name}.pt"
    in_the_way.mkdir(parents=True)
    with mirrored(run, copy, said) as (sender, keeper):
        sender.send(states[0])
        assert keeper.last is None
        (line,) = said
        assert line.startswith(f"host 1 has no copy of checkpoint {states[0].name} (")
        assert "Is a directory" in line
        assert line.endswith("; the run goes on")
        assert not in_the_way.with_suffix(".json").exists()  # a description of a state that is not there
        in_the_way.rmdir()
        sender.send(states[1])
    assert said == [line]
    assert find(copy).checkpoint == states[1]


def test_a_lost_mirror_is_told_once_and_the_run_goes_on(run, tmp_path):
    said = []
    with mirrored(run, run.parent / "copy", said) as (sender, _):
        sender._link.give_up("no sign of life for 60 s")
        for state in checkpoints_of(run):
            sender.send(state)
    (line,) = said
    assert "no sign of life for 60 s; no more copies are made" in line


@pytest.mark.parametrize("name", ["../settings.yaml", "/tmp/settings.yaml", "checkpoints/../../a.json", "a.py"])
def test_a_mirror_writes_files_of_a_run_and_no_others(name, tmp_path):
    copy = tmp_path / "in" / "copy"
    with mirrored(tmp_path / "run", copy, []) as (sender, _):
        leader = sender._link
        for wanted, parts in ((Refused, [PartOfFile(name, 0, 4)]), (CopyDone, [])):
            leader.send(Copy("000000000016", tuple(parts), ()))
            for _ in parts:
                leader.deliver(torch.zeros(4, dtype=torch.uint8))
            assert isinstance(leader.receive(), wanted)
    assert files_of(tmp_path).keys() - {"store"} == {"in/copy/events.jsonl"}


def test_records_that_do_not_belong_behind_what_is_there_are_refused(tmp_path):
    copy = tmp_path / "copy"
    with mirrored(tmp_path / "run", copy, []) as (sender, _):
        leader = sender._link
        leader.send(Copy("000000000016", (PartOfFile("events.jsonl", 5, 4),), ()))
        leader.deliver(torch.zeros(4, dtype=torch.uint8))
        answer = leader.receive()
    assert isinstance(answer, Refused)
    assert "has 0 bytes, and what came belongs behind byte 5" in answer.reason


def test_a_keeper_ends_when_rank_0_is_gone(tmp_path):
    rendezvous = Rendezvous(str(tmp_path))
    link = Pair(rendezvous, PAIR, serves=False)
    with own(tmp_path / "copy") as events:
        keeper = Keeper(link, tmp_path / "copy", events)
        link.give_up("rank 0 is lost")
        keeper.keep()
    with pytest.raises(Gone):
        link.receive()


def test_what_a_host_has_received_prepares_a_task_while_it_is_there(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    Received({}, {"/there": str(place)}).write(tmp_path)
    received = received_by(tmp_path)
    assert received.prepared(Plane()) == Plane()
    place.rmdir()
    with pytest.raises(UsageError, match=r"place is gone, where this host had its copy of /there; delete"):
        received.prepared(Plane())
    with pytest.raises(UsageError, match=r"received.json is not of this run"):
        Received({"prepared": "x"}, {}).prepared(Plane())
    (tmp_path / "received.json").write_text("{")
    with pytest.raises(UsageError, match=r"received.json is damaged"):
        received_by(tmp_path)
    assert received_by(place) is None


def test_a_mirror_without_a_copy_yet_says_where_an_earlier_one_lies(run, tmp_path):
    copy = tmp_path / "copy"
    keeper = Keeper(None, copy, None)
    assert "earlier" not in left_here(keeper, str)
    for has_come in (False, True, False):  # the copies of three starts
        if has_come:
            shutil.copytree(run, copy)
        copy.mkdir(exist_ok=True)
        set_aside(copy)
    assert left_here(keeper, str).endswith(f"; an earlier copy lies in {copy}.before-2")
