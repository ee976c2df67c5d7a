"""What two runs may differ in: everything that they were asked for is compared, by its meaning."""

import dataclasses

import pytest
from doors import asyncsgd
from scenarios import ASYNC, EIGHT, LOSSES_DECIDE, SOONER, SYNC, ends_at, reaches, row_of, two_arms
from synthetic import edit_json, edit_yaml, write_run

CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]
LOSS = "loss_at_equal_samples"
TIME = "time_to_target"


def asked(folder, arm, **settings):
    for path in sorted((folder / "test" / arm.name).glob("s*/settings.yaml")):
        edit_yaml(path, **settings)


def said(folder, arm, **summary):
    for path in sorted((folder / "test" / arm.name).glob("s*/summary.json")):
        edit_json(path, **summary)


def study(folder, ours, theirs=None, arms=(SYNC, ASYNC), curves=CURVES):
    def change(path):
        asked(path, arms[1], **ours)
        asked(path, arms[0], **(theirs or {}))

    return two_arms(folder, *curves, arms=arms, afterwards=change)


@pytest.mark.parametrize(
    ("settings", "theirs", "told"),
    [
        ({"weight_decay": 0.5}, {}, "weight_decay of async-w4-virtual: 0.5; of sync-w4-virtual: 0.01"),
        ({"lossscale": 0.5}, {"lossscale": 1.0}, "lossscale of async-w4-virtual: 0.5; of sync-w4-virtual: 1"),
        ({"sample_order": 1}, {}, "sample_order of async-w4-virtual: 1; of sync-w4-virtual: 2"),
        ({"beta1": 0.8}, {}, "beta1 of async-w4-virtual: 0.8; of sync-w4-virtual: 0.9"),
    ],
)
def test_a_setting_that_changes_a_loss_and_that_no_plan_names_is_a_difference(tmp_path, settings, theirs, told):
    found = study(tmp_path, settings, theirs)
    assert set(found.tests["word"]) == {"not comparable"}
    assert set(found.tests["reason"]) == {told}
    for notes in found.tests["notes"]:
        for note in notes:
            assert not note.startswith(("the budget of every run is", "compared at"))


def test_every_difference_is_named_with_both_values(tmp_path):
    found = study(tmp_path, {"warmup": 80, "precision": "bf16"})
    assert set(found.tests["reason"]) == {
        "precision of async-w4-virtual: bf16; of sync-w4-virtual: fp32; "
        "warmup of async-w4-virtual: 80; of sync-w4-virtual: 640"
    }


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"weight_decay": 0.01, "sample_order": 2, "accumulate": 1}, {}),
        ({"data": "texts.csv"}, {"data": "/home/me/texts.csv"}),
        ({"speeds": "slow:factor=3.0,worker=0,seconds=1"}, {}),
        ({"churn": "leave:worker=1,seconds=2"}, {"churn": "leave:seconds=2.0,worker=1"}),
        ({"checkpoint_seconds": 60.0, "cache_dir": "a", "track": "tensorboard"}, {}),
        ({"batch_statistics": None, "statistics_batches": None}, {}),
        ({"optimizer": "adamw", "beta1": 0.9}, {}),
    ],
    ids=["defaults", "paths", "speeds", "churn", "places", "statistics", "optimizer"],
)
def test_what_means_the_same_is_no_difference(tmp_path, ours, theirs):
    found = study(tmp_path, ours, theirs)
    assert row_of(found, LOSS).word == "better"
    assert not any(note.startswith("the arms also differ") for note in row_of(found, LOSS).notes)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        ({"threads": 2, "compile": True}, {}, "the arms also differ in compile (True, False)"),
        (
            {"scale": "<function half at 0x7f5a>"},
            {"scale": "<function half at 0x7f5b>"},
            "the arms also differ in scale (not known)",
        ),
    ],
)
def test_what_only_rounds_or_is_not_known_is_told_and_not_refused(tmp_path, ours, theirs, told):
    row = row_of(study(tmp_path, ours, theirs), LOSS)
    assert row.word == "better"
    assert told in row.notes


def test_micro_batches_are_a_difference_where_a_layer_normalises_over_the_batch(tmp_path):
    for name, fact, word in (("with", True, "not comparable"), ("without", None, "better")):

        def change(path, fact=fact):
            said(path, ASYNC, micro_batches=2, normalises_over_batch=fact)

        found = two_arms(tmp_path / name, *CURVES, afterwards=change)
        assert row_of(found, LOSS).word == word


ENDING_AT_5 = [ends_at(5.0)] * 8


def beginning_at(first):
    """Curves of eight seeds with this loss at update 0."""
    curves = []
    for k in range(8):
        _, *later = ends_at(5.5 + 0.01 * k)
        curves.append([(0, 0.0, first), *later])
    return curves


def test_two_runs_of_one_model_have_one_loss_at_update_0(tmp_path):
    for share, word in ((1.0005, "worse"), (1.002, "not comparable")):
        ours = beginning_at(6.0 * share)
        found = two_arms(tmp_path / str(share), ENDING_AT_5, ours, registration=LOSSES_DECIDE)
        row = row_of(found, LOSS)
        assert row.word == word
    assert row.reason == "evaluated unlike: the loss at update 0 of async-w4-virtual: 6.012; of sync-w4-virtual: 6"


