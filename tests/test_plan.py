"""From a config to arms and runs, without running anything: names, blocks, budgets, shards, and every refusal."""

import copy
import datetime
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from asyncsgd.errors import UsageError
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.check import check
from asyncsgd.studies.config import ENDPOINTS, read_config
from asyncsgd.studies.overlay import quick_of
from asyncsgd.studies.plan import make_plan, sha256_of, share
from asyncsgd.studies.runs import STAGES
from asyncsgd.tasks import task_class

FLAGS = task_flags(task_class("masked_lm"))
SYNC = {"mode": "sync"}
ASYNC = {"mode": "async"}
RATES = {"learning_rate": [5.0e-4, 1.0e-3]}


def config_of(**parts):
    return {"name": "n", "algorithms": {"sync": SYNC, "async": ASYNC}, "conditions": [{"nproc": 2}], **parts}


FULL = config_of(
    base={"data": "pydocs", "samples": 64, "schedule": "constant"},
    base_model={"samples": 64},
    conditions=[{"nproc": 2}, {"nproc": [4, 8], "clock": "virtual"}],
    seeds=[100, 101, 102],
    replicates=2,
    tuning={"grid": RATES, "seeds": [0, 1]},
    pilots=[50, 51],
    finetune={"data": "pydocs", "repetitions": 2},
    analysis={"reference": "sync", "primary": {"num_workers": 4, "clock": "virtual"}, "margins": {"loss": 0.02}},
)


def folders_of(plan, stage):
    return [run.folder for run in plan.of_stage(stage)]


ONE = {"algorithms": {"async": ASYNC}}
SLOW = "slow:worker=0,factor=3"


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        # What is the same in all conditions of a clock is not in the names.
        ({"conditions": {"nproc": 2, "clock": "virtual", "speeds": SLOW}}, "sync-w2-virtual async-w2-virtual"),
        (
            ONE | {"conditions": {"nproc": 2, "clock": "virtual", "speeds": [SLOW, "exponential:1.0"]}},
            "async-w2-speeds_slow_worker_0_factor_3-virtual async-w2-speeds_exponential_1.0-virtual",
        ),
        (
            {
                "conditions": [{"nproc": [2, 4], "clock": ["measured", "virtual"]}],
                "exclude": [{"algorithm": "sync", "nproc": 4}, {"nproc": 2, "clock": "virtual"}],
            },
            "sync-w2 async-w2 async-w4 async-w4-virtual",
        ),
        # An algorithm with conditions of its own runs under these alone.
        (
            {
                "algorithms": {"async": ASYNC, "single": {"mode": "single", "conditions": [{"batch_size": [4, 8]}]}},
                "conditions": {"nproc": [2, 4]},
            },
            "async-w2 async-w4 single-w1-batch_size_4 single-w1-batch_size_8",
        ),
    ],
)
def test_an_arm_is_named_by_its_algorithm_its_workers_what_differs_and_the_virtual_clock(parts, names):
    plan = make_plan(config_of(**parts))
    assert [arm.name for arm in plan.arms] == names.split()


def test_workers_clock_and_speeds_of_the_base_belong_to_the_arm_as_if_its_condition_had_said_so():
    condition = {"nproc": 4, "clock": "virtual", "speeds": "exponential:1.0"}
    from_base = make_plan(config_of(base=condition, conditions=[{}], replicates=2))
    from_conditions = make_plan(config_of(conditions=[condition], replicates=2))
    assert from_base.arms == from_conditions.arms
    assert from_base.runs == from_conditions.runs


def test_other_names_of_a_setting_plan_what_its_name_plans():
    def config(nproc, speeds, data, rate):
        return config_of(
            base={speeds: SLOW},
            algorithms={"sync": SYNC, "async": {**ASYNC, "rule": "ringmaster:threshold={nproc}"}},
            conditions={nproc: [2, 4], "clock": "virtual"},
            exclude=[{"algorithm": "sync", nproc: 2}],
            seeds=[9],
            tuning={"grid": {rate: [0.1, 0.2]}},
            finetune={data: "pydocs"},
        )

    plan = make_plan(config("nproc", "speeds", "data", "learning_rate"))
    other = make_plan(config("workers", "times", "train_file", "learning-rate"))
    assert other.base == plan.base
    assert other.arms == plan.arms
    assert other.runs == plan.runs
    assert other.finetune == plan.finetune


