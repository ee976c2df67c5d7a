"""What a run leaves: files that say everything about it, nothing about the machine's owner, and can be used again."""

import getpass
import json
import math
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
from doors import ROOT, Evaluation, Event, Finished, Membership, UsageError, asyncsgd, cli, load_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import slow
from tasks import Plane

MODES = {"single": {"mode": "single"}} | {mode: {"mode": mode, "nproc": 2} for mode in ("sync", "async", "hogwild")}
every_mode = pytest.mark.parametrize("mode", MODES)
FIELDS = {"arrival": Event, "evaluate": Evaluation, "join": Membership}

pytestmark = pytest.mark.processes


@every_mode
def test_a_run_leaves_settings_environment_events_summary_and_a_model(mode, train):
    run = train(**MODES[mode], samples=40, evaluations=2, warmup=8, seed=5)
    files = {path.name for path in run.path.iterdir()} - {"usage.jsonl", "printed.txt"}  # after a second; the gallery's
    assert files == {"console.log", "environment.json", "events.jsonl", "model", "settings.yaml", "summary.json"}
    num_workers = MODES[mode].get("nproc", 1)
    num_updates = 5 if mode == "sync" else 10

    written = (run.path / "environment.json").read_text()
    cores = len(os.sched_getaffinity(0))
    expected = {"device": "cpu", "num_devices": min(num_workers, cores), "cores": cores, "gpus": []}
    expected |= {"torch_build": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    assert json.loads(written).items() >= expected.items()
    about_here = [socket.gethostname(), str(Path.home()), str(Path.cwd()), str(ROOT), tempfile.gettempdir()]
    assert [word for word in about_here if word.strip("/") and word in written] == []
    assert f'"{getpass.getuser()}"' not in written

    summary = run.summary
    rule = "asynchronous" if mode in ("async", "hogwild") else "synchronous"
    exact = {"schema": 2, "status": "DONE", "message": "", "mode": mode, "rule": rule, "clock": "measured"}
    exact |= {"from_scratch": True, "num_workers": num_workers, "threads": 1, "seed": 5, "batch_size": 4}
    exact |= {"num_samples": 40, "num_samples_applied": 40, "num_updates": num_updates}
    exact |= {"samples_per_second": pytest.approx(40 / summary["train_seconds"])}
    exact |= {"final_eval_loss": pytest.approx(math.log(summary["metrics"]["perplexity"]))}
    assert summary | exact == summary
    assert summary["eval_seconds"] > 0
    assert len(summary["data_fingerprint"]) == 16
    assert len(summary["parameters_sha256"]) == 64
    assert summary["initial_model_sha256"] == summary["init_sha256"]
    assert summary["init_sha256"] != summary["parameters_sha256"]
    assert summary["normalises_over_batch"] is False
    assert "train_fingerprint" not in summary
    assert summary["delay"].keys() == {"mean", "p50", "p95", "max"}
    assert set(summary["delay"].values()) == {0} or mode in ("async", "hogwild")

    header, *records = run.records()
    better = {"accuracy": "higher", "perplexity": "lower"}
    told = {"task": "masked_lm", "better": better, "loss_unit": "nats", "sample_order": 2}
    assert header == {"kind": "header", "schema": 2, **told}
    seconds = [record["train_seconds"] for record in records]
    assert seconds == sorted(seconds)
    for kind, of_kind in FIELDS.items():
        assert {frozenset(record) for record in run.records(kind)} == {frozenset(of_kind.__struct_fields__)}
    assert len(run.records("join")) == num_workers
    arrivals, (first, _, last) = run.records("arrival"), run.records("evaluate")
    assert len({record["batches"][0][1] for record in arrivals}) == 10  # a slow first one may be in flight to the end
    assert [record["total_samples"] for record in arrivals] == list(range(4, 44, 4))
    uses = sorted(use[0] for record in arrivals for use in record["uses"])
    assert uses == sorted(record["dispatch"] for record in arrivals)
    assert first["version"] == 0
    assert arrivals[-1]["version"] == num_updates
    assert last["version"] == num_updates
    assert first["loss"] == summary["first_eval_loss"]
    said = [summary[name] for name in ("final_eval_loss", "eval_weight", "metrics", "details")]
    assert said == [last[name] for name in ("loss", "weight", "metrics", "details")]


def test_the_page_about_run_folders_names_every_key_that_a_run_leaves(train):
    page = (ROOT / "docs" / "run_folder.md").read_text()
    run = train(mode="single", samples=40)
    keys = {key for record in run.records() for key in record} | set(run.summary)
    assert [key for key in sorted(keys - {"schema", "kind"}) if f"`{key}`" not in page] == []


def test_the_console_log_holds_the_lines_from_those_about_the_task_to_the_last_one_of_the_run(train):
    run = train(mode="single", samples=40)
    shown = (run.path / "printed.txt").read_text().splitlines()
    first = next(number for number, line in enumerate(shown) if line.startswith("run ")) + 1
    assert shown[-1] == f"next   python -m analysis compare {run.path.parent}"
    assert (run.path / "console.log").read_text().splitlines() == shown[first:-1]


@every_mode
def test_no_samples_is_one_evaluation_whose_loss_does_not_depend_on_mode_or_workers(mode, train):
    run = train(**MODES[mode], samples=0)
    single = train(mode="single", samples=0)
    said = [run.summary[key] for key in ("status", "num_samples", "num_updates", "train_seconds", "samples_per_second")]
    assert said == ["DONE", 0, 0, 0.0, None]
    assert set(run.summary["delay"].values()) == {None}
    assert [record["kind"] for record in run.records()] == ["header", "evaluate", "memory"]
    assert run.records("evaluate")[0]["loss"] == run.summary["final_eval_loss"]
    assert run.summary["final_eval_loss"] == pytest.approx(single.summary["final_eval_loss"], rel=1e-9)


def test_what_is_masked_in_training_does_not_change_the_test(train):
    untrained = {"mode": "single", "samples": 0}
    plain = train(**untrained).summary
    other = train(**untrained, mask="word", mask_prob=0.4).summary
    assert plain["eval_masking"] == "token:0.15"
    assert other["eval_masking"] == "token:0.15"
    assert plain["final_eval_loss"] == other["final_eval_loss"]
    assert plain["eval_weight"] == other["eval_weight"]
    another_test = train(**untrained, eval_mask="word", eval_mask_prob=0.4).summary
    assert another_test["eval_masking"] == "word:0.4"
    assert another_test["eval_weight"] > 1.5 * plain["eval_weight"]


@pytest.mark.parametrize("mode", ["hogwild", *slow("sync")])
def test_the_model_saved_after_a_limit_in_seconds_is_the_one_evaluated_last(mode, train):
    run = train(**MODES[mode], samples=None, seconds=2, evaluations=2, learning_rate=1e-2)
    summary = run.summary
    last = run.records()[-1]
    assert summary["status"] == "DONE"
    assert summary["num_updates"] > 0
    assert 2 <= last["train_seconds"] < 2 + 5
    assert last["version"] == summary["num_updates"]
    saved = train(mode="single", model=run.path / "model", samples=0, vocab_size=8192)
    assert saved.summary["final_eval_loss"] == pytest.approx(summary["final_eval_loss"], rel=1e-6)
    assert saved.summary["parameters_sha256"] == summary["parameters_sha256"]


@pytest.fixture(scope="module")
def log(train, tmp_path_factory):
    """A copy of a run, and the lines of its log."""
    path = shutil.copytree(train(mode="single", evaluations=7).path, tmp_path_factory.mktemp("log") / "run")
    return path, (path / "events.jsonl").read_text().splitlines()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0))
