"""The arithmetic of the speed ladder, on rates that were made up: which rungs are kept, and what is said of them; and
that trainings whose settings differ beyond what their rungs change have no speed-up, no score and no word."""

import json
import math

import pytest
import yaml
from pandas import DataFrame
from synthetic import SyntheticArm, edit_json, straight, write_run

from analysis.gate import ArmsCompared, RunsCompared
from analysis.ladder import TRAINING, Ladders, Sides, ladder_of, read, speed_up, verdict_in
from analysis.ladder_sections import addition_of, publication_table, tables_of
from analysis.ladder_sections import text as text_of
from analysis.load import load
from analysis.speed_ladder import main as report
from asyncsgd.errors import OUT_OF_MEMORY, UsageError
from asyncsgd.studies.arms import Arm
from asyncsgd.studies.config import LadderConfig, Rung, typed
from asyncsgd.studies.ladder import DOES_NOT_PAY, NO_MEMORY, NOT_COMPARABLE, PAYS, Climbed, devices_of, grown

MACHINE = {
    "cores": 2,
    "cpu": "A",
    "gpus": [],
    "memory_bytes": 2**32,
    "versions": {"torch": "2.13.0"},
}
TURNS = range(5)
SEEDS = range(8)


def training(rate, loss=1.0, score=0.6):
    return {
        **{"samples_per_second": rate, "warmup_seconds": 0.5, "loss": loss, "score": score},
        **{"memory_gib": 1.0, "gpu_gib": 0.0, "busy_cores": 1.5, "busy_gpu": None},
    }


def rung(name, box, times, spread=0.01, loss=0.0):
    """A rung `times` as fast, up to a factor that rises and falls with the turns."""
    noise = [math.exp(spread * (-1) ** turn) for turn in TURNS]
    before = [training(10.0 + turn) for turn in TURNS]
    after = []
    for k, each in enumerate(before):
        after.append(training(each["samples_per_second"] * times * noise[k], 1.0 + loss))
    return {"name": name, "box": box, "reason": "", "before": before, "after": after}


def ladder(**changes):
    """Three rungs that pay, 4 x 2 x 1.5; one that costs, one that is noise, one that was not measured."""
    skipped = {"name": "compile", "box": "torch.compile", "reason": "too long", "before": []}
    noise = [0.002 * (-1) ** seed for seed in SEEDS]
    found = {
        **{"task": "classification", "data": "posts", "model": "tiny", "epoch": 20_000, "climb_samples": 512},
        **{"samples": 4096, "score": "macro_f1", "margin": 0.03},
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
        "operations": {"tiny at 256 tokens": 1e9, "tiny at 512 tokens": 2.5e9, "small at 256 tokens": 4e9},
        **{"longest": 80, "loss_margin": 0.05, "turns": len(TURNS)},
    }
    return found | changes


def scores(*shifts, spread=0.002, number=8, **changes):
    """A stack for each shift of the score, each with one rung more."""
    noise = [spread * (-1) ** seed for seed in range(number)]
    naive = [training(10.0, score=0.6 + each) for each in noise]
    stacks = []
    for place, shift in enumerate(shifts):
        stacks.append(
            {
                "rungs": ["padding", "fused", "async"][: place + 1],
                "trainings": [training(50.0 + place, score=0.6 + shift - each) for each in noise],
            }
        )
    return ladder(naive=naive, stacks=stacks, **changes)


def lossy(**change):
    return [{"rungs": ["padding"], "trainings": [training(50.0 + seed) | change for seed in SEEDS]}]


SLOW_START = [rung("padding", "Dynamic padding", 0.9), rung("fused", "Fused optimizer", 1.5)]
LARGE = {**rung("large", "Larger batch", 2.0), "reason": NO_MEMORY, "before": [], "after": []}
LADDERS = {
    "made up": ladder(),
    "a loss": ladder(task="masked_lm", score="loss"),
    "a first rung that does not pay stays": ladder(rungs=SLOW_START, stacks=ladder()["stacks"][:1]),
    "a rung ran out of memory": ladder(rungs=[*ladder()["rungs"], LARGE]),
    "the loss is lost": ladder(stacks=lossy(loss=1.1)),
    "the score is lost": ladder(stacks=lossy(score=0.5)),
    "the second stack loses score": scores(0.001, -0.1, 0.001),
    "two seeds": scores(0.001, number=2),
    "two seeds without noise": scores(0.0, spread=0.0, number=2),
    "scores that scatter": scores(0.0, spread=0.1),
    "scores without noise": scores(0.0, spread=0.0),
    "a margin that is too wide": ladder(margin=0.3),
    "long texts": ladder(longest=256),
}


def sides(before, after):
    """Trainings of which all turns are compared."""
    pairs = {(turn, 0): RunsCompared({}, {}, {}) for turn in range(len(after))}
    frames = [DataFrame(one, columns=[*TRAINING]).astype(float) for one in (before, after)]
    return Sides(*frames, ArmsCompared(pairs))


