"""The timeline of a run: where spans lie, what the trace holds, and which runs a command finds."""

import itertools
import json
import os
import shutil

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from doors import Evaluation, RunFolder, arrival, cli

COLOURS = {"compute": "#029e73", "wait": "#dddddd", "pull": "#0173b2", "push": "#de8f05", "apply": "#cc78bc"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "first")
    parts = {"wait_seconds": 1.0, "pull_seconds": 0.5, "compute_seconds": 4.0, "apply_seconds": 0.25}
    folder.append(arrival(0, 1, train_seconds=10.0, **parts))
    folder.append(Evaluation(1, 1, 10.0, 5.0, 10.0, {}, 2.0))
    folder.append(arrival(1, 0, train_seconds=12.0, compute_seconds=8.0, push_seconds=1.0))
    folder.close()
    return folder.path


def test_a_trace_has_a_row_each_and_spans_lie_backwards_from_an_arrival_in_microseconds(run):
    assert cli("analysis.timeline runs/first").code == 0
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    rows = {}
    for event in events:
        if event["ph"] == "M":
            rows[event["tid"]] = event["args"]["name"]
    spans = []
    for event in events:
        if event["ph"] != "M":
            spans.append((rows[event["tid"]], event["name"], event["ts"], event.get("dur")))
    assert spans == [
        ("server", "apply", 9.75e6, 0.25e6),
        ("worker 1", "compute", 5.75e6, 4e6),
        ("worker 1", "pull", 5.25e6, 0.5e6),
        ("worker 1", "wait", 4.25e6, 1e6),
        ("server", "evaluate", 10e6, None),
        ("server", "apply", 12e6, 0.0),
        ("worker 0", "push", 11e6, 1e6),
        ("worker 0", "compute", 3e6, 8e6),
    ]
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_in_each_row_the_colours_of_what_it_did_in_their_order(run):
    assert cli("analysis.timeline runs/first --begin 0 --seconds 12").code == 0
    pixels = matplotlib.image.imread(run / "timeline.png")[:, :, :3]
    kinds = {}
    for kind, colour in COLOURS.items():
        kinds[tuple(round(255 * part) for part in matplotlib.colors.to_rgb(colour))] = kind
    seen = set()
    for line in np.round(255 * pixels).astype(int).tolist():
        in_line = [kinds[tuple(pixel)] for pixel in line if tuple(pixel) in kinds]
        seen.add(tuple(kind for kind, _ in itertools.groupby(in_line)))
    assert ("compute", "push") in seen  # worker 0
    assert ("wait", "pull", "compute") in seen  # worker 1
    assert ("apply",) in seen  # the server


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("runs/first --seconds 0", "--seconds must be more than 0, got 0"),
        ("runs/first --begin 99", "--begin 99 is outside the run, which trained for 12.0 seconds"),
        ("runs", "runs holds no run: it has no events.jsonl"),
        ("second", "second is no folder, and no run in runs/ begins so"),
        ("there/last", "there/last is no folder, and there is no run in there/ yet"),
    ],
)
def test_what_cannot_be_drawn_is_refused(line, said, run):
    ended = cli(f"analysis.timeline {line}")
    assert ended.code == 2
    assert ended.err.startswith(f"error: {said}")


def test_a_run_is_named_by_the_beginning_of_its_name_or_as_the_last(run):
    other = RunFolder(run.parent / "fist")
    other.append(arrival(0, train_seconds=1.0, compute_seconds=1.0))
    other.close()
    os.utime(run / "events.jsonl", (2e9, 2e9))
    last, bare, whole = (cli(f"analysis.timeline {name}").out for name in ("last", "fir", "runs/fir"))
    assert last == whole
    assert bare == whole
    assert last.splitlines()[0] == "runs/first/timeline.json"
    said = "error: fi is no folder, and these runs begin so: runs/fist, runs/first; type more of one\n"
    assert cli("analysis.timeline fi").err == said
    shutil.copytree(run, "runs/first-2")
    assert cli("analysis.timeline first").out == whole


@pytest.mark.parametrize("key", ["worker", "train_seconds", "apply_seconds", "pull_seconds", "dispatch"])
@pytest.mark.parametrize("value", ["seven", None, [1]])
def test_a_damaged_record_is_refused_in_one_sentence_and_leaves_no_file(run, key, value):
    lines = (run / "events.jsonl").read_text().splitlines()
    arrivals = [number for number, line in enumerate(lines) if '"arrival"' in line]
    record = json.loads(lines[arrivals[-1]])
    del record[key]
    if key != "dispatch":
        record[key] = value
    lines[arrivals[-1]] = json.dumps(record)
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    ended = cli("analysis.timeline runs/first")
    assert ended.code == 2
    assert ended.err.startswith("error: runs/first holds no event log that can be read: ")
    assert not list(run.glob("timeline.*"))
