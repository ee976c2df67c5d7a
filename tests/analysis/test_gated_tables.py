"""No table sets two arms against each other whose runs differ in what no plan says: a walk over all public tables."""

import re

import pandas as pd
import pytest
import yaml
from synthetic import (
    SyntheticArm,
    edit_json,
    planned,
    straight,
    write_finetuning,
    write_plan,
    write_registration,
    write_run,
)

from analysis import __main__ as commands
from analysis import comparison_sections, comparisons, lab_notes, tasks, ways
from analysis.dose import read_dose
from analysis.load import TABLES, load
from analysis.report import tables_of
from asyncsgd.errors import UsageError

SEEDS = range(100, 106)
ONE, SYNC, ASYNC = (
    SyntheticArm(name, workers, "measured", None, batch_size=batch, settings={"batch_size": batch})
    for name, workers, batch in (("single", 1, 64), ("sync", 2, 32), ("async", 2, 32))
)
ARMS = (ONE, SYNC, ASYNC)
REASON = "weight_decay of"
AGAINST = {
    "tests": {"better", "difference", "times_sooner", "p", "p_holm", "p_equal", "test"},
    "differences": set(),  # of four arms, which test_differences.py looks at
    "arms": {"speed_up", "efficiency"},
    "paper": {"times sooner"},
    "settings": set(),
    "tuning": set(),
    "downstream": set(),
    "sets": set(),
    "runs": set(),
    "environments": set(),
    "trust": set(),
    "comparison": {"loss - reference", "p_holm", "samples/s, times the reference"},
    "costs": set(),
    "ways": {"samples to the loss of one process", "came there"},
    "scores": set(),
    "agreement": {"seconds, async / sync", "perplexity, async / sync"},
}
"""Table -> its columns that set two arms against each other, beside those of words."""
WORDS = {"tests": "word", "paper": "verdict", "comparison": "word", "agreement": "agrees"}
NO_ARMS = ("candidates", "timeline", "watch")
"""Commands that look at one run or one corpus."""
WALKED = ("report", "compare", "tasks", "language_model", "parallelism", "lab_notes")
LADDER = ("speed_ladder",)
"""test_ladder_report.py walks over its tables."""


def written(folder, unlike=False, number=0):
    """A study with every part, and, `unlike`, with a weight decay in the asynchronous runs that no plan speaks of."""
    runs = []
    for arm, end, seconds in zip(ARMS, (5.0, 5.1, 5.3), (20.0, 10.0, 8.0), strict=True):
        for seed in SEEDS:
            at = f"test/{arm.name}/s{seed}"
            runs.append(planned(at, "test", arm.name, seed))
            last = end + 0.01 * number + 0.001 * (seed % 5)
            path = write_run(folder / at, arm, straight(6.0, last, seconds=seconds, evaluations=41), seed=seed)
            _changed(path, unlike and arm is ASYNC)
            if arm is ONE:
                continue
            at = f"finetune/{arm.name}/s{seed}-f0"
            runs.append(planned(at, "finetune", arm.name, seed, parent=runs[-1]["folder"], finetune_seed=0))
            parent = {"run": f"s{seed}"}
            write_finetuning(
                folder / at, seed=0, macro_f1=0.6 + 0.01 * (seed % 4) + 0.05 * (arm is ASYNC), parent=parent
            )
    primary = {"endpoint": "loss_at_equal_samples", "num_workers": 2, "clock": "measured"}
    write_registration(folder, num_seeds=len(SEEDS), primary=primary, targets={SYNC.name: 5.5})
    write_plan(folder, ARMS, runs)
    return folder