def built(given):
    """What such measurements of one task show."""
    rungs = []
    for each in given["rungs"]:
        measured = sides(each["before"], each["after"])
        word = each["reason"] or (PAYS if measured.speed.pays else DOES_NOT_PAY)
        step = Rung(name=each["name"], box=each["box"], change={each["name"]: True})
        rungs.append((Climbed(step, Arm("before", "", {}), Arm("after", "", {}), word), measured))
    proof = [(stack["rungs"], sides(given["naive"], stack["trainings"])) for stack in given["stacks"]]
    return ladder_of(given, rungs, proof)


def test_what_is_said_of_a_ladder_and_how_it_differs_for_others(approved):
    said = {}
    for name, given in LADDERS.items():
        said[name] = text_of(Ladders(MACHINE, [built(given)])).splitlines()
    first, *others = LADDERS
    lines = said[first]
    for name in others:
        lines = [*lines, "", f"# {name}", *(line for line in said[name] if line not in said[first])]
    approved("\n".join([*lines, ""]))


def test_the_command_writes_what_it_says_and_a_page(tmp_path, capsys):
    climbed(tmp_path, name="made-quick", seeds=[0, 1])
    edit_json(tmp_path / "facts.json", machine={key: MACHINE[key] for key in MACHINE if key != "memory_bytes"})
    assert report([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert (tmp_path / "ladder.md").read_text() in said
    for told in ("2 seeds bear no verdict", "TRAINING SPEED COMPARISON: masked_lm"):
        assert told in said
        assert told in page
    assert "2 seeds</span>" in page
    assert "masked_lm on posts: 8.00\u00d7 (median of 2" in str(load(tmp_path))


def test_a_rung_pays_only_with_the_whole_interval_of_its_ratios():
    assert speed_up([1.0, 1.0, 1.0], [1.1, 1.2, 1.15]).pays
    assert not speed_up([1.0, 1.0, 1.0], [0.9, 1.5, 1.4]).pays
    assert not speed_up([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).pays
    assert not speed_up([1.0], [2.0]).pays


def test_a_folder_without_a_finished_ladder_is_refused_with_what_to_type(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "asyncsgd study speed_ladder --quick" in capsys.readouterr().err
    folder = climbed(tmp_path / "begun")
    (folder / "masked_lm/proof/stack-0/s3/summary.json").unlink()
    assert report([str(folder)]) == 2
    assert "is not finished; type the command again that began it" in capsys.readouterr().err


QUIET = {"own_share": 0.75, "others_share": 0.0, "stolen_share": 0.0, "cores": 2}
TOLD = "weight_decay of masked_lm/wide/after: 0.5; of masked_lm/wide/before: 0.01"
AGAINST = {
    "rungs": ("times the rung before", "95 % interval", "loss - before"),
    "stacks": ("times the naive loop", "95 % interval", "difference, 90 % interval"),
    "published": ("after against before",),
}
"""Table -> its columns that set trainings against each other, beside those of words."""


def side(folder, rates, loss=5.0, batch_size=16, **settings):
    """The runs of an arm, each with so many samples a second from its first to its last one."""
    for seed, rate in enumerate(rates):
        arm = SyntheticArm("single", 1, "measured", None, batch_size, settings={"learning_rate": 5e-4} | settings)
        curve = straight(6.0, loss + 0.001 * (-1) ** seed, seconds=160 / rate)
        used = {"memory": {"leader": [2**30, 0], "workers": []}, "machine_load": QUIET, "usage": None}
        write_run(folder / f"s{seed}", arm, curve, seed=seed, delays=[0] * 10, **used)


def climbed(folder, name="made", seeds=tuple(SEEDS), **change):
    """A rung that is the library, one of twice the batch, and a stack of both.

    Args:
        change: what the second rung changes besides.
    """
    task = {"data": ["pydocs"], "score": "loss", "margin": 0.05, "samples": 160, "settings": {"learning_rate": 5e-4}}
    wide = {"name": "wide", "box": "wide", "change": {"batch_size": 32, **change}}
    keys = {"turns": len(TURNS), "samples": 144, "warmup": 16, "eval_samples": 8, "loss_margin": 0.05}
    config = {
        "name": name,
        "report": "speed_ladder",
        "base": {"mode": "single", "batch_size": 16, "sampling": "random"},
        "seeds": list(seeds),
        "ladder": {"tasks": {"masked_lm": task}, "rungs": [{"name": "padding", "box": "padding"}, wide], **keys},
    }
    operations = {"tiny at 256 tokens": 1e9, "tiny at 512 tokens": 2.5e9, "small at 256 tokens": 4e9}
    facts = {"data": "posts", "epoch": 20_000, "longest": 80, "operations": operations}
    turns = [10.0 + turn for turn in TURNS]
    large = {"batch_size": 32}
    own = folder / "masked_lm"
    side(own / "padding/before", turns)
    side(own / "padding/after", [4 * rate for rate in turns])
    side(own / "wide/before", [4 * rate for rate in turns])
    side(own / "wide/after", [8 * rate for rate in turns], **large)
    side(own / "proof/naive", [10.0 for _ in seeds])
    side(own / "proof/stack-0", [80.0 for _ in seeds], 4.999, **large)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "facts.json").write_text(json.dumps({"machine": MACHINE, "tasks": {"masked_lm": facts}}))
    return folder


def words(folder):
    """Of the rungs."""
    return read(folder).ladders[0].rungs["word"].to_list()


def tables(folder):
    found = read(folder)
    (rungs, *_), (stacks, *_), (boxes, *_) = tables_of(found.ladders[0], MACHINE)
    return {"rungs": rungs, "stacks": stacks, "published": publication_table(found)}, boxes, text_of(found)


def blank(value):
    value = getattr(value, "estimate", value)
    return value != value or value in ("", "-", NOT_COMPARABLE)


def test_a_setting_that_no_rung_changes_empties_all_that_sets_trainings_against_each_other(tmp_path):
    """A rung that is not comparable is in no stack, so the stack of the first one has the setting too."""
    alike = climbed(tmp_path / "alike")
    before, boxes, told = tables(alike)
    assert NOT_COMPARABLE not in told
    unlike = climbed(tmp_path / "unlike")
    for at in ("proof/stack-0", "wide/after"):
        for path in unlike.glob(f"masked_lm/{at}/*/settings.yaml"):
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"weight_decay": 0.5}))
    after, gated, said = tables(unlike)
    after["rungs"], before["rungs"] = after["rungs"][1:], before["rungs"][1:]
    for name, columns in AGAINST.items():
        for column in columns:
            assert not all(map(blank, before[name][column])), f"{column} of {name} was empty before"
            assert all(map(blank, after[name][column])), f"{column} of {name} is not empty"
    assert after["rungs"]["word"].to_list() == [f"{NOT_COMPARABLE} ({TOLD})"]
    assert after["stacks"]["word"].to_list() == [NOT_COMPARABLE]
    config = typed(yaml.safe_load((unlike / "config.yaml").read_text()), LadderConfig, "config.yaml")
    said_of_rungs = grown(config, devices_of(MACHINE), verdict_in(unlike, config)).words
    assert said_of_rungs == {"masked_lm, padding": "pays", "masked_lm, wide": NOT_COMPARABLE}
    said_of = []
    for one in (boxes, gated):
        said_of.append(dict(zip(one["box"], one["in a word"], strict=True)))
    changed = {box for box, word in said_of[0].items() if said_of[1][box] != word}
    assert changed == {box for box in said_of[0] if box.startswith(("loss as", "score as"))}
    assert {said_of[1][box] for box in changed} == {"not known"}
    assert "The stack up to padding is not comparable with what it is set against: " in said
    assert "weight_decay of masked_lm/proof/stack-0: 0.5" in said
    assert "Speed-up:   not comparable" in said
    assert f"wide {NOT_COMPARABLE}" in "".join(addition_of(read(unlike)).sections[0].lead)
    assert "More data" not in said


