"""Training with candidates: the budget and the test of a run without, in every mode, and a second test beside it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gallery import trainer, write_texts
from marks import slow

import mask_candidates
import stilt_mlm
import sweep
from asyncsgd.api import replay
from asyncsgd.core.checkpoints import find
from asyncsgd.core.signals import StopRequest
from asyncsgd.data.masks import ByCandidate, ByToken
from asyncsgd.domain_masking.candidates import CANDIDATES_FORMAT
from asyncsgd.errors import UsageError
from asyncsgd.run.prepare import _check_began_from
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks.base import add_sums
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.worker.evaluation import evaluate_sets, measured

FLAGS = task_flags(MaskedLM)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("domain")


@pytest.fixture(scope="module")
def train(root):
    """Runs on a small text whose words with b or d are candidates; of some sentences, none is."""
    write_texts(root)
    run = trainer(root)
    text = (root / "train.txt").read_text()
    words = {word for word in text.replace(".", " ").split() if word[0] in "bd"}
    (root / "terms.txt").write_text("\n".join(sorted(words)[::2]))
    argv = ["--data", f"{root}/train.txt", "--eval-data", f"{root}/eval.txt", "--vocab-size", "512"]
    argv += ["--finder", f"terms:{root}/terms.txt", "--out", f"{root}/found", "--cache-dir", f"{root}/cache"]
    with StopRequest() as stop:
        assert mask_candidates.run([*argv, "--processes", "1"], stop) == 0
    return lambda **values: run(**({"candidates": str(root / "found")} | values))


def test_candidates_that_are_not_complete_are_refused_before_a_run_or_a_sweep_has_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("found").mkdir()
    Path("found/manifest.json").write_text(json.dumps({"format": CANDIDATES_FORMAT, "complete": False}))
    with StopRequest() as stop, pytest.raises(UsageError, match=r"found is not complete; .*goes on where it was"):
        stilt_mlm.SCRIPT.run(["--mask", "candidates", "--candidates", "found"], stop)
    algorithms = {name: {"mode": "single", "mask": name} for name in ("token", "candidates")}
    base = {"candidates": "found", "samples": 64}
    config = {"name": "few", "base": base, "algorithms": algorithms, "conditions": {}, "seeds": [0]}
    Path("few.yaml").write_text(json.dumps(config))
    monkeypatch.setattr("sys.argv", ["sweep.py", "few.yaml"])
    assert sweep.main() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.yaml", "found"]


def prepared(train, root, **values):
    settings = FLAGS.make(
        {
            "data": f"{root}/train.txt",
            "eval_data": f"{root}/eval.txt",
            "vocab_size": 512,
            "seq_len": 32,
            "batch_size": 4,
            "candidates": f"{root}/found",
            "cache_dir": f"{root}/cache",
            **values,
        }
    )
    return settings.task.prepare(0, root / "cache")


def test_batches_have_the_samples_and_the_number_of_masked_tokens_of_uniform_masking(train, root):
    uniform = prepared(train, root, mask="token")
    ours = prepared(train, root, mask="candidates")
    half = prepared(train, root, mask="candidates", candidate_share=0.5)
    assert [task.strategy for task in (uniform, ours, half)] == [ByToken(), ByCandidate(1.0), ByCandidate(0.5)]
    found = []
    for task in (uniform, ours, half):
        batches = [task.data(3).batch(1, index) for index in range(40)]
        again = task.data(3)
        for index in (39, 0, 7):
            assert torch.equal(again.batch(1, index)["input_ids"], batches[index]["input_ids"])
        found.append(batches)
    shares = []
    for task in (uniform, ours, half):
        chosen, candidates, _ = np.sum(masked_words(task), axis=0)
        shares.append((chosen, candidates / chosen))
    assert len({chosen for chosen, _ in shares}) == 1
    assert [ours.weight(batch) for batch in found[0]] == [ours.weight(batch) for batch in found[1]]
    assert shares[0][1] + 0.1 < shares[2][1] < shares[1][1] - 0.1


def test_the_first_test_is_that_of_runs_without_candidates_and_the_second_masks_candidates_only(train, root):
    with_candidates = train(mode="single", samples=0)
    without = train(mode="single", samples=0, candidates=None)
    (ours,), (plain,) = (run.records("evaluate") for run in (with_candidates, without))
    assert plain["details"] == {}
    assert ours["loss"] == plain["loss"]
    assert ours["weight"] == plain["weight"]
    assert ours["metrics"] == plain["metrics"]
    second = ours["details"]["evaluations"]["candidates"]
    assert second["loss"] != ours["loss"]
    assert set(second["metrics"]) == set(ours["metrics"])
    assert with_candidates.summary["details"] == ours["details"]
    assert with_candidates.summary["data_fingerprint"] == without.summary["data_fingerprint"]
    assert "candidates_sha256" not in without.summary
    task = prepared(train, root)
    batches = task.data(0).evaluation["candidates"]
    assert second["weight"] == sum(task.weight(batches[index]) for index in range(len(batches)))


def test_shards_of_all_sets_add_up(train, root):
    task = prepared(train, root)
    model = task.model(0)
    sets = task.data(0).evaluation
    device = torch.device("cpu")
    whole = measured(task, evaluate_sets(task, model, sets, 0, 1, device))
    # More shards than batches: some are empty.
    parts = measured(task, add_sums(evaluate_sets(task, model, sets, n, 9, device) for n in range(9)))
    one = whole.details["evaluations"]["candidates"]
    other = parts.details["evaluations"]["candidates"]
    assert one["weight"] == other["weight"]
    assert one["metrics"]["accuracy"] == other["metrics"]["accuracy"]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)


def masked_words(task, num_batches=40):
    """Of every sample of some batches: masked tokens, those among them in words with a candidate, and all of these."""
    rows = task.samples("train")
    words = {}
    counts = []
    for number in range(len(rows)):
        of_token = np.cumsum(rows.row("word_starts", number))
        marked = np.isin(of_token, of_token[rows.row("candidates", number)])
        words[tuple(rows.row("ids", number).tolist())] = marked
    for index in range(num_batches):
        batch = task.data(3).batch(1, index)
        masked = batch["labels"] != -100
        ids = batch["input_ids"].where(~masked, batch["labels"])
        for row, length, of_row in zip(ids, batch["attention_mask"].sum(1), masked, strict=True):
            flags = words[tuple(row[:length].tolist())]
            counts.append((int(of_row.sum()), int((of_row[:length].numpy() & flags).sum()), int(flags.sum())))
    return counts


def test_tech_masks_candidates_only_as_many_as_the_budget_or_all_there_are(train, root):
    only = prepared(train, root, tech=True)
    filled = prepared(train, root, mask="candidates")
    counts = masked_words(only)
    for masked, candidates, _ in counts:
        assert masked == candidates
        assert candidates > 0
    assert any(masked == every for masked, _, every in counts)
    assert any(masked < every for masked, _, every in counts)
    filled_up = masked_words(filled)
    assert any(masked > candidates == every for masked, candidates, every in filled_up)


def test_tech_leaves_out_sequences_without_a_candidate_and_counts_them(train, root):
    every = prepared(train, root)
    tech = prepared(train, root, tech=True)
    numbers = [task.facts()["num_train_samples"] for task in (every, tech)]
    assert 0 < tech.facts()["num_without_candidates"] == numbers[0] - numbers[1]
    for mask, is_told in (("token", False), ("word", False), ("candidates", True)):
        notes = prepared(train, root, mask=mask).facts()["notes"]
        assert any("as if there were no candidates" in note for note in notes) == is_told
    rows = tech.samples("train")
    for number in range(len(rows)):
        assert np.any(rows.row("candidates", number))
    run = train(mode="single", tech=True)
    assert run.summary["num_without_candidates"] == tech.facts()["num_without_candidates"]
    assert "are left out" in (run.path / "console.log").read_text()
    assert "candidates loss" in (run.path / "console.log").read_text()


def test_a_resumed_run_needs_the_candidates_that_it_began_with(train, root):
    run = train(mode="single", mask="candidates", checkpoint_every="20")
    checkpoint = find(run.path, lambda _: True)
    assert checkpoint.checkpoint.began_from["candidates"] == run.summary["candidates_sha256"]
    now = {**checkpoint.checkpoint.began_from, "candidates": "f00d"}
    with pytest.raises(UsageError, match=r"began with other candidates than there are now \(.* -> f00d\)"):
        _check_began_from(checkpoint, now)


MODES = {
    "single": {"mode": "single"},
    "async": {"mode": "async", "nproc": 2},
    "process_group": {"mode": "async", "nproc": 2, "transport": "process_group"},
    "sync": {"mode": "sync", "nproc": 2},
    "hogwild": {"mode": "hogwild", "nproc": 2},
    "virtual": {"mode": "async", "nproc": 3, "clock": "virtual", "rule": "ringmaster", "speeds": "exponential:1"},
}


@pytest.mark.parametrize("mode", ["virtual", *slow("async", "process_group", "sync", "hogwild")])
def test_every_mode_takes_both_tests(train, root, mode):
    run = train(**MODES[mode], mask="candidates", candidate_share=0.7)
    task = prepared(train, root)
    last = run.records("evaluate")[-1]
    expected = measured(task, evaluate_sets(task, run.model(), task.data(0).evaluation, 0, 1, torch.device("cpu")))
    second = last["details"]["evaluations"]["candidates"]
    of_model = expected.details["evaluations"]["candidates"]
    assert second["weight"] == of_model["weight"]
    assert second["loss"] == pytest.approx(of_model["loss"], rel=1e-5)
    assert last["loss"] == pytest.approx(expected.loss, rel=1e-5)
    if mode == "virtual":
        assert replay(run.path, cache=root / "cache").identical
