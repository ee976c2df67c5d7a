"""Sweeps made for real on a small text: in order, once each, stopped and killed anywhere, and the same afterwards."""

import copy
import dataclasses
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import statistics
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import Command, until
from doors import UsageError, asyncsgd
from gallery import sentences, write_tables
from scipy import stats

import stilt_mlm
import sweep as sweep_script
from asyncsgd.core.signals import StopRequest
from asyncsgd.records.events import read_events
from asyncsgd.records.machine import available_cores
from asyncsgd.scripts.study import power_text
from asyncsgd.scripts.train import run_task
from asyncsgd.studies.estimate import Estimator
from asyncsgd.studies.plan import make_plan, sha256_of, share
from asyncsgd.studies.study_folder import StudyFolder, locked

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SCRIPT = EXPERIMENTS / "sweep.py"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sweep of 2 arms, 2 trials each (one of them diverges), and 2 seeds, all on the virtual clock."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "train.txt").write_text(sentences(200, seed=0))
    (folder / "eval.txt").write_text(sentences(20, seed=1))
    text = {
        "data": str(folder / "train.txt"),
        "eval_data": str(folder / "eval.txt"),
        "cache_dir": str(folder / "cache"),
        "seq_len": 16,
        "batch_size": 2,
        "warmup": 0,
        "device": "cpu",
        "schedule": "constant",
    }
    return {
        "name": "small",
        "base_model": {**text, "vocab_size": 512, "samples": 4, "evaluations": 1},
        "base": {**text, "samples": 12, "evaluations": 3},
        "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
        "conditions": {"nproc": 2, "clock": "virtual", "speeds": "slow:worker=0,factor=3"},
        "seeds": [100, 101],
        "tuning": {"grid": {"learning_rate": [1.0e30, 2.0e-3, 1.0e-3]}, "seeds": [0]},
        "pilots": [50, 51],
        "analysis": {"reference": "sync", "margins": {"loss": 0.02}, "margin_reasons": {"loss": "small"}},
    }


def written(config, folder):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def sweep(config, out, *flags):
    """The script, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sweep.py", str(config), "--out", str(out), *flags])
        return int(sweep_script.main())


def plan_of(out):
    return make_plan(yaml.safe_load((out / "config.yaml").read_text()))


def summary_of(out, folder):
    return json.loads((out / folder / "summary.json").read_text())


def results_of(out):
    """What must be the same however the sweep was cut: parameters and samples of every run."""
    folders = [run.folder for run in plan_of(out).runs if (out / run.folder).exists()]
    keys = ("status", "parameters_sha256", "num_samples")
    return {folder: [summary_of(out, folder)[key] for key in keys] for folder in folders}


def files_of(out):
    """Every file below the folder, with its inode and its time: what has been written, and what has not."""
    files = {}
    for path in out.rglob("*"):
        if path.is_file() and not path.name.startswith(".lock"):
            stat = path.stat()
            files[str(path.relative_to(out))] = (stat.st_ino, stat.st_mtime_ns)
    return files


def forget(out, folder, status="FAILED"):
    """Let a finished run look as if it had ended in another way."""
    path = out / folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": status, "message": "as told"}))


@pytest.fixture(scope="module")
def unbroken(small, tmp_path_factory):
    """(config, folder) of a sweep that nobody has disturbed; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = written(small, folder)
    out = folder / "out"
    assert sweep(config, out) == 0
    return config, out


@pytest.fixture
def finished(unbroken, tmp_path):
    """A copy of `unbroken` that may be changed; a sweep's folder can be moved."""
    config, out = unbroken
    shutil.copytree(out, tmp_path / "out")
    return config, tmp_path / "out"


def test_every_run_of_the_plan_is_made_in_its_folder_with_its_settings_and_those_of_the_best_trial(unbroken):
    _, out = unbroken
    plan = plan_of(out)
    assert len(plan.runs) == 1 + 2 * 3 + 2 + 2 * 2
    chosen = {}
    for arm in json.loads((out / "plan.json").read_text())["arms"]:
        finals = [summary_of(out, f"tuning/{arm['name']}/t{trial}-s0").get("final_eval_loss") for trial in (1, 2)]
        assert [trial["score"] for trial in arm["trials"]] == [None, *finals]  # the first one diverged
        chosen[arm["name"]] = arm["chosen"]
        assert arm["chosen"] == {"learning_rate": [2.0e-3, 1.0e-3][finals.index(min(finals))]}
    for run in plan.runs:
        assert summary_of(out, run.folder)["status"] == ("DIVERGED" if run.trial == 0 else "DONE")
        values = plan.run_settings(run, chosen, {SYNC: 9.0}, {SYNC: LOOK})
        told = yaml.safe_load((out / run.folder / "settings.yaml").read_text())
        assert {key: told[key] for key in values if key in told} == {key: values[key] for key in values if key in told}
        assert (out / "logs" / (run.folder.replace("/", "-") + ".txt")).stat().st_size > 0
    assert not [*out.rglob("*.before-*"), *out.rglob("*.partial")]


