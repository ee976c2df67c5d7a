"""What is laid over the config of a study: its quick: block, and --set key=value."""

import copy
from pathlib import Path

import pytest
import yaml
from doors import cli

CONFIG = {
    "name": "mine",
    "task": "tasks:Plane",
    "base": {"samples": 64, "evaluations": 2, "momentum": 0.5, "optimizer": "sgd", "device": "cpu"},
    "algorithms": {"one": {"mode": "single"}, "two": {"mode": "async"}},
    "conditions": {"nproc": 2, "clock": "virtual"},
    "exclude": [{"algorithm": "one"}],
    "seeds": [0, 1],
    "quick": {"base": {"samples": 16, "momentum": None}, "seeds": [5]},
}
CHAIN = {
    "name": "chain",
    "stages": [
        {"name": "first", "task": "masked_lm", "samples": 64, "arms": {"sync": {"mode": "sync"}}},
        {"name": "last", "task": "classification", "samples": 64, "data": "pydocs"},
    ],
    "quick": {"stages": {"first": {"samples": 16}, "last": {"samples": 8}}},
}
COMPARISON = {
    "name": "pairs",
    "models": {"small": {"task": "masked_lm", "model": "small"}},
    "comparisons": {"of": {"reference": "a", "margin": 0.1, "arms": {"a": {"samples": 8}, "b 2": {"samples": 8}}}},
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Type ``asyncsgd study`` with a config in a new folder."""
    monkeypatch.chdir(tmp_path)

    def typed(config, *words):
        Path("mine.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return cli(["asyncsgd", "study", "mine.yaml", *words])

    return typed


def runs_of(ended):
    """The flags of the runs that would be made."""
    assert ended.code == 0, ended.err
    return [line for line in ended.out.splitlines() if line.startswith("asyncsgd train ")]


def test_the_quick_block_is_laid_over_the_rest_and_null_takes_a_key_out(study):
    whole = runs_of(study(CONFIG, "--print-commands"))
    (quick,) = runs_of(study(CONFIG, "--print-commands", "--quick"))
    assert len(whole) == 2
    for run in whole:
        assert "--samples 64" in run
        assert "--momentum 0.5" in run
    assert "--samples 16" in quick
    assert "--momentum" not in quick
    assert "--run-dir runs/mine-quick/test/two-w2-virtual/s5" in quick
    assert "--run-dir runs/mine/test/two-w2-virtual/s1" in whole[1]


@pytest.mark.parametrize(
    ("config", "word", "flag"),
    [
        (CONFIG, "base.samples=32", "--samples 32"),
        (CONFIG, "base.learning_rate=1e-2", "--learning-rate 1e-2"),
        (CONFIG, "algorithms.two={mode: async, rule: ringmaster:threshold=1}", "--rule ringmaster:threshold=1"),
        (CONFIG, "seeds=[7]", "--seed 7"),
        (CHAIN, "stages.first.samples=32", "--samples 32"),
        (CHAIN, "stages.first.arms.sync.batch_size=2", "--batch-size 2"),
        (COMPARISON, "comparisons.of.arms.b 2.samples=24", "--samples 24"),
    ],
)
def test_one_setting_is_changed_wherever_it_stands(config, word, flag, study):
    before = runs_of(study(config, "--print-commands"))
    after = runs_of(study(config, "--print-commands", "--set", word))
    assert not any(flag in run for run in before)
    assert any(flag in run for run in after)


def test_settings_are_laid_over_the_quick_block_one_after_the_other(study):
    words = ("--set", "base.samples=24", "--set", "base.samples=32", "--set", "seeds=[9]")
    (run,) = runs_of(study(CONFIG, "--print-commands", "--quick", *words))
    assert "--samples 32" in run
    assert run.endswith("/s9")


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        (CONFIG, "--set sedes=[1]", "--set sedes: there is no 'sedes' there; did you mean 'seeds'?"),
        (CONFIG, "--set quick.seeds=[1]", "--set quick.seeds: there is no 'quick' there; the keys are report, algo"),
        (CONFIG, "--set tuning.sedes=[1]", "there is no 'sedes' there; did you mean 'seeds'?"),
        (CONFIG, "--set algorithms.twoo.samples=8", "there is no 'twoo' there; did you mean 'two'?"),
        (CONFIG, "--set base.samplse=8", "unknown key 'samplse'; did you mean 'samples'?"),
        (CONFIG, "--set seeds.0=1", "--set seeds.0: seeds is [0, 1] and has no keys"),
        (CONFIG, "--set base.samples.x=1", "--set base.samples.x: base.samples is 64 and has no keys"),
        (CONFIG, "--set base.sampels=", "--set base.sampels.base takes sampels out, which is not there"),
        (CONFIG, "--set base.samples", "--set takes a key and a value, such as --set base.samples=400"),
        (CONFIG, "--set base=[", "--set base is not YAML"),
        (CHAIN, "--set stages.lats.samples=8", "there is no 'lats' there; did you mean 'last'?"),
        (COMPARISON, "--set comparisons.of.margn=.2", "there is no 'margn' there; did you mean 'margin'?"),
        (COMPARISON, "--quick", "mine.yaml has no quick: block that --quick could lay over the rest"),
        ({**CONFIG, "quick": {"base": {"warmup": None}}}, "--quick", "mine.yaml: quick.base takes warmup out, which"),
        ({**CONFIG, "quick": [1]}, "--quick", "mine.yaml: quick: expected keys with values"),
        ({**CONFIG, "quick": {"sedes": [1]}}, "--quick", "mine.yaml: unknown key `sedes`"),
    ],
)
def test_what_cannot_be_laid_over_is_refused_by_its_name(config, words, message, study):
    ended = study(config, *words.split(), "--dry-run")
    assert ended.code == 2, ended.err
    assert message in ended.err, ended.err
    assert ended.err.count("\n") == 1


def test_the_folder_keeps_the_config_that_was_run_and_goes_on_with_it(study):
    ended = study(CONFIG, "--quick", "--set", "base.evaluations=1")
    assert ended.code == 0, ended.err
    kept = Path("runs/mine-quick/config.yaml")
    first, _, text = kept.read_text().partition("\n")
    assert first == "# mine.yaml with --quick --set base.evaluations=1"
    expected = copy.deepcopy(CONFIG)
    del expected["quick"]
    expected["name"] = "mine-quick"
    expected["base"] = {"samples": 16, "evaluations": 1, "optimizer": "sgd", "device": "cpu"}
    expected["seeds"] = [5]
    assert yaml.safe_load(text) == expected
    again = cli("asyncsgd study runs/mine-quick/config.yaml")
    assert "test         1 run: 1 DONE" in again.out
    assert "another config" in study(CONFIG, "--quick").err


def test_a_quick_block_and_its_absence_are_one_study(study):
    """Configs got such blocks when there were folders of their studies."""
    without = copy.deepcopy(CONFIG)
    del without["quick"]
    assert study(without, "--quick", "--out", "out").code == 2
    small = ("--set", "seeds=[5]", "--set", "base.samples=8", "--out", "out")
    assert study(without, *small).code == 0
    ended = study(CONFIG, *small)
    assert "1 DONE" in ended.out


def test_the_name_of_a_quick_config_that_became_a_block_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = cli("asyncsgd study language_model-quick")
    assert ended.code == 2, ended.err
    assert ended.err.endswith("; type asyncsgd study language_model --quick\n"), ended.err
    ended = cli("sweep.py experiments/configs/chain-quick.yaml")
    assert ended.code == 2, ended.err
    told = "; type python experiments/sweep.py experiments/configs/chain.yaml --quick\n"
    assert ended.err.endswith(told), ended.err
    assert "cannot be read" in cli("asyncsgd study nothing-quick").err
