"""The arithmetic of the speed ladder, on rates that were made up: which rungs are kept, and what is said of them; and
that trainings whose settings differ beyond what their rungs change have no speed-up, no score and no word."""

import json
import math

import pytest
import yaml
from synthetic import SyntheticArm, edit_json, straight, write_run

from analysis.ladder import NO_MEMORY, NOT_COMPARABLE, NOT_KNOWN, SETTINGS, pays, read, speed_up
from analysis.speed_ladder import main as report
from analysis.speed_ladder import page, publication_table, tables_of
from analysis.speed_ladder import text as text_of

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
    after = []
    for k, each in enumerate(before):
        after.append(training(each["samples_per_second"] * times * noise[k], 1.0 + loss))
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
    "a loss": ladder(task="masked_lm", score="loss", lower_is_better=True),
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


def written(folder, *names, **changes):
    found = {"quick": False, "machine": MACHINE, "ladders": [LADDERS[name] for name in names]}
    (folder / "ladder.json").write_text(json.dumps(found | changes))


def test_what_is_said_of_a_ladder_and_how_it_differs_for_others(tmp_path, approved):
    said = {}
    for name in LADDERS:
        written(tmp_path, name)
        said[name] = text_of(read(tmp_path)).splitlines()
    first, *others = LADDERS
    lines = said[first]
    for name in others:
        lines = [*lines, "", f"# {name}", *(line for line in said[name] if line not in said[first])]
    approved("\n".join([*lines, ""]))