RATES = {"learning_rate": [1.0, 2.0, 3.0]}


def test_the_plan_names_no_model_for_a_run_that_starts_from_a_model_of_the_study(unbroken):
    planned = json.loads((unbroken[1] / "plan.json").read_text())["settings"]
    assert {folder for folder, settings in planned.items() if "model" in settings} == {"base"}


def scored(small, out, losses, grid=RATES):
    """A sweep whose tuning runs ended with given losses; None has diverged. No run is made."""
    tuning = {"grid": grid, "seeds": [0, 1]}
    config = {**small, "base_model": None, "tuning": tuning, "pilots": []}
    plan = make_plan(config)
    for run in plan.of_stage("tuning"):
        number = (run.trial or 0) * 2 + run.seed
        loss = losses[run.arm][number]
        folder = out / run.folder
        folder.mkdir(parents=True)
        status = "DIVERGED" if loss is None else "DONE"
        summary = {"status": status, "final_eval_loss": loss or 1.0, "train_seconds": 10.0 * (loss or 0.0)}
        summary["num_samples"] = 100
        (folder / "summary.json").write_text(json.dumps(summary))
        trial = plan.arm(run.arm).trials[run.trial or 0]
        (folder / "settings.yaml").write_text(json.dumps({"settings_format": 2, **trial}))
        curve = [8.0, (loss or 1.0) - 0.5, None, loss]  # a run that is DONE may have had one that is not finite
        records = [{"kind": "header", "schema": 2}, *({"kind": "evaluate", "loss": value} for value in curve)]
        (folder / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return StudyFolder(plan, "", out)


SYNC = "sync-w2-virtual"
ASYNC = "async-w2-virtual"
LOOK = 10
"""Samples, 90 % of the 12 that the pilots make in their 9 seconds, rounded down."""


def test_trials_are_judged_by_the_mean_over_seeds_and_one_divergence_rules_a_trial_out(small, tmp_path):
    made = scored(small, tmp_path, {SYNC: [4.0, 7.0, 5.0, 5.0, 1.0, None], ASYNC: [6.0, 6.0, 5.0, 7.0, 9.0, 9.0]})
    made.choose()
    assert made.unfinished("tuning") == []
    assert made.chosen == {SYNC: {"learning_rate": 2.0}, ASYNC: {"learning_rate": 1.0}}  # of equal ones the first
    forget(tmp_path, f"tuning/{SYNC}/t2-s1", "INTERRUPTED")
    made = StudyFolder(made.plan, "", tmp_path)
    made.choose()
    assert [run.folder for run in made.unfinished("tuning")] == [f"tuning/{SYNC}/t2-s1"]
    assert set(made.chosen) == {ASYNC}  # nothing for an arm before all its trials are finished


def test_a_grid_with_its_keys_in_another_order_numbers_other_trials_and_takes_no_run_for_one_of_them(small, tmp_path):
    grid = {"learning_rate": [1.0, 2.0], "warmup": [0, 8]}
    losses = {SYNC: [4.0] * 8, ASYNC: [4.0] * 8}
    made = scored(small, tmp_path, losses, grid)
    made.choose()
    plan = scored(small, tmp_path / "other", losses, dict(reversed(grid.items()))).plan
    assert plan.config_sha256 == made.plan.config_sha256
    with pytest.raises(UsageError, match=r"t1-s0 was made with warmup: 8, and .* has warmup: 0"):
        StudyFolder(plan, "", tmp_path).choose()


def test_without_pilots_the_target_is_a_share_of_the_median_improvement_of_the_references_tuning_runs(small, tmp_path):
    made = scored(small, tmp_path, {SYNC: [4.0, 5.0, 6.0, 6.0, 7.0, 7.0], ASYNC: [1.0] * 6})
    made.choose()
    made.register()
    registered = yaml.safe_load((tmp_path / "analysis.yaml").read_text())
    best = statistics.median([3.5, 4.5])  # the lowest of each curve, not its last
    assert registered["targets"] == {SYNC: round(8.0 - 0.95 * (8.0 - best), 6)}
    assert registered["target_from"].startswith("95 % of the median improvement of 2 pilot runs of the reference")
    assert registered["budget_seconds"] == {SYNC: 45.0}  # so does the budget: theirs were 40 and 50
    assert registered["look_samples"] == {SYNC: 81}  # 90 % of what the slower one, 2 samples a second, makes by then
    told = json.loads((tmp_path / "plan.json").read_text())
    assert [told[key] for key in ("targets", "budget_seconds")] == [registered["targets"], {SYNC: 45.0}]


def test_the_registered_target_is_what_the_formula_says_of_the_recorded_evaluations(unbroken):
    _, out = unbroken
    paths = [out / f"pilot/{SYNC}/s{seed}/events.jsonl" for seed in (50, 51)]
    curves = []
    for path in paths:
        curves.append([record["loss"] for record in read_events(path) if record["kind"] == "evaluate"])
    assert [len(curve) for curve in curves] == [4, 4]
    (first,) = {curve[0] for curve in curves}  # of the base model
    best = statistics.median(min(curve) for curve in curves)
    target = round(first - 0.95 * (first - best), 6)
    assert yaml.safe_load((out / "analysis.yaml").read_text()) == {
        "schema": 1,
        "study": "small",
        "reference": "sync",
        "control": None,
        "primary": {"endpoint": "time_to_target", "num_workers": 2, "clock": "virtual"},
        "alpha": 0.05,
        "margins": {"loss": 0.02},
        "margin_reasons": {"loss": "small"},
        "family": [ASYNC],
        "num_seeds": 2,
        "seeds": [100, 101],
        "targets": {SYNC: target},
        "budget_seconds": {SYNC: 9.0},
        "look_samples": {SYNC: LOOK},
        "pilots": {SYNC: {"runs": 2, "first_loss": round(first, 6), "best_loss": round(best, 6)}},
        "config_sha256": sha256_of(yaml.safe_load((out / "config.yaml").read_text())),
        "target_from": "95 % of the median improvement of 2 pilot runs of the reference (its chosen trial, seeds of "
        "their own)",
    }


def test_every_test_run_has_the_seconds_that_the_references_pilots_took_for_their_samples(unbroken):
    _, out = unbroken
    assert [summary_of(out, f"pilot/{SYNC}/s{seed}")["train_seconds"] for seed in (50, 51)] == [9.0, 9.0]
    for arm, samples, update in (
        (SYNC, 12, 4),
        (ASYNC, 24, 2),
    ):  # 12 samples are 6 gradients; a slow worker makes 3, the other 9
        for seed in (100, 101):
            settings = yaml.safe_load((out / f"test/{arm}/s{seed}/settings.yaml").read_text())
            assert settings["seconds"] == 9.0
            assert settings.get("samples") is None
            assert settings["evaluate_at"] == LOOK
            summary = summary_of(out, f"test/{arm}/s{seed}")
            assert summary["train_seconds"] == 9.0
            assert summary["num_samples"] == samples
            records = read_events(out / f"test/{arm}/s{seed}/events.jsonl")
            looks = {record["total_samples"] for record in records if record["kind"] == "evaluate"}
            assert not looks.isdisjoint(range(LOOK, LOOK + update))  # the first update from there on


def test_the_analysis_is_registered_before_the_first_test_run(unbroken):
    _, out = unbroken
    registered = (out / "analysis.yaml").stat().st_mtime_ns
    before = [*out.glob("tuning/*/*/summary.json"), *out.glob("pilot/*/*/summary.json")]
    assert max(path.stat().st_mtime_ns for path in before) < registered
    assert registered < min(path.stat().st_mtime_ns for path in out.glob("test/*/*/settings.yaml"))
    recorded = json.loads((out / "plan.json").read_text())["analysis_sha256"]
    assert recorded == hashlib.sha256((out / "analysis.yaml").read_bytes()).hexdigest()


def of_staleness(small, **difference):
    """Two optimizers, each without a delay and with one."""
    algorithms = {
        f"{optimizer}_{delay}": {"mode": "async", "rule": f"fixed_delay:delay={delay}", "optimizer": optimizer}
        for optimizer in ("sgd", "adamw")
        for delay in (0, 1)
    }
    named = {"treatment": ["sgd_1", "sgd_0"], "reference": ["adamw_1", "adamw_0"]} | difference
    analysis = {"reference": "sgd_0", "primary": {"endpoint": "loss_at_equal_samples"}, "differences": {"late": named}}
    untuned = {key: value for key, value in small.items() if key != "tuning"}
    return untuned | {"algorithms": algorithms, "pilots": [], "seeds": [100], "analysis": analysis}


def test_a_difference_of_differences_is_registered_before_the_runs_and_read_from_there(small, unbroken, tmp_path):
    config = of_staleness(small)
    assert sweep(written(config, tmp_path), tmp_path / "out") == 0
    registered = yaml.safe_load((tmp_path / "out" / "analysis.yaml").read_text())
    assert registered["differences"] == config["analysis"]["differences"]
    assert "differences" not in yaml.safe_load((unbroken[1] / "analysis.yaml").read_text())
    (row,) = asyncsgd.load(tmp_path / "out").differences.itertuples()
    ends = {}
    for name in config["algorithms"]:
        ends[name] = summary_of(tmp_path / "out", f"test/{name}-w2-virtual/s100")["final_eval_loss"]
    assert row.n == 1
    assert row.word == "too few seeds"
    assert row.estimate == pytest.approx(ends["sgd_1"] - ends["sgd_0"] - (ends["adamw_1"] - ends["adamw_0"]))


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        (
            {"treatment": ["sgd_1", "sgd"]},
            "names 'sgd', which is none of the algorithms sgd_0,",
        ),
        ({"treatment": ["sgd_1", "adamw_0"]}, "must name four algorithms, got sgd_1, adamw_0, adamw_1, adamw_0"),
        ({"treatment": ["sgd_1"]}, "expected a list of length"),
    ],
)
def test_a_difference_of_differences_of_other_arms_is_refused(difference, told, small):
    with pytest.raises(UsageError) as raised:
        make_plan(of_staleness(small, **difference))
    assert told in str(raised.value)


