"""A recorded run, executed again in one process, ends at the same bits; a log that is not the run's is found out."""

import json
import math
import shutil

import pytest
import torch
from doors import Asynchronous, AsyncLocalSGD, Finished, Virtual, asyncsgd, cli
from marks import slow
from tasks import Steep
from transformers import AutoModelForMaskedLM

pytestmark = pytest.mark.processes


def replay(run, *more):
    return cli(["asyncsgd", "replay", run.path, "--cache-dir", run.cache, *more])


def copy_of(run, folder, lines=None):
    """The run in another folder beside its cache, with other lines in its log."""
    path = shutil.copytree(run.path, folder / "run")
    if lines is not None:
        (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "cache").symlink_to(run.cache)
    return Finished(path)


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "async", "nproc": 2, "transport": "process_group", "dropout": 0.1},
        {"mode": "async", "nproc": 3, "rule": "ringmaster:threshold=1", "dropout": 0.1},
        {"mode": "single", "accumulate": 3},
        *slow({"mode": "async", "nproc": 2, "optimizer": "sgd", "momentum": 0.9, "clip_norm": 1.0}),
    ],
    ids=str,
)
def test_a_replayed_run_ends_at_the_same_parameters_bit_for_bit(values, train):
    run = train(**values)
    ended = replay(run)
    assert ended.code == 0
    assert ended.out.count(run.summary["parameters_sha256"]) == 2
    assert ended.out.startswith(f"updates    {run.summary['num_updates']} replayed, 20 losses compared\n")


@pytest.mark.parametrize("rule", [Asynchronous(), AsyncLocalSGD(num_local_steps=2)], ids=str)
def test_a_float16_run_is_replayed_with_the_loss_scales_that_its_workers_had(rule, tmp_path):
    more = {"runtime": Virtual(3), "precision": "fp16", "samples": 160, "learning_rate": 1e-3, "quiet": True}
    run = Finished(asyncsgd.train(Steep(), rule=rule, folder=tmp_path / "run", **more).folder)
    events = run.records("arrival")
    assert all(len(event["loss_scales"]) == event["num_local_steps"] for event in events)
    assert len({scale for event in events for scale in event["loss_scales"]}) > 1
    assert asyncsgd.replay(run.path, Steep()).identical


def edited(line, **fields):
    record = json.loads(line) | fields
    return json.dumps({name: value for name, value in record.items() if value != "removed"})


def nudged(line):
    """With the next larger loss."""
    return edited(line, loss=math.nextafter(json.loads(line)["loss"], math.inf))


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
def test_a_log_is_the_runs_or_is_found_out(code, said, damage, tmp_path):
    words = ["--nproc", "3", "--samples", "24", "--problem", "heterogeneous", "--evaluations", "3"]
    assert cli(["simulate.py", *words, "--runs-dir", tmp_path]).code == 0
    (path,) = tmp_path.glob("simulate-*")
    lines = (path / "events.jsonl").read_text().splitlines()
    arrivals = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"]
    (path / "events.jsonl").write_text("\n".join(damage(lines, arrivals[8])) + "\n")
    ended = cli(["asyncsgd", "replay", path])
    assert ended.code == code
    assert said in (ended.err if code == 2 else ended.out)
    assert ("identical" in ended.out) == (code == 0)


def test_two_arrivals_in_flight_together_swapped_are_found_out(train, tmp_path):
    # On the virtual clock three workers of one speed arrive in turn, and each had started before the other arrived.
    run = train(mode="async", nproc=3, clock="virtual")
    lines = (run.path / "events.jsonl").read_text().splitlines()
    first, second = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"][-2:]
    earlier, later = json.loads(lines[first]), json.loads(lines[second])
    assert earlier["worker"] != later["worker"]
    assert later["read_version"] < earlier["version"]
    earlier["started"] = []  # which does not arrive
    # All that can be told from the two lines is mended, so that only the order in which they were applied is wrong.
    for name in ("version", "total_samples", "learning_rate", "train_seconds"):
        earlier[name], later[name] = later[name], earlier[name]
    earlier["uses"] = [[earlier["dispatch"], earlier["version"] - 1 - earlier["read_version"]]]
    later["uses"] = [[later["dispatch"], later["version"] - 1 - later["read_version"]]]
    lines[first], lines[second] = json.dumps(later), json.dumps(earlier)
    ended = replay(copy_of(run, tmp_path, lines))
    assert ended.code == 1
    assert "all compared losses agree, the final parameters do not" in ended.out


def test_a_run_that_was_stopped_at_its_end_and_went_on_there_is_replayed(train, tmp_path):
    """Its workers leave and join again after the last gradient, as a run says that goes on for its last evaluation."""
    run = copy_of(train(mode="async", nproc=2, clock="virtual"), tmp_path)
    last = run.records("evaluate")[-1]
    reply = {"reason": "", "lost": [], "uses": [], "started": [], "drops": [], "abandoned": []}
    clock = {name: last[name] for name in ("version", "total_samples", "train_seconds")}
    with open(run.path / "events.jsonl", "a") as log:
        for kind, worker in (("leave", 0), ("leave", 1), ("join", 0), ("join", 1)):
            log.write(json.dumps({"kind": kind, "worker": worker, **clock, **reply}) + "\n")
    assert replay(run).code == 0


def test_a_replay_to_a_version_saves_the_model_of_that_version(train, tmp_path):
    run = train(mode="async", nproc=2, evaluations=4)
    version = run.records("evaluate")[2]["version"]
    assert replay(run, "--to", version, "--out", tmp_path / "model").code == 0
    again = train(mode="single", model=tmp_path / "model", samples=0, vocab_size=8192)
    assert again.records("evaluate")[0]["loss"] == pytest.approx(run.records("evaluate")[2]["loss"], rel=1e-6)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path / "model"), torch.nn.Module)


@pytest.mark.parametrize(("mode", "reason"), [("hogwild", "without locks"), ("sync", "in no recorded order")])
def test_runs_whose_reads_are_not_recorded_are_refused_with_the_reason(mode, reason, train):
    ended = replay(train(mode=mode, nproc=2))
    assert ended.code == 2
    assert f"a run of mode {mode} cannot be replayed" in ended.err
    assert reason in ended.err


def test_a_folder_without_a_run_is_refused(tmp_path):
    ended = cli(["asyncsgd", "replay", tmp_path])
    assert ended.code == 2
    assert "holds no finished run" in ended.err


def test_the_model_of_a_checkpoint_is_the_one_that_a_replay_to_its_version_saves(train, tmp_path):
    run = train(mode="single", checkpoint_every="32")
    name = min(path.stem for path in (run.path / "checkpoints").glob("*.pt"))
    (checkpoint,) = [record for record in run.records("checkpoint") if record["name"] == name]
    exported = f"asyncsgd export {run.path} --cache-dir {run.cache} --out {tmp_path}/out --checkpoint {name}"
    assert cli(exported).code == 0
    to = f"asyncsgd replay {run.path} --cache-dir {run.cache} --to {checkpoint['version']} --out {tmp_path}/replayed"
    assert cli(to).code == 0
    exported_and_replayed = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "replayed")]
    assert exported_and_replayed[0] == exported_and_replayed[1]
    assert cli(exported).code == 2  # it is there already