def test_the_command_writes_what_it_says_and_a_page(tmp_path, capsys):
    machine = {key: value for key, value in MACHINE.items() if key != "memory_bytes"}
    written(tmp_path, "two seeds", "a loss", machine=machine, quick=True)
    assert report([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert (tmp_path / "ladder.md").read_text() in said
    for told in ("A quick ladder: short trainings", "2 seeds bear no verdict", "TRAINING SPEED COMPARISON: masked_lm"):
        assert told in said
        assert told in page


def test_a_rung_pays_only_with_the_whole_interval_of_its_ratios():
    assert speed_up([1.0, 1.0, 1.0], [1.1, 1.2, 1.15]).pays
    assert not speed_up([1.0, 1.0, 1.0], [0.9, 1.5, 1.4]).pays
    assert not speed_up([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]).pays
    assert not speed_up([1.0], [2.0]).pays


def test_a_folder_without_a_ladder_is_refused_with_what_to_type(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "python experiments/speed_ladder.py --quick" in capsys.readouterr().err
    (tmp_path / SETTINGS).write_text("{}")
    assert report([str(tmp_path)]) == 2
    assert "is not finished; type the command again that began it" in capsys.readouterr().err


SMALL = {"mode": "single", "batch_size": 16}
LARGE = {"mode": "single", "batch_size": 32}
TOLD = "weight_decay of wide/after: 0.5; of wide/before: 0.01"
AGAINST = {
    "rungs": ("times the rung before", "95 % interval", "cumulative, product", "loss - before"),
    "stacks": ("times the naive loop", "95 % interval", "difference, 90 % interval"),
    "published": ("before against after",),
}
"""Table -> its columns that set trainings against each other, beside those of words."""


def side(folder, name, asked, rates, score=0.6, **settings):
    """A side of a rung or of the proof: its run folders, and what ladder.json says of them."""
    trainings = []
    for seed, rate in enumerate(rates):
        own = {**asked, "learning_rate": 5e-4}
        arm = SyntheticArm("single", 1, "measured", None, asked["batch_size"], settings=own | settings)
        write_run(folder / name / f"s{seed}", arm, straight(6.0, 5.0, seconds=10.0), seed=seed)
        measured = training(rate, score=score + 0.001 * (-1) ** seed)
        trainings.append({"run": f"{name}/s{seed}", "asked": {**own, "seed": seed}, **measured})
    return trainings


def climbed(folder, wrong=None):
    """A rung that is the library, one of twice the batch, and a stack of both; `wrong` is in every training with it."""
    turns = [10.0 + turn for turn in TURNS]
    seeds = [10.0 for _ in SEEDS]
    changes = wrong or {}
    rungs = []
    for name, times, before, after, other in (
        ("padding", 4, SMALL, SMALL, {}),
        ("wide", 2, SMALL, LARGE, changes),
    ):
        rung = {"name": name, "box": name, "flags": "", "reason": ""}
        rung["before"] = side(folder, f"{name}/before", before, turns)
        rung["after"] = side(folder, f"{name}/after", after, [times * rate for rate in turns], **other)
        rungs.append(rung)
    stack = side(folder, "stack-0", LARGE, [80.0 + seed for seed in SEEDS], 0.601, **changes)
    found = ladder(rungs=rungs, naive=side(folder, "naive", SMALL, seeds))
    found["stacks"] = [{"rungs": ["padding", "wide"], "trainings": stack}]
    (folder / "ladder.json").write_text(json.dumps({"quick": False, "machine": MACHINE, "ladders": [found]}))
    return folder


def tables(folder):
    found = read(folder)
    (rungs, *_), (stacks, *_), (boxes, *_) = tables_of(found.ladders[0], MACHINE)
    return {"rungs": rungs, "stacks": stacks, "published": publication_table(found)}, boxes, text_of(found)


def blank(value):
    value = getattr(value, "estimate", value)
    return value != value or value in ("", "-", NOT_COMPARABLE)


def test_a_setting_that_no_rung_changes_empties_all_that_sets_trainings_against_each_other(tmp_path):
    before, boxes, told = tables(climbed(tmp_path / "alike"))
    assert NOT_COMPARABLE not in told
    assert NOT_KNOWN not in told
    after, gated, said = tables(climbed(tmp_path / "unlike", {"weight_decay": 0.5}))
    after["rungs"], before["rungs"] = after["rungs"][1:], before["rungs"][1:]
    for name, columns in AGAINST.items():
        for column in columns:
            assert not all(map(blank, before[name][column])), f"{column} of {name} was empty before"
            assert all(map(blank, after[name][column])), f"{column} of {name} is not empty"
    assert after["rungs"]["word"].to_list() == [f"{NOT_COMPARABLE} ({TOLD})"]
    assert after["stacks"]["word"].to_list() == [NOT_COMPARABLE]
    words = []
    for one in (boxes, gated):
        words.append(dict(zip(one["box"], one["in a word"], strict=True)))
    changed = {box for box, word in words[0].items() if words[1][box] != word}
    assert changed == {box for box in words[0] if box.startswith(("loss as", "score as", "seconds an epoch"))}
    assert {words[1][box] for box in changed} == {"not known"}
    assert "The stack up to wide is not comparable with what it is set against: weight_decay of stack-0: 0.5" in said
    assert "Speed-up:   not comparable" in said
    assert f"wide {NOT_COMPARABLE}" in page(read(tmp_path / "unlike"), "")
    assert "More data" not in said


def test_a_rung_of_unlike_trainings_does_not_pay_while_it_is_climbed(tmp_path):
    for wrong, paid in (({}, True), ({"weight_decay": 0.5}, False)):
        folder = climbed(tmp_path / str(paid), wrong)
        (given,) = json.loads((folder / "ladder.json").read_text())["ladders"]
        assert [pays(rung, folder) for rung in given["rungs"]] == [True, paid]


def test_seconds_of_turns_on_a_busy_machine_are_in_no_ratio(tmp_path):
    folder = climbed(tmp_path)
    load = {"own_share": 0.5, "others_share": 0.2, "stolen_share": 0.0, "cores": 2}
    for turn in (1, 3):
        edit_json(folder / f"wide/after/s{turn}/summary.json", machine_load=load)
    (found,) = read(folder).ladders
    assert [speed.n for speed in found.rungs["speed"]] == [5, 3]
    assert found.not_compared == [
        "wide: seconds of 2 turns are not compared: other programs used 20 % of the machine during wide/after/s1."
    ]


@pytest.mark.parametrize("lost", ["run", "folder"])
def test_without_the_runs_it_is_said_that_what_they_were_given_is_not_known(tmp_path, lost):
    folder = climbed(tmp_path, {"weight_decay": 0.5})
    content = json.loads((folder / "ladder.json").read_text())
    if lost == "run":
        for rung in content["ladders"][0]["rungs"]:
            for one in (*rung["before"], *rung["after"]):
                del one["run"]
        (folder / "ladder.json").write_text(json.dumps(content))
    else:
        for path in folder.glob("wide/after/*/summary.json"):
            path.unlink()
    found = read(folder)
    assert found.ladders[0].rungs["word"].to_list()[1] != NOT_COMPARABLE
    assert NOT_KNOWN in found.ladders[0].not_compared


def test_sampling_tells_trainings_apart_and_changes_nothing_else(tmp_path):
    folder = climbed(tmp_path)
    for path in folder.glob("wide/after/*/settings.yaml"):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"sampling": "group_by_length"}))
    for path in folder.glob("*/*/*/settings.yaml"):
        settings = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({"sampling": "random"} | settings))
    content = json.loads((folder / "ladder.json").read_text())
    assert read(folder).ladders[0].rungs["word"].to_list()[1] == NOT_COMPARABLE
    for rung in content["ladders"][0]["rungs"]:
        for name in ("before", "after"):
            for one in rung[name]:
                one["asked"]["sampling"] = "group_by_length" if (rung["name"], name) == ("wide", "after") else "random"
    (folder / "ladder.json").write_text(json.dumps(content))
    assert read(folder).ladders[0].rungs["word"].to_list() == ["kept", "kept"]