def test_what_is_done_is_not_run_again_and_nothing_of_it_is_written(unbroken, capsys):
    config, out = unbroken
    before = files_of(out)
    assert sweep(config, out) == 0
    after = files_of(out)
    assert {name for name in after if after[name] != before.get(name)} == {"config.yaml", "plan.json"}
    assert set(after) == set(before)
    said = capsys.readouterr()
    assert f"done   {out}: 13 of 13 runs\nnext   python -m analysis report {out} --out report.html\n" in said.out
    assert said.err == ""


def test_a_failed_run_is_told_and_run_again_only_with_retry(finished, capsys):
    config, out = finished
    folder = f"test/{ASYNC}/s101"
    before = results_of(out)
    forget(out, folder)
    assert sweep(config, out) == 1
    said = capsys.readouterr()
    assert said.err == "1 run FAILED; the same command with --retry runs them again\n"
    assert f"so far   {out}: 12 of 13 runs" in said.out
    assert not (out / f"{folder}.before-1").exists()
    assert sweep(config, out, "--retry") == 0
    assert summary_of(out, f"{folder}.before-1")["status"] == "FAILED"  # kept beside the new attempt
    assert results_of(out) == before


def test_no_test_run_begins_while_a_pilot_has_no_result(finished, capsys):
    config, out = finished
    (out / "analysis.yaml").unlink()
    shutil.rmtree(out / "test")
    forget(out, f"pilot/{SYNC}/s50")
    assert sweep(config, out) == 1
    assert (
        f"error: 1 pilot run is not finished, the first is pilot/{SYNC}/s50; look at its log" in capsys.readouterr().err
    )
    assert not (out / "analysis.yaml").exists()
    assert not (out / "test").exists()


