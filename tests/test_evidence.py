"""What 03c2f30 answered, before the library was made smaller: its runs, its verdicts and its plans."""

import ast
import csv
import hashlib
import json
import math
import tarfile
from collections import Counter
from pathlib import Path

import pandas
import pytest
import yaml
from marks import slow

import asyncsgd
from analysis import compare
from asyncsgd.errors import UsageError
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.arms import flags_of
from asyncsgd.studies.config import read_config
from asyncsgd.studies.overlay import quick_of
from asyncsgd.studies.plan import make_plan
from asyncsgd.tasks import task_class
from own_model import Shapes

EVIDENCE = Path(__file__).resolve().parents[2] / "shared" / "evidence"
CONFIGS = Path(__file__).resolve().parents[1] / "asyncsgd" / "configs"

pytestmark = pytest.mark.skipif(
    not EVIDENCE.is_dir(), reason="the evidence is not beside the repository (../shared/evidence)"
)


def unpacked(archive, folder, names=()):
    """The folder of an archive, with all that is in it or only with what is named there."""
    with tarfile.open(EVIDENCE / archive) as tar:
        members = []
        for member in tar:
            if not names or not {*names}.isdisjoint(Path(member.name).parts):
                members.append(member)
        tar.extractall(folder, members, filter="data")
    unpacked = folder / archive.removesuffix(".tar.gz")
    for path in unpacked.rglob("settings.yaml"):
        path.write_text(yaml.safe_dump(in_one_format(path), sort_keys=False), "utf-8")
    return unpacked


def in_one_format(path):
    """The settings of a run in the format that is written now. Its writer had three: that of scripts, which did not
    name the task, that of `asyncsgd.train`, whose task and optimizer lay one level deeper, and that of simulations.
    """
    content = yaml.safe_load(path.read_text("utf-8"))
    if "simulate" in content:
        told = {"experiment": "simulate"} | content["simulate"]
        renamed = {"workers": "nproc", "budget_seconds": "seconds"}
        return {"settings_format": 2} | {renamed.get(name, name): value for name, value in told.items()}
    content.pop("save_model", None)
    named = content.pop("task_class", None)
    fields = content.pop("task_fields", {})
    options = content.pop("optimizer_options", {})
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    if content.get("mode") not in (None, "async"):
        content.pop("rule", None)
    if named is None and path.with_name("events.jsonl").is_file():
        named = json.loads(path.with_name("events.jsonl").read_text("utf-8").partition("\n")[0]).get("task")
    built_in = {f"asyncsgd.tasks.{name}:{kind}": name for name, kind in asyncsgd.tasks.TASKS.items()}
    known = {"settings_format": 2, "experiment": "train", "task": built_in.get(named, named)}
    if known["task"] in asyncsgd.tasks.TASKS:
        known["sample_order"] = 1  # the only order that there was
    of_masked_lm = {"model_name": "model", "data_name": "data", "eval_split": "split"}
    fields = {of_masked_lm.get(name, name): value for name, value in fields.items()}
    return known | content | options | fields


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return unpacked("runs.tar.gz", tmp_path_factory.mktemp("evidence"))


SHAPES = ["single", "async2-ringmaster", "async2-ksync-abandons", "async2-fedbuff", "async2-process-group"]
SHAPES += ["virtual-churn", "virtual-resumed"]
QUICK = ("single", "async2-ksync-abandons", "virtual-resumed")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in SHAPES if name not in QUICK))])
def test_a_run_is_replayed_whole_on_any_processor(runs, name):
    """Its bits are those of the processor that it was recorded on."""
    replayed = asyncsgd.replay(runs / name, Shapes(train_images=320, width=8))
    assert replayed.difference == ""
    assert replayed.equal_to_rounding is True
    assert replayed.equal_up_to == replayed.num_updates
    assert replayed.num_updates == summary(runs / name)["num_updates"]
    same_bits = replayed.parameters_sha256 == summary(runs / name)["parameters_sha256"]
    assert replayed.identical == same_bits


@pytest.mark.slow
def test_a_run_of_a_masked_language_model_is_replayed_whole(runs, tmp_path):
    """Its texts are the documentation of Python and of its packages, which have to be those of the run."""
    try:
        replayed = asyncsgd.replay(runs / "mlm-async2", cache=tmp_path)
    except UsageError as error:
        if "the data are not the run's" not in str(error):
            raise
        pytest.skip(str(error))
    assert replayed.difference == ""
    assert replayed.equal_to_rounding is True


def test_every_run_is_read_with_its_losses(runs):
    for folder in sorted(path.parent for path in runs.glob("*/summary.json")):
        run = asyncsgd.load_run(folder)
        said = summary(folder)
        assert run.status == "DONE", folder.name
        assert run.evaluations[0].loss == said["first_eval_loss"], folder.name
        assert run.evaluations[-1].loss == said["final_eval_loss"], folder.name
        frame = run.frame()
        curve = asyncsgd.load(folder).curves.drop(columns="run")
        pandas.testing.assert_frame_equal(frame.astype(float), curve)


