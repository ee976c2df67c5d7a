"""Run folders that were written in schema 1 are read as if they were written today: tests/fixtures/runs_schema1."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from analysis.compare import compare, main, render
from analysis.report.__main__ import main as report
from analysis.study.run import Run, load_runs
from asyncsgd.records.events import current_summary, read_better, read_events
from experiments.replay import main as replay

FOLDER = Path(__file__).parent / "fixtures" / "runs_schema1"
PRETRAINING = ("async", "single", "virtual")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy whose settings name its own texts."""
    copy = tmp_path / "runs"
    shutil.copytree(FOLDER, copy)
    for settings in copy.glob("*/settings.yaml"):
        text = re.sub(r"^((?:eval_)?data): (.+)$", rf"\1: {copy}/\2", settings.read_text(), flags=re.MULTILINE)
        settings.write_text(text)
    return copy


@pytest.fixture
def runs(folder: Path) -> dict[str, Run]:
    loaded, problems = load_runs(folder)
    assert problems == []
    return {run.name: run for run in loaded}


def test_evaluations_are_given_metrics_and_a_weight_and_lose_the_old_keys() -> None:
    records = [record for record in read_events(FOLDER / "async" / "events.jsonl") if record["kind"] == "evaluate"]
    assert [(record["weight"], record["metrics"]) for record in records] == [
        (108, {"accuracy": 0.018518518518518517}),
        (108, {"accuracy": 0.018518518518518517}),
        (108, {"accuracy": 0.05555555555555555}),
    ]
    tuned = list(read_events(FOLDER / "finetuning" / "events.jsonl"))
    assert {tuple(record["metrics"].items()) for record in tuned} == {(("macro_f1", 1 / 6), ("accuracy", 1 / 3))}
    assert all(record["weight"] is None for record in tuned)
    assert not {"accuracy", "macro_f1", "masked_tokens"} & {key for record in [*records, *tuned] for key in record}
    assert read_better(FOLDER / "async" / "events.jsonl") == {}


def test_a_closed_form_problem_has_no_metrics_and_a_summary_of_today_stays_as_it_is() -> None:
    nothing = dict.fromkeys(("perplexity", "masked_token_accuracy", "eval_masked_tokens"))
    told = {"metrics": {}, "details": {}, "eval_weight": None}
    assert current_summary({"schema": 1, "num_samples": 3} | nothing) == {"schema": 1, "num_samples": 3} | told
    today = {"schema": 2, "metrics": {"f1": 0.5}, "details": {"confusion": [[1]]}, "accuracy": "a key of its own"}
    assert current_summary(today) == today


@pytest.mark.parametrize(
    ("name", "loss", "accuracy", "perplexity"),
    [
        ("async", 5.378659769340798, 0.05555555555555555, 216.73161034033032),
        ("single", 5.399608819573014, 0.018518518518518517, 221.31982328559047),
        ("virtual", 5.419803888709457, 0.009259259259259259, 225.83482939914344),
    ],
)
def test_pretraining_runs_load_with_the_numbers_that_they_hold(
    name: str, loss: float, accuracy: float, perplexity: float, runs: dict[str, Run]
) -> None:
    run = runs[name]
    assert (run.summary["final_eval_loss"], run.summary["eval_weight"], run.details) == (loss, 108, {})
    assert run.metrics == {"accuracy": accuracy, "perplexity": perplexity}
    assert run.primary_metric == "accuracy"
    last = run.evaluations.iloc[-1]
    assert (last["loss"], last["weight"], last["metrics.accuracy"]) == (loss, 108.0, accuracy)


def test_a_fine_tuning_run_loads_with_its_scores_and_its_confusion_matrix(runs: dict[str, Run]) -> None:
    run = runs["finetuning"]
    assert (run.metrics, run.primary_metric) == ({"macro_f1": 1 / 6, "accuracy": 1 / 3}, "macro_f1")
    assert run.details == {
        "per_class_f1": {"care": 0.0, "chores": 0.0, "trade": 0.5},
        "confusion": [[0, 0, 10], [0, 0, 10], [0, 0, 10]],
    }


def test_the_comparison_shows_them(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--out", str(tmp_path / "figures")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("± -")[1].split()[:3] for line in lines if " 1/1 " in line] == [
        ["0.0185", "221.32", "0.3"],
        ["0.0556", "216.73", "0.1"],
        ["0.0093", "225.83", "1.8"],
    ]
    assert render(compare(load_runs(folder)[0]), "text").splitlines() == lines[: lines.index("  finetuning: DONE") + 1]


def test_the_report_shows_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(folder), "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "| accuracy |" in shown
    assert "| 5.379 (n = 1) | 5.379 (n = 1; at 0.07604 s) | 0.056 (n = 1) |" in shown
    assert "| 0.167 (n = 1) | 0.333 (n = 1) |" in shown


@pytest.mark.parametrize("name", ["async", "virtual"])
def test_they_replay_to_the_same_bits_or_on_another_processor_to_a_loss_that_is_all_but_the_same(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = replay([str(folder / name), "--cache-dir", str(tmp_path / "cache")])
    shown = capsys.readouterr().out
    if code == 0:
        recorded = json.loads((folder / name / "summary.json").read_text())["parameters_sha256"]
        hashes = f"recorded   {recorded}\nreplayed   {recorded}\n"
        assert shown == f"updates    6 replayed, 6 losses compared\n{hashes}identical\n"
        return
    losses = re.search(r"the loss of dispatch \d+ at version \d+ is (\S+), the log has (\S+)\n", shown)
    assert losses is not None or "all compared losses agree, the final parameters do not" in shown, shown
    if losses is not None:
        assert float(losses[1]) == pytest.approx(float(losses[2]), rel=1e-5)