def test_a_registration_is_never_changed_nor_made_afterwards(finished, capsys):
    config, out = finished
    path = out / "analysis.yaml"
    text = path.read_text()
    for tampered in (text.replace("alpha: 0.05", "alpha: 0.5"), "schema: 1\n", None):
        path.unlink()
        if tampered is not None:
            path.write_text(tampered)
        assert sweep(config, out) == 2
        assert (path.read_text() if path.exists() else None) == tampered
        said = "is missing, though there are test runs" if tampered is None else "was written before the test runs"
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path} {said}")
        assert "put the old file back" in err
    path.write_text(text)
    assert sweep(config, out) == 0
    assert path.read_text() == text


def test_a_choice_at_an_end_of_its_grid_is_told_before_the_registration_and_not_afterwards(finished, capsys):
    config, out = finished
    (out / "analysis.yaml").unlink()
    (out / "plan.json").unlink()  # it has the hash of the registration
    shutil.rmtree(out / "pilot")
    shutil.rmtree(out / "test")
    for best in (f"tuning/{SYNC}/t2-s0", f"tuning/{ASYNC}/t1-s0"):  # the smallest of three rates, and the middle one
        path = out / best / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "final_eval_loss": 0.1}))
    assert sweep(config, out) == 0
    said = capsys.readouterr().out
    notes = [line for line in said.splitlines() if "of its grid" in line]
    assert len(notes) == 1
    assert notes[0].startswith(f"note   {SYNC}: the best learning_rate, 0.001, is the smallest of its grid; stop here")
    assert said.index(notes[0]) < said.index("pilot/") < said.index("analysis.yaml  sha256")
    assert sweep(config, out) == 0
    assert "of its grid" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--dry-run", "--print-commands"])
