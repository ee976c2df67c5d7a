"""The study of what delays cost under two normalisations: its rates, its differences of differences, its files."""

import itertools
import json

import numpy as np
import pytest
import yaml
from doors import UsageError, cli

from norm_under_delay import CONFIG as SHIPPED
from norm_under_delay import Config, answers, at_rates, costs_of, read_config, text, tuned, typed

SEEDS = tuple(range(10, 18))
GIVEN = {
    "name": "study",
    "arms": {"running": {}, "reestimated": {}, "group": {}},
    "delays": (0, 3, 7),
    "rates": (0.1, 0.2, 0.4),
    "rates_of": {"running": "reestimated"},
    "tuning_seeds": (0, 1),
    "seeds": SEEDS,
    "differences": {"primary": ("reestimated", "group"), "secondary": ("running", "group")},
}
CONFIG = Config(**GIVEN)


def test_the_config_that_is_shipped_is_one():
    config = typed(read_config(SHIPPED), Config, SHIPPED.name)
    assert config.delays == (0, 3, 7, 15)
    assert len(config.seeds) == 8
    assert config.arms.keys() == {"running", "reestimated", "group"}


def making(best, seen):
    """Runs whose loss is lowest at the `best` rate of an arm and delay; those above 1 diverge."""

    def make(trials):
        runs = {}
        for trial in trials:
            seen.append(trial)
            if trial.rate > 1:
                runs[trial] = {"status": "DIVERGED", "final_eval_loss": None}
                continue
            octaves = abs(np.log2(trial.rate / best[trial.arm, trial.delay]))
            runs[trial] = {"status": "DONE", "final_eval_loss": octaves + 0.01 * trial.seed}
        return runs

    return make


def test_a_best_rate_at_an_end_widens_the_grid_of_every_arm_and_delay():
    best = dict.fromkeys(itertools.product(("reestimated", "group"), (0, 3, 7)), 0.2)
    seen = []
    assert tuned(CONFIG, making(best, seen)) == dict.fromkeys(CONFIG.arms, dict.fromkeys((0, 3, 7), 0.2))
    assert {trial.rate for trial in seen} == {0.1, 0.2, 0.4}
    best["group", 7] = 0.05
    best["reestimated", 0] = 0.8
    seen = []
    rates = tuned(CONFIG, making(best, seen))
    assert rates["group"] == {0: 0.2, 3: 0.2, 7: 0.05}
    assert rates["running"] == {0: 0.8, 3: 0.2, 7: 0.2}
    assert rates["reestimated"] == {0: 0.8, 3: 0.2, 7: 0.2}
    grid = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    expected = itertools.product(("reestimated", "group"), (0, 3, 7), grid)
    assert {(trial.arm, trial.delay, trial.rate) for trial in seen} == set(expected)
    for delay in (0, 3, 7):
        best["running", delay] = 0.2
    tests = at_rates(CONFIG, rates, making(best, []))
    assert len(tests) == 3 * 3 * len(SEEDS)
    for trial in tests:
        if trial.arm == "running" and trial.delay == 0:
            assert trial.rate == 0.8


def test_where_no_rate_is_best_the_study_ends_with_a_sentence():
    def make(trials):
        return {trial: {"status": "DONE", "final_eval_loss": trial.rate} for trial in trials}

    with pytest.raises(UsageError, match=r"at an end of 0\.0015625 to 0\.4; give base more samples"):
        tuned(CONFIG, make)


def drawn_losses():
    """Final losses whose costs differ between arms at 7 updates and nowhere else."""
    random = np.random.default_rng(0)
    at_7 = {"running": 0.6, "reestimated": 0.5, "group": 0.2}
    losses = {}
    for arm, delay, seed in itertools.product(CONFIG.arms, CONFIG.delays, SEEDS):
        cost = {0: 0.0, 3: 0.1, 7: at_7[arm]}[delay]
        noise = 0.02 * random.standard_normal()
        losses[arm, delay, seed] = 1 + 0.1 * seed + cost + noise
    return losses