def test_seconds_of_turns_on_a_busy_machine_are_in_no_ratio(tmp_path):
    folder = climbed(tmp_path)
    load = QUIET | {"others_share": 0.2}
    for turn in (1, 3):
        edit_json(folder / f"masked_lm/wide/after/s{turn}/summary.json", machine_load=load)
    (found,) = read(folder).ladders
    assert [speed.n for speed in found.rungs["speed"]] == [5, 3]
    assert found.not_compared == [
        "wide: the seconds of 2 turns are not compared: other programs used 20 % of the machine during "
        "masked_lm/wide/after/s1."
    ]


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"status": "FAILED", "message": f"FAILED: {OUT_OF_MEMORY}"}, "ran out of memory"),
        ({"status": "DIVERGED"}, "a training diverged"),
    ],
    ids=["memory", "diverged"],
)
def test_a_rung_with_a_training_without_result_is_reported_and_in_no_stack(tmp_path, ended, reason):
    folder = climbed(tmp_path)
    edit_json(folder / "masked_lm/wide/after/s2/summary.json", **ended)
    (found,) = read(folder).ladders
    assert found.rungs["reason"].to_list() == ["", reason]
    assert [stack.rungs for stack in found.stacks] == [["padding"]]


def test_a_run_that_failed_otherwise_leaves_the_ladder_unfinished(tmp_path):
    folder = climbed(tmp_path)
    edit_json(folder / "masked_lm/wide/after/s2/summary.json", status="FAILED", message="a worker was lost")
    with pytest.raises(UsageError, match=r"that is not finished; type .* with --retry where a run FAILED"):
        read(folder)


def test_sampling_tells_trainings_apart_and_changes_nothing_else(tmp_path):
    for wanted, change in ((NOT_COMPARABLE, {}), ("kept", {"sampling": "group_by_length"})):
        folder = climbed(tmp_path / str(len(change)), **change)
        for path in folder.glob("*/*/*/*/settings.yaml"):
            settings = yaml.safe_load(path.read_text())
            settings["sampling"] = "group_by_length" if "wide/after" in str(path) else "random"
            path.write_text(yaml.safe_dump(settings))
        assert words(folder) == ["kept", wanted]