def test_placeholders_are_filled_in_by_the_workers_of_each_arm_in_settings_and_in_trials():
    rules = ["k_sync:quorum={nproc//2}", "k_sync:quorum={nproc-1}"]
    algorithms = {
        "ringmaster": {"mode": "async", "rule": "ringmaster:threshold={nproc}"},
        "m_sync": {"mode": "async", "tune": {"rule": rules}},
    }
    conditions = {"nproc": [4, 8]}
    config = config_of(algorithms=algorithms, conditions=conditions, tuning={"grid": RATES}, seeds=[9])
    plan = make_plan(config)
    assert plan.arm("ringmaster-w8").settings["rule"] == "ringmaster:threshold=8"
    assert plan.arm("m_sync-w4").trials == ({"rule": "k_sync:quorum=2"}, {"rule": "k_sync:quorum=3"})


def test_on_the_virtual_clock_synchronous_training_is_the_synchronous_rule():
    conditions = {"nproc": 4, "clock": "virtual"}
    by_itself = config_of(algorithms={"sync": SYNC}, conditions=conditions)
    by_base = config_of(algorithms={"sync": {}}, base=SYNC, conditions=conditions)
    for config in (by_itself, by_base):
        (arm,) = make_plan(config).arms
        assert arm.settings["mode"] == "async"
        assert arm.settings["rule"] == "synchronous"


def test_an_arm_with_more_trials_than_another_is_refused():
    """Whoever tries more rates finds a better one by chance."""
    two = {"learning_rate": [1e-4, 1e-3]}
    three = {"learning_rate": [1e-4, 1e-3, 1e-2]}
    algorithms = {"sync": {"mode": "sync", "tune": two}, "async": {"mode": "async", "tune": three}}
    with pytest.raises(UsageError, match=r"as many trials as any other.* got sync-w2 2, async-w2 3"):
        make_plan(config_of(algorithms=algorithms, conditions={"nproc": 2}, tuning={"seeds": [9]}))


def test_values_have_the_types_that_settings_have_however_yaml_reads_them():
    grid = {"learning-rate": ["1e-4", 0.0001]}
    conditions = {"nproc": 2, "batch-size": "8"}
    plan = make_plan(config_of(seeds=[9], tuning={"grid": grid}, conditions=conditions))
    for arm in plan.arms:
        assert arm.settings["batch_size"] == 8
        assert arm.trials == ({"learning_rate": 1e-4}, {"learning_rate": 1e-4})
        for trial in arm.trials:
            assert type(trial["learning_rate"]) is float
    assert len(plan.of_stage("tuning")) == 2  # the two are one trial


def test_pilots_are_runs_of_the_reference_as_it_was_tuned_under_every_condition():
    plan = make_plan(FULL)
    runs = plan.of_stage("pilot")
    references = [arm.name for arm in plan.arms if arm.algorithm == "sync"]
    expected = itertools.product(references, (50, 51))
    assert sorted((run.arm, run.seed) for run in runs) == sorted(expected)
    rates = {}
    chosen = {}
    for number, name in enumerate(references, 1):
        rates[name] = 0.25 * number
        chosen[name] = {"learning_rate": rates[name]}
    for run in runs:
        values = plan.run_settings(run, chosen, {}, {})
        assert values["learning_rate"] == rates[run.arm]
        assert values["seed"] == run.seed
        assert run.folder == f"pilot/{run.arm}/s{run.seed}"


def test_where_times_are_compared_all_test_runs_of_a_group_get_the_seconds_of_its_reference():
    single = {"mode": "single", "conditions": [{"nproc": 1}]}
    plan = make_plan({**FULL, "algorithms": {**FULL["algorithms"], "single": single}})
    expected = {}
    for place in ("w2", "w4-virtual", "w8-virtual"):
        expected[f"sync-{place}"] = f"sync-{place}"
        expected[f"async-{place}"] = f"sync-{place}"
    assert plan.timed_by == expected
    chosen = {arm.name: arm.trials[0] for arm in plan.arms}
    budgets = {"sync-w2": 1.5, "sync-w4-virtual": 12.0, "sync-w8-virtual": 6.0}
    looks = {"sync-w2": 30, "sync-w4-virtual": 40, "sync-w8-virtual": 50}
    for run in (*plan.of_stage("tuning"), *plan.of_stage("pilot"), *plan.of_stage("test")):
        budget = FLAGS.make(plan.run_settings(run, chosen, budgets, looks)).budget
        ends = (budget.samples, budget.seconds, budget.evaluate_at)
        if run.stage == "test" and not run.arm.startswith("single"):
            reference = plan.timed_by[run.arm]
            assert ends == (None, budgets[reference], looks[reference])
        else:
            assert ends == (64, None, None)


