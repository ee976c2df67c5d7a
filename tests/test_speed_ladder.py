"""experiments/speed_ladder.py: what is measured and kept, and that the notebook walks it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from gallery import sentences
from hypothesis import given
from hypothesis import strategies as st

import speed_ladder
from analysis.ladder import NO_MEMORY, read
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError
from speed_ladder import FULL, QUICK, Step, changes_of, climb, in_turns, kept_in, masked, reason_not_to, steps_of, tried
from speed_ladder_trainings import Meter, Subject

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "speed_ladder.ipynb"


@given(stop=st.integers(0, 11))
def test_a_ladder_that_was_interrupted_goes_on_with_the_turn_that_it_was_cut_in(stop):
    """12 trainings, two a turn; whatever was cut, each whole turn is measured once and its numbers stay."""
    calls = 0

    def measure(turn):
        nonlocal calls
        if calls == stop:
            calls = 100
            raise KeyboardInterrupt
        calls += 1
        return {"number": calls}

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "parts.json")
        with pytest.raises(KeyboardInterrupt):
            in_turns("x", 6, [measure, measure], kept_in(file, {"turns": 6}))
        first, second = in_turns("x", 6, [measure, measure], kept_in(file, {"turns": 6}))
        numbers = [sorted((a["number"], b["number"])) for a, b in zip(first, second, strict=True)]
        whole = stop // 2
        assert numbers[:whole] == [[2 * turn + 1, 2 * turn + 2] for turn in range(whole)]
        assert numbers[whole:] == [[101 + 2 * turn, 102 + 2 * turn] for turn in range(6 - whole)]
        kept_in(file, {"turns": 6})("y", lambda: [{}])
        with pytest.raises(UsageError, match=r"other settings \(turns\); type another --out"):
            kept_in(file, {"turns": 5})


def test_a_rung_without_gain_or_without_memory_is_not_in_the_stack_of_the_next_one():
    """bf16 is slower, the batch is faster, micro-batches are not measured, a larger batch has no memory."""
    seen = []

    def rate(samples_per_second):
        return {"samples_per_second": samples_per_second, "loss": 1.0, "score": 1.0}

    def train(changes, turn):
        seen.append(changes)
        size = changes.get("batch_size", 16)
        if size == 64:
            raise RunError(f"a training ended FAILED: {OUT_OF_MEMORY}")
        return rate(100 * (1 + 0.01 * turn) * (0.5 if "precision" in changes else 1.0) * size / 16)

    steps = [
        Step("library", "L", "", {}),
        Step("bf16", "A", "", {"precision": "bf16"}),
        Step("parts", "B", "", {"micro_batches": 2}),
        Step("batch", "C", "", {"batch_size": 32}),
        Step("larger", "D", "", {"batch_size": 64}),
    ]
    kept, rungs = climb(
        lambda turn: rate(10.0 + turn),
        train,
        steps,
        3,
        lambda step: "not here" if step.box == "B" else "",
        lambda name, measure: measure(),
    )
    assert changes_of(kept) == {"batch_size": 32}
    assert [rung["reason"] for rung in rungs] == ["", "", "not here", "", NO_MEMORY]
    assert [len(rung["before"]) for rung in rungs] == [3, 3, 0, 3, 0]
    assert [one for one in seen if one not in ({}, {"batch_size": 64})] == [
        *[{"precision": "bf16"}] * 3,
        *[{"batch_size": 32}] * len([one for one in seen if one == {"batch_size": 32}]),
    ]


def test_the_stacks_of_the_proof_begin_with_what_leaves_updates_as_they_were():
    kept = [
        Step("library", "", "", {}),
        Step("lengths", "", "", {"sampling": "group_by_length"}, False),
        Step("bf16", "", "", {"precision": "bf16"}),
        Step("async", "", "", {"workers": "async"}, False),
    ]
    names = [[step.name for step in steps] for steps in tried(kept)]
    safe = ["library", "bf16"]
    assert names == [safe, [*safe, "lengths"], [*safe, "lengths", "async"]]


def test_a_rung_is_left_out_with_a_reason(capsys):
    *_, last = steps = steps_of("classification", "cpu")
    assert reason_not_to(steps[1], "cpu", QUICK, [steps[1].box]) == "left out by --leave-out"
    assert reason_not_to(steps[1], "cpu", QUICK, []) == reason_not_to(last, "cpu", FULL, []) == ""
    assert "too long for --quick" in reason_not_to(last, "cpu", QUICK, [])
    assert speed_ladder.main(["--margin", "0"]) == 2
    assert "--margin must be a number above 0" in capsys.readouterr().err


def test_rates_are_those_after_the_warm_up():
    meter = Meter(16, 32, "cpu")
    for samples, seconds in ((8, 5.0), (16, 10.0), (32, 11.0), (48, 14.0), (64, 100.0)):
        meter.arrived(samples, seconds)
    found = meter.found(2.0, 0.5, (7, 0))
    assert found["samples_per_second"] == 32 / 4.0
    assert (found["warmup_seconds"], found["loss"], found["score"], found["memory_bytes"]) == (10.0, 2.0, 0.5, 7)


def test_the_naive_loop_predicts_15_of_100_words_and_no_special_ones():
    class Words:
        all_special_ids, mask_token_id = (0, 1, 4), 4

        def __len__(self):
            return 100

    input_ids = torch.randint(5, 100, (64, 200), generator=torch.Generator().manual_seed(0))
    input_ids[:, 100:] = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        changed, labels = masked(input_ids, Words())
    chosen = labels != -100
    assert not chosen[:, 100:].any()
    assert chosen[:, :100].float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(labels[chosen], input_ids[chosen])
    assert torch.equal(changed[~chosen], input_ids[~chosen])
    assert (changed[chosen] == 4).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (changed[chosen] == input_ids[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.02)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(sentences(120, seed=0))
    return str(tmp_path / "text.txt")


@pytest.mark.slow
@pytest.mark.processes
def test_a_small_ladder_of_both_tasks_is_measured_and_reported(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    small = QUICK._replace(turns=2, climb_samples=32, warmup=16, eval_samples=16)
    monkeypatch.setattr("speed_ladder.QUICK", small._replace(proof_samples=dict.fromkeys(QUICK.proof_samples, 64)))
    rows = [f"{line},{'AB'[number % 2]}" for number, line in enumerate(sentences(120, seed=1).splitlines())]
    Path("labelled").mkdir()
    for side, part in (("train", rows[:90]), ("test", rows[90:])):
        Path("labelled", f"{side}.csv").write_text("\n".join(["text,label", *part]))
    words = ["--quick", "--out", "out", "--device", "cpu", "--cache-dir", "cache"]
    words += ["--classification-data", "labelled", "--masked-lm-data", text, "--leave-out", "Mixed precision"]
    for box in ("Gradient checkpointing", "Loaders, pinned memory", "Gradient accumulation"):
        words += ["--leave-out", box]
    train = Subject.train

    def interrupted(subject, *arguments):
        if subject.name == "masked_lm":
            raise KeyboardInterrupt
        return train(subject, *arguments)

    monkeypatch.setattr(Subject, "train", interrupted)
    assert speed_ladder.main(words) == 130
    monkeypatch.setattr(Subject, "train", train)
    before = json.loads(Path("out/parts.json").read_text())["turns"]
    assert {turn.partition(":")[0] for turn in before} == {"classification"}
    assert speed_ladder.main(words) == 0
    printed = capsys.readouterr().out
    found = read(Path("out"))
    after = json.loads(Path("out/parts.json").read_text())["turns"]
    assert {turn: after[turn] for turn in before} == before
    assert [ladder.given["task"] for ladder in found.ladders] == ["classification", "masked_lm"]
    for ladder in found.ladders:
        assert [*ladder.rungs["name"]] == [step.name for step in steps_of(ladder.given["task"], "cpu")]
        left_out = ladder.rungs[ladder.rungs["box"] == "Mixed precision"]
        assert [*left_out["reason"]] == ["left out by --leave-out"]
        assert (ladder.rungs["reason"][ladder.rungs["word"] == "not measured"] != "").all()
        assert len(ladder.naive) == len(ladder.final.trainings) == 2
        assert ladder.final is ladder.stacks[-1]
        assert ladder.final.word == "too few seeds"
    for part in (
        "TRAINING SPEED COMPARISON",
        "Theoretical speed-up",
        "no claim, 2 seeds are too few",
        "Before and after",
    ):
        assert part in printed
    assert json.loads(Path("out/ladder.json").read_text())["quick"]
    assert "Theoretical speed-up" in Path("out/report.html").read_text()
    first, *cells = notebook()  # the first cell climbs the whole quick ladder, in eight minutes
    program = "\n\n".join(["from pathlib import Path\nimport asyncsgd\nOUT = Path('out')", *cells])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TRAINING SPEED COMPARISON" in done.stdout
    (flags,) = re.findall(r"^FLAGS = (.*)$", first, re.MULTILINE)
    assert speed_ladder.parser().parse_args([*ast.literal_eval(flags), "--out", "out"]).quick


def notebook():
    """The code cells."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    for cell in code:
        compile("".join(cell["source"]), NOTEBOOK.name, "exec")
