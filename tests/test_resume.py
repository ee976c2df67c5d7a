"""A run that was stopped and goes on from a checkpoint is the run that was never stopped."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from doors import (
    ADPSGD,
    ALL,
    SGD,
    SGP,
    AdamW,
    AllReduce,
    DiLoCo,
    Exponential,
    FixedDelay,
    Hogwild,
    InProcess,
    Processes,
    RunError,
    StreamingDiLoCo,
    Synchronous,
    UsageError,
    Virtual,
    asyncsgd,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from marks import slow
from stopped_runs import BATCH, SAMPLES, Noisy, checkpointed, log, sha256, summary, train


def records(folder):
    """What happened, without seconds and memory, and without checkpoints and where the run went on."""
    return [
        {key: value for key, value in record.items() if not key.endswith("seconds")}
        for record in log(folder)
        if record["kind"] not in ("checkpoint", "memory", "resume")
    ]


def results(folder):
    measured = ["seconds", "per_second", "memory", "usage", "machine_load", "throughput"]
    measured += ["events_bytes", "last_record"]  # records tell seconds, and a run that went on tells where
    kept = {}
    for key, value in summary(folder).items():
        if not any(word in key for word in measured):
            kept[key] = value
    return kept


def checkpoints(folder):
    """The descriptions of its checkpoints, oldest first."""
    return [json.loads(path.read_text()) for path in sorted((folder / "checkpoints").glob("*.json"))]


IN_ONE_PROCESS = {
    "single": {"optimizer": AdamW(), "schedule": "linear", "warmup": 20},
    "accumulated": {"runtime": InProcess(accumulate=3), "optimizer": SGD(momentum=0.9), "keep_best": True},
    "virtual": {"runtime": Virtual(3, Exponential()), "optimizer": AdamW(), "clip_norm": 1.0, "keep_best": True},
    "seconds": {"runtime": Virtual(3, Exponential()), "samples": None, "seconds": 20.0, "evaluate_at": 30},
    "ad_psgd": {"runtime": Virtual(3, Exponential()), "rule": ADPSGD(), "optimizer": AdamW()},
    "sgp": {"runtime": Virtual(3, Exponential()), "rule": SGP(delay=1)},
    "streaming": {"runtime": Virtual(3, Exponential()), "rule": StreamingDiLoCo(3, 2, 1, transfer_seconds=0.5)},
    "patience": {"learning_rate": 0.1, "evaluations": 8, "evaluate_every": 12, "patience": 2, "keep_best": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an unbroken run, made once."""
    root = tmp_path_factory.mktemp("whole")

    def folder(name):
        if not (root / name).exists():
            train(root / name, **IN_ONE_PROCESS[name])
        return root / name

    return folder


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
@given(stops=st.lists(st.integers(1, SAMPLES - BATCH), min_size=1, max_size=3).map(sorted), every=st.integers(1, 90))
@example(stops=[76], every=90)
@settings(deadline=None, max_examples=3, suppress_health_check=list(HealthCheck))
def test_stopped_anywhere_and_resumed_is_never_stopped(name, stops, every, whole, tmp_path_factory):
    arguments = IN_ONE_PROCESS[name]
    path = tmp_path_factory.mktemp("cut") / "run"
    for stop in [*stops, None]:
        run = train(path, stop_at=stop, resume=True, checkpoint_every=every, **arguments)
        if run.status == "DONE":
            break
    assert records(path) == records(whole(name))
    assert results(path) == results(whole(name))
    assert run.status == "DONE"
    recorded_losses = [record["loss"] for record in log(path, "evaluate")]
    assert [evaluation.loss for evaluation in run.evaluations] == recorded_losses
    assert asyncsgd.replay(path, Noisy()).identical