def test_every_run_is_a_row_of_the_comparison(runs, tmp_path, capsys):
    assert compare.main([str(runs), "--format", "csv", "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    losses = sorted(summary(path.parent)["final_eval_loss"] for path in runs.glob("*/summary.json"))
    assert len(losses) == 11
    assert sorted(float(row["loss_mean"]) for row in rows) == losses


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


ROWS = json.loads((EVIDENCE / "rows.json").read_text()) if EVIDENCE.is_dir() else {}
STUDIES = sorted(ROWS)
SAMPLE = STUDIES[::8]
OTHERS = [name for name in STUDIES if name not in SAMPLE]


def test_there_are_161_studies_with_525_rows():
    assert len(ROWS) == 161
    assert sum(map(len, ROWS.values())) == 525


@pytest.mark.parametrize("names", [SAMPLE, *slow(OTHERS)], ids=["every eighth", "all others"])
def test_studies_are_judged_as_before(tmp_path, names):
    folder = unpacked("studies.tar.gz", tmp_path, names)
    for name in names:
        completed(folder / name)
    assert [line for name in names for line in differences(name, ROWS[name], judged(folder / name))] == []


def completed(study):
    """Write what every study says and the writer of these did not: the hash of what was registered, the parameters that
    every run began with, and its budget. For that it wrote where a run had ended, also of one that diverged or that
    something else had stopped.
    """
    registered = study / "analysis.yaml"
    plan = study / "plan.json"
    if registered.is_file() and plan.is_file():
        content = json.loads(plan.read_text("utf-8"))
        if isinstance(content, dict) and content.get("analysis_sha256") is None:
            content["analysis_sha256"] = hashlib.sha256(registered.read_bytes()).hexdigest()
            plan.write_text(json.dumps(content), "utf-8")
    ends: dict[Path, dict[Path, int]] = {}
    for path in study.glob("test/*/*/summary.json"):
        content = path.read_text("utf-8")
        if content.startswith("{") and "init_sha256" not in content:
            path.write_text(content.replace("{", '{"init_sha256": "a1b2", ', 1), "utf-8")
        lasted = yaml.safe_load(path.with_name("settings.yaml").read_text("utf-8"))["samples"] or 0
        ends.setdefault(path.parents[1], {})[path.parent] = 0 if '"DIVERGED"' in content else lasted
    for runs in ends.values():
        most = max(runs.values()) or max(end for others in ends.values() for end in others.values())
        for run in runs:
            settings = yaml.safe_load((run / "settings.yaml").read_text("utf-8")) | {"samples": most}
            (run / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), "utf-8")


NOT_COMPARABLE = "results-runs_on_different_data_or_evaluation_masks_are_not_comp"
"""Studies whose runs differ in what they were evaluated on: they had no row, and now have rows that say so."""
UNLIKE_BUDGETS = (
    "headline-conditions_are_named_in_words",
    "headline-the_settings_that_differ_within_a_group_are_a_table_and-0-1",
    "results-budgets_that_differ_are_compared_at_the_smallest_and_no",
)
"""Studies whose arms had other budgets, which no plan said: they were compared at the smaller one, with a note."""


LOADED = (
    "scenarios_of_machines-a_machine_that_others_used-0-0",
    "scenarios_of_machines-a_tenth_of_the_machine_may_be_used_by_others_or_stolen-1-0",
)
"""Studies in which others used more than a tenth of the machine: measured seconds of such pairs are not compared."""
EVALUATED_UNLIKE = "results-an_arm_that_adds_nothing_to_the_front_does_not_change_i-0-1"
"""A study in which one initial model has a loss of 6 in one arm and of 6.5 in the other."""


CHANGED = {
    # a fine-tuning of it was lost: what is left was not chosen before looking
    ("results-a_lost_fine_tuning_run_takes_its_own_pair_alone_and_a_d-0-0", "ringmaster-w4-virtual", "macro_f1"): {
        "family": "exploratory"
    },
}
"""(study, treatment, endpoint) of the rows that are no longer what they were -> what they are now, with the reason."""


BETWEEN_LOOKS = json.loads(Path(__file__).with_name("evidence_between_looks.json").read_text("utf-8"))
"""Cause -> rows that were read off chords between two evaluations, and no longer are: study, treatment, reference,
endpoint, p and word as they were, p of both ends, word now. Another p_holm or word changes only in their families."""
OFF_CHORDS = {(row[0], *row[1:4]): row for rows in BETWEEN_LOOKS.values() for row in rows}


def test_what_was_read_off_chords_is_a_time_or_a_loss():
    endpoints = Counter(key[3] for key in OFF_CHORDS)
    assert set(endpoints) == {"time_to_target", "target_reached", "loss_at_equal_samples", "loss_at_equal_seconds"}
    assert len(OFF_CHORDS) == sum(map(len, BETWEEN_LOOKS.values()))


def differences(study, before, now):
    if study.startswith(NOT_COMPARABLE):
        assert not before
        return [f"{study}: {row['word']}" for row in now if row["word"] != "not comparable"]
    if study.startswith(UNLIKE_BUDGETS):
        assert len(now) == len(before)
        told = [f"{row['word']}, {row['reason']}" for row in now]
        return [f"{study}: {one}" for one in told if not one.startswith("not comparable, samples of ")]
    was = by_comparison(before)
    is_now = by_comparison(now)
    lines = [f"{study}: {' '.join(key)} is on one side only" for key in was.keys() ^ is_now.keys()]
    if study in LOADED:
        lines = []
    for key in was.keys() & is_now.keys():
        if study in LOADED and key[2] != "loss_at_equal_samples":
            assert is_now[key]["word"] == "not comparable" or is_now[key]["n"] == was[key]["n"] - 1
            continue
        if study == EVALUATED_UNLIKE and key[0].startswith("ringmaster"):
            assert is_now[key]["reason"].startswith("evaluated unlike: the loss at update 0 of ringmaster")
            continue
        if changed := CHANGED.get((study, key[0], key[2])):
            assert changed.items() <= is_now[key].items()
            continue
        off_chord = OFF_CHORDS.get((study, *key))
        if off_chord is not None:
            *_, p, word, p_ends, word_now = off_chord
            told = [was[key]["p"], was[key]["word"], is_now[key]["p_ends"], is_now[key]["word"]]
            lines += [] if same([p, word, p_ends, word_now], told) else [f"{study}: {' '.join(key)}: {told}"]
            continue
        family = {
            tuple(one)
            for name, *one in OFF_CHORDS
            if name == study and is_now[tuple(one)]["family"] == was[key]["family"]
        }
        for column, value in was[key].items():
            if column in ("p_holm", "word") and family:
                continue
            if column != "reason" and not same(value, is_now[key][column]):
                lines.append(f"{study}: {column} of {' '.join(key)} was {value} and is {is_now[key][column]}")
    return lines


def by_comparison(rows):
    found = {}
    for row in rows:
        found[row["treatment"], row["reference"], row["endpoint"]] = row
    assert len(found) == len(rows)
    return found


def same(value, other):
    """Whether two words, numbers, or a number with its interval are the same; NaN and None are.

    The ends of intervals were found by bisection, and are now one of the means that they lie between.

    >>> same([2.0, None], [2.0 + 1e-8, math.nan]), same(None, math.nan), same(0.5, 0.6), same("better", "worse")
    (True, True, False, False)
    """
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    value, other = (math.nan if part is None else part for part in (value, other))
    if isinstance(other, list) and value != value:
        return same([None] * len(other), other)
    numbers = all(isinstance(part, int | float) for part in (value, other))
    if numbers:
        return bool(value == pytest.approx(other, rel=1e-7, abs=1e-8, nan_ok=True))
    return value == other


def judged(folder):
    """The rows of a study's table of tests; an estimate and a ratio stand with both ends of their intervals."""

    names = ("treatment", "reference", "endpoint", "word", "reason", "family", "n", "p", "p_holm")
    return [
        {name: getattr(row, name) for name in names}
        | {
            "p_ends": list(row.p_ends),
            "estimate": [row.estimate, row.low, row.high],
            "ratio": [row.ratio, row.ratio_low, row.ratio_high],
        }
        for row in asyncsgd.load(folder).tests.itertuples()
    ]


PLANS = json.loads((EVIDENCE / "plans.json").read_text()) if EVIDENCE.is_dir() else {}


@pytest.mark.parametrize("config", sorted(PLANS))
def test_a_config_plans_the_same_runs(config):
    name = config.removesuffix("-quick")
    given = read_config(CONFIGS / f"{name}.yaml")
    if name != config:  # a config of its own then, and now the quick: block of the other
        given = quick_of(given, name)
    assert sorted(planned(given)) == sorted(map(recorded, PLANS[config]))


def planned(config):
    plan = make_plan(config)
    if "comparisons" in config:
        spelled = {"--model": "--init-from"}  # then, where an encoder gets a new head
        made = []
        for run in plan.runs:
            task = plan.task(run)
            words = flags_of(plan.run_settings(run, {}, {}, {}), task_flags(task_class(task)).specs)
            if task == "question_answering":
                own = [spelled.get(word, word) for word in words]
            else:
                own = words
            made.append(json.dumps([run.folder, task, in_order(own)]))
        return made
    return [recorded({key: str(value) for key, value in vars(run).items()}) for run in plan.runs]


def recorded(run):
    """A run of plans.json: the fields of one of a sweep, or how Python writes one of a comparison.

    >>> recorded("Job(folder='a/s1', task='masked_lm', flags=('--mode', 'single'))")
    '["a/s1", "masked_lm", ["mode single"]]'
    """
    if isinstance(run, dict):
        return json.dumps(run, sort_keys=True)
    call = ast.parse(run, mode="eval").body
    assert isinstance(call, ast.Call)
    folder, task, flags = (ast.literal_eval(keyword.value) for keyword in call.keywords)
    return json.dumps([folder, task, in_order(flags)])


def in_order(words):
    """Flags with their values, in an order that is not the one in which a config has them."""
    return sorted(f" {' '.join(words)}".split(" --")[1:])