def test_an_evaluation_that_the_config_names_goes_before_the_one_at_the_pilots_samples():
    plan = make_plan({**FULL, "base": {**FULL["base"], "evaluate_at": 12}})
    chosen = {arm.name: arm.trials[0] for arm in plan.arms}
    names = set(plan.timed_by.values())
    for run in plan.of_stage("test"):
        values = plan.run_settings(run, chosen, dict.fromkeys(names, 1.5), dict.fromkeys(names, 30))
        assert values["evaluate_at"] == 12


def test_a_control_arm_keeps_its_samples_and_is_not_in_the_primary_family():
    config = copy.deepcopy(FULL)
    config["algorithms"]["small"] = {"mode": "sync", "batch_size": "{8//nproc}"}
    config["analysis"]["control"] = "small"
    plan = make_plan(config)
    assert plan.family == ("async-w4-virtual",)
    assert not [name for name in plan.timed_by if name.startswith("small")]
    assert plan.arm("small-w2").settings["batch_size"] == 4
    assert plan.arm("small-w4-virtual").settings["batch_size"] == 2


def test_fine_tuning_starts_every_arm_of_a_block_and_the_baseline_with_one_seed():
    plan = make_plan(FULL)
    names = {arm.name for arm in plan.arms} | {"baseline"}
    blocks = {}
    for run in plan.of_stage("finetune"):
        if run.arm == "baseline":
            assert run.parent is None
        else:
            assert run.parent == f"test/{run.arm}/s{run.seed}"
        blocks.setdefault((run.seed, run.finetune_seed), set()).add(run.arm)
    expected = {}
    for seed in plan.config.seeds:
        for repetition in (0, 1):
            expected[seed, 1000 * seed + repetition] = names
    assert blocks == expected
    without = make_plan({**FULL, "finetune": {"data": "pydocs", "baseline": False, "learning-rate": "1e-4"}})
    assert all(run.parent is not None for run in without.of_stage("finetune"))
    assert without.finetune is not None
    assert without.finetune.settings == {"data": "pydocs", "learning_rate": 1e-4}


@given(st.permutations(list(FULL)))
def test_the_hash_and_the_order_of_runs_are_a_function_of_the_config_and_not_of_the_order_of_its_keys(keys):
    shuffled = {key: FULL[key] for key in keys}
    assert sha256_of(shuffled) == sha256_of(FULL)
    assert make_plan(shuffled).runs == make_plan(FULL).runs


@given(st.integers(1, 30))
def test_shards_are_a_partition_of_every_stage_and_a_measured_block_stays_on_one_machine(number):
    plan = make_plan(FULL)
    owner = {}
    for stage in STAGES:
        shared = []
        for index in range(1, number + 1):
            part = share(plan, stage, (index, number))
            shared += part
            owner |= dict.fromkeys(part, index)
        assert sorted(shared) == sorted(folders_of(plan, stage))
    for seed in plan.config.seeds:
        measured = []
        for run in plan.of_stage("test"):
            if run.seed == seed and not plan.arm(run.arm).virtual:
                measured.append(run)
        assert len(measured) == 4
        owners = {owner[run.folder] for run in measured}
        assert len(owners) == 1