def test_a_look_writes_nothing_before_and_after(flag, unbroken, tmp_path, capsys):
    config, out = unbroken
    assert sweep(config, tmp_path / "new", flag) == 0
    assert not (tmp_path / "new").exists()
    said = capsys.readouterr()
    if flag == "--dry-run":
        for stage, number in (("base", 1), ("tuning", 6), ("test", 4)):
            assert re.search(rf"\n{stage} +{number} runs? to make: about ", said.out)
        told = f"budget    about 9 virtual s, what {SYNC} takes for its samples: every test run of {ASYNC}, {SYNC}\n"
        assert told in said.out
        assert "note   with 2 seeds no difference can be found in a primary family of 1 comparison" in said.out
    else:
        assert said.out.count("python experiments/stilt_mlm.py") == 1  # the base model
        assert said.err == "# the commands of later runs depend on these; print them again afterwards\n"
    before = files_of(out)
    assert sweep(config, out, flag) == 0
    assert files_of(out) == before
    assert "stilt_mlm.py" not in capsys.readouterr().out


def test_printed_commands_make_a_study_that_was_registered_before_its_test_runs(unbroken, tmp_path, capsys):
    config, out = unbroken
    new = tmp_path / "new"
    for folders in ({"base"}, {"tuning"}, {"pilot"}, {"test"}, set()):
        if folders == {"test"}:
            with locked(new / ".lock-1-of-1"):  # as a study that is at work does
                assert sweep(config, new, "--print-commands") == 2
            assert f"error: another process is at work in {new}; wait for it" in capsys.readouterr().err
            assert not (new / "analysis.yaml").exists()
        capsys.readouterr()
        assert sweep(config, new, "--print-commands") == 0
        commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python ")]
        words = [shlex.split(command) for command in commands]
        made = [Path(line[line.index("--run-dir") + 1]).relative_to(new).parts[0] for line in words]
        assert set(made) == folders
        assert (new / "analysis.yaml").exists() == (folders <= {"test"})
        for line in words:
            stilt_mlm.SCRIPT.run(line[2:], StopRequest())
        if folders == {"tuning"}:
            assert sweep(config, new, "--print-commands", "--set", "base.samples=16") == 2
            assert "another config: it has another samples; type another --out" in capsys.readouterr().err
    before = files_of(new)
    assert sweep(config, new) == 0
    assert files_of(new).keys() == before.keys()
    assert results_of(new) == results_of(out)
    assert (new / "analysis.yaml").read_text() == (out / "analysis.yaml").read_text()


def test_only_a_study_of_the_librarys_tasks_keeps_from_the_network(small, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    of_own_task = {"task": "tasks:Plane", "base": {"samples": 8}, "algorithms": {"one": {"mode": "single"}}}
    assert sweep(written(of_own_task, tmp_path), tmp_path / "out", "--print-commands") == 0
    assert "HF_HUB_OFFLINE" not in os.environ
    assert sweep(written(small, tmp_path), tmp_path / "out", "--print-commands") == 0
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("num_seeds", "num_arms", "level", "least"), [(6, 1, "0.05", 6), (7, 3, "0.05 / 3", 7)])
def test_a_plan_says_what_its_seeds_can_find(num_seeds, num_arms, level, least, small):
    algorithms = {"sync": {"mode": "sync"}} | {f"async{k}": {"mode": "async"} for k in range(num_arms)}
    told = power_text(make_plan({**small, "algorithms": algorithms, "seeds": [*range(100, 100 + num_seeds)]}))
    # 2 / 2^n is the only p below alpha / m: all differences have one sign, which n normal ones have with Phi(d)^n
    effect = stats.norm.ppf(0.8 ** (1 / num_seeds))
    assert f"the sign-flip test at {level} " in told
    assert f"finds a difference of {effect:.1f} standard deviations of the differences in 80 % of studies" in told
    assert told.endswith(f"with fewer than {least} seeds it finds none")