def test_a_difference_of_differences_is_tested_by_all_signs_and_by_holm_within_its_family():
    losses = drawn_losses()
    rows = answers(CONFIG, costs_of(CONFIG, losses))
    assert [(row["family"], row["delay"]) for row in rows] == list(itertools.product(("primary", "secondary"), (3, 7)))
    signs = np.array(list(itertools.product((1, -1), repeat=len(SEEDS))))
    for family in ("primary", "secondary"):
        arm, reference = CONFIG.differences[family]
        expected = []
        own = [row for row in rows if row["family"] == family]
        for row in own:
            delay = row["delay"]
            of_seed = []
            for seed in SEEDS:
                cost = losses[arm, delay, seed] - losses[arm, 0, seed]
                cost_of_reference = losses[reference, delay, seed] - losses[reference, 0, seed]
                of_seed.append(cost - cost_of_reference)
            assert row["estimate"] == pytest.approx(np.mean(of_seed))
            sums = signs @ of_seed
            expected.append((abs(sums) >= abs(np.sum(of_seed)) - 1e-12).mean())
        assert [row["p"] for row in own] == pytest.approx(expected)
        low, high = sorted(expected)
        adjusted = {low: 2 * low, high: max(2 * low, high)}
        assert [row["p_holm"] for row in own] == pytest.approx([adjusted[p] for p in expected])
        assert own[1]["word"] == "worse"
        assert own[0]["word"] != "worse"


def test_the_text_says_every_cost_and_every_difference_and_a_run_that_diverged():
    losses = drawn_losses()
    rates = dict.fromkeys(CONFIG.arms, dict.fromkeys(CONFIG.delays, 0.2))
    said = text(CONFIG, rates, losses, same=24)
    assert "| group | 7 | 0.2 | 2.55" in said
    assert "Primary: at 3 updates undecided; reestimated pays more than group for a delay of 7 updates" in said
    assert said.endswith("24 of 24 pairs of runs that differ in what is evaluated have the same parameters.")
    losses["reestimated", 7, 10] = float("inf")
    assert "| reestimated | 7 | 0.2 | 1 of 8 diverged | 1 of 8 diverged |" in text(CONFIG, rates, losses, same=24)


@pytest.mark.parametrize("diverged", [("reestimated",), ("reestimated", "group")])
def test_a_seed_whose_run_without_delay_diverged_is_no_answer(diverged):
    losses = drawn_losses()
    without = {place: loss for place, loss in losses.items() if place[2] != 13}
    for arm in diverged:
        losses[arm, 0, 13] = losses[arm, 3, 13] = float("inf")
    rows = answers(CONFIG, costs_of(CONFIG, losses))[:2]
    others = Config(**GIVEN | {"seeds": [seed for seed in SEEDS if seed != 13]})
    assert rows == answers(others, costs_of(others, without))[:2]
    assert {row["n"] for row in rows} == {7}
    said = text(CONFIG, dict.fromkeys(CONFIG.arms, dict.fromkeys(CONFIG.delays, 0.2)), losses, same=24)
    assert "| reestimated | 7 | 0.2 |" in said
    assert "nan" not in said.partition("Primary:")[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delays": (3, 7)}, "delays must begin with 0"),
        ({"rates_of": {"running": "batch"}}, "batch is none of the arms"),
        ({"rates_of": {"running": "group", "group": "running"}}, "rates of group, which has none of its own"),
        ({"seeds": (1, 2)}, r"seeds and tuning_seeds must name each seed once, they share \[1\]"),
        ({"seeds": (10, 10, 11)}, r"seeds must name each seed once, they share \[10\]$"),
    ],
)
def test_a_config_that_means_nothing_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Config(**GIVEN | changes)


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_makes_its_runs_once_and_registers_before_the_tests(tmp_path):
    small = {"samples": 64, "side": 8, "width": 4, "train_images": 100}
    small |= {"evaluations": 1, "optimizer": "sgd", "warmup": 0}
    again = {"batch_statistics": "reestimated", "statistics_batches": 2}

    def write(config):
        without_tuples = json.loads(json.dumps(config))
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(without_tuples))

    def ages():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("events.jsonl")}

    config = GIVEN | {
        "base": small,
        "arms": {"running": {"norm": "batch"}, "reestimated": {"norm": "batch", **again}, "group": {"norm": "group"}},
        "delays": [0, 1],
        "tuning_seeds": [0],
        "seeds": [10, 11],
    }
    write(config)
    line = ["norm_under_delay.py", "--config", tmp_path / "study.yaml", "--out", tmp_path / "out", "--jobs", "1"]
    ended = cli(line)
    assert ended.code == 0, ended.err
    assert "4 of 4 pairs of runs that differ in what is evaluated have the same parameters." in ended.out
    registered = (tmp_path / "out" / "registered.json").stat().st_mtime
    test_runs = list((tmp_path / "out").glob("*/d*/lr*/s1?/summary.json"))
    assert len(test_runs) == 12
    for path in test_runs:
        assert path.stat().st_mtime >= registered
    before = ages()
    again = cli(line)
    assert again.out.splitlines()[-1] == ended.out.splitlines()[-1]
    assert ages() == before
    write(config | {"seeds": [12, 13]})
    refused = cli(line)
    assert refused.code != 0
    assert "type another --out" in refused.err
