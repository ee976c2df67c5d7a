"""Run folders written by the library itself load completely; damaged ones load as far as they go, with a message."""

import dataclasses

import pytest

from analysis.study.run import EVALUATION_COLUMNS, Condition, labels, load_runs
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DIVERGED, DONE, SCHEMA, Evaluation, Fault, Membership
from asyncsgd.records.run_folder import RunFolder

SUMMARY = {
    "status": DONE,
    "mode": "async",
    "rule": "asynchronous",
    "from_scratch": True,
    "num_workers": 4,
    "threads": 1,
    "seed": 0,
    "batch_size": 8,
    "data_fingerprint": "f00d",
    "num_samples": 160,
    "num_samples_applied": 160,
    "num_updates": 20,
    "train_seconds": 8.0,
    "eval_seconds": 0.5,
    "first_eval_loss": 9.0,
    "final_eval_loss": 5.0,
    "metrics": {"accuracy": 0.25, "perplexity": 148.4},
    "details": {},
    "eval_weight": 300.0,
    "samples_per_second": 20.0,
    "delay": {"mean": 3.0, "p50": 3.0, "p95": 4.0, "max": 6},
    "oversubscription": 1.0,
    "clock": "measured",
    "parameters_sha256": "00",
}
EVALUATIONS = (
    Evaluation(0, 0, 0.0, 9.0, 300.0, {"accuracy": 0.0}, 0.25),
    Evaluation(10, 80, 4.0, 6.0, 300.0, {"accuracy": 0.125}, 0.25),
    Evaluation(20, 160, 8.0, 5.0, 300.0, {"accuracy": 0.25}, 0.25),
)


def write_run(path, *, records=EVALUATIONS, summary=SUMMARY):
    better = {} if summary is None else dict.fromkeys(summary["metrics"], "higher")
    folder = RunFolder(path, task="some_task", better=better)
    for record in records:
        folder.append(record)
    if summary is not None:
        folder.write_summary(summary)
    folder.close()
    return path


def only_run(folder):
    (run,), messages = load_runs(folder)
    assert messages == [f"{run.name}: {problem}" for problem in run.problems]
    return run


def test_a_finished_run_loads_completely_and_without_a_problem(tmp_path):
    path = write_run(tmp_path / "a")
    run = only_run(tmp_path)
    assert (run.path, run.name, run.problems) == (path, "a", ())
    assert run.summary == {"schema": SCHEMA, **SUMMARY}
    assert run.done
    assert not run.oversubscribed
    assert run.condition == Condition("async", "asynchronous", 4, 8)
    assert {column: str(dtype) for column, dtype in run.evaluations.dtypes.items()} == EVALUATION_COLUMNS | {
        "metrics.accuracy": "float64",
        "metrics.perplexity": "float64",
    }
    expected = [{key: vars(evaluation)[key] for key in EVALUATION_COLUMNS} for evaluation in EVALUATIONS]
    assert run.evaluations[list(EVALUATION_COLUMNS)].to_dict("records") == expected
    assert list(run.evaluations["metrics.accuracy"]) == [0.0, 0.125, 0.25]
    assert run.evaluations["metrics.perplexity"].isna().all()
    assert (run.metrics, run.primary_metric) == (SUMMARY["metrics"], "accuracy")


def test_runs_are_found_at_any_depth_and_sorted_by_name(tmp_path):
    for name in ("b", "sweep/z", "a"):
        write_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    runs, messages = load_runs(str(tmp_path))
    assert [run.name for run in runs] == ["a", "b", "sweep/z"]
    assert messages == []


def test_what_was_predicted_of_a_run_is_no_run_of_its_own_unless_it_is_named(tmp_path):
    # python -m asyncsgd predict puts the first two there; the others are runs that somebody has kept so
    for name in ("a", "a/predicted-1", "a/predicted-2", "a/tuned", "predicted-1", "a/predicted-1-again"):
        write_run(tmp_path / name)
    runs, messages = load_runs(tmp_path)
    assert [run.name for run in runs] == ["a", "a/predicted-1-again", "a/tuned", "predicted-1"]
    assert messages == []
    assert only_run(tmp_path / "a" / "predicted-1").name == "predicted-1"


def test_a_run_folder_itself_can_be_loaded(tmp_path):
    write_run(tmp_path / "one")
    assert only_run(tmp_path / "one").name == "one"