def test_wrong_flags_and_files_end_with_2_and_one_line(unbroken, small, tmp_path, capsys):
    config, made = unbroken
    new = tmp_path / "new"
    occupied = tmp_path / "occupied"
    (occupied / "holiday").mkdir(parents=True)
    (tmp_path / "file").touch()
    written({**small, "seeds": [100, 102]}, tmp_path).rename(tmp_path / "other.yaml")
    before = files_of(made)
    rule = written({**small, "algorithms": {"sync": {}, "async": {"rule": "asynchronos"}}}, tmp_path)
    for arguments, words in (
        ((config, new, "--shard=3/2"), "--shard 2/8 '3/2'"),
        ((config, new, "--jobs", "0"), "--jobs 1 0"),
        ((config, new, "--quick"), "config --quick"),
        ((config, tmp_path / "file"), "file --out"),
        ((config, occupied), "occupied --out"),
        ((rule.with_name("other.yaml"), made), "another config --out config.yaml"),
        ((rule, new, "--dry-run"), "async-w2-virtual 'asynchronous'"),
    ):
        assert sweep(*arguments) == 2
        err = capsys.readouterr().err
        for word in ("error: ", *words.split()):
            assert word in err
        assert err.count("\n") == 1
    assert not new.exists()
    assert files_of(made) == before
    assert [path.name for path in occupied.iterdir()] == ["holiday"]


def test_a_base_model_that_cannot_be_made_ends_the_sweep_with_where_to_look(small, tmp_path, capsys):
    config = copy.deepcopy(small)
    config["base_model"]["data"] = str(tmp_path / ("deep" * 20) / "nowhere.txt")  # its name is told, however long
    out = tmp_path / "out"
    assert sweep(written(config, tmp_path), out) == 1
    err = capsys.readouterr().err
    assert f"error: the base model could not be made; look at {out / 'logs' / 'base.txt'}, then" in err
    assert "nowhere.txt" in err
    assert "nowhere.txt" in (out / "logs" / "base.txt").read_text()
    assert not (out / "tuning").exists()


@pytest.mark.slow
def test_a_sweep_judges_its_models_by_the_spans_that_their_taggers_find(small, tmp_path, capsys):
    draw = random.Random(0)
    for side, number in (("train", 24), ("test", 8)):
        rows = []
        for _ in range(number):
            words = draw.choices(("bada", "gimo", "sune"), k=5)
            tags = ["B-X" if word == "sune" else "O" for word in words]
            rows.append({"tokens": words, "ner_tags": tags})
        write_tables(tmp_path / "tagged", **{side: rows})
    tagged = {"task": "token_classification", "data": str(tmp_path / "tagged"), "cache_dir": str(tmp_path / "cache")}
    config = {
        **{key: small[key] for key in ("name", "base_model", "base")},
        "algorithms": {"token": {"mode": "single"}, "words": {"mode": "single", "mask": "word"}},
        "conditions": {},
        "seeds": [7],
        "finetune": {**tagged, "samples": 16, "batch_size": 4, "evaluations": 1, "device": "cpu"},
        "analysis": {"reference": "token", "primary": {"endpoint": "span_f1"}, "margins": {"span_f1": 0.01}},
    }
    out = tmp_path / "out"
    assert sweep(written(config, tmp_path), out) == 0
    assert re.search(r"finetune/words-w1/s7-f0 +DONE +span F1 0\.", capsys.readouterr().out)
    study = asyncsgd.load(out)
    assert study.plan.problems == ()
    (row,) = [row for row in study.tests.itertuples() if (row.treatment, row.endpoint) == ("words-w1", "span_f1")]
    assert row.reference == "token-w1"
    assert row.endpoint == "span_f1"
    assert row.n == 1
    assert row.word == "too few seeds"


@pytest.fixture(scope="module")
def stoppable(small, tmp_path_factory):
    """(config, folder) of a sweep of a virtual arm, a measured one, one that diverges, and fine-tuning."""
    folder = tmp_path_factory.mktemp("stoppable")
    (folder / "posts").mkdir()
    for side, number in (("train", 24), ("test", 8)):
        rows = [f"{('bada gimo', 'sune kata')[row % 2]} {row},{row % 2}" for row in range(number)]
        (folder / "posts" / f"{side}.csv").write_text("\n".join(["text,label", *rows]))
    labelled = {"data": str(folder / "posts"), "cache_dir": str(folder / "cache"), "samples": 12, "seq_len": 16}
    config = {key: small[key] for key in ("base_model", "base")} | {
        "name": "stoppable",
        "algorithms": {
            "async": {"mode": "async", "conditions": small["conditions"]},
            "single": {"mode": "single", "conditions": {}},
            "wild": {"mode": "async", "conditions": {"clock": "virtual"}, "learning_rate": 1.0e30},
        },
        "seeds": [7],
        "finetune": {**labelled, "batch_size": 4, "evaluations": 1, "class_weights": True, "device": "cpu"},
    }
    path = written(config, folder)
    out = folder / "out"
    assert sweep(path, out) == 0
    return path, out


