"""The comparison of ways to spread a training: a study of few runs, and what its report says."""

import json
import math
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from gallery import sentences
from tasks import Plane

from analysis.parallelism import main as report
from analysis.stats import Interval
from analysis.ways import above_never_answering, f1_curve, scores_of
from asyncsgd.records.events import read_events
from asyncsgd.worker.worker import Loss, OnAllGPUs
from parallelism import main


def ways(*rows):
    """Of a model, with their name, F1 and its curve."""
    one = {"model": "bert", "silent": 0.5, "samples": 320, "loss": score(2.25), "seconds": score(90.0)}
    one |= {"answerable": score(0.3), "best_f1": math.nan, "oversubscribed": False, "bytes_per_sample": 1.0}
    made = []
    for name, f1, curve in rows:
        made.append(one | {"name": name, "metrics": {"f1": score(f1)}, "curve": [*curve, (320, f1)]})
    return pandas.DataFrame(made)


def score(value):
    return Interval(value, math.nan, math.nan, 0.95, 1)


def test_what_silence_scores_is_said_beside_the_scores():
    for f1, above in ((0.53, "async"), (0.52, "none")):
        (said,) = above_never_answering(ways(("single", 0.52, ()), ("async", f1, ())))
        assert said == f"bert: a model that never answers has F1 0.500; 3 points or more above it: {above}."


def test_the_scores_stand_beside_the_loss_and_the_seconds():
    table = scores_of(ways(("DDP 2", 0.45, ()))).frame
    assert list(table) == ["model", "way", "f1", "HasAns f1", "loss", "seconds"]
    assert [one.estimate for one in table.loc[0, "f1":]] == [0.45, 0.3, 2.25, 90.0]


def test_a_curve_of_f1_has_the_places_where_all_runs_were_evaluated():
    rows = [("a", 0, 0.5), ("a", 80, 0.4), ("b", 0, 0.6), ("b", 80, None), ("b", 96, 0.5)]
    curves = pandas.DataFrame(rows, columns=["run", "samples", "metric.f1"])
    assert f1_curve(curves) == [(0, pytest.approx(0.55))]


def test_a_data_parallel_batch_without_gpus_is_the_bare_loss():
    task = Plane()
    model = task.model(0)
    batch = task.data(0).batch(0, 0)
    assert torch.equal(OnAllGPUs(Loss(task, model))(batch), Loss(task, model)(batch))


BASE = {"data": "pydocs", "vocab_size": 512, "seq_len": 32, "batch_size": 8, "samples": 80, "evaluations": 2}
CONFIG = {
    "name": "few",
    "base": BASE | {"eval_samples": 40, "warmup": 0, "schedule": "constant", "clip_norm": 0},
    "models": {"tiny": {"task": "masked_lm", "model": "tiny"}},
    "comparisons": {
        "parallel": {
            "reference": "single",
            "margin": 0.1,
            "arms": {
                "single": {"mode": "single", "data_parallel": True},
                "pipeline 2": {"mode": "pipeline", "nproc": 2, "micro_batches": 4},
                "DeepSpeed 2": {
                    "mode": "pipeline",
                    "nproc": 2,
                    "micro_batches": 4,
                    "pipeline_schedule": "deepspeed",
                },
            },
        }
    },
}


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Run the script in a new folder with a config."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def run(config, *flags):
        Path("few.yaml").write_text(yaml.safe_dump(config))
        monkeypatch.setattr("sys.argv", ["parallelism.py", "few.yaml", *flags])
        return main()

    return run


def test_models_and_data_are_looked_for_before_the_first_run_and_all_that_is_missing_is_said_at_once(typed, capsys):
    models = {**CONFIG["models"], "other": {"task": "masked_lm", "model": "base/nobody"}}
    config = {**CONFIG, "models": models, "base": {"data": "nowhere.txt", "samples": 80, "batch_size": 8}}
    nobody = "--model base/nobody: here is no such folder, and the Hub does not give a model of that name"
    assert typed(config) == 2
    message = capsys.readouterr().err
    assert "few cannot be run here, and no run was started:" in message
    assert "there is no file or folder 'nowhere.txt'; --data takes" in message
    assert nobody in message
    Path("nowhere.txt").write_text(sentences(20, seed=0))
    assert typed(config) == 2
    message = capsys.readouterr().err
    assert "nowhere" not in message
    assert nobody in message
    assert sorted(map(str, Path().iterdir())) == ["few.yaml", "nowhere.txt"]


@pytest.mark.slow
def test_a_report_of_few_runs(typed, capsys):
    assert typed(CONFIG) == 0
    said = capsys.readouterr().out
    absent = "DeepSpeed 2/s0 is left out: DeepSpeed is not installed" in said
    first, *others = sorted(Path("runs/few").glob("*/*/*/s*/summary.json"))
    ages = [path.stat().st_mtime_ns for path in others]
    first.unlink()
    assert typed(CONFIG) == 0  # it goes on
    assert first.exists()
    assert [path.stat().st_mtime_ns for path in others] == ages
    assert report(["runs/few", "--out", "report.html", "--json", "report.json"]) == 0
    found = {}
    for way in json.loads(Path("report.json").read_text())["ways"]:
        found[way["name"]] = way
    expected = {"single", "pipeline 2"}
    if not absent:
        expected.add("DeepSpeed 2")
    assert set(found) == expected
    assert found["pipeline 2"]["formula"] == pytest.approx(1 / 5)
    assert 0 < found["pipeline 2"]["bubble"] < 1
    assert found["single"]["bytes_per_sample"] == 0
    assert found["single"]["samples_to_target"] == 1
    # A batch of 8 makes 4 micro-batches; both stages send hidden states once, and the tied embedding.
    events = read_events(Path("runs/few/parallel/tiny/pipeline 2/s0/events.jsonl"))
    sent = 0
    for event in events:
        if event["kind"] == "stages":
            sent += sum(bytes_sent for *_, bytes_sent in event["stages"])
    assert found["pipeline 2"]["bytes_per_sample"] == pytest.approx(sent / 80)
    assert "kB sent a sample" in Path("report.html").read_text()
    assert report(["runs/few"]) == 0
    assert "(p-1)/(m+p-1)" in capsys.readouterr().out
