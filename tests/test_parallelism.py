"""The comparison of ways to spread a training: its configs, its bubbles, and what its report says."""

import json
import math
import os
import signal
from pathlib import Path

import pandas
import pytest
import torch
from gallery import sentences

from analysis.parallelism import about_silence, f1_curve, more_tables, read_bubbles
from analysis.parallelism import main as report
from analysis.stats import Interval
from asyncsgd.signals import StopRequest
from asyncsgd.study.comparisons import jobs_of, planned
from asyncsgd.study.config import read_config
from asyncsgd.tasks.questions import load_questions
from parallelism import EqualStages, bubble, lacks, main, measure_bubbles, write_planted

CONFIGS = Path(__file__).resolve().parents[1] / "experiments" / "configs"


@pytest.mark.parametrize("path", [*CONFIGS.glob("parallelism*"), *CONFIGS.glob("language*"), *CONFIGS.glob("squad*")])
def test_every_run_of_the_configs_has_valid_settings_and_a_folder_of_its_own(path):
    jobs = jobs_of(read_config(path))
    assert jobs == jobs_of(read_config(path))
    assert all(job.settings for job in jobs)
    assert len({job.folder for job in jobs}) == len(jobs)


def test_planted_answers_are_behind_the_marker(tmp_path):
    write_planted(tmp_path / "planted")
    data = load_questions(str(tmp_path / "planted")).questions
    assert (len(data["train"]), len(data["eval"])) == (2000, 300)
    for question in data["eval"]:
        words = question.context.split()
        assert question.answers == ((words[words.index("key") + 1],) if "key" in words else ())


def ways(*rows):
    """Of a model, with their name, F1 and its curve."""
    one = {"model": "bert", "silent": 0.5, "samples": 320, "loss": score(2.25), "seconds": score(90.0)}
    one |= {"answerable": score(0.3), "best_f1": math.nan, "oversubscribed": False, "bytes_per_sample": 1.0}
    return pandas.DataFrame(
        one | {"name": name, "metrics": {"f1": score(f1)}, "curve": [*curve, (320, f1)]} for name, f1, curve in rows
    )


def score(value):
    return Interval(value, math.nan, math.nan, 0.95, 1)


def test_what_silence_scores_is_said_beside_the_scores():
    assert about_silence(ways(("single", 0.52, ()), ("async", 0.53, ()))) == [
        "bert: a model that never answers has F1 0.500; 3 points or more above it: async.",
    ]
    (said,) = about_silence(ways(("single", 0.52, ())))
    assert "After 320 samples none has learned where answers begin." in said
    assert said.endswith(
        "single: its F1 does not rise over its last evaluations, so they do not say how much is missing."
    )
    rising = ((0, 0.5), (80, 0.46), (160, 0.48))  # .02 with every doubling, and .03 are missing
    (said,) = about_silence(ways(("single", 0.5, rising)))
    assert said.endswith("single: about 905 samples, 2.8 times as many, if F1 rises on as it does.")
    (said,) = about_silence(ways(("single", 0.5, ((40, 0.4), (80, 0.45), (160, 0.4999)))))
    assert said.endswith("single: more than 1000 times as many samples, its F1 hardly rises.")


def test_the_scores_stand_beside_the_loss_and_the_seconds():
    headings = ("processes", "bubble", "formula", "exchange", "samples_to_target", "reached")
    found = ways(("DDP 2", 0.45, ())).assign(**dict.fromkeys(headings, 1.0))
    _, table, _ = more_tables(found, pandas.DataFrame())["scores"]
    assert list(table) == ["model", "way", "f1", "HasAns f1", "loss", "seconds"]
    assert [one.estimate for one in table.loc[0, "f1":]] == [0.45, 0.3, 2.25, 90.0]


def test_a_curve_of_f1_has_the_places_where_all_runs_were_evaluated():
    rows = [("a", 0, 0.5), ("a", 80, 0.4), ("b", 0, 0.6), ("b", 80, None), ("b", 96, 0.5)]
    curves = pandas.DataFrame(rows, columns=["run", "samples", "metric.f1"])
    assert f1_curve(curves) == [(0, pytest.approx(0.55))]


@pytest.mark.slow
def test_the_bubble_of_stages_that_sleep_is_that_of_the_formula(tmp_path):
    """At least it: a wait can be longer on a busy machine, never shorter."""
    task = EqualStages(batch_size=8, num_blocks=2)
    assert bubble(task, "1f1b", 4, tmp_path / "run") > 1 / (4 + 1) - 0.02


def test_a_bubble_that_was_interrupted_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr("parallelism.bubble", lambda *given: os.kill(os.getpid(), signal.SIGTERM) or 0.5)
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        measure_bubbles(tmp_path, (4,), stop)
    assert read_bubbles(tmp_path).empty