VIRTUAL = "test/async-w2-virtual/s7"
MEASURED = "test/single-w1/s7"
TUNED = "finetune/async-w2-virtual/s7-f0"


def test_fine_tuning_starts_from_every_model_of_the_test_and_from_the_base_model(stoppable, tmp_path, capsys):
    config, out = stoppable
    parent = summary_of(out, VIRTUAL)
    baseline = summary_of(out, "finetune/baseline/s7-f0")
    child = summary_of(out, TUNED)
    assert baseline["status"] == "DONE"
    assert child["status"] == "DONE"
    assert child["class_weights"] is True
    assert baseline["seed"] == 7000
    assert child["seed"] == 7000
    assert baseline["parent"] is None
    assert baseline["init_sha256"] == summary_of(out, "base")["parameters_sha256"]
    assert child["parent"]["run"] == "s7"
    assert child["parent"]["parameters_sha256"] == parent["parameters_sha256"]
    assert child["init_sha256"] == parent["parameters_sha256"]
    assert sweep(config, out) == 0
    said = capsys.readouterr()
    assert "1 fine-tuning run has no model to start from, since its pretraining run is not DONE\n" in said.err
    assert f"so far   {out}: 7 of 8 runs" in said.out  # the one that diverged has a result, and no model

    shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / TUNED)
    assert sweep(config, tmp_path / "out", "--print-commands") == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("python "))
    assert shlex.split(command)[:3] == ["python", "experiments/train.py", "classification"]
    assert run_task(shlex.split(command)[2:], StopRequest()) == 0
    assert summary_of(tmp_path / "out", TUNED)["parameters_sha256"] == child["parameters_sha256"]


def test_an_estimate_adds_up_runs_that_measure_time_and_shares_the_cores_among_others(stoppable):
    made = StudyFolder(plan_of(stoppable[1]), "", stoppable[1])
    estimator = Estimator()
    jobs = {run.folder: made.job(run) for run in made.plan.runs}
    for folder, at_once in ((MEASURED, 1), (VIRTUAL, min(2, available_cores()))):
        once = estimator.seconds([jobs[folder]], 1)
        assert once > 0
        assert estimator.seconds([jobs[folder]] * 2, 2) == pytest.approx(2 * once / at_once)


def test_an_estimate_grows_by_the_training_and_by_the_evaluations_that_a_run_has_more(stoppable):
    """Its other seconds, those of a start, are the same. What a gradient and an evaluation take is timed once."""
    made = StudyFolder(plan_of(stoppable[1]), "", stoppable[1])
    (job,) = (made.job(run) for run in made.plan.runs if run.folder == MEASURED)
    estimator = Estimator()

    def with_budget(**changes):
        return dataclasses.replace(job, values=job.values | changes)

    short = with_budget(samples=100, evaluations=2)
    long = with_budget(samples=1000, evaluations=2)
    training = estimator.training_seconds(long) - estimator.training_seconds(short)
    assert training == pytest.approx(0.9 * estimator.training_seconds(long))
    assert estimator.seconds([long], 1) - estimator.seconds([short], 1) == pytest.approx(training)
    often = [estimator.seconds([with_budget(samples=100, evaluations=number)], 1) for number in (2, 3, 5)]
    assert often[2] - often[1] == pytest.approx(2 * (often[1] - often[0]))
    assert often[0] < often[1]


def stop_in_the_middle(out, folder):
    """Let a run look as a kill leaves it: without a summary, its newest checkpoint before its end."""
    made = StudyFolder(plan_of(out), "", out)
    (run,) = (run for run in made.plan.runs if run.folder == folder)
    job = made.job(run)
    assert job is not None
    shutil.rmtree(out / folder)
    command = dataclasses.replace(job, values={**job.values, "checkpoint_every": "4", "keep": 9}).command
    run = {"stilt_mlm": stilt_mlm.SCRIPT.run, "train": run_task}[Path(command[1]).stem]
    assert run(command[2:], StopRequest()) == 0
    for later in sorted((out / folder / "checkpoints").glob("*.json"))[1:]:
        later.unlink()
    (out / folder / "summary.json").unlink()
    shutil.rmtree(out / folder / "model", ignore_errors=True)  # fine-tuning leaves none


