"""The arithmetic of the speed ladder, on rates that were made up: which rungs are kept, and what is said of them."""

import copy
import json
import math

import pytest

from analysis.findings.speed_ladder import NO_MEMORY, PARTS, Ladders, ladder_of, read
from analysis.questions import TIMES
from analysis.report.tables.speed_ladder import block, checklist, gains, prediction, score, validation
from analysis.speed_ladder import main as report
from analysis.speed_ladder import text as text_of
from analysis.statistics.speed_up import product, speed_up

MACHINE = {
    "cores": 2,
    "cpu": "A",
    "device": "cpu",
    "devices": 2,
    "memory_bytes": 2**32,
    "versions": {"torch": "2.13.0"},
}
TURNS = range(5)
SEEDS = range(8)


def training(rate, loss=1.0, score=0.6):
    return {
        **{"samples_per_second": rate, "warmup_seconds": 0.5, "loss": loss, "score": score},
        **{"memory_bytes": 2**30, "gpu_bytes": 0, "busy_cores": 1.5, "busy_gpu": None},
    }


def rung(name, box, times, spread=0.01, loss=0.0):
    """A rung `times` as fast, up to a factor that rises and falls with the turns."""
    noise = [math.exp(spread * (-1) ** turn) for turn in TURNS]
    before = [training(10.0 + turn) for turn in TURNS]
    after = [training(each["samples_per_second"] * times * noise[k], 1.0 + loss) for k, each in enumerate(before)]
    return {"name": name, "box": box, "flags": f"--{name}", "reason": "", "before": before, "after": after}


def ladder(**changes):
    """Three rungs that pay, 4 x 2 x 1.5; one that costs, one that is noise, one that was not measured."""
    skipped = {"name": "compile", "box": "torch.compile", "flags": "--compile", "reason": "too long", "before": []}
    noise = [0.002 * (-1) ** seed for seed in SEEDS]
    found = {
        **{"task": "classification", "data": "posts", "model": "tiny", "epoch": 20_000, "climb_samples": 512},
        **{"proof_samples": 4096, "score": "macro_f1", "lower_is_better": False, "margin": 0.03},
        "score_at_start": 0.2,
        "rungs": [
            rung("padding", "Dynamic padding", 4.0),
            rung("slow", "Gradient checkpointing", 0.7),
            rung("sync", "More workers", 0.9),
            rung("async", "More workers", 2.0, loss=0.25),
            rung("noise", "Prefetch", 1.05, spread=0.3),
            skipped | {"after": []},
            rung("fused", "Fused optimizer", 1.5),
        ],
        "naive": [training(10.0, score=0.6 + noise[seed]) for seed in SEEDS],
        "stacks": [
            {
                "rungs": ["padding", "fused", *others],
                "trainings": [training(rate + seed, score=0.601 - noise[seed]) for seed in SEEDS],
            }
            for rate, others in ((50.0, []), (90.0, ["async"]))
        ],
        "expected": [{"num_workers": n, "synchronous": 90.0 * n, "asynchronous": 95.0 * n} for n in (1, 2, 4, 8)],
        "one_worker": 91.0,
        "operations": {"tiny at 256 tokens": 1e9, "tiny at 512 tokens": 2.5e9, "small at 256 tokens": 4e9},
        **{"longest": 80, "loss_margin": 0.05, "turns": len(TURNS)},
    }
    return found | changes


