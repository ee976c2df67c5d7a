"""Run folders that were written in schema 1 are read as if they were written today: tests/fixtures/runs_schema1."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from asyncsgd.records.events import current_summary, read_better, read_events
from experiments.replay import main as replay

FOLDER = Path(__file__).parent / "fixtures" / "runs_schema1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy whose settings name its own texts."""
    copy = tmp_path / "runs"
    shutil.copytree(FOLDER, copy)
    for settings in copy.glob("*/settings.yaml"):
        text = re.sub(r"^((?:eval_)?data): (.+)$", rf"\1: {copy}/\2", settings.read_text(), flags=re.MULTILINE)
        settings.write_text(text)
    return copy


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