REFERENCE = {"reference": "sync", "target_loss": 6.2}
# An arm that stands before its reference in the config, and has other seconds.
LESS = {"algorithms": {"async": {"seconds": 10}, "sync": SYNC}, "base": {"seconds": 20, "schedule": "constant"}}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"base": {"seed": 3}}, "base seed seeds"),
        ({"base": {"samplse": 8}}, "sync-w2 'samplse' 'samples'"),
        ({"algorithms": {"a": {"rule": "asynchronos"}}}, "a-w2 'asynchronos' 'asynchronous'"),
        ({"algorithms": {"a": {"rule": "{nproc**2}"}}}, "algorithms.a.rule {nproc**2} {nproc//2}"),
        ({"tuning": {}, "seeds": [9]}, "tuning sync-w2 0"),
        ({"tuning": {"grid": {"samples": [8, 16]}}, "seeds": [9]}, "algorithms.sync.tune samples"),
        ({"conditions": [{"nproc": 2}, {"nproc": 2}]}, "two sync-w2"),
        ({"exclude": [{"algoritm": "sync"}]}, "exclude 'algoritm'"),
        ({"tuning": {"grid": RATES, "seeds": [0]}}, "tuning.seeds seeds [0]"),
        ({"finetune": {"data": "pydocs", "mode": "sync"}}, "finetune: sync mode: single"),
        ({"analysis": {**REFERENCE, "reference": "snyc"}}, "analysis.reference 'snyc' 'sync'"),
        ({"analysis": {**REFERENCE, "primary": {"endpoint": "macro_f1"}}}, "macro_f1 finetune"),
        ({"analysis": {"reference": "sync"}}, "analysis pilots target_loss"),
        ({**FULL, "base": {"samples": 64}}, "sync-w2 seconds schedule: constant, got linear, samples: 64"),
        ({**LESS, "analysis": REFERENCE}, "async-w2 seconds 10 sync-w2;"),
        # As a share of the samples it would be none in the test runs, which have seconds.
        ({**FULL, "base": {**FULL["base"], "warmup": 0.1}}, "sync-w2 seconds warmup: in samples, got warmup: 0.1,"),
        ({"algorithms": {"a": {"model": "small"}}, "finetune": {"data": "pydocs"}}, "a-w2 small, tiny; baseline:"),
        ({"algorithms": {"a": {"model": "small"}}, "base_model": {"samples": 8}}, "a-w2 small out"),
        ({"base": {"model": "small"}, "base_model": {"samples": 8}}, "sync-w2 small out"),
        ({"algorithms": {"a": {"tune": {"workers": [1, 2]}}}}, "a.tune nproc"),
        ({"name": datetime.date(2026, 3, 1)}, "date quotes"),
        ({"algorithms": {"sync": SYNC, False: ASYNC}}, "off quotes"),  # YAML reads off as false
        ({"exclude": [{"nproc": 2}]}, "exclude every"),
        ({"finetune": {"clock": "virtual", "rule": "asynchronos"}}, "finetune 'asynchronos' 'asynchronous'"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_write_instead(parts, words):
    with refused(words):
        check(make_plan(config_of(**parts), "my.yaml"))


MODELS = {"a": {"task": "classification", "model": "tiny"}}
ARMS = {"arms": {"one": {}, "two": {"nproc": 2, "mode": "async"}}, "reference": "one", "margin": 0.02}
POINTS = {"threshold": {"a": 1.0}, "learning_rate": [0.1], "batch_size": [2], "seq_len": [8], "seeds": [3, 3]}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"seeds": [0, 0], "comparisons": {"c": ARMS}}, "seeds once, [0]"),
        ({"grid": POINTS}, "grid: seeds once, [3]"),
        ({"comparisons": {"c": ARMS}, "models": {"a": {"task": 5}}}, "task: text, number"),
    ],
)
def test_what_is_wrong_in_a_config_of_comparisons_is_named(parts, words):
    config = {"name": "n", "models": MODELS, **parts}
    with refused(words):
        make_plan(config, "my.yaml")


def test_a_file_that_is_no_config_is_refused_by_its_name(tmp_path):
    path = tmp_path / "c.yaml"
    for text in ("name: [", "- 1", "algorithms:\n  a: {}\n  a: {}\n", "name: \xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match=re.escape(str(path))):
            read_config(path)


OF_ONE_SCRIPT = {"norm_under_delay.yaml"}
"""Configs that no plan is made of; the script that reads one has a test of its own."""
FOLDER = Path(__file__).parents[1] / "asyncsgd" / "configs"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if path.name not in OF_ONE_SCRIPT)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_is_shipped_can_be_planned_and_its_quick_block_needs_no_data(path, is_quick):
    config = read_config(path)
    if is_quick and "quick" not in config:
        with pytest.raises(UsageError, match="has no quick: block"):
            quick_of(config, path.name)
        return
    if is_quick:
        config = quick_of(config, path.name)
    plan = make_plan(config)
    absent = []
    for name in re.findall(r"[.]{2}/shared/\S+\w", path.read_text()):
        if not Path(name).exists():
            absent.append(name)
    if is_quick or not absent:
        check(plan)  # which reads the labels of a target task
    if is_quick:
        assert "../" not in str(plan.models_and_data())
    expected_name = f"{path.stem}-quick" if is_quick else path.stem
    assert plan.name == expected_name
    if "algorithms" in config:
        assert_invariants(plan)