def test_ratios_are_taken_turn_by_turn_and_pay_only_with_their_whole_interval():
    found = speed_up([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (found.median, found.lowest, found.highest, found.n) == (2.0, 2.0, 2.0, 3)
    assert found.pays
    assert speed_up([1.0, 1.0, 1.0], [1.1, 1.2, 1.15]).pays
    assert not speed_up([1.0, 1.0, 1.0], [0.9, 1.5, 1.4]).pays
    assert not speed_up([1.0], [2.0]).pays
    assert product([found, found]) == 4.0


@pytest.mark.parametrize(("before", "after"), [([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([], []), ([1.0], [math.inf])])
def test_rates_that_are_no_pairs_or_no_rates_are_refused(before, after):
    with pytest.raises(ValueError, match=r"shorter than|longer than|above 0|list of numbers|is inf"):
        speed_up(before, after)


def test_a_rung_that_does_not_pay_is_left_out_of_the_product():
    found = ladder_of(ladder())
    words = {rung.name: rung.word for rung in found.rungs}
    assert words == {
        **{"padding": "kept", "slow": "does not pay", "sync": "does not pay", "async": "kept"},
        **{"noise": "does not pay", "compile": "not measured", "fused": "kept"},
    }
    medians = [4.0, 2.0, 1.5]
    assert [rung.cumulative for rung in found.rungs] == pytest.approx(
        [4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 12.0], rel=0.04
    )  # each median is one of two values beside its factor
    assert found.predicted == pytest.approx(math.prod(medians) * math.exp(0.03))
    change = found.rungs[3].loss_change
    assert change is not None
    assert change.estimate == pytest.approx(0.25)


def test_the_first_rung_stays_though_it_does_not_pay_and_its_box_is_not_ticked():
    rungs = [rung("padding", "Dynamic padding", 0.9), rung("fused", "Fused optimizer", 1.5)]
    found = ladder_of(ladder(rungs=rungs, stacks=ladder()["stacks"][:1]))
    assert [(each.word, each.in_stack) for each in found.rungs] == [("does not pay", True), ("kept", True)]
    assert found.predicted == pytest.approx(0.9 * 1.5, rel=0.03)
    assert [line[:3] for line in checklist(found)] == ["[ ]", "[x]"]


def test_the_block_has_the_guide_s_three_lines_and_the_score():
    assert block(ladder_of(ladder())).splitlines() == [
        "TRAINING SPEED COMPARISON: classification, posts",
        "=" * 60,
        "Original:       2,000 s/epoch     10.00 samples/s",
        "Optimised:      213.9 s/epoch     93.50 samples/s",
        f"Speed-up:   9.35{TIMES} (median of 8, 95 % interval 9.35 [9.14, 9.55])",
        "Score:      macro_f1 0.600 -> 0.601; equivalent within ±0.03 (8 seeds)",
    ]


def test_a_box_is_ticked_by_a_measured_gain_and_by_nothing_else():
    ticked = {line.partition("] ")[2].partition(":")[0]: line[1] == "x" for line in checklist(ladder_of(ladder()))}
    assert ticked == {
        **{"Dynamic padding": True, "Gradient checkpointing": False, "More workers": True, "Prefetch": False},
        **{"torch.compile": False, "Fused optimizer": True},
    }
    lines = "\n".join(checklist(ladder_of(ladder())))
    assert f"[ ] Gradient checkpointing: slow 0.71{TIMES} does not pay here" in lines
    assert "[ ] torch.compile: compile not measured (too long)" in lines


def test_every_box_of_the_validation_checklist_stands_beside_what_was_measured():
    """The final stack takes 213.9 s an epoch where 2,000 s / 12.37 = 161.7 s were predicted: more than 1.2 times."""
    boxes = {
        box.name: (box.wanted, box.before, box.after, box.passed) for box in validation(ladder_of(ladder()), MACHINE)
    }
    assert boxes == {
        "cores busy": ("90 % or more", "75 %", "75 %", False),
        "memory used": ("90 % or less", "25 %", "25 %", True),
        "seconds an epoch as predicted, or fewer": (
            f"194.1 or less, 1.20{TIMES} the predicted 161.7",
            *("2,000", "213.9", False),
        ),
        "loss as before": ("within ±0.05 nats, 90 % interval", "1.000", "1.000, difference 0.000", True),
        "score as before: macro_f1": ("within ±0.03, 90 % interval", "0.600", "0.601, equivalent", True),
        "no training out of memory": ("none", "-", "none", True),
        "the run is complete": ("84 trainings", "-", "84 came to their end", True),
    }


def test_a_rung_that_ran_out_of_memory_fails_two_boxes():
    rungs = [*ladder()["rungs"], {**rung("large", "Larger batch", 2.0), "reason": NO_MEMORY, "before": [], "after": []}]
    passed = {box.name: (box.after, box.passed) for box in validation(ladder_of(ladder(rungs=rungs)), MACHINE)}
    assert passed["no training out of memory"] == ("large", False)
    assert passed["the run is complete"] == ("84 came to their end", False)  # of 94


@pytest.mark.parametrize(
    ("change", "box"),
    [({"loss": 1.1}, "loss as before"), ({"score": 0.5}, "score as before: macro_f1")],
)
def test_a_loss_or_a_score_that_is_lost_fails_its_box(change, box):
    stacks = [{"rungs": ["padding"], "trainings": [training(50.0 + seed, 1.0, 0.6) | change for seed in SEEDS]}]
    assert {each.name: each.passed for each in validation(ladder_of(ladder(stacks=stacks)), MACHINE)}[box] is False


def test_what_nobody_measured_is_not_known():
    few = scores(0.001, number=2)
    unknown = [box.name for box in validation(few, {"cores": 2}) if box.passed is None]
    assert unknown == ["memory used", "loss as before", "score as before: macro_f1"]
    old = ladder()
    del old["turns"], old["loss_margin"]
    assert [box.name for box in validation(ladder_of(old), MACHINE)][3:] == [
        *("score as before: macro_f1", "no training out of memory", "the run is complete"),
    ]


def test_the_product_of_the_rungs_stands_beside_what_was_measured():
    found = prediction(ladder_of(ladder()))
    assert found.startswith(f"Theoretical speed-up: 4.04 x 2.02 x 1.52 = 12.4{TIMES}. Measured: 9.35{TIMES}")
    assert f"{100 * 9.35 / ladder_of(ladder()).predicted:.0f} % of it" in found


def test_what_the_gain_buys_follows_from_the_measured_ratio_and_counted_operations():
    data, epochs, length, model = gains(ladder_of(ladder()))
    assert f"9.35{TIMES} the texts" in data
    assert "187,000" in data
    assert epochs == "More epochs: 9.350 in the time of one."
    assert "the limit costs nothing" in length
    assert f"2.50{TIMES}" in length
    assert f"4.00{TIMES}" in model
    assert "0.4278 of" in model
    assert f"leaves 3.74{TIMES}" in gains(ladder_of(ladder(longest=256)))[2]


def scores(*shifts, spread=0.002, number=8):
    """A stack for each shift of the score, each with one rung more."""
    noise = [spread * (-1) ** seed for seed in range(number)]
    naive = [training(10.0, score=0.6 + each) for each in noise]
    stacks = [
        {
            "rungs": ["padding", "fused", "async"][: place + 1],
            "trainings": [training(50.0 + place, score=0.6 + shift - each) for each in noise],
        }
        for place, shift in enumerate(shifts)
    ]
    return ladder_of(ladder(naive=naive, stacks=stacks))


def test_the_score_is_called_equivalent_only_where_the_interval_lies_inside_the_margin():
    def word(found):
        return found.final.verdict.word

    assert word(scores(0.001)) == "equivalent"
    assert word(scores(-0.1)) == "worse"
    assert word(scores(0.0, spread=0.1)) == "undecided"
    for few in (scores(0.001, number=2), scores(0.0, spread=0.0, number=2)):
        assert "no claim, 2 seeds are too few" in score(few, few.final)
    assert word(scores(0.0, spread=0.0)) == "undecided"
    wide = ladder_of(ladder(margin=0.3)).final.verdict
    assert wide.word != "equivalent"
    assert "too wide" in wide.reason


@pytest.mark.parametrize(
    ("shifts", "number", "final"),
    [
        ((0.001, 0.001, 0.001), 8, 2),
        ((0.001, 0.001, -0.1), 8, 1),
        ((0.001, -0.1, 0.001), 8, 0),  # nothing behind the first that fails is tested
        ((-0.1, 0.001, 0.001), 8, 0),
        ((-0.1, -0.1, -0.1), 2, 2),  # no verdict at all
    ],
)
def test_the_final_stack_is_the_last_before_the_first_that_loses_score(shifts, number, final):
    found = scores(*shifts, number=number)
    assert found.final is found.stacks[final]
    words = {rung.name: rung.word for rung in found.rungs}
    for name in ("fused", "async"):
        assert words[name] == ("kept" if name in found.final.rungs else "left out for the score")
    ticked = {line.partition(": ")[2]: line[1] for line in checklist(found)}
    assert any(text.startswith("fused") and (mark == "x") == (final > 0) for text, mark in ticked.items())
    assert ("All rungs:" in block(found)) == (final < 2)
    said = text_of(Ladders(False, MACHINE, (found,)))
    assert said.count("| yes |") == 1
    if final < 2:
        assert "left out for the score" in said


def test_the_page_and_the_markdown_say_it_all(tmp_path, capsys):
    other = copy.deepcopy(ladder()) | {"task": "masked_lm", "score": "loss", "lower_is_better": True}
    found = {"schema": 2, "quick": False, "machine": MACHINE, "ladders": [ladder(), other]}
    (tmp_path / "ladder.json").write_text(json.dumps(found))
    assert report([str(tmp_path)]) == 0
    printed, markdown, page = (
        text
        for text in (
            capsys.readouterr().out,
            (tmp_path / "ladder.md").read_text(),
            (tmp_path / "report.html").read_text(),
        )
    )
    assert markdown in printed
    for text in (markdown, page):
        assert "TRAINING SPEED COMPARISON: masked_lm" in text
        assert "Prediction, not a measurement" in text
        assert "does not pay here" in text
        assert "Before and after" in text
        assert "the validation checklist" in text
    assert read(tmp_path).num_seeds == 8


def test_a_folder_without_a_ladder_is_refused_with_what_to_type(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "python experiments/speed_ladder.py --quick" in capsys.readouterr().err
    (tmp_path / PARTS).write_text("{}")
    assert report([str(tmp_path)]) == 2
    assert "is not finished; type the command again that began it" in capsys.readouterr().err
