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
    asyncsgd.train(Steep(), rule=rule, folder=tmp_path / "run", **more)
    scales = set()
    for event in Finished(tmp_path / "run").records("arrival"):
        assert len(event["loss_scales"]) == event["num_local_steps"]
        scales.update(event["loss_scales"])
    assert len(scales) > 1
    assert asyncsgd.replay(tmp_path / "run", Steep()).identical


def nothing(records, at):
    """Leave the log as it was written."""


def newer(records, at):
    """As a later version writes it."""
    for record in records:
        record["newer"] = [1]
    records.insert(0, {"kind": "newer"})


def nudged(records, at):
    """The next larger loss."""
    records[at]["loss"] = math.nextafter(records[at]["loss"], math.inf)


def swapped(records, at):
    records.insert(at, records.pop(at + 1))


def cut(records, at):
    del records[at:]


def without_a_field(records, at):
    del records[8:at]
    del records[9:]
    del records[8]["read_version"]


@pytest.mark.parametrize(
    ("code", "said", "damage"),
    [
        (0, "identical", nothing),
        (0, "identical", newer),
        (1, "the loss of dispatch", nudged),
        (1, "different", swapped),
        (1, "the log ends after", cut),
        (2, "line 9 is no record", without_a_field),
    ],
)
def test_a_log_is_the_runs_or_is_found_out(code, said, damage, tmp_path):
    words = ["--nproc", "3", "--samples", "24", "--problem", "heterogeneous", "--evaluations", "3"]
    assert cli(["simulate.py", *words, "--runs-dir", tmp_path]).code == 0
    (path,) = tmp_path.glob("simulate-*")
    records = Finished(path).records()
    arrivals = [number for number, record in enumerate(records) if record["kind"] == "arrival"]
    damage(records, arrivals[8])
    lines = map(json.dumps, records)
    (path / "events.jsonl").write_text("\n".join([*lines, ""]))
    ended = cli(["asyncsgd", "replay", path])
    assert ended.code == code
    if code == 2:
        assert said in ended.err
    else:
        assert said in ended.out
    assert ("identical" in ended.out) == (code == 0)


def test_two_arrivals_in_flight_together_swapped_are_found_out(train, tmp_path):
    # On the virtual clock three workers of one speed arrive in turn, and each had started before the other arrived.
    run = train(mode="async", nproc=3, clock="virtual")
    records = run.records()
    *_, first, second = [number for number, record in enumerate(records) if record["kind"] == "arrival"]
    earlier = records[first]
    later = records[second]
    assert earlier["worker"] != later["worker"]
    assert later["read_version"] < earlier["version"]
    earlier["started"] = []  # which does not arrive
    # All that can be told from the two lines is mended, so that only the order in which they were applied is wrong.
    for name in ("version", "total_samples", "learning_rate", "train_seconds"):
        of_earlier = earlier[name]
        earlier[name] = later[name]
        later[name] = of_earlier
    for record in (earlier, later):
        delay = record["version"] - 1 - record["read_version"]
        record["uses"] = [[record["dispatch"], delay]]
    records[first] = later
    records[second] = earlier
    ended = replay(copy_of(run, tmp_path, map(json.dumps, records)))
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
    replayed = (tmp_path / "replayed" / "model.safetensors").read_bytes()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == replayed
    assert cli(exported).code == 2  # it is there already
