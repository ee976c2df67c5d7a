"""experiments/speed_ladder.py: what is measured and kept, and that the notebook walks it."""

from __future__ import annotations

import ast
import dataclasses
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
from asyncsgd.evaluation import Measured
from asyncsgd.tasks.masked_lm import MaskedLM
from speed_ladder import (
    FIRST,
    FULL,
    QUICK,
    Parts,
    Step,
    climb,
    in_turns,
    masked,
    parser,
    reason_not_to,
    size_of,
    stack_of,
    steps_of,
    tried,
)
from speed_ladder_trainings import DecodedEverywhere, Meter, Stack, Subject

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "speed_ladder.ipynb"


def rate(samples_per_second):
    return {
        **{"samples_per_second": samples_per_second, "warmup_seconds": 0.1, "loss": 1.0, "score": 1.0},
        **{"memory_bytes": 1, "gpu_bytes": 0, "busy_cores": None, "busy_gpu": None},
    }


def now(name, measure):
    """Keeps nothing."""
    return measure()


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
            in_turns("x", 6, [measure, measure], Parts(file, {"turns": 6}).keep)
        first, second = in_turns("x", 6, [measure, measure], Parts(file, {"turns": 6}).keep)
        numbers = [sorted((a["number"], b["number"])) for a, b in zip(first, second, strict=True)]
        whole = stop // 2
        assert numbers[:whole] == [[2 * turn + 1, 2 * turn + 2] for turn in range(whole)]
        assert numbers[whole:] == [[101 + 2 * turn, 102 + 2 * turn] for turn in range(6 - whole)]
        assert in_turns("x", 6, [measure, measure], Parts(file, {"turns": 6}).keep) == [first, second]


def test_a_ladder_goes_on_with_the_same_settings_only(tmp_path):
    file = tmp_path / "parts.json"
    Parts(file, {"turns": 3, "device": "cpu"}).keep("x", lambda: [1])
    with pytest.raises(UsageError, match=r"other settings \(turns 3 -> 5\); type another --out"):
        Parts(file, {"turns": 5, "device": "cpu"})
    file.write_text("{")
    with pytest.raises(UsageError, match=r"parts.json cannot be read .*; delete it, or type another --out"):
        Parts(file, {"turns": 3, "device": "cpu"})


def test_a_rung_without_memory_is_left_out_and_the_climb_goes_on():
    def train(stack, turn):
        if stack.batch_size == 64:
            raise RunError(f"a training ended FAILED: {OUT_OF_MEMORY}")
        return rate(100.0 + turn)

    steps = [Step("batch", "A", "", {"batch_size": 64}), Step("fused", "B", "", {"fused": True})]
    _, rungs = climb(lambda turn: rate(10.0 + turn), train, steps, 3, lambda step: "", now)
    assert [(rung["reason"], len(rung["after"])) for rung in rungs] == [("", 3), (NO_MEMORY, 0), ("", 3)]


def test_a_rung_that_does_not_pay_is_not_in_the_stack_of_the_next_one():
    """bf16 is slower, the batch is faster, micro-batches are not measured; each is tried on what was kept."""
    seen = []

    def train(stack, turn):
        seen.append(stack)
        noise = 1 + 0.01 * turn
        return rate(100 * noise * (0.5 if stack.precision == "bf16" else 1.0) * stack.batch_size / 16)

    steps = [
        Step("bf16", "A", "", {"precision": "bf16"}),
        Step("parts", "B", "", {"micro_batches": 2}),
        Step("batch", "C", "", {"batch_size": 32}),
    ]
    kept, rungs = climb(
        lambda turn: rate(10.0 + turn), train, steps, 3, lambda step: "not here" if step.box == "B" else "", now
    )
    assert stack_of(kept) == Stack(batch_size=32)
    assert [rung["reason"] for rung in rungs] == ["", "", "not here", ""]
    assert set(seen) == {Stack(), Stack(precision="bf16"), Stack(batch_size=32)}
    assert [len(rung["before"]) for rung in rungs] == [3, 3, 0, 3]


def test_the_stacks_of_the_proof_begin_with_what_leaves_updates_as_they_were():
    kept = [
        FIRST,
        Step("lengths", "", "", {"sampling": "group_by_length"}, False),
        Step("fused", "", "", {"fused": True}),
        Step("async", "", "", {"workers": "async"}, False),
    ]
    names = [[step.name for step in steps] for steps in tried(kept)]
    safe = [FIRST.name, "fused"]
    assert names == [safe, [*safe, "lengths"], [*safe, "lengths", "async"]]
    assert stack_of(tried(kept)[-1]) == Stack(sampling="group_by_length", fused=True, workers="async")
    assert tried([FIRST]) == [[FIRST]]


