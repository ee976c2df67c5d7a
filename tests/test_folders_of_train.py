"""Every command on a run works on a folder that `asyncsgd.train` wrote, also where the task is one's own."""

import shutil
from pathlib import Path

import pytest
import stopped_runs
import torch
from doors import ADPSGD, AdamW, Exponential, Finished, Processes, UsageError, Virtual, asyncsgd, cli
from safetensors.torch import load_file
from tasks import Plane

OWN = ["--task", "tasks:Plane"]
ARGUMENTS = {
    "single": {"optimizer": AdamW(), "schedule": "linear", "warmup": 20},
    "virtual": {"runtime": Virtual(3, Exponential()), "clip_norm": 1.0},
    "peers": {"runtime": Virtual(3, Exponential()), "rule": ADPSGD()},
}


def train(folder, stop_at=None, **arguments):
    """A run of 160 samples; asked to stop when so many have arrived."""
    chosen = {"samples": 160, "evaluations": 4}
    return stopped_runs.train(folder, stop_at, task=Plane(), **(chosen | arguments))


def weights(folder):
    return load_file(folder / "model.safetensors")["weight"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_run_that_was_stopped_goes_on_by_a_command_to_the_end_of_the_whole_run(name, tmp_path):
    whole = train(tmp_path / "whole", **ARGUMENTS[name])
    assert train(tmp_path / "cut", stop_at=60, **ARGUMENTS[name]).status == "INTERRUPTED"
    done = cli(["asyncsgd", "resume", tmp_path / "cut", *OWN])
    assert done.code == 0, done.err
    summary = Finished(tmp_path / "cut").summary
    assert summary["status"] == "DONE"
    assert summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def test_a_run_that_is_done_becomes_longer_by_a_command(tmp_path):
    more = {"checkpoint_every": 40, "evaluate_every": 40, "evaluations": 8}
    train(tmp_path / "run", samples=80, **more)
    done = cli(["asyncsgd", "resume", tmp_path / "run", "--samples", "160", *OWN])
    assert done.code == 0, done.err
    whole = train(tmp_path / "whole", samples=160, **more)
    assert Finished(tmp_path / "run").summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def test_a_run_goes_on_in_more_parts_of_a_batch_by_the_command_that_says_so(tmp_path):
    assert train(tmp_path / "run", stop_at=60).status == "INTERRUPTED"
    refused = cli(["asyncsgd", "resume", tmp_path / "run", "--micro-batches", "0", *OWN])
    assert refused.code == 2
    assert "--micro-batches" in refused.err
    done = cli(["asyncsgd", "resume", tmp_path / "run", "--micro-batches", "2", *OWN])
    assert done.code == 0, done.err
    assert Finished(tmp_path / "run").summary["micro_batches"] == 2
    (parts,) = Finished(tmp_path / "run").records("parts")
    assert (parts["before"], parts["micro_batches"]) == (1, 2)


@pytest.mark.parametrize("name", ["virtual", "peers"])
def test_the_model_of_a_checkpoint_is_that_of_its_version_in_a_replay(name, tmp_path):
    run = train(tmp_path / "run", checkpoint_every=40, **ARGUMENTS[name])
    checkpoint = sorted((tmp_path / "run" / "checkpoints").glob("*.pt"))[-1].stem
    version = str(int(checkpoint) // Plane().batch_size)  # every gradient is an update
    models = []
    for command, flag, value in (("export", "--checkpoint", checkpoint), ("replay", "--to", version)):
        out = tmp_path / command
        ended = cli(["asyncsgd", command, tmp_path / "run", flag, value, "--out", out, *OWN])
        assert ended.code == 0, ended.err
        models.append(weights(out))
    assert torch.equal(models[0], models[1])
    if int(checkpoint) < 160:
        assert not torch.equal(models[0], run.model().weight)


def row(name, measured, predicted):
    """A line of prediction.md; 0 has no ratio."""
    ratio = f"{predicted / measured:.4g}" if measured else "-"
    return f"| {name} | {measured:.4g} | {predicted:.4g} | {ratio} |"


def test_a_run_of_processes_is_predicted_on_the_virtual_clock(tmp_path):
    measured = train(tmp_path / "run", runtime=Processes(2))
    done = cli(["asyncsgd", "predict", tmp_path / "run", *OWN])
    assert done.code == 0, done.err
    runs = [Finished(tmp_path / "run"), Finished(tmp_path / "run" / "predicted-1")]
    summaries = [run.summary for run in runs]
    for key in ("num_updates", "num_samples", "rule", "num_workers"):
        assert summaries[1][key] == measured.summary[key]
    assert summaries[1]["clock"] == "virtual"
    lines = (tmp_path / "run" / "predicted-1" / "prediction.md").read_text().splitlines()
    assert row("seconds in all", *[summary["train_seconds"] for summary in summaries]) in lines
    per_second = [summary["num_updates"] / summary["train_seconds"] for summary in summaries]
    assert row("updates per second", *per_second) in lines
    for quantile in ("mean", "p50", "p95", "max"):
        assert row(f"delay {quantile}", *[summary["delay"][quantile] for summary in summaries]) in lines
    losses = []
    for run in runs:
        losses.append({record["total_samples"]: record["loss"] for record in run.records("evaluate")})
    for samples in (40, 80, 120, 160):
        assert row(f"loss at {samples} samples", losses[0][samples], losses[1][samples]) in lines


def fails(task, sums):
    raise ZeroDivisionError("no score")


def test_a_run_that_goes_on_to_its_end_without_a_score_ends_as_one_that_was_begun(tmp_path, monkeypatch):
    train(tmp_path / "run", samples=80, checkpoint_every=40, evaluate_every=40, evaluations=8)
    monkeypatch.setattr(Plane, "metrics", fails)
    done = cli(["asyncsgd", "resume", tmp_path / "run", "--samples", "160", *OWN])
    assert Finished(tmp_path / "run").summary["status"] == "DONE"
    assert done.code == 1


def test_an_export_that_fails_leaves_nothing_and_a_version_before_the_first_is_refused(tmp_path, monkeypatch):
    train(tmp_path / "run", samples=16)

    def full(source, target, **given):
        Path(target, "half").touch()
        raise shutil.Error([(source, target, "No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    ended = cli(["asyncsgd", "export", tmp_path / "run", "--out", tmp_path / "out"])
    assert ended.code == 2
    assert ended.err.startswith(f"error: {tmp_path / 'out'} cannot be written: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    ended = cli(["asyncsgd", "replay", tmp_path / "run", "--to", "-1", *OWN])
    assert (ended.code, ended.out) == (2, "")
    assert "--to must be at least 0" in ended.err


@pytest.mark.parametrize("command", [["resume"], ["replay", "--to", "3"], ["export", "--checkpoint", "000000000040"]])
def test_a_folder_is_not_believed_about_the_class_of_its_task(command, tmp_path):
    train(tmp_path / "run", checkpoint_every=40, keep=9)
    name, *more = command
    more += ["--out", tmp_path / "out"] if name == "export" else []
    done = cli(["asyncsgd", name, tmp_path / "run", *more])
    assert done.code == 2
    assert "a folder is not believed about code; type --task tasks:Plane" in done.err


@pytest.mark.parametrize("asked", [{"resume": True}, {"checkpoint_every": 8}, {"checkpoint_seconds": 1.0}])
def test_checkpoints_without_a_folder_are_refused(asked):
    with pytest.raises(UsageError, match="there is none; give folder="):
        asyncsgd.train(Plane(), samples=16, **asked)