junk = st.sampled_from([None, True, 0, -1, 0.5, "", "x", "1e-3", "{nproc", [], [1], {}, {"a": 1}, {"seed": 1}, [[2]]])
CHOICES = {
    "conditions": [{"nproc": 2}, [{"nproc": 2}, {"nproc": [4, 8], "clock": "virtual"}], {"batch-size": [4, 8]}],
    "base": [{"samples": 8}, {"schedule": "constant"}, {"clock": "virtual"}, {"learning-rate": "1e-3"}],
    "base_model": [None, {}, {"samples": 8, "seed": 3}],
    "exclude": [[{"algorithm": "a"}], [{"nproc": 2}]],
    "replicates": [1, 2, 3],
    "tuning": [{"grid": RATES, "seeds": [9]}, {"grid": {"beta1": [0.5, 0.5], **RATES}, "seeds": [9, 8]}],
    "pilots": [[20, 21]],
    "finetune": [{"data": "pydocs", "repetitions": 2}, {"data": "pydocs", "baseline": False}],
    "analysis": [],
}
for endpoint, number in itertools.product((*ENDPOINTS, "macro_f1"), (2, None)):
    primary = {"endpoint": endpoint, "num_workers": number}
    for more in ({}, {"margins": {"loss": 0.1}, "target_loss": 6.0}):
        CHOICES["analysis"].append({"reference": "sync", "primary": primary, **more})
ALGORITHMS = {"sync": SYNC, "a": ASYNC, "own": {"conditions": {"nproc": 3}}, "b": {"rule": "k_sync:quorum={nproc-1}"}}


def named_algorithms(names):
    return {name: ALGORITHMS[name] for name in names}


some_algorithms = st.lists(st.sampled_from([*ALGORITHMS]), min_size=1).map(named_algorithms)
optional = {"seeds": st.just([3, 2, 1])}
for key, values in CHOICES.items():
    optional[key] = st.sampled_from(values)
sound = st.fixed_dictionaries({"algorithms": some_algorithms}, optional=optional)
spoiled = st.dictionaries(st.sampled_from([*CHOICES, "algorithms", "seeds", "unknown"]), junk, max_size=1)
anything = st.builds(lambda some, others: {**some, **others}, sound, spoiled)


def assert_invariants(plan):
    """What holds for every plan, whatever the config."""
    names = [arm.name for arm in plan.arms]
    assert names
    assert len(set(names)) == len(names)
    assert len({run.folder for run in plan.runs}) == len(plan.runs)
    stages = [run.stage for run in plan.runs]
    assert stages == sorted(stages, key=STAGES.index)
    assert set(plan.config.seeds).isdisjoint(plan.config.tuning.seeds)
    assert len({len(arm.trials) for arm in plan.arms}) == 1
    blocks = Counter((run.seed, run.arm) for run in plan.of_stage("test"))
    expected = {}
    for arm in plan.arms:
        times = 1 if arm.virtual else plan.config.replicates  # on the virtual clock it were the same run
        for seed in plan.config.seeds:
            expected[seed, arm.name] = times
    assert blocks == expected
    tests = {run.folder for run in plan.of_stage("test")}
    assert all(run.parent in tests or run.arm == "baseline" for run in plan.of_stage("finetune"))
    chosen = {arm.name: arm.trials[0] for arm in plan.arms if arm.trials}
    for run in plan.runs:
        if run.stage == "finetune":
            continue
        values = plan.run_settings(run, chosen, dict.fromkeys(names, 7.5), {})
        settings = FLAGS.make(values)
        assert settings.job.seed == run.seed
        if run.stage == "base":
            continue
        arm = plan.arm(run.arm)
        assert (settings.job.clock == "virtual") == arm.virtual
        assert f"-w{settings.job.nproc}" in arm.name
        if chosen:
            trial = arm.trials[run.trial or 0]
            assert trial.items() <= values.items()
    if plan.analysis is not None:
        primary = plan.analysis.primary
        reference = (plan.analysis.reference, primary.num_workers, primary.clock)
        assert reference in {(arm.algorithm, *arm.workers_and_clock) for arm in plan.arms}


@given(anything)
def test_any_config_is_planned_soundly_or_refused_and_nothing_else(config):
    before = copy.deepcopy(config)
    try:
        plan = make_plan(config)
    except UsageError:
        return
    finally:
        assert config == before
    assert_invariants(plan)
    assert make_plan(config).runs == plan.runs
