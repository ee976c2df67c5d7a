"""experiments/speed_ladder.py: what is measured and kept, and that the notebook walks it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gallery import sentences

import speed_ladder
from analysis.ladder import NO_MEMORY, read
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError
from naive_loop import masked
from speed_ladder import QUICK, Step, Trainings, changes_of, climb, in_turns, reason_not_to, steps_of, tried

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "speed_ladder.ipynb"


def test_a_turn_has_its_sides_in_an_order_of_its_own_and_what_changes_is_refused(tmp_path):
    made = []

    def train(folder, changes, seed):
        made.append(folder)
        return {"changes": changes, "seed": seed}

    found = in_turns("x", 8, {"before": None, "after": {"batch_size": 32}}, train)
    assert found["before"] == [{"changes": None, "seed": turn} for turn in range(8)]
    assert sorted(made) == sorted(f"x/{side}/s{turn}" for side in found for turn in range(8))
    assert 0 < sum("before" in folder for folder in made[::2]) < 8
    for _ in range(2):
        speed_ladder.refuse_others(tmp_path / "settings.json", {"turns": 3, "device": "cpu"})
    with pytest.raises(UsageError, match=r"other settings \(turns\); type another --out"):
        speed_ladder.refuse_others(tmp_path / "settings.json", {"turns": 5, "device": "cpu"})


def test_a_rung_without_gain_or_without_memory_is_not_in_the_stack_of_the_next_one(tmp_path):
    """bf16 is slower, the batch is faster, micro-batches are not measured, a larger batch has no memory."""
    seen = []

    def rate(samples_per_second):
        return {"samples_per_second": samples_per_second, "loss": 1.0, "score": 1.0}

    def train(folder, changes, turn):
        if changes is None:
            return rate(10.0 + turn)
        seen.append(changes)
        size = changes.get("batch_size", 16)
        if size == 64:
            raise RunError(f"a training ended FAILED: {OUT_OF_MEMORY}")
        return rate(100 * (1 + 0.01 * turn) * (0.5 if "precision" in changes else 1.0) * size / 16)

    steps = [
        Step("library", "L", {}),
        Step("bf16", "A", {"precision": "bf16"}),
        Step("parts", "B", {"micro_batches": 2}),
        Step("batch", "C", {"batch_size": 32}),
        Step("larger", "D", {"batch_size": 64}),
    ]
    kept, rungs = climb("task", train, steps, 3, lambda step: "not here" if step.box == "B" else "", tmp_path)
    assert changes_of(kept) == {"batch_size": 32}
    assert [rung["reason"] for rung in rungs] == ["", "", "not here", "", NO_MEMORY]
    assert [len(rung["before"]) for rung in rungs] == [3, 3, 0, 3, 0]
    assert {"batch_size": 32, "precision": "bf16"} not in seen


def test_the_stacks_of_the_proof_begin_with_what_leaves_updates_as_they_were():
    kept = [
        Step("library", "", {}),
        Step("lengths", "", {"sampling": "group_by_length"}, False),
        Step("bf16", "", {"precision": "bf16"}),
        Step("async", "", {"workers": "async"}, False),
    ]
    names = [[step.name for step in steps] for steps in tried(kept)]
    safe = ["library", "bf16"]
    assert names == [safe, [*safe, "lengths"], [*safe, "lengths", "async"]]


def test_a_rung_is_left_out_with_a_reason(capsys):
    *_, last = steps = steps_of("classification", "cpu")
    assert reason_not_to(steps[1], "cpu", QUICK, [steps[1].box]) == "left out by --leave-out"
    assert reason_not_to(steps[1], "cpu", QUICK, []) == ""
    assert reason_not_to(last, "cpu", speed_ladder.FULL, []) == ""
    assert "too long for --quick" in reason_not_to(last, "cpu", QUICK, [])
    assert speed_ladder.main(["--margin", "0"]) == 2
    assert "--margin must be a number above 0" in capsys.readouterr().err


def test_the_naive_loop_predicts_15_of_100_words_and_no_special_ones():
    class Words:
        all_special_ids = (0, 1, 4)
        mask_token_id = 4

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
    train = Trainings.train

    def interrupted(trainings, folder, changes, seed):
        if folder.startswith("masked_lm") and changes is not None:
            raise KeyboardInterrupt
        return train(trainings, folder, changes, seed)

    monkeypatch.setattr(Trainings, "train", interrupted)
    assert speed_ladder.main(words) == 130
    monkeypatch.setattr(Trainings, "train", train)
    before = {file: file.stat().st_mtime_ns for file in Path("out/classification").rglob("summary.json")}
    assert before
    assert speed_ladder.main(words) == 0
    assert before == {file: file.stat().st_mtime_ns for file in Path("out/classification").rglob("summary.json")}
    printed = capsys.readouterr().out
    found = read(Path("out"))
    assert [ladder.given["task"] for ladder in found.ladders] == ["classification", "masked_lm"]
    for ladder in found.ladders:
        for told in ladder.not_compared:
            assert ": seconds of " in told
            assert "other programs used" in told
        assert [*ladder.rungs["name"]] == [step.name for step in steps_of(ladder.given["task"], "cpu")]
        left_out = ladder.rungs[ladder.rungs["box"] == "Mixed precision"]
        assert [*left_out["reason"]] == ["left out by --leave-out"]
        assert (ladder.rungs["reason"][ladder.rungs["word"] == "not measured"] != "").all()
        assert len(ladder.naive) == 2
        assert len(ladder.final.trainings) == 2
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