def test_a_rung_is_left_out_on_request():
    step = steps_of("classification", "cpu", 32)[0]
    assert reason_not_to(step, "cpu", QUICK, [step.box]) == "left out by --leave-out"
    assert reason_not_to(step, "cpu", QUICK, []) == ""
    last = steps_of("classification", "cpu", 32)[-1]
    assert "too long for --quick" in reason_not_to(last, "cpu", QUICK, [])
    assert reason_not_to(last, "cpu", FULL, []) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "1"], "--turns must be at least 2"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--margin", "0"], "--margin must be a number above 0"),
        (["--tasks", "chess"], "--tasks takes classification, masked_lm; got chess"),
        (["--leave-out", "Sleep"], "--leave-out takes .*Mixed precision.*; got Sleep"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        size_of(parser().parse_args(words))


def test_rates_are_those_after_the_warm_up():
    meter = Meter(16, 32, "cpu")
    for samples, seconds in ((8, 5.0), (16, 10.0), (32, 11.0), (48, 14.0), (64, 100.0)):
        meter.arrived(samples, seconds)
    found = meter.found(Measured(2.0), 0.5, (7, 0))
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


def test_decoding_everywhere_gives_the_same_gradient(text, tmp_path):
    few = MaskedLM(data_name=text, vocab_size=256, seq_len=32, batch_size=4).prepare(0, tmp_path / "cache")
    fields = {field.name: getattr(few, field.name) for field in dataclasses.fields(few)}
    gradients = []
    for task in (few, DecodedEverywhere(**fields)):
        model = task.model(0)
        task.loss(task.outputs(model, batch := task.data(0).batch(0, 0)), batch).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        assert len(task.outputs(model.eval(), batch)) == int(task.weight(batch))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.processes
def test_a_small_ladder_of_both_tasks_is_measured_and_reported(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    small = dataclasses.replace(QUICK, turns=2, climb_samples=32, warmup=16, eval_samples=16)
    monkeypatch.setattr(
        "speed_ladder.QUICK", dataclasses.replace(small, proof_samples=dict.fromkeys(QUICK.proof_samples, 64))
    )
    rows = [f"{line},{'AB'[number % 2]}" for number, line in enumerate(sentences(120, seed=1).splitlines())]
    Path("labelled").mkdir()
    for side, part in (("train", rows[:90]), ("test", rows[90:])):
        Path("labelled", f"{side}.csv").write_text("\n".join(["text,label", *part]))
    words = ["--quick", "--out", "out", "--device", "cpu", "--cache-dir", "cache", "--seeds", "2"]
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
        names = {step.name for step in steps_of(ladder.given["task"], "cpu", 32)}
        assert names < {*ladder.rungs["name"]}
        left_out = ladder.rungs[ladder.rungs["box"] == "Mixed precision"]
        assert [*left_out["reason"]] == ["left out by --leave-out"]
        assert (ladder.rungs["reason"][ladder.rungs["word"] == "not measured"] != "").all()
        assert len(ladder.naive) == len(ladder.final.trainings) == 2
        assert ladder.final is ladder.stacks[-1]
        assert [each["num_workers"] for each in ladder.given["expected"]] == [1, 2, 4, 8]
        assert 0.5 < ladder.given["expected"][0]["asynchronous"] / ladder.given["one_worker"] < 2.0
        assert ladder.final.word == "too few seeds"
    for part in (
        "TRAINING SPEED COMPARISON",
        "Theoretical speed-up",
        "no claim, 2 seeds are too few",
        "Before and after",
    ):
        assert part in printed
    assert json.loads(Path("out/ladder.json").read_text())["quick"]
    assert "Prediction, not a measurement" in Path("out/report.html").read_text()
    first, *cells = notebook()  # the first cell climbs the whole quick ladder, in eight minutes
    program = "\n\n".join(["from pathlib import Path\nimport asyncsgd\nOUT = Path('out')", *cells])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TRAINING SPEED COMPARISON" in done.stdout
    (flags,) = re.findall(r"^FLAGS = (.*)$", first, re.MULTILINE)
    assert parser().parse_args([*ast.literal_eval(flags), "--out", "out"]).quick


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
