"""The scripts whose flags are a task's fields, as a user meets them: help, mistyped words, settings, Ctrl-C."""

import importlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from gallery import sentences
from transformers import AutoModelForCausalLM

from asyncsgd.scripts.base import run_script

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SCRIPTS = {"clm": "causal_lm", "train_tagger": "token_classification", "answer_questions": "question_answering"}


def run(name, line):
    """The exit code of a command line, in this process."""
    return run_script(importlib.import_module(name).SCRIPT.run, line.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text and a table in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text(sentences(100, seed=0))
    draw = random.Random(0)
    rows = [{"tokens": draw.choices(["be", "di", "fo"], k=5), "ner_tags": ["B-A", *"OOOO"]} for _ in range(40)]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


SMALL = (
    "--data text.txt --cache-dir cache --seq-len 24 --batch-size 4 --vocab-size 320 --samples 48 --warmup 0 "
    "--evaluations 2 --learning-rate 3e-3"
)


def the_only_run():
    (path,) = Path("runs").iterdir()
    return path, json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("clm", "--data nowhere", "'nowhere' --data"),
        ("clm", "--eval-data nowhere", "'nowhere' --eval-data"),
        ("clm", "--model ./nowhere", "'./nowhere' --model"),
        ("clm", "--model .", "config.json --model"),
        ("clm", "--model gpt2 --vocab-size 400", "--vocab-size --model 'gpt2'"),
        ("clm", "--text-column body", "--text-column pydocs"),
        ("clm", "--rule asynchronus", "'asynchronus'"),
        ("train_tagger", "", "--data"),
        ("train_tagger", "--data ./text.txt", "text.txt columns"),
        ("train_tagger", "--data table.jsonl --tags-column tokens", "--tokens-column --tags-column"),
        ("train_tagger", "--data table.jsonl --init-from ./nowhere", "--init-from ./nowhere"),
        ("answer_questions", "", "--data"),
        ("answer_questions", "--data text.txt", "text.txt questions"),
        ("answer_questions", "--data table.jsonl --stride 999", "--stride 999 --seq"),
    ],
)
def test_a_mistyped_word_is_one_line_and_leaves_no_folder_behind(name, line, words, folder, capsys):
    assert run(name, line) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert all(word in shown for word in words.split())
    assert shown.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_rules_can_be_listed(name, folder, capsys):
    assert run(name, "--rule help") == 0
    assert "ringmaster" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_a_run_is_made_again_from_its_settings_and_not_over_itself(folder, capsys):
    line = f"{SMALL} --mode single --run-dir first"
    assert run("clm", line) == 0
    assert run("clm", line) == 2
    assert "first holds this run already, DONE; type another --run-dir, or --overwrite" in capsys.readouterr().err
    assert run("clm", "--cache-dir cache --config first/settings.yaml") == 0
    path, again = the_only_run()
    first = json.loads(Path("first/summary.json").read_text())
    assert again["parameters_sha256"] == first["parameters_sha256"]
    assert "next   python -m analysis.compare runs" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run("clm", f"--config {path}/settings.yaml --print-config")
    printed = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load((path / "settings.yaml").read_text())
    assert printed.items() >= written.items()


@pytest.mark.processes
@pytest.mark.parametrize("flags", ["--mode sync --nproc 2", "--mode async --nproc 2"])
def test_perplexity_falls_with_two_workers_and_the_model_loads(flags, folder):
    assert run("clm", f"{SMALL} --samples 240 {flags}") == 0
    path, summary = the_only_run()
    perplexities = [
        json.loads(line)["metrics"]["perplexity"]
        for line in (path / "events.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "evaluate"
    ]
    # With two workers the order of arrivals is the machine's, and of two late evaluations either may be the lower.
    assert max(perplexities[1:]) < perplexities[0] / 2
    assert perplexities[-1] < 0.7 * perplexities[0]
    assert summary["metrics"]["perplexity"] == perplexities[-1]
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert sum(p.numel() for p in model.parameters()) == summary["num_parameters"]


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_ends_a_run_with_its_model_and_a_summary(folder):
    flags = f"{SMALL} --mode async --nproc 2 --samples 100000 --evaluations 1000 --run-dir run"
    command = [sys.executable, str(EXPERIMENTS / "clm.py"), *flags.split()]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        for shown in running.stdout:
            if shown.split()[:1] == ["100"]:  # samples: the second line of the table
                break
        running.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130, errors
    assert time.monotonic() - began < 30
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "INTERRUPTED"
    assert summary["num_updates"] >= 25
    AutoModelForCausalLM.from_pretrained("run/model")