def test_a_log_cut_anywhere_gives_all_its_complete_records(share, log):
    path, lines = log
    text = "\n".join(lines) + "\n"
    cut = int(share * len(text))
    (path / "events.jsonl").write_text(text[:cut])
    whole = lines[1 : text[: cut + 1].count("\n")]  # a record needs no line end to be complete
    losses = []
    for record in map(json.loads, whole):
        if record["kind"] == "evaluate":
            losses.append(record["loss"])
    assert [evaluation.loss for evaluation in load_run(path).evaluations] == losses


def test_a_damaged_line_and_a_newer_schema_are_refused(log):
    path, lines = log
    for number, line, words in ((2, "null", "is damaged"), (0, '{"kind": "header", "schema": 3}', "has schema 3")):
        (path / "events.jsonl").write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
        with pytest.raises((UsageError, ValueError), match=rf"events\.jsonl: line {number + 1} {words}"):
            load_run(path)


def whole(path):
    """All that a run folder holds can be read, but for the end of its log; the arrivals of whole lines."""
    for file in [*path.glob("*.json"), *path.glob("checkpoints/*.json")]:
        assert json.loads(file.read_text()), file
    log = path / "events.jsonl"
    records = map(json.loads, log.read_text().rpartition("\n")[0].splitlines() if log.exists() else [])
    return [record["total_samples"] for record in records if record["kind"] == "arrival"]