CONFIG = """
name: few
base: {data: pydocs, vocab_size: 512, seq_len: 32, batch_size: 8, samples: 80, evaluations: 2, eval_samples: 40,
       warmup: 0, learning_rate: 1.0e-3, schedule: constant, clip_norm: 0}
models:
  tiny: {task: masked_lm, model: tiny}
seeds: [0]
comparisons:
  parallel:
    reference: single
    margin: 0.1
    arms:
      single: {mode: single, data_parallel: true}
      pipeline 2: {mode: pipeline, nproc: 2, micro_batches: 4}
      async 2: {mode: async, nproc: 2}
      DeepSpeed 2: {mode: pipeline, nproc: 2, micro_batches: 4, pipeline_schedule: deepspeed}
"""


def test_models_and_data_are_looked_for_before_the_first_run_and_all_that_is_missing_is_said_at_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    config = CONFIG.replace("data: pydocs, vocab_size: 512", "data: nowhere.txt").replace(
        "models:\n", "models:\n  other: {task: masked_lm, model: base/nobody}\n"
    )
    Path("few.yaml").write_text(config)
    monkeypatch.setattr("sys.argv", ["parallelism.py", "few.yaml", "--bubbles"])
    assert main() == 2
    message = capsys.readouterr().err
    assert "few.yaml cannot be run here, and no run was started:" in message
    assert "there is no file or folder 'nowhere.txt'; --data takes" in message
    assert "--model base/nobody: here is no such folder, and the Hub does not give a model of that name" in message
    assert "the first lines of few.yaml say where its models and data come from" in message
    Path("nowhere.txt").write_text(sentences(20, seed=0))
    assert main() == 2
    message = capsys.readouterr().err
    assert "nowhere" not in message
    assert "base/nobody" in message
    assert list(tmp_path.iterdir()) == [tmp_path / "few.yaml", tmp_path / "nowhere.txt"]


def test_runs_go_into_a_folder_with_the_name_in_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(CONFIG)
    out, jobs = planned(Path("file.yaml"), None)
    assert (out, len(jobs)) == (Path("runs/few"), 4)
    assert Path("runs/few/config.yaml").read_text() == CONFIG


@pytest.mark.slow
def test_a_report_of_few_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "few.yaml").write_text(CONFIG)
    monkeypatch.setattr("sys.argv", ["parallelism.py", str(tmp_path / "few.yaml"), "--out", str(tmp_path / "runs")])
    assert main() == 0
    said = capsys.readouterr().out
    left_out = [job for job in jobs_of(read_config(tmp_path / "few.yaml")) if lacks(job)]
    assert all(job.folder in said for job in left_out)
    rows = [
        {
            "stages": 2,
            "schedule": "1f1b",
            "micro_batches": m,
            "sleeps": True,
            "measured": 1.1 / m,
            "formula": 1 / (m + 1),
        }
        for m in (4, 8)
    ]
    (tmp_path / "runs" / "bubbles.json").write_text(json.dumps({"bubbles": rows}))
    assert [*read_bubbles(tmp_path / "runs")["measured"]] == [1.1 / 4, 1.1 / 8]
    out = tmp_path / "report.html"
    assert report([str(tmp_path / "runs"), "--out", str(out), "--json", str(tmp_path / "report.json")]) == 0
    numbers = json.loads((tmp_path / "report.json").read_text())
    ways = {way["name"]: way for way in numbers["ways"]}
    assert set(ways) == {"single", "pipeline 2", "async 2", "DeepSpeed 2"} - ({"DeepSpeed 2"} if left_out else set())
    assert ways["pipeline 2"]["formula"] == pytest.approx(1 / 5)
    assert 0 < ways["pipeline 2"]["bubble"] < 1
    assert ways["single"]["bytes_per_sample"] == 0
    assert ways["single"]["samples_to_target"] == 1
    # A batch of 8 makes 4 micro-batches; both stages send hidden states once, and the tied embedding.
    events = [json.loads(line) for line in next((tmp_path / "runs").glob("*/*/pipeline 2/s0/events.jsonl")).open()]
    sent = sum(row[5] for event in events if event["kind"] == "stages" for row in event["stages"])
    assert ways["pipeline 2"]["bytes_per_sample"] == pytest.approx(sent / 80)
    page = out.read_text()
    assert "kB sent a sample" in page
    assert "Bubbles" in page
    assert report([str(tmp_path / "runs")]) == 0
    assert "(p-1)/(m+p-1)" in capsys.readouterr().out


def test_a_data_parallel_batch_without_gpus_is_the_bare_loss():
    from asyncsgd.worker import Loss, OnAllGPUs

    task = EqualStages(batch_size=4)
    model, batch = task.model(0), task.data(0).batch(0, 0)
    assert torch.equal(OnAllGPUs(Loss(task, model))(batch), Loss(task, model)(batch))