def wait_for_checkpoint(record):
    """The next one is then due when its samples are there, however slow the disk is."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def killed_at(num_samples, folder, **arguments):
    """A run that a kill has ended when so many samples had arrived, and its newest evaluation was of fewer."""
    whole = folder.with_name(f"{folder.name}-whole")
    if folder.exists():
        folder.rename(whole)

    def copy_the_folder(record):  # as a kill at this moment leaves it
        wait_for_checkpoint(record)  # no file may vanish while it is copied
        if record.kind == "arrival" and record.total_samples == num_samples:
            shutil.copytree(whole, folder)

    train(whole, also=copy_the_folder, **arguments)
    shutil.rmtree(whole)
    return folder


@pytest.mark.parametrize("name", ["single", "virtual"])
def test_a_run_that_was_killed_repeats_what_it_had_done_since_and_keeps_the_record_of_it(name, whole, tmp_path):
    path = killed_at(148, tmp_path / "run", checkpoint_every=50, **IN_ONE_PROCESS[name])
    killed_at(148, path, resume=True, checkpoint_every=1000, **IN_ONE_PROCESS[name])
    newest = checkpointed(path)[-1]
    assert newest < 144  # the last evaluation, with which all arrivals before it were written
    train(path, resume=True, **IN_ONE_PROCESS[name])
    assert records(path) == records(whole(name))
    (seam,) = log(path, "resume")
    assert seam["total_samples"] == newest
    seams = [seam]
    num_arrivals = 0
    for line in (path / "events.discarded.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "resume":
            seams.append(record)
        if record["kind"] == "arrival":
            num_arrivals += 1
    assert len(seams) == 2
    assert num_arrivals > 0
    assert sum(each["discarded"] for each in seams) == num_arrivals


@pytest.mark.parametrize("rule", [*ALL[:3], *slow(*ALL[3:])], ids=str)
@given(
    num_workers=st.integers(1, 4),
    stop=st.integers(1, 120),
    end=st.just(SAMPLES) | st.integers(32, 56).map(lambda number: number * BATCH),
)
@settings(max_examples=2)
def test_under_every_rule_a_run_that_is_stopped_and_made_longer_is_the_whole_run_and_is_replayed(
    rule, num_workers, stop, end, tmp_path_factory
):
    root = tmp_path_factory.mktemp("rule")
    path = root / "run"
    whole = root / "whole"
    budget = SAMPLES
    refused = ""
    optimizer = SGD() if rule.needs_plain_sgd else SGD(momentum=0.9)
    arguments = {"runtime": Virtual(num_workers, Exponential()), "rule": rule, "optimizer": optimizer}
    train(path, samples=end, stop_at=stop, checkpoint_every=40, **arguments)
    assert train(path, samples=end, resume=True, **arguments).status == "DONE"
    if end < SAMPLES:
        try:
            train(path, resume=True, **arguments)
        except UsageError as error:
            refused = str(error)
            budget = end
    assert not refused or (rule.in_rounds and "works in rounds, and the budget cuts one short" in refused)
    train(whole, samples=budget, **arguments)
    if end == SAMPLES:
        assert records(path) == records(whole)
        assert results(path) == results(whole)
    assert sha256(path) == sha256(whole)
    losses = []
    for each in (path, whole):
        losses.append([(r["dispatch"], r["loss"]) for r in log(each, "arrival")])
    assert losses[0] == losses[1]
    assert asyncsgd.replay(path, Noisy()).identical


@pytest.fixture
def stopped(tmp_path):
    run = train(tmp_path / "run", stop_at=150, checkpoint_every=40)
    assert run.summary["status"] == "INTERRUPTED"
    return tmp_path / "run"


def test_a_run_that_goes_on_takes_checkpoints_as_it_did_before(stopped):
    train(stopped, also=wait_for_checkpoint, resume=True)
    (seam,) = log(stopped, "resume")
    taken = [record["total_samples"] for record in log(stopped, "checkpoint")]
    assert [samples for samples in taken if samples > seam["total_samples"]] == [160, 200, SAMPLES]


@pytest.mark.parametrize("damage", ["bit", "gone"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_is_used(damage, stopped, capsys):
    *_, before, newest = sorted((stopped / "checkpoints").glob("*.pt"))
    if damage == "bit":
        content = bytearray(newest.read_bytes())
        content[-9] ^= 1
        newest.write_bytes(content)
    else:
        newest.unlink()
    train(stopped, resume=True, quiet=False)
    said = capsys.readouterr().out
    assert f"checkpoint {newest.stem} is damaged and not used" in said
    assert log(stopped, "resume")[-1]["total_samples"] == int(before.stem)
    train(stopped.parent / "whole")
    assert sha256(stopped) == sha256(stopped.parent / "whole")


def test_the_newest_checkpoint_the_best_one_and_the_newest_that_can_grow_are_kept(tmp_path):
    # Rounds of 3 batches of 4: the budget cuts the ninth round, which begins at 96, short.
    arguments = {"samples": 104, "learning_rate": 0.3, "runtime": Virtual(3), "rule": Synchronous()}
    kept = {"checkpoint_every": 8, "keep": 1, "evaluations": 13}
    train(tmp_path / "a", also=wait_for_checkpoint, **arguments, **kept)
    evaluations = log(tmp_path / "a", "evaluate")
    taken = [record["total_samples"] for record in log(tmp_path / "a", "checkpoint")]
    lowest = min(evaluations, key=lambda record: record["loss"])["total_samples"]
    best = min(samples for samples in taken if samples >= lowest)
    newest_before_the_round = max(samples for samples in taken if samples < 96)
    assert lowest < newest_before_the_round
    assert checkpointed(tmp_path / "a") == [best, newest_before_the_round, 104]


def test_without_any_checkpoint_and_with_one_of_another_schema_the_user_is_told(stopped):
    for path in (stopped / "checkpoints").glob("*.json"):
        older = json.loads(path.read_text()) | {"schema": 4}
        del older["description_sha256"], older["events_sha256"]
        path.write_text(json.dumps(older))
    with pytest.raises(UsageError, match=r"has schema 4 \(asyncsgd .*\), this version .* reads schema 8"):
        train(stopped, resume=True)
    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(UsageError, match=r"no checkpoint to go on from\. Begin a new run, with --checkpoint-every"):
        train(stopped, resume=True)
    train(stopped.with_name("whole"))
    with pytest.raises(UsageError, match="whole is DONE and has kept no checkpoint; begin a new run, with a larger"):
        train(stopped.with_name("whole"), resume=True)


class Counted(Noisy):
    """It says how many samples it has."""

    def facts(self):
        return {"num_train_samples": 96}


def test_epochs_may_grow_as_samples_may(tmp_path):
    train(tmp_path / "run", task=Counted(), samples=None, epochs=1, checkpoint_every=40)
    longer = train(tmp_path / "run", task=Counted(), samples=None, epochs=1.5, resume=True)
    assert longer.summary["num_samples"] == 144
    train(tmp_path / "whole", task=Counted(), samples=144)
    assert sha256(tmp_path / "run") == sha256(tmp_path / "whole")
    with pytest.raises(UsageError, match=r"epochs 1.5 -> 1.0"):
        train(tmp_path / "run", task=Counted(), samples=None, epochs=1, resume=True)


def test_settings_must_agree_and_only_samples_may_grow(stopped):
    with pytest.raises(UsageError, match=r"other settings \(seed 0 -> 7\)"):
        train(stopped, resume=True, seed=7)
    with pytest.raises(UsageError, match=r"samples 240 -> 200"):
        train(stopped, resume=True, samples=200)
    train(stopped, resume=True)
    with pytest.raises(UsageError, match="is DONE; type a larger --samples"):
        train(stopped, resume=True)
    train(stopped, resume=True, samples=2 * SAMPLES)
    train(stopped.parent / "long", samples=2 * SAMPLES)
    assert sha256(stopped) == sha256(stopped.parent / "long")


@pytest.mark.parametrize(
    "arguments",
    [
        # Its last checkpoints lie in a round that is cut short.
        {"runtime": Virtual(3, Exponential()), "rule": Synchronous(), "optimizer": SGD()},
        {"runtime": InProcess(accumulate=5)},
        *slow({"runtime": AllReduce(2), "optimizer": AdamW()}),
    ],
    ids=str,
)
def test_a_finished_run_has_a_checkpoint_of_its_end_and_becomes_the_longer_run(arguments, tmp_path):
    path = tmp_path / "run"
    every = {"evaluate_every": 12, "evaluations": 8, "checkpoint_every": 10}
    done = train(path, samples=100, **arguments, **every)
    assert checkpointed(path)[-1] == done.summary["num_samples"]
    assert done.summary["num_samples"] == 100
    train(path, resume=True, samples=200, **arguments, **every)
    train(tmp_path / "whole", samples=200, **arguments, **every)
    assert sha256(path) == sha256(tmp_path / "whole")
    losses = []
    for each in (path, tmp_path / "whole"):
        losses.append([r["loss"] for r in records(each) if r["kind"] == "arrival"])
    assert losses[0] == losses[1]


def test_a_run_that_its_evaluations_have_ended_ends_there_with_a_larger_budget_too(tmp_path):
    arguments = IN_ONE_PROCESS["patience"]
    early = train(tmp_path / "run", checkpoint_every=40, **arguments)
    longer = train(tmp_path / "run", resume=True, samples=2 * SAMPLES, **arguments)
    assert early.summary["stopped_early"] is not None
    for name in ("stopped_early", "message", "num_samples", "num_updates", "parameters_sha256"):
        assert longer.summary[name] == early.summary[name]


def test_too_little_memory_is_no_fault_of_the_checkpoint_that_is_read(stopped, monkeypatch):
    def load(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(RunError, match=r"not enough memory to read checkpoint .* free some$"):
        train(stopped, resume=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks up the files of descriptors in /proc")
def test_a_checkpoint_gets_its_name_when_its_records_and_its_state_outlive_a_power_cut(tmp_path, monkeypatch):
    """By the order of system calls: a power cut may undo all that was not synced, names in a folder too."""
    sync = os.fsync
    replace = os.replace
    safe = {}
    named = []
    wrong = []

    def synced(descriptor):
        safe[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size
        sync(descriptor)

    def renamed(old, new):
        if Path(new).parent.name == "checkpoints" and Path(new).suffix == ".json":
            content = json.loads(Path(old).read_text())
            named.append(content["name"])
            if safe.get(str(tmp_path / "run" / "events.jsonl"), 0) < content["events_bytes"]:
                wrong.append(f"records of {named[-1]}")
            if not safe.get(str(Path(new).with_suffix(".pt"))) or str(Path(new).parent) not in safe:
                wrong.append(f"state of {named[-1]}")
        if Path(new).suffix == ".pt":
            safe.pop(str(Path(new).parent), None)  # until the folder is synced again
            safe[str(new)] = safe.pop(str(old), 0)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    train(tmp_path / "run", checkpoint_every=40)
    assert len(named) > 1
    assert wrong == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "No space left on device: free some space"),
        (MemoryError(), "there is not enough memory to write it"),
    ],
    ids=["disk", "memory"],
)
def test_a_refusal_in_the_middle_of_a_checkpoint_keeps_the_run_and_the_last_good_one(
    error, why, tmp_path, monkeypatch, capsys
):
    saved = torch.save
    calls = []

    def full(content, file):
        calls.append(True)
        if len(calls) > 1:  # on a slow machine there are two, the first and the last
            file.write(b"half of it")
            raise error
        saved(content, file)

    monkeypatch.setattr(torch, "save", full)
    run = asyncsgd.train(Noisy(), folder=tmp_path / "run", samples=SAMPLES, checkpoint_every=40, device="cpu")
    assert run.summary["status"] == "DONE"
    said = capsys.readouterr().out
    assert f"could not be written ({why}); the run goes on, and the last good" in said
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    assert f"the last good one is {checkpointed(tmp_path / 'run')[-1]:012}" in said


def test_a_run_goes_on_where_memory_does_not_suffice_for_the_copy_of_a_checkpoint(tmp_path, monkeypatch, capsys):
    def refused(state):
        raise MemoryError

    monkeypatch.setattr("asyncsgd.core.checkpoints.copy_of", refused)
    train(tmp_path / "run", checkpoint_every=40, quiet=False)
    said = capsys.readouterr().out
    assert f"checkpoint {40:012} could not be written (there is not enough memory for a copy of the state);" in said


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "rule"),
    [
        ("process_group", Synchronous()),
        ("shared_memory", DiLoCo(num_local_steps=3)),
        ("shared_memory", FixedDelay(delay=2)),
    ],
    ids=str,
)
def test_processes_are_replaced_what_they_had_in_flight_is_lost_and_a_replay_crosses_the_seam(
    transport, rule, tmp_path
):
    arguments = {"runtime": Processes(2, via=transport), "rule": rule, "optimizer": AdamW()}
    train(tmp_path / "run", stop_at=120, **arguments)
    train(tmp_path / "run", resume=True, **arguments)
    happened = log(tmp_path / "run")
    members = [record for record in happened if record["kind"] in ("leave", "join")]
    assert [record["kind"] for record in members] == ["join"] * 2 + ["leave"] * 2 + ["join"] * 2
    lost = [dispatch for record in members[2:4] for dispatch in record["lost"]]
    assert lost
    assert not {record["dispatch"] for record in happened if record["kind"] == "arrival"} & set(lost)
    assert asyncsgd.replay(tmp_path / "run", Noisy()).identical


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, {"evaluations": 60}),
        (3, {}),
        (2, {"micro_batches": 2, "learning_rate": 0.3, "evaluations": 40, "patience": 10}),
    ],
    ids=["2", "3", "in parts until nothing improves"],
)
def test_synchronous_ranks_go_on_as_if_they_had_never_stopped(ranks, more, tmp_path):
    """Two are asked to stop amid a round at whose end they evaluate."""
    arguments = {"runtime": AllReduce(ranks), "optimizer": AdamW(), "samples": 480, **more}
    train(tmp_path / "run", stop_at=100, **arguments)
    train(tmp_path / "run", resume=True, **arguments)
    train(tmp_path / "whole", **arguments)
    assert sha256(tmp_path / "run") == sha256(tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    stopped = [summary(tmp_path / name)["stopped_early"] for name in ("run", "whole")]
    assert stopped[0] == stopped[1]
    assert (stopped[0] is None) == ("patience" not in more)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("share_state", [False, True])
def test_hogwild_goes_on_from_a_frozen_vector_and_uses_its_budget_exactly(share_state, tmp_path):
    runtime = Hogwild(2, share_state=share_state)
    train(tmp_path / "run", stop_at=100, runtime=runtime, optimizer=AdamW(), checkpoint_every=60)
    frozen = checkpointed(tmp_path / "run")[-1]
    run = train(tmp_path / "run", resume=True, runtime=runtime, optimizer=AdamW())
    assert run.summary["num_samples"] == SAMPLES
    assert 0 < frozen < SAMPLES


@pytest.mark.slow
@pytest.mark.processes
def test_the_times_that_are_drawn_for_a_real_worker_go_on_where_they_stopped(tmp_path):
    arguments = {"runtime": Processes(1, speeds=Exponential(0.05)), "samples": 30 * BATCH, "evaluations": 1}
    train(tmp_path / "run", stop_at=12 * BATCH, **arguments)
    train(tmp_path / "run", resume=True, **arguments)
    arrivals = log(tmp_path / "run", "arrival")
    sampler = Exponential(0.05).on(1, 0)
    drawn = [sampler.draw_one(0, number) for number in range(30)]
    for arrival, seconds in zip(arrivals, drawn, strict=True):
        assert arrival["compute_seconds"] >= seconds
    assert any(later > seconds for later, seconds in zip(drawn[12:], drawn, strict=False))
