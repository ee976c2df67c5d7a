"""The timeline of a run: where spans lie, what the trace holds, and what is refused."""

import json

import pytest

import timeline
from asyncsgd.records.events import Evaluation, Event
from asyncsgd.records.run_folder import RunFolder


def arrival(worker, train_seconds, **seconds):
    return Event(
        dispatch=0,
        worker=worker,
        batches=((0, 0, 1),),
        read_version=0,
        version=1,
        arrival_delay=0,
        outcome="applied",
        uses=((0, 0),),
        drops=(),
        abandoned=(),
        started=(),
        loss=1.0,
        weight=1.0,
        num_samples=1,
        learning_rate=0.1,
        train_seconds=train_seconds,
        total_samples=1,
        **seconds,
    )


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.append(arrival(1, 10.0, wait_seconds=1.0, pull_seconds=0.5, compute_seconds=4.0, apply_seconds=0.25))
    folder.append(Evaluation(1, 1, 10.0, 5.0, 10.0, {}, 2.0))
    folder.append(arrival(0, 12.0, compute_seconds=8.0, push_seconds=1.0))
    folder.close()
    return folder.path


def test_spans_lie_backwards_from_the_arrival_and_the_step_after_it(run):
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][1:]
    assert [span[:4] for span in timeline.spans_of(records)] == [
        ("server", "apply", 9.75, 0.25),
        ("worker 1", "compute", 5.75, 4.0),
        ("worker 1", "pull", 5.25, 0.5),
        ("worker 1", "wait", 4.25, 1.0),
        ("server", "evaluate", 10.0, 0.0),
        ("server", "apply", 12.0, 0.0),
        ("worker 0", "push", 11.0, 1.0),
        ("worker 0", "compute", 3.0, 8.0),
    ]


def test_the_trace_has_a_named_row_each_and_times_in_microseconds(run):
    assert timeline.main([str(run)]) == 0
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(rows.values()) == ["server", "worker 0", "worker 1"]
    compute = next(event for event in events if event["name"] == "compute" and rows[event["tid"]] == "worker 0")
    assert (compute["ph"], compute["ts"], compute["dur"]) == ("X", 3e6, 8e6)
    assert [event["ph"] for event in events if event["name"] == "evaluate"] == ["i"]
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seconds", "0"], "--seconds must be more than 0, got 0"),
        (["--begin", "99"], "--begin 99 is outside the run, which trained for 12.0 seconds"),
    ],
)
def test_a_window_outside_the_run_is_refused(flags, said, run, capsys):
    assert timeline.main([str(run), *flags]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_folder_without_a_log_is_refused(tmp_path, capsys):
    assert timeline.main([str(tmp_path)]) == 2
    assert "holds no event log that can be read" in capsys.readouterr().err