@pytest.mark.parametrize(
    ("fact", "ours", "theirs", "told"),
    [
        ("initial_model_sha256", "ab" * 32, "cd" * 32, "initial parameters with the head of async-w4-virtual: "),
        ("initial_model_sha256", "ab" * 32, "ab" * 32, ""),
        ("initial_model_sha256", "ab" * 32, None, ""),
        ("train_fingerprint", "beef", "f00d", "training data of async-w4-virtual: beef; of sync-w4-virtual: f00d"),
        ("train_fingerprint", "beef/16", "f00d/16", "training data of async-w4-virtual: beef/16; of sync-w4-virtual"),
        ("train_fingerprint", "beef/16", "f00d/8", ""),
        ("train_fingerprint", "beef/16x5", "f00d/16", ""),
        ("train_fingerprint", None, "f00d/16", ""),
    ],
)
def test_what_only_newer_runs_say_of_their_beginning_is_compared_where_both_say_it(tmp_path, fact, ours, theirs, told):
    def change(path):
        said(path, ASYNC, **{fact: ours})
        said(path, SYNC, **{fact: theirs})

    row = row_of(two_arms(tmp_path, *CURVES, afterwards=change), LOSS)
    if told:
        assert row.word == "not comparable"
        assert row.reason.startswith(told)
    else:
        assert row.word == "better"


@pytest.mark.parametrize(
    ("key", "value", "word"), [("augmentation", 0.5, "better"), ("weight_decay", 0.5, "not comparable")]
)
def test_training_data_may_differ_where_a_field_of_the_task_tells_the_arms(tmp_path, key, value, word):
    def change(path):
        said(path, ASYNC, train_fingerprint="beef/16")
        said(path, SYNC, train_fingerprint="f00d/16")
        asked(path, SYNC, **{key: 0.01})

    ours = dataclasses.replace(ASYNC, settings={**ASYNC.settings, key: value})
    theirs = dataclasses.replace(SYNC, settings={**SYNC.settings, key: 0.01})
    found = two_arms(tmp_path, *CURVES, arms=(theirs, ours), afterwards=change)
    row = row_of(found, LOSS)
    assert row.word == word
    is_told = "training data (beef/16, f00d/16)" in " ".join(row.notes)
    assert is_told == (word == "better")


@pytest.mark.parametrize("heads", [("ab" * 32, "ab" * 32), ("ab" * 32, None), (None, None)])
def test_where_no_file_says_that_models_differ_their_loss_at_update_0_does(tmp_path, heads):
    def change(path):
        for arm, head in zip((ASYNC, SYNC), heads, strict=True):
            said(path, arm, initial_model_sha256=head)

    ours = beginning_at(6.02)
    found = two_arms(tmp_path, ENDING_AT_5, ours, afterwards=change, registration=LOSSES_DECIDE)
    row = row_of(found, LOSS)
    assert row.reason == "evaluated unlike: the loss at update 0 of async-w4-virtual: 6.02; of sync-w4-virtual: 6"


def test_measured_seconds_of_a_busy_machine_are_not_compared_and_losses_are(tmp_path):
    arms = []
    for arm in (SYNC, ASYNC):
        arms.append(dataclasses.replace(arm, clock="measured", speeds=None))
    load = {"own_share": 0.5, "others_share": 0.2, "stolen_share": 0.0, "cores": 2}
    found = two_arms(tmp_path, *CURVES, arms=arms, afterwards=lambda path: said(path, arms[1], machine_load=load))
    names = (arms[1].name, arms[0].name)
    assert row_of(found, TIME, *names).word == "not comparable"
    assert row_of(found, TIME, *names).reason.startswith("other programs used 20 % of the machine during test/async-w4")
    assert row_of(found, LOSS, *names).word == "better"


def write_loose_runs(folder, of_sync, of_async):
    """Runs of eight seeds of two arms, without a plan, with these settings."""
    for arm, times, settings in ((SYNC, EIGHT, of_sync), (ASYNC, SOONER, of_async)):
        for seed, time in enumerate(times):
            path = write_run(folder / f"{arm.algorithm}{seed}", arm, reaches(time), seed=seed)
            edit_yaml(path / "settings.yaml", **settings)


def test_arms_may_differ_in_what_tells_them_and_in_what_follows_from_it(tmp_path):
    own = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}
    other = {"optimizer": "adamw", "beta1": 0.8, "learning_rate": 5e-4}
    write_loose_runs(tmp_path, own, other)
    assert row_of(asyncsgd.load(tmp_path), LOSS).reason.endswith("--arms beta1,learning_rate,momentum,optimizer)")
    row = row_of(asyncsgd.load(tmp_path, arms=["optimizer"]), LOSS)
    assert row.word == "better"
    assert "the arms also differ in optimizer (adamw, sgd)" in row.notes


def test_arms_may_differ_in_the_statistics_that_are_evaluated(tmp_path):
    """The number of batches, which only re-estimated ones have, follows from it."""
    write_loose_runs(tmp_path, {}, {"batch_statistics": "reestimated", "statistics_batches": 20})
    reason = row_of(asyncsgd.load(tmp_path), LOSS).reason
    assert reason.endswith("--arms batch_statistics,statistics_batches)")
    assert row_of(asyncsgd.load(tmp_path, arms=["batch_statistics"]), LOSS).word == "better"