@pytest.mark.parametrize("name", ["missing", "empty", "file"])
def test_a_folder_without_runs_is_a_usage_error_that_says_how_to_make_one(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"python experiments/stilt_mlm\.py --mode async --nproc 4") as caught:
        load_runs(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_run_without_summary_is_unfinished_and_keeps_its_evaluations(tmp_path):
    write_run(tmp_path / "a", summary=None)
    run = only_run(tmp_path)
    assert run.status == "UNFINISHED"
    assert not run.done
    assert run.problems == ("no summary.json: the run crashed, was killed or is still running",)
    assert list(run.evaluations["loss"]) == [9.0, 6.0, 5.0]


def test_a_delay_may_be_missing_and_is_never_zero(tmp_path):
    write_run(tmp_path / "a", summary={**SUMMARY, "delay": None})
    write_run(tmp_path / "b", summary={**SUMMARY, "delay": {"mean": None, "max": "6"}})
    (one, two), messages = load_runs(tmp_path)
    assert one.summary["delay"] == dict.fromkeys(("mean", "p50", "p95", "max"))
    assert two.status == "UNREADABLE"
    assert messages == ["b: summary.json is damaged: its max is '6'"]


def test_a_loss_that_was_not_finite_is_missing_not_zero(tmp_path):
    diverged = (EVALUATIONS[0], dataclasses.replace(EVALUATIONS[1], loss=float("nan")))
    write_run(tmp_path / "a", records=diverged, summary={**SUMMARY, "status": DIVERGED, "final_eval_loss": None})
    run = only_run(tmp_path)
    assert run.evaluations["loss"].isna().tolist() == [False, True]
    assert run.problems == ("the evaluation at version 10 has no finite loss",)


def test_faults_and_lost_workers_are_problems_of_a_run(tmp_path):
    fault = Fault("the loss of worker 1 is not finite", 1, 5, 2.0)
    orderly = Membership("leave", 0, 20, 160, 8.0)
    lost = Membership("leave", 2, 7, 56, 3.0, reason="killed")
    write_run(tmp_path / "a", records=(fault, *EVALUATIONS, orderly))
    write_run(tmp_path / "b", records=(fault, lost, *EVALUATIONS))
    _, messages = load_runs(tmp_path)
    assert messages == [
        "a: fault at version 5: the loss of worker 1 is not finite",
        "b: 2 faults, the last: worker 2 left at version 7: killed",
    ]


def test_a_run_without_events_keeps_its_summary(tmp_path):
    (write_run(tmp_path / "a") / "events.jsonl").unlink()
    run = only_run(tmp_path)
    assert run.done
    assert run.evaluations.empty
    assert not set(EVALUATION_COLUMNS) - set(run.evaluations.columns)
    assert run.problems == ("no events.jsonl: it has no curve in the figures",)


def test_unknown_kinds_and_keys_of_the_same_schema_are_ignored(tmp_path):
    events = write_run(tmp_path / "a", summary={**SUMMARY, "new": 1}) / "events.jsonl"
    with open(events, "a") as file:
        file.write('{"kind":"checkpoint","version":20}\n')
    assert only_run(tmp_path).problems == ()


def test_labels_name_what_tells_conditions_apart_and_nothing_else():
    plain = Condition("async", "Asynchronous", 4, 8)
    single = [Condition("single", "asynchronous", 1, 8), Condition("single", "synchronous", 1, 8)]
    hogwild = Condition("hogwild", None, 2, 8)
    assert list(labels([hogwild, plain, *single]).values()) == [
        "single (asynchronous), 1 worker",
        "single (synchronous), 1 worker",
        "async, 4 workers",
        "hogwild, 2 workers",
    ]
    assert labels([plain, dataclasses.replace(plain, batch_size=16)])[plain] == "async, 4 workers, batch 8"


def test_settings_are_read_and_damage_to_them_is_told(tmp_path):
    path = write_run(tmp_path / "a")
    assert only_run(tmp_path).settings == {}
    (path / "settings.yaml").write_text("# a comment\nlearning_rate: 0.001\nrule: null\n")
    run = only_run(tmp_path)
    assert (run.settings, run.learning_rate, run.problems) == ({"learning_rate": 0.001, "rule": None}, 0.001, ())
    (path / "settings.yaml").write_text("simulate:\n  learning_rate: 1.0e-1\n")
    assert only_run(tmp_path).learning_rate == 0.1
    (path / "settings.yaml").write_text("- 1\n")
    assert only_run(tmp_path).problems == ("settings.yaml is damaged: it holds no keys and values",)