@pytest.mark.slow
def test_a_run_killed_at_a_hundred_moments_leaves_readable_folders_and_ends_as_if_it_had_not_been(tmp_path):
    plain = {"samples": 1600, "evaluations": 8, "quiet": True, "learning_rate": 0.01}
    expected = asyncsgd.train(Plane(), **plain).summary["parameters_sha256"]
    draw = random.Random(0)
    path = tmp_path / "run0"
    for number in range(101):
        if (path / "summary.json").exists() or (path.exists() and not any(path.glob("checkpoints/*.json"))):
            path = tmp_path / f"run{number}"  # it has ended, or there is nothing to go on from
        if (child := os.fork()) == 0:
            asyncsgd.train(Plane(), folder=path, resume=path.exists(), checkpoint_every=80, **plain)
            os._exit(0)
        if number < 100:  # the last one goes on to its end
            time.sleep(draw.uniform(0, 0.5))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        arrived = whole(path)
        assert arrived == list(range(8, 8 + 8 * len(arrived), 8))
        if (path / "summary.json").exists():
            assert len(arrived) == 200
            assert Finished(path).summary["parameters_sha256"] == expected
    assert (path / "summary.json").exists()


def test_a_run_goes_on_in_its_own_folder_alone_and_one_that_cannot_be_written_is_named(train, tmp_path):
    """A folder in place of the records is refused to everybody who would write them, root included."""
    path = shutil.copytree(train(mode="single", samples=40).path, tmp_path / "run")
    (path / "events.jsonl").unlink()
    (path / "events.jsonl").mkdir()
    before = sorted(path.rglob("*"))
    ended = cli(f"train.py masked_lm --config {path / 'settings.yaml'} --resume {path}")
    assert ended.code == 2
    assert f"error: {path} cannot be written (" in ended.err
    assert "copy the folder to where you may write, and go on there\n" in ended.err
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--run-dir", "--runs-dir"])
def test_a_place_where_no_folder_can_be_made_is_told_with_its_flag(flag, small, tmp_path):
    (tmp_path / "file").touch()
    ended = cli(f"train.py masked_lm {' '.join(small)} {flag} {tmp_path / 'file' / 'runs'}")
    assert ended.code == 2
    assert f"cannot be written (Not a directory); type {flag} FOLDER" in ended.err


def test_no_unit_is_named_for_the_loss_of_a_task_that_states_none(tmp_path):
    """Plane's loss is a squared error; a cross entropy in nats says so by its `loss_unit`."""
    asyncsgd.train(Plane(), samples=8, folder=tmp_path / "run", quiet=True, device="cpu")
    header = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert header["loss_unit"] == ""
    assert "nats" not in repr(asyncsgd.load(tmp_path))
