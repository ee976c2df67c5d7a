"""What a run leaves: files that say everything about it, nothing about the machine's owner, and can be used again."""

from __future__ import annotations

import dataclasses
import getpass
import json
import math
import os
import random
import shlex
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from marks import slow

import stilt_mlm
from analysis.compare import main as compare
from asyncsgd.records.environment import available_cores
from asyncsgd.records.events import Evaluation, Event, Fault, Membership, read_events
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.settings.training import FLAGS, make_settings
from asyncsgd.signals import StopRequest

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "stilt_mlm.py"
HATE = Path(__file__).resolve().parents[2] / "shared" / "data" / "hate_mlm" / "small"
MODES = ["single", "sync --nproc 2", "async --nproc 2", "hogwild --nproc 2"]
WORDS = ("alpha", "beta", "gamma", "worker", "server", "gradient", "update", "reads", "writes", "stale", "fresh")


@dataclasses.dataclass
class Ended:
    path: Path
    exit_code: int
    out: str

    @property
    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    def records(self, kind):
        return [record for record in read_events(self.path / "events.jsonl") if record["kind"] == kind]


Train = Callable[[str], Ended]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text and a cache, for all runs of this file."""
    folder = tmp_path_factory.mktemp("place")
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=12)) + f" {line}" for line in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def train(place, monkeypatch, capsys, tmp_path, tmp_path_factory):
    """Run the script in this process, in a folder of the test's own; workers come from a fork server."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.chdir(tmp_path)
    text = f"--data {place / 'text.txt'} --cache-dir {place / 'cache'} --seq-len 32 --batch-size 4"

    def run(flags):
        vocabulary = "" if "--model " in flags or "--config " in flags else "--vocab-size 512"
        given = f"--cache-dir {place / 'cache'}" if "--config " in flags or "--data " in flags else text
        capsys.readouterr()
        code = stilt_mlm.run(f"{given} {vocabulary} {flags}".split(), StopRequest())
        out = capsys.readouterr().out
        path = next(line.split()[1] for line in out.splitlines() if line.startswith("run "))
        return Ended(tmp_path / path, code, out)

    return run


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_a_run_leaves_settings_environment_events_summary_and_a_model(mode, train):
    ended = train(f"--mode {mode} --samples 40 --evaluations 2 --eval-samples 8 --warmup 8 --seed 5")
    assert ended.exit_code == 0
    files = sorted(path.name for path in ended.path.iterdir() if path.name != "usage.jsonl")  # after a second
    assert files == ["console.log", "environment.json", "events.jsonl", "model", "settings.yaml", "summary.json"]
    name = mode.split()[0]
    num_workers = 1 if name == "single" else 2
    num_updates = 5 if name == "sync" else 10

    environment = json.loads((ended.path / "environment.json").read_text())
    assert (environment["device"], environment["num_devices"]) == ("cpu", min(num_workers, available_cores()))
    assert {key: environment[key] for key in ("cores", "gpus", "torch_build", "cpu_capability")} == {
        "cores": available_cores(),
        "gpus": [],
        "torch_build": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }

    summary = ended.summary
    exact = {
        "schema": 2,
        "status": "DONE",
        "message": "",
        "mode": name,
        "rule": "asynchronous" if name in ("async", "hogwild") else "synchronous",
        "from_scratch": True,
        "num_workers": num_workers,
        "threads": 1,
        "seed": 5,
        "batch_size": 4,
        "clock": "measured",
        "num_samples": 40,
        "num_samples_applied": 40,
        "num_updates": num_updates,
    }
    assert {key: summary[key] for key in exact} == exact
    assert summary["final_eval_loss"] == pytest.approx(math.log(summary["metrics"]["perplexity"]))
    assert summary["samples_per_second"] == pytest.approx(40 / summary["train_seconds"])
    assert summary["eval_seconds"] > 0
    assert 0 <= summary["metrics"]["accuracy"] <= 1
    assert summary["eval_weight"] >= 8
    assert len(summary["data_fingerprint"]) == 16
    assert len(summary["parameters_sha256"]) == 64
    assert set(summary["delay"]) == {"mean", "p50", "p95", "max"}
    if num_updates * 4 * num_workers == 40 or name == "single":
        assert set(summary["delay"].values()) == {0}

    arrivals, evaluations = ended.records("arrival"), ended.records("evaluate")
    assert {frozenset(record) for record in arrivals} == {frozenset(field.name for field in dataclasses.fields(Event))}
    assert {frozenset(record) for record in evaluations} == {
        frozenset(field.name for field in dataclasses.fields(Evaluation))
    }
    assert {frozenset(record) for record in ended.records("join")} == {
        frozenset(field.name for field in dataclasses.fields(Membership))
    }
    assert len(ended.records("join")) == num_workers
    batches = sorted(record["batches"][0][1] for record in arrivals)
    assert len(set(batches)) == len(batches) == 10  # a slow worker's first batch may be in flight to the end
    assert [record["total_samples"] for record in arrivals] == list(range(4, 44, 4))
    assert arrivals[-1]["version"] == num_updates
    assert sorted(use[0] for record in arrivals for use in record["uses"]) == sorted(
        record["dispatch"] for record in arrivals
    )
    assert len(evaluations) == 3
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["version"] == num_updates
    assert evaluations[-1]["loss"] == summary["final_eval_loss"]
    assert evaluations[0]["loss"] == summary["first_eval_loss"]
    assert {record["weight"] for record in evaluations} == {summary["eval_weight"]}
    assert (evaluations[-1]["metrics"], evaluations[-1]["details"]) == (summary["metrics"], summary["details"])
    header = json.loads((ended.path / "events.jsonl").read_text().splitlines()[0])
    better = {"accuracy": "higher", "perplexity": "lower"}
    assert header == {"kind": "header", "schema": 2, "task": "masked_lm", "better": better}
    assert list(summary["metrics"]) == list(better)
    seconds = [record["train_seconds"] for record in read_events(ended.path / "events.jsonl")]
    assert seconds == sorted(seconds)

    about_here = [socket.gethostname(), str(Path.home()), str(Path.cwd()), str(SCRIPT.parent), tempfile.gettempdir()]
    environment = (ended.path / "environment.json").read_text()
    assert [word for word in about_here if word.strip("/") and word in environment] == []
    assert getpass.getuser() not in json.loads(environment).values()
    assert f'"{getpass.getuser()}"' not in environment


