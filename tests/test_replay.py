"""A recorded run, executed again in one process, ends at the same bits; a log that is not the run's is found out."""

import json
import math
import shutil

import pytest
from doors import Asynchronous, AsyncLocalSGD, Finished, Virtual, asyncsgd, cli
from tasks import Steep

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


@pytest.mark.parametrize("rule", [Asynchronous(), AsyncLocalSGD(num_local_steps=2)], ids=str)
def test_a_float16_run_is_replayed_with_the_loss_scales_that_its_workers_had(rule, tmp_path):
    more = {"runtime": Virtual(3), "precision": "fp16", "samples": 160, "learning_rate": 1e-3, "quiet": True}
    run = Finished(asyncsgd.train(Steep(), rule=rule, folder=tmp_path / "run", **more).folder)
    events = run.records("arrival")
    for event in events:
        assert len(event["loss_scales"]) == event["num_local_steps"]
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
        (1, "different", lambda lines, at: [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]),
        (1, "the log ends after", lambda lines, at: lines[:at]),
        (2, "line 9 is no record", lambda lines, at: [*lines[:8], edited(lines[at], read_version="removed")]),
    ],
)
def test_a_log_is_the_runs_or_is_found_out(code, said, damage, tmp_path):
    words = ["--nproc", "3", "--samples", "24", "--problem", "heterogeneous", "--evaluations", "3"]
    assert cli(["simulate.py", *words, "--runs-dir", tmp_path]).code == 0
    (path,) = tmp_path.glob("simulate-*")
    lines = (path / "events.jsonl").read_text().splitlines()
    arrivals = []
    for number, line in enumerate(lines):
        if json.loads(line)["kind"] == "arrival":
            arrivals.append(number)
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
    earlier = json.loads(lines[first])
    later = json.loads(lines[second])
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
    assert "all compared losses agree, the final parameters or running statistics do not" in ended.out


@pytest.mark.parametrize(("mode", "reason"), [("hogwild", "without locks"), ("sync", "in no recorded order")])
def test_runs_whose_reads_are_not_recorded_are_refused_with_the_reason(mode, reason, train):
    ended = replay(train(mode=mode, nproc=2))
    assert ended.code == 2
    assert f"a run of mode {mode} cannot be replayed" in ended.err
    assert reason in ended.err


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