@pytest.fixture
def stopped(stoppable, tmp_path):
    """A copy of `stoppable` in which a run of each kind was killed, and the model that one started from as well."""
    config, out = stoppable
    shutil.copytree(out, tmp_path / "out")
    for folder in (TUNED, VIRTUAL, MEASURED):
        stop_in_the_middle(tmp_path / "out", folder)
    return config, tmp_path / "out"


def resumes(out, folder):
    """The samples at which a run went on."""
    records = read_events(out / folder / "events.jsonl")
    return [record["total_samples"] for record in records if record["kind"] == "resume"]


def test_what_was_stopped_goes_on_bit_for_bit_unless_it_measures_time(stoppable, stopped):
    config, out = stopped
    assert sweep(config, out) == 0
    assert results_of(out) == results_of(stoppable[1])  # one process is the same every time, also anew
    assert [resumes(out, folder) for folder in (VIRTUAL, TUNED, MEASURED)] == [[4], [4], []]
    assert [str(path.relative_to(out)) for path in out.rglob("*.before-*")] == [f"{MEASURED}.before-1"]
    assert not (out / VIRTUAL / "checkpoints").exists()
    assert not (out / TUNED / "checkpoints").exists()


def test_a_run_that_failed_is_made_again_from_its_start_though_it_has_a_checkpoint(stoppable, tmp_path):
    config, whole = stoppable
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    stop_in_the_middle(out, VIRTUAL)
    (out / VIRTUAL / "summary.json").write_text(json.dumps({"status": "FAILED", "message": "as told"}))
    assert sweep(config, out, "--retry") == 0
    assert resumes(out, VIRTUAL) == []
    assert results_of(out) == results_of(whole)


@pytest.mark.slow
def test_shards_together_make_what_one_sweep_makes(unbroken, finished, capsys):
    whole = unbroken[1]
    config, out = finished
    parts = {}
    for index in (1, 2):
        parts[index] = share(plan_of(out), "tuning", (index, 2))
    for folder in ("base", "pilot", "test", min(parts[1]), min(parts[2])):  # as if the sweep had not come so far
        shutil.rmtree(out / folder)
    (out / "analysis.yaml").unlink()
    assert sweep(config, out, "--shard", "2/2") == 1
    assert "error: the base model is made by --shard 1/2; run it first, then this command" in capsys.readouterr().err
    for shard, stage in ((1, "tuning"), (2, "pilot")):
        assert sweep(config, out, "--shard", f"{shard}/2") == 1
        assert f"error: 1 {stage} run is not finished, the first is {stage}/" in (err := capsys.readouterr().err)
        assert err.endswith("; run the other shards, then this command again\n")
        assert not (out / "analysis.yaml").exists()
    assert sweep(config, out, "--shard", "1/2") == 0
    made = {str(path.parent.relative_to(out)) for path in out.glob("test/*/*/summary.json")}
    assert made == share(plan_of(out), "test", (1, 2))
    assert f"so far   {out}: 11 of 13 runs" in capsys.readouterr().out
    assert sweep(config, out, "--shard", "2/2") == 0
    assert f"done   {out}: 13 of 13 runs" in capsys.readouterr().out
    assert results_of(out) == results_of(whole)
    assert (out / "analysis.yaml").read_bytes() == (whole / "analysis.yaml").read_bytes()
    assert not list(out.rglob("*.before-*"))


@pytest.mark.slow
@pytest.mark.processes
def test_a_sweep_killed_on_the_virtual_clock_ends_like_an_unbroken_one_and_is_alone_while_it_runs(
    unbroken, tmp_path, capsys
):
    config, whole = unbroken
    out = tmp_path / "out"
    command = Command([sys.executable, str(SCRIPT), str(config), "--out", str(out), "--jobs", "2"], tmp_path)
    try:
        until(lambda: list(out.glob("tuning/*/*/settings.yaml")), "a tuning run")
        assert sweep(config, out) == 2  # while it runs
        assert f"error: another process is at work in {out}; wait for it" in capsys.readouterr().err
        seconds = random.random() * 3  # anywhere, and told where the test fails
        print(f"killed after {seconds:.3f} s")
        time.sleep(seconds)
        command.process.kill()
        command.process.wait(10)
        until(lambda: not command.pids(), "all processes to be gone", 30)  # a fork server first ends its imports
    finally:
        command.end()
    assert sweep(config, out) == 0
    assert results_of(out) == results_of(whole)
    assert (out / "analysis.yaml").read_bytes() == (whole / "analysis.yaml").read_bytes()