def test_the_console_log_holds_the_lines_from_those_about_the_task_to_the_last_one_of_the_run(train):
    ended = train("--mode single --samples 40 --evaluations 2 --eval-samples 8")
    shown = ended.out.splitlines()
    first = next(number for number, line in enumerate(shown) if line.startswith("run ")) + 1
    assert shown[-1].startswith("next ")
    assert (ended.path / "console.log").read_text().splitlines() == shown[first:-1]


def test_the_page_about_run_folders_names_every_key_that_a_run_leaves(train):
    page = (Path(__file__).resolve().parents[1] / "docs" / "run_folder.md").read_text()
    keys = {field.name for kind in (Event, Evaluation, Membership, Fault) for field in dataclasses.fields(kind)}
    keys |= set(train("--mode single --samples 8 --evaluations 1 --eval-samples 8").summary) - {"schema"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["single", "async --nproc 2 --rule ringmaster:threshold=3"])
def test_settings_given_back_with_config_are_the_same_settings(mode, train):
    first = train(f"--mode {mode} --samples 8 --evaluations 1 --eval-samples 8 --learning-rate 1e-4")
    again = train(f"--config {first.path / 'settings.yaml'}")
    written = [make_settings(FLAGS.load_yaml(run.path / "settings.yaml")) for run in (first, again)]
    assert FLAGS.settings_hash(written[0]) == FLAGS.settings_hash(written[1])
    assert first.path.name.endswith("-" + FLAGS.settings_hash(written[0]))
    assert again.path == first.path.with_name(first.path.name + "-2")
    if mode == "single":
        assert first.summary["parameters_sha256"] == again.summary["parameters_sha256"]


def test_the_line_that_says_how_to_run_it_again_works_where_the_command_was_typed(train, tmp_path):
    (tmp_path / "my runs").mkdir()
    open_run_folder("tests", make_settings({"runs_dir": "my runs", "mode": "single"}), "python train.py")
    for folder in (*(tmp_path / "my runs").iterdir(), train("--mode single --samples 0 --eval-samples 8").path):
        lines = (folder / "settings.yaml").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("# to run this again: "))
        flag, path = shlex.split(line.removeprefix("# to run this again: "))
        assert flag == "--config"
        assert Path(path).samefile(folder / "settings.yaml")


