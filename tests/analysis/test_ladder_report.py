"""The arithmetic of the speed ladder, on rates that were made up: which rungs are kept, and what is said of them."""

import json
import math

from analysis.ladder import NO_MEMORY, SETTINGS, read, speed_up
from analysis.speed_ladder import main as report
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
        "operations": {"tiny at 256 tokens": 1e9, "tiny at 512 tokens": 2.5e9, "small at 256 tokens": 4e9},
        **{"longest": 80, "loss_margin": 0.05, "turns": len(TURNS)},
    }
    return found | changes


def scores(*shifts, spread=0.002, number=8, **changes):
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
    said, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert (tmp_path / "ladder.md").read_text() in said
    for told in ("A quick ladder: short trainings", "2 seeds bear no verdict", "TRAINING SPEED COMPARISON: masked_lm"):
        assert told in said
        assert told in page


def test_a_rung_pays_only_with_the_whole_interval_of_its_ratios():
    assert speed_up([1.0, 1.0, 1.0], [1.1, 1.2, 1.15]).pays
    assert not speed_up([1.0, 1.0, 1.0], [0.9, 1.5, 1.4]).pays
    assert not speed_up([1.0], [2.0]).pays


def test_a_folder_without_a_ladder_is_refused_with_what_to_type(tmp_path, capsys):
    assert report([str(tmp_path)]) == 2
    assert "python experiments/speed_ladder.py --quick" in capsys.readouterr().err
    (tmp_path / SETTINGS).write_text("{}")
    assert report([str(tmp_path)]) == 2
    assert "is not finished; type the command again that began it" in capsys.readouterr().err