def compared(folder, unlike=False):
    """A folder of experiments/language_model.py."""
    arms = {"single": ONE, "sync": SYNC, "async": ASYNC}
    settings = {name: {"mode": arm.mode, "nproc": arm.num_workers} for name, arm in arms.items()}
    for arm in settings.values():
        arm["batch_size"] = 32
    settings["single"]["batch_size"] = 64
    comparison = {"reference": "single", "margin": 0.1, "arms": settings}
    folder.mkdir()
    config = {"name": "small", "models": {"tiny": {}}, "comparisons": {"workers": comparison}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for name, arm in arms.items():
        for seed in SEEDS:
            curve = straight(6.0, 5.0 + (0.001 * (seed % 5) if name == "single" else -0.01), seconds=10.0 + seed % 3)
            path = write_run(folder / f"workers/tiny/{name}/s{seed}", arm, curve, seed=seed)
            _changed(path, unlike and arm is ASYNC)
    return folder


def _changed(path, unlike):
    if unlike:
        file = path / "settings.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"weight_decay": 0.5}))


def tables(kind, folder):
    """The tables of a command by name, and all that is told beside them."""
    if kind == "report":
        study = load(folder)
        return {name: of(study) for name, (_, of) in TABLES.items()}, study.verdict
    if kind == "lab_notes":
        runs, _, plan = comparisons.read_study(folder)
        table, reasons = lab_notes._agreement(lab_notes.table_rows(runs, plan), plan)
        return {"agreement": table[table["clock"] == "measured"]}, " ".join(reasons)
    found = comparisons.read(folder)
    parts = comparison_sections.parts_of(found)
    if kind == "parallelism":
        parts += ways.parts_of(found, ways.ways_of(found))
    told = " ".join(comparison_sections.sentences(found))
    return {re.sub("-.*", "", part.key): part.frame for part in parts}, told


def _of_async(frame, kind):
    """The rows of the arm that is changed; the lab notes have no others."""
    if kind == "lab_notes":
        return frame
    return frame[[any(ASYNC.algorithm in str(cell) for cell in row) for row in frame.to_numpy().tolist()]]


def empty(value):
    return value is None or value in ("", "-") or bool(pd.isna(getattr(value, "estimate", value)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("gate")
    made = {}
    for name, unlike in (("alike", False), ("unlike", True)):
        made["study", name] = written(place / name, unlike)
        made["comparisons", name] = compared(place / f"{name}-comparisons", unlike)
    return made


def test_every_command_is_walked_or_has_no_arms():
    assert {*WALKED, *NO_ARMS, *LADDER} == {*commands.COMMANDS}


@pytest.mark.parametrize("kind", ["report", "lab_notes", "language_model", "parallelism"])
def test_a_setting_of_one_arm_empties_all_that_sets_it_against_another_and_is_named(folders, kind):
    source = "study" if kind in ("report", "lab_notes") else "comparisons"
    before, _ = tables(kind, folders[source, "alike"])
    after, told = tables(kind, folders[source, "unlike"])
    assert set(before) <= set(AGAINST)
    assert REASON in told
    for name, frame in after.items():
        assert AGAINST[name] <= {*before[name]}, f"{name} has other columns than it had"
        rows = _of_async(frame, kind)
        were = _of_async(before[name], kind)
        for column in AGAINST[name]:
            assert not all(map(empty, were[column])), f"{column} of {name} was empty before"
            assert column not in rows or all(map(empty, rows[column])), f"{column} of {name} is not empty"
        if name in WORDS:
            assert set(rows[WORDS[name]]) == {"not comparable"}
            assert "not comparable" not in set(before[name][WORDS[name]])
    for name in {"runs", "environments", "downstream", "costs"} & {*before}:
        assert after[name].equals(before[name])
    if kind == "report":
        assert "weight_decay" in after["settings"]
        assert set(after["tests"]["endpoint"]) >= {"macro_f1", "time_to_target", "loss_at_equal_samples"}


def test_no_score_over_tasks_has_a_study_whose_arms_are_not_comparable(folders, tmp_path):
    studies = [tasks.read_task(folders["study", "alike"]), tasks.read_task(written(tmp_path / "second", number=1))]
    assert [study.why_untimed for study in studies] == ["", ""]
    with pytest.raises(UsageError, match=f"no task: {REASON} async-w2: 0.5; of sync-w2: 0.01"):
        tasks.read_task(folders["study", "unlike"])


def test_a_dose_of_runs_that_are_not_comparable_is_refused(tmp_path):
    delayed = SyntheticArm("delayed", 2, "measured", None, batch_size=32, settings={"batch_size": 32})
    for name, unlike in (("alike", False), ("unlike", True)):
        folder = tmp_path / name
        runs = []
        for arm in (SYNC, delayed):
            for seed in SEEDS:
                at = f"test/{arm.name}/s{seed}"
                runs.append(planned(at, "test", arm.name, seed))
                path = write_run(folder / at, arm, straight(6.0, 5.0, seconds=10.0), seed=seed)
                _changed(path, unlike and arm is delayed)
        primary = {"endpoint": "loss_at_equal_samples", "num_workers": 2, "clock": "measured"}
        write_registration(folder, num_seeds=len(SEEDS), primary=primary, targets={SYNC.name: 5.5})
        write_plan(folder, (SYNC, delayed), runs)
    assert len(read_dose(tmp_path / "alike").runs) == 2 * len(SEEDS)
    with pytest.raises(UsageError, match=f"are not comparable: {REASON}"):
        read_dose(tmp_path / "unlike")


def test_a_task_is_not_counted_twice(folders):
    one = tasks.read_task(folders["study", "alike"])
    copied = [one, one._replace(name="a copy"), one._replace(name="another", models=frozenset())]
    with pytest.raises(UsageError, match="alike and a copy hold runs of the same parameters"):
        tasks.across(copied, None)


def test_a_fine_tuning_of_another_run_than_the_plan_says_is_misplaced(tmp_path):
    folder = written(tmp_path / "study")
    tuned = folder / f"finetune/{ASYNC.name}"
    edit_json(tuned / "s100-f0/summary.json", parent={"run": "s101"})
    edit_json(tuned / "s101-f0/summary.json", parent={"run": "s101", "parameters_sha256": "that of another arm"})
    runs = load(folder).runs
    assert [*runs.index[runs["status"] == "MISPLACED"]] == [f"finetune/{ASYNC.name}/s{seed}-f0" for seed in (100, 101)]
    assert runs.loc[f"finetune/{ASYNC.name}/s100-f0", "left_out"].endswith(
        f"from s101, not from test/{ASYNC.name}/s100"
    )


def test_fine_tunings_on_other_data_are_not_compared_whatever_their_pretrainings_are(tmp_path):
    folder = written(tmp_path / "study")
    for path in folder.glob(f"finetune/{ASYNC.name}/*/summary.json"):
        edit_json(path, data_fingerprint="beef")
    words = load(folder).tests.set_index("endpoint")
    assert words.loc["macro_f1", ["word", "reason"]].to_list() == [
        "not comparable",
        "data of async-w2: beef; of sync-w2: feed",
    ]
    assert "not comparable" not in set(words["word"].drop("macro_f1"))


def test_a_misspelled_setting_of_arms_is_refused(folders):
    loose = folders["comparisons", "alike"] / "workers"
    with pytest.raises(UsageError, match="no run here has a setting 'batch_sise'; did you mean 'batch_size'"):
        load(loose, arms=["learning_rate", "batch_sise"])
    with pytest.raises(UsageError, match=r"write arms=\['learning_rate'\]"):
        load(loose, arms="learning_rate")
    with pytest.raises(UsageError, match=r"plan\.json says in what the arms of this folder differ"):
        load(folders["study", "alike"], arms=["learning_rate"])


def test_markdown_begins_with_the_headline_as_the_page_does(folders):
    study = load(folders["study", "alike"])
    first, *_ = tables_of(study, "md", None).splitlines()
    assert first == f"**{study.headlines[0].text}**"
    assert not tables_of(study, "md", "tests").startswith(f"**{study.headlines[0].text}")