@pytest.mark.parametrize("moment", ["settings", "events"])
def test_a_folder_whose_run_was_killed_while_it_was_made_can_be_used_again(moment, tmp_path, monkeypatch):
    path = tmp_path / "run"
    settings = make_settings({"run_dir": str(path)})

    def killed(*arguments, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if moment == "settings":
            patched.setattr(os, "replace", killed)  # the file is written and has not got its name
        else:
            patched.setattr(RunFolder, "__init__", killed)
        with pytest.raises(KeyboardInterrupt):
            open_run_folder("tests", settings, "python train.py")
    half_made = {"settings": "settings.yaml.partial", "events": "settings.yaml"}[moment]
    assert {left.name for left in path.iterdir()} == {half_made, "events.jsonl"}
    open_run_folder("tests", settings, "python train.py").close()
    assert {left.name for left in path.iterdir()} == {"settings.yaml", "events.jsonl"}
    assert make_settings(FLAGS.load_yaml(path / "settings.yaml")).budget == settings.budget


def test_the_script_ends_by_saying_how_to_compare_its_run(train):
    ended = train("--mode single --samples 0 --eval-samples 8")
    assert ended.out.splitlines()[-1] == "next   python -m analysis.compare runs"


def test_the_same_command_twice_gives_two_folders(train):
    runs = [train("--mode single --samples 0 --eval-samples 8") for _ in range(3)]
    names = [run.path.name for run in runs]
    assert names == [names[0], names[0] + "-2", names[0] + "-3"]


def test_the_saved_model_is_read_by_transformers_with_its_tokenizer(train):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    ended = train("--mode single --samples 40 --evaluations 1 --eval-samples 8")
    folder = ended.path / "model"
    model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer(f"worker {tokenizer.mask_token} gradient", return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 5)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (1, 5, model.config.vocab_size)
    assert bool(torch.isfinite(logits).all())
    assert sum(parameter.numel() for parameter in model.parameters()) == ended.summary["num_parameters"]


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_no_samples_is_one_evaluation_and_no_training(mode, train):
    ended = train(f"--mode {mode} --samples 0 --eval-samples 8")
    assert ended.exit_code == 0
    summary = ended.summary
    told = [summary[key] for key in ("status", "num_samples", "num_updates", "train_seconds", "samples_per_second")]
    assert told == ["DONE", 0, 0, 0.0, None]
    assert set(summary["delay"].values()) == {None}
    evaluation, memory = read_events(ended.path / "events.jsonl")
    assert (evaluation["kind"], memory["kind"]) == ("evaluate", "memory")
    assert evaluation["loss"] == summary["final_eval_loss"]


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_the_evaluated_loss_of_an_untrained_model_does_not_depend_on_mode_or_workers(mode, train):
    losses = [
        train(f"--mode {each} --samples 0 --eval-samples 40").summary["final_eval_loss"] for each in ("single", mode)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_what_is_masked_in_training_does_not_change_the_test(train):
    untrained = "--mode single --samples 0 --eval-samples 20"
    plain, other = train(untrained).summary, train(f"{untrained} --mask word --mask-prob 0.4").summary
    assert (plain["eval_masking"], other["eval_masking"]) == ("token:0.15", "token:0.15")
    assert plain["final_eval_loss"] == other["final_eval_loss"]
    assert plain["eval_weight"] == other["eval_weight"]
    another_test = train(f"{untrained} --eval-mask word --eval-mask-prob 0.4").summary
    assert another_test["eval_masking"] == "word:0.4"
    assert another_test["eval_weight"] > 1.5 * plain["eval_weight"]


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_a_target_loss_ends_the_run_at_the_evaluation_that_reaches_it(mode, train):
    ended = train(
        f"--mode {mode} --samples 4000 --evaluations 100 --eval-samples 8 --learning-rate 5e-3 --warmup 40 "
        "--target-loss 5.5"
    )
    summary = ended.summary
    assert (ended.exit_code, summary["status"]) == (0, "DONE")
    losses = [record["loss"] for record in ended.records("evaluate")]
    assert summary["final_eval_loss"] == losses[-1] <= 5.5 < min(losses[:-1])
    assert 0 < summary["num_samples"] < 4000


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async --nproc 2", *slow("single", "sync --nproc 2", "hogwild --nproc 2")])
def test_the_model_saved_after_a_limit_in_seconds_is_the_one_evaluated_last(mode, train):
    ended = train(f"--mode {mode} --seconds 2 --evaluations 2 --eval-samples 40 --learning-rate 1e-2 --warmup 0")
    summary = ended.summary
    assert (ended.exit_code, summary["status"]) == (0, "DONE")
    assert summary["num_updates"] > 0
    records = list(read_events(ended.path / "events.jsonl"))
    assert 2 <= records[-1]["train_seconds"] < 2 + 5
    assert records[-1]["version"] == summary["num_updates"]
    saved = train(f"--mode single --model {ended.path / 'model'} --samples 0 --eval-samples 40")
    assert saved.summary["final_eval_loss"] == pytest.approx(summary["final_eval_loss"], rel=1e-6)
    assert saved.summary["parameters_sha256"] == summary["parameters_sha256"]


@pytest.fixture(scope="module")
def first_stage(tmp_path_factory):
    """Where the first stage is kept between the tests of one module; filled by the first of them."""
    return {"folder": tmp_path_factory.mktemp("first")}


@pytest.mark.processes
@pytest.mark.skipif(not HATE.is_dir(), reason="the shared data set hate_mlm/small is not beside this checkout")
@pytest.mark.parametrize("mode", ["async --nproc 2", *slow("single", "sync --nproc 2", "hogwild --nproc 2")])
def test_continued_pretraining_on_social_media_text_lowers_the_loss(mode, train, first_stage):
    model = first_stage["folder"] / "model"
    if not model.exists():
        first = train(f"--data {HATE} --mode single --seq-len 32 --samples 640 --evaluations 1 --eval-samples 40")
        assert first.summary["from_scratch"] is True
        shutil.copytree(first.path / "model", model)
    ended = train(
        f"--data {HATE} --model {model} --mode {mode} --seq-len 32 --samples 640 --evaluations 1 --eval-samples 40 "
        "--warmup 64"
    )
    assert ended.exit_code == 0
    assert ended.summary["status"] == "DONE"
    assert ended.summary["from_scratch"] is False
    assert ended.summary["data"] == "small"
    assert ended.summary["final_eval_loss"] < ended.summary["first_eval_loss"] - 0.05


@pytest.mark.processes
def test_compare_prints_a_table_of_what_was_run(train, capsys):
    for mode in ("single", "async --nproc 2"):
        train(f"--mode {mode} --samples 40 --evaluations 2 --eval-samples 8")
    failed = train("--mode single --samples 0 --eval-samples 8 --seed 1")
    (failed.path / "summary.json").unlink()  # as SIGKILL leaves it
    capsys.readouterr()
    assert compare(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split()[0] for line in lines if line.split()]
    assert [word for word in first_words if word in ("single", "async")] == ["single", "async"]
    assert any("UNFINISHED" in line and failed.path.name in line for line in lines)


LINES = [json.dumps({"kind": "header", "schema": 2})] + [
    json.dumps({"kind": "arrival", "dispatch": number, "loss": 1.5, "batches": [[0, number, number + 1]]})
    for number in range(5)
]


@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, len("\n".join(LINES)) + 1))
def test_a_file_cut_anywhere_gives_all_its_complete_records(cut, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(("\n".join(LINES) + "\n")[:cut])
    whole = ("\n".join(LINES) + "\n")[: cut + 1].count("\n")  # a record needs no line end to be complete
    assert list(read_events(path)) == [json.loads(line) for line in LINES[1:whole]]


@pytest.mark.parametrize("damaged", ["{", "null"])
def test_damage_before_the_last_line_is_an_error_that_names_the_line(damaged, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join([*LINES[:2], damaged, *LINES[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl: line 3 is damaged"):
        list(read_events(path))


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "header", "schema": 3}\n' + LINES[1] + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl has schema 3, this version reads 2"):
        list(read_events(path))
    assert os.listdir(tmp_path) == ["events.jsonl"]
