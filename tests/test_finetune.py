"""Fine-tuning: an independent loop gives the same bits, the chain is written down, every ending has its summary."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import Train
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

import replay
import stilt_finetune
from asyncsgd import models
from asyncsgd.data.labelled import LabelledBatch
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.flat import Layout
from asyncsgd.records.events import read_events
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.finetuning import finetuning
from asyncsgd.scripts.run_folder import open_finetune_folder
from asyncsgd.settings.finetuning import FINETUNE_FLAGS, FinetuneSettings, Start, make_finetune_settings
from asyncsgd.signals import StopRequest
from asyncsgd.study.estimate import Estimator
from asyncsgd.study.plan import PlannedRun
from asyncsgd.study.sweep import Job
from asyncsgd.tasks.classification import Classification
from asyncsgd.training import lead

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "stilt_finetune.py"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NUM_LABELS = 3
WHOLE_LINE = 16
"""Classes whose biases fill a cache line: fused AdamW rounds them alike on the flat vector and on single tensors."""
BATCH = 4


class Tuned:
    """A finished fine-tuning run and what it left in its folder."""

    def __init__(self, path: Path, exit_code: int) -> None:
        self.path, self.exit_code = path, exit_code

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in read_events(self.path / "events.jsonl") if record["kind"] == "evaluate"]


@pytest.fixture(scope="module")
def posts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose label is their most frequent word, in a folder with splits."""
    folder = tmp_path_factory.mktemp("posts")
    draw = random.Random(0)
    marks = ["bada", "gimo", "sune"]
    for side, number in (("train", 60), ("test", 25)):
        lines = ["text,label"]
        for _ in range(number):
            label = draw.randrange(NUM_LABELS)
            words = draw.choices(["be", "di", "fo", "gu", "ka"], k=draw.randint(1, 12)) + [marks[label]] * 3
            draw.shuffle(words)
            lines.append(f"{' '.join(words)} {draw.random():.6f},{'abc'[label]}")
        (folder / f"{side}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def parent(train: Train) -> Path:
    return train(mode="single", samples=40, learning_rate=0.01).path


@pytest.fixture(scope="module")
def many_classes(posts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same texts, with names for classes that nobody has."""
    folder = tmp_path_factory.mktemp("many") / "posts"
    shutil.copytree(posts, folder)
    (folder / "labels.json").write_text(json.dumps(list("abcdefghijklmnop")))
    return folder


Tune = Callable[..., Tuned]


@pytest.fixture
def tune(posts: Path, parent: Path, tmp_path: Path) -> Tune:
    """Fine-tune in this process with some settings, in a new folder."""
    numbers = iter(range(1000))

    def run(**values: object) -> Tuned:
        path = tmp_path / f"run{next(numbers)}"
        small = {
            "init_from": str(parent),
            "data": str(posts),
            "cache_dir": str(tmp_path / "cache"),
            "seq_len": 24,
            "batch_size": BATCH,
            "samples": 40,
            "evaluations": 2,
            "device": "cpu",
            "run_dir": str(path),
        }
        settings = make_finetune_settings(small | values)
        launch = Launch(settings.job.nproc, None, False)
        folder = open_finetune_folder(settings, "tests")
        return Tuned(path, lead(finetuning(settings), launch, folder, fork_server("tiny")))

    return run


def plain_loop(settings: FinetuneSettings, parent: Path, weights: torch.Tensor | None = None) -> Any:
    """The same training, written down once more on a model that the library loads, with torch's own optimizer."""
    experiment, seed, tuning = finetuning(settings), settings.job.seed, settings.tuning
    data = experiment.task.prepare(seed, experiment.cache).data(seed)
    with torch.random.fork_rng():
        model = AutoModelForSequenceClassification.from_pretrained(
            parent / "model",
            num_labels=WHOLE_LINE,
            hidden_dropout_prob=tuning.dropout,
            attention_probs_dropout_prob=tuning.dropout,
        ).train()
        head = torch.Generator().manual_seed(seed)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name in ("bert.pooler.dense.weight", "classifier.weight"):
                named[name].normal_(0.0, 0.02, generator=head)
            named["bert.pooler.dense.bias"].zero_()
            named["classifier.bias"].zero_()
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": tuning.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=0.0,
            fused=True,
        )
        total = math.ceil(tuning.samples / BATCH) * BATCH
        warmup = round(tuning.warmup * total)
        for index in range(total // BATCH):
            batch = data.batch(0, index)
            torch.manual_seed(dropout_seed(seed, 0, index))
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            if weights is None:
                loss = functional.cross_entropy(logits, batch.labels)
            else:
                losses = functional.cross_entropy(logits, batch.labels, reduction="none")
                loss = (weights[batch.labels] * losses).mean()
            optimizer.zero_grad()
            loss.backward()
            if tuning.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), tuning.clip_norm)
            seen = (index + 1) * BATCH
            factor = seen / warmup if seen < warmup else 1.0 - 0.9 * (seen - warmup) / (total - warmup)
            for group in optimizer.param_groups:
                group["lr"] = tuning.learning_rate * factor
            optimizer.step()
    return model


def settings_of(tuned: Tuned) -> FinetuneSettings:
    return make_finetune_settings(FINETUNE_FLAGS.load_yaml(tuned.path / "settings.yaml"))


def saved(tuned: Tuned) -> dict[str, torch.Tensor]:
    return dict(AutoModelForSequenceClassification.from_pretrained(tuned.path / "model").named_parameters())


@pytest.mark.parametrize("class_weights", [False, True])
def test_a_plain_torch_loop_gives_the_same_parameters_bit_for_bit(
    tune: Tune, parent: Path, many_classes: Path, class_weights: bool
) -> None:
    tuned = tune(data=str(many_classes), seed=3, clip_norm=0, save_model=True, class_weights=class_weights)
    labels = [line.rsplit(",", 1)[1] for line in (many_classes / "train.csv").read_text().split("\n")[1:]]
    counts = torch.tensor([labels.count(label) for label in "abc"])
    weights = (60 / (3 * counts.double())).float() if class_weights else None
    expected = dict(plain_loop(settings_of(tuned), parent, weights).named_parameters())
    found = saved(tuned)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_a_plain_loop_with_torch_s_own_clipping_gives_the_same_parameters_but_for_rounding(
    tune: Tune, parent: Path, many_classes: Path
) -> None:
    tuned = tune(data=str(many_classes), clip_norm=0.5, save_model=True, samples=16)
    expected = dict(plain_loop(settings_of(tuned), parent).named_parameters())
    for name, parameter in saved(tuned).items():
        assert torch.allclose(parameter, expected[name], atol=1e-5), name
    free = saved(tune(data=str(many_classes), clip_norm=0, save_model=True, samples=16))
    assert any(not torch.allclose(parameter, free[name], atol=1e-5) for name, parameter in expected.items())


def test_the_same_settings_give_the_same_bits_and_another_seed_gives_others(tune: Tune) -> None:
    first, again, other = (tune(seed=seed).summary for seed in (5, 5, 6))
    costs = ("seconds", "memory", "usage", "machine_load", "throughput")
    measured = ("train_seconds", "eval_seconds", "samples_per_second", *costs)
    assert {k: v for k, v in first.items() if k not in measured} == {
        k: v for k, v in again.items() if k not in measured
    }
    assert first["parameters_sha256"] != other["parameters_sha256"]


def test_the_number_of_evaluations_changes_no_bit(tune: Tune) -> None:
    assert tune(evaluations=1).summary["parameters_sha256"] == tune(evaluations=5).summary["parameters_sha256"]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("constant", [1.0] * 5), ("linear", [0.91, 0.73, 0.55, 0.37, 0.1]), ("cosine", [0.978, 0.81, 0.55, 0.29, 0.1])],
)
def test_the_learning_rate_takes_the_form_asked_for(tune: Tune, schedule: str, factors: list[float]) -> None:
    tuned = tune(schedule=schedule, warmup=0, learning_rate=0.01, optimizer="sgd", momentum=0.5)
    arrivals = [record for record in read_events(tuned.path / "events.jsonl") if record["kind"] == "arrival"]
    rates = [arrivals[number]["learning_rate"] / 0.01 for number in (0, 2, 4, 6, 9)]
    assert rates == pytest.approx(factors, abs=0.02)
    plain = tune(schedule=schedule, warmup=0, learning_rate=0.01, optimizer="sgd")
    assert plain.summary["parameters_sha256"] != tuned.summary["parameters_sha256"]


def test_the_betas_are_those_of_adamw(tune: Tune) -> None:
    default, written, other = (tune(**betas).summary for betas in ({}, {"beta1": 0.9, "beta2": 0.999}, {"beta2": 0.9}))
    assert default["parameters_sha256"] == written["parameters_sha256"] != other["parameters_sha256"]


def test_batches_in_parts_evaluations_every_so_many_samples_and_patience_are_those_of_pretraining(tune: Tune) -> None:
    whole, parts = tune(dropout=0), tune(dropout=0, micro_batches=2)
    assert whole.summary["parameters_sha256"] != parts.summary["parameters_sha256"]
    assert parts.summary["final_eval_loss"] == pytest.approx(whole.summary["final_eval_loss"], rel=1e-4)
    stopped = tune(learning_rate=0.5, evaluations=4, evaluate_every="8", patience=2, samples=400)
    losses = [evaluation["loss"] for evaluation in stopped.evaluations()]
    assert len(losses) == losses.index(min(losses)) + 3
    assert [evaluation["total_samples"] for evaluation in stopped.evaluations()] == [8 * n for n in range(len(losses))]
    assert stopped.summary["stopped_early"]["best_loss"] == min(losses)


def test_settings_that_came_later_leave_the_names_of_runs_as_they_were() -> None:
    hashes = [
        FINETUNE_FLAGS.settings_hash(make_finetune_settings({"init_from": "tiny", **values}))
        for values in ({}, {"schedule": "linear", "momentum": 0, "beta1": 0.9, "micro_batches": 1}, {"beta2": 0.9})
    ]
    assert hashes[0] == hashes[1] == "616f59" != hashes[2]


def test_class_weights_change_what_is_learned(tune: Tune) -> None:
    plain, weighted = tune().summary, tune(class_weights=True).summary
    assert plain["parameters_sha256"] != weighted["parameters_sha256"]
    assert (plain["class_weights"], weighted["class_weights"]) == (False, True)
    assert plain["first_eval_loss"] == weighted["first_eval_loss"]  # the scored loss is never weighted


def test_it_learns_what_can_be_learned_and_its_cases_are_judged_by_what_counts_as_hateful(
    tune: Tune, tmp_path: Path
) -> None:
    draw = random.Random(1)
    rows = ["functionality,text,label"]
    for number in range(60):
        name, mark, hateful = [("first_h", "bada", 1), ("second_nh", "gimo", 0), ("third_h", "sune", 1)][number % 3]
        words = draw.choices(["be", "di", "fo", "gu", "ka"], k=draw.randint(1, 12)) + [mark] * 3
        rows.append(f"{name},{' '.join(words)},{hateful}")
    (tmp_path / "cases.csv").write_text("\n".join(rows))
    summary = tune(
        samples=1200,
        learning_rate=2e-3,
        dropout=0.0,
        hatecheck=str(tmp_path / "cases.csv"),
        hatecheck_positive="a, c",
    ).summary
    assert summary["metrics"]["accuracy"] > 0.9
    assert summary["final_eval_loss"] < 0.5 < summary["first_eval_loss"]
    checked = summary["hatecheck"]["functionalities"]
    assert {name: item["num_cases"] for name, item in checked.items()} == {
        "first_h": 20,
        "second_nh": 20,
        "third_h": 20,
    }
    assert all(item["accuracy"] > 0.8 for item in checked.values())


@pytest.mark.processes
def test_two_synchronous_workers_are_one_process_with_two_batches_an_update(tune: Tune) -> None:
    values = {"save_model": True, "learning_rate": 2e-3}
    both = [tune(mode="sync", nproc=2, **values), tune(mode="single", accumulate=2, **values)]
    assert [tuned.summary["num_updates"] for tuned in both] == [5, 5]
    losses = [[record["loss"] for record in tuned.evaluations()] for tuned in both]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    sync, accumulated, other = (
        torch.cat([parameter.detach().flatten() for parameter in saved(tuned).values()])
        for tuned in (*both, tune(**values))
    )
    assert float((sync - accumulated).norm() / accumulated.norm()) <= 1e-5
    assert float((other - accumulated).norm() / accumulated.norm()) > 1e-3


@pytest.mark.processes
def test_four_workers_under_a_rule_are_replayed_from_the_command_line(
    posts: Path, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    flags = f"--init-from {parent} --data {posts} --cache-dir {cache} --seq-len 24 --batch-size 4 --samples 80"
    how = f"--mode async --nproc 4 --rule ringmaster:threshold=4 --run-dir {run}"
    assert stilt_finetune.run([*flags.split(), *how.split()], StopRequest()) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [summary[key] for key in ("mode", "rule", "num_workers")] == [
        "async",
        "ringmaster:threshold=4,stops=False",
        4,
    ]
    assert summary["delay"]["max"] < 4  # what came later was dropped
    assert summary["num_updates"] == summary["num_samples_applied"] / BATCH
    capsys.readouterr()
    assert replay.main([run, "--cache-dir", cache]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical"


def bert(seed: int) -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    with models.seeded(seed):
        return BertForMaskedLM(BertConfig(vocab_size=64, **shape))


def test_the_head_and_the_pooler_are_a_function_of_the_seed_whatever_the_model() -> None:
    one, other = (models.build_classifier(bert(seed), ["a", "b"], dropout=0.1, seed=9).model for seed in (0, 1))
    for name in ("classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"):
        assert torch.equal(one.get_parameter(name), other.get_parameter(name))
    again = models.build_classifier(bert(0), ["a", "b"], dropout=0.1, seed=10).model
    assert not torch.equal(one.get_parameter("classifier.weight"), again.get_parameter("classifier.weight"))
    assert float(one.get_parameter("classifier.weight").std().detach()) == pytest.approx(0.02, rel=0.3)


def test_the_encoder_is_that_of_the_masked_language_model_and_a_copy() -> None:
    masked_lm = bert(0)
    classifier = models.build_classifier(masked_lm, ["a", "b"], dropout=0.1, seed=9).model
    for name, parameter in masked_lm.base_model.named_parameters():
        assert torch.equal(classifier.get_parameter(f"bert.{name}"), parameter)
        assert classifier.get_parameter(f"bert.{name}").data_ptr() != parameter.data_ptr()
    assert classifier.config.id2label == {0: "a", 1: "b"}


def test_a_tagger_has_the_encoder_and_a_head_of_the_seed_too() -> None:
    masked_lm = bert(0)
    tagger = models.build_tagger(masked_lm, ["B", "I", "O"], dropout=0.3, seed=9)
    for name, parameter in masked_lm.base_model.named_parameters():
        assert torch.equal(tagger.model.get_parameter(f"bert.{name}"), parameter)
    assert tagger.new_parameters == ("classifier.bias", "classifier.weight")
    drawn = torch.empty(3, 32).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(9))
    assert torch.equal(tagger.model.classifier.weight, drawn)
    assert (tagger.model.config.id2label, tagger.model.dropout.p) == ({0: "B", 1: "I", 2: "O"}, 0.3)


def test_building_a_classifier_leaves_torch_s_generator_as_it_was() -> None:
    masked_lm = bert(0)
    state = torch.random.get_rng_state()
    models.build_classifier(masked_lm, ["a", "b"], dropout=0.1, seed=9)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_half_precision_configuration_does_not_round_the_encoder() -> None:
    masked_lm = bert(0)
    masked_lm.config.dtype = torch.bfloat16
    classifier = models.build_classifier(masked_lm, ["a", "b"], dropout=0.0, seed=9).model
    weight = masked_lm.base_model.embeddings.word_embeddings.weight
    assert torch.equal(classifier.get_parameter("bert.embeddings.word_embeddings.weight"), weight)


def test_the_summary_names_the_pretraining_run_and_the_scores_are_those_of_its_table(tune: Tune, parent: Path) -> None:
    tuned = tune(seed=7)
    summary, pretraining = tuned.summary, json.loads((parent / "summary.json").read_text())
    assert tuned.exit_code == 0
    assert summary["parent"] == {
        "run": parent.name,
        "mode": "single",
        "rule": "synchronous",
        "num_workers": 1,
        "seed": 0,
        "clock": "measured",
        "learning_rate": 0.01,
        "parameters_sha256": pretraining["parameters_sha256"],
    }
    assert pretraining["experiment"] == "stilt_mlm"
    assert summary["init_sha256"] == pretraining["parameters_sha256"]
    assert (
        summary.items()
        >= {
            "schema": 2,
            "experiment": "stilt_finetune",
            "task": "classification",
            "status": "DONE",
            "message": "",
            "seed": 7,
            "model": str(parent),
            "from_scratch": True,  # the parent began with random weights
            "split": "test",
            "labels": ["a", "b", "c"],
            "num_train_samples": 60,
            "num_eval_samples": 25,
            "class_weights": False,
            "batch_size": BATCH,
            "num_samples": 40,
            "num_updates": 10,
            "hatecheck": None,
        }.items()
    )
    table = np.array(summary["details"]["confusion"])
    assert table.sum() == 25
    assert summary["metrics"]["accuracy"] == np.trace(table) / 25
    f1 = [score for score in summary["details"]["per_class_f1"].values() if score is not None]
    assert list(summary["details"]["per_class_f1"]) == ["a", "b", "c"]
    assert summary["metrics"]["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    assert not (tuned.path / "model").exists()
    assert json.loads((tuned.path / "environment.json").read_text())["num_workers"] == 1


def test_events_are_the_evaluations_with_their_scores_and_the_last_one_is_the_result(tune: Tune) -> None:
    tuned = tune(evaluations=4)
    evaluations, summary = tuned.evaluations(), tuned.summary
    assert [record["version"] for record in evaluations] == [0, 3, 5, 8, 10]
    assert [record["total_samples"] for record in evaluations] == [0, 12, 20, 32, 40]
    assert all(record["weight"] == 25 for record in evaluations)
    assert [evaluations[-1][key] for key in ("loss", "metrics", "details", "weight")] == [
        summary[key] for key in ("final_eval_loss", "metrics", "details", "eval_weight")
    ]
    header = json.loads((tuned.path / "events.jsonl").read_text().splitlines()[0])
    better = {"macro_f1": "higher", "accuracy": "higher"}
    assert header == {"kind": "header", "schema": 2, "task": "classification", "better": better}
    assert list(summary["metrics"]) == list(better)
    assert evaluations[0]["loss"] == summary["first_eval_loss"]
    assert evaluations[0]["loss"] == pytest.approx(math.log(NUM_LABELS), abs=0.1)


def test_epochs_are_counted_in_training_texts_and_rounded_up_to_whole_batches(tune: Tune) -> None:
    assert tune(samples=None, epochs=0.5, train_samples=21).summary["num_samples"] == 12
    assert tune(samples=None, train_samples=6).summary["num_updates"] == 3  # two epochs by default


def test_random_weights_are_from_scratch_and_have_no_parent(tune: Tune) -> None:
    summary = tune(init_from="tiny", samples=8).summary
    assert (summary["from_scratch"], summary["parent"], summary["status"]) == (True, None, "DONE")


@pytest.mark.parametrize(
    ("base", "from_scratch"),
    [(None, False), ({"from_scratch_pretraining": True}, False), ({"from_scratch": True}, True)],
)
def test_a_saved_model_is_pretrained_unless_its_base_json_says_otherwise(
    tune: Tune, parent: Path, tmp_path: Path, base: dict[str, bool] | None, from_scratch: bool
) -> None:
    shutil.copytree(parent / "model", tmp_path / "saved")
    if base is not None:
        (tmp_path / "saved" / "base.json").write_text(json.dumps(base))
    summary = tune(init_from=str(tmp_path / "saved"), samples=8).summary
    assert (summary["from_scratch"], summary["parent"]) == (from_scratch, None)
    assert summary["init_sha256"] == json.loads((parent / "summary.json").read_text())["parameters_sha256"]


def test_a_run_that_continued_a_pretrained_model_is_not_from_scratch(tune: Tune, parent: Path, tmp_path: Path) -> None:
    continued = copied_run(parent, tmp_path / "continued", from_scratch=False)
    assert tune(init_from=str(continued), samples=8).summary["from_scratch"] is False


def test_a_run_and_its_saved_model_give_the_same_bits(tune: Tune, parent: Path) -> None:
    hashes = {
        tune(init_from=str(place), samples=8).summary["parameters_sha256"] for place in (parent, parent / "model")
    }
    assert len(hashes) == 1


def test_a_saved_classifier_is_the_one_that_was_scored(tune: Tune) -> None:
    tuned = tune(save_model=True)
    model = AutoModelForSequenceClassification.from_pretrained(tuned.path / "model")
    assert Layout.of(model).num_parameters == tuned.summary["num_parameters"]
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_settings_yaml_makes_the_same_run_again(tune: Tune) -> None:
    first = tune(seed=2, class_weights=True)
    again = tune(**FINETUNE_FLAGS.load_yaml(first.path / "settings.yaml"))
    assert again.summary["parameters_sha256"] == first.summary["parameters_sha256"]


def test_a_loss_that_is_no_number_ends_the_run_as_diverged_without_scores(
    tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = tune(learning_rate=1e30, clip_norm=0, warmup=0)
    summary = tuned.summary
    assert (tuned.exit_code, summary["status"]) == (1, "DIVERGED")
    assert summary["message"].startswith("the loss of worker 0 at version ")
    assert "is nan; try a smaller --learning-rate" in summary["message"]
    assert 0 < summary["num_updates"] < 10
    assert "DIVERGED:" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_after_the_current_step(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Classification.loss

    def interrupting(task: Classification, outputs: torch.Tensor, batch: LabelledBatch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return taken(task, outputs, batch)

    calls: list[int] = []
    monkeypatch.setattr(Classification, "loss", interrupting)
    tuned = tune()
    summary = tuned.summary
    assert (tuned.exit_code, summary["status"], summary["num_updates"]) == (130, "INTERRUPTED", 4)
    assert summary["parent"]["mode"] == "single"


def test_whatever_goes_wrong_leaves_a_summary_that_says_failed(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(Classification, "loss", broken)
    tuned = tune()
    assert (tuned.exit_code, tuned.summary["status"]) == (1, "FAILED")
    assert tuned.summary["message"] == "RuntimeError: the machine is on fire"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data nowhere.csv", "there is no file or folder 'nowhere.csv'; --data takes"),
        ("--data words.txt", "words.txt is plain text and has no columns; give a .parquet, .csv or .jsonl file"),
        ("--data {posts} --text-column a --label-column a", "--text-column and --label-column are both 'a'"),
        ("--hatecheck nowhere.csv", "there is no file or folder 'nowhere.csv'; --hatecheck takes"),
        ("--init-from ./nowhere", "--init-from ./nowhere: there is no such folder"),
    ],
)
def test_a_mistyped_word_leaves_no_folder_behind(
    flags: str, message: str, posts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    given = ["--init-from", "tiny"] if "--init-from" not in flags else []
    with pytest.raises(UsageError) as error:
        stilt_finetune.run(
            [*given, "--run-dir", "run", "--cache-dir", "cache", *flags.format(posts=posts).split()], StopRequest()
        )
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def refused(tune: Tune, **values: object) -> str:
    with pytest.raises(UsageError) as error:
        tune(**values)
    return str(error.value)


def copied_run(parent: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(parent, to)
    summary = json.loads((to / "summary.json").read_text()) | changes
    (to / "summary.json").write_text(json.dumps(summary))
    return to


def test_a_run_that_is_not_done_is_refused_and_its_model_is_offered(tune: Tune, parent: Path, tmp_path: Path) -> None:
    run = copied_run(parent, tmp_path / "stopped", status="INTERRUPTED")
    message = refused(tune, init_from=str(run))
    assert f"{run}: the run is INTERRUPTED, not DONE; run it again, or type --init-from {run / 'model'}" in message
    failed = json.loads((tmp_path / "run0" / "summary.json").read_text())
    assert (failed["status"], failed["message"]) == ("FAILED", message)


def test_a_run_without_a_summary_or_a_model_is_refused(tune: Tune, parent: Path, tmp_path: Path) -> None:
    run = copied_run(parent, tmp_path / "one")
    shutil.rmtree(run / "model")
    assert "the run folder has no model/; run it again" in refused(tune, init_from=str(run))
    (run / "summary.json").unlink()
    assert "has no summary.json, so it is still going or was killed" in refused(tune, init_from=str(run))


def test_a_fine_tuning_run_is_not_fine_tuned_again(tune: Tune) -> None:
    message = refused(tune, init_from=str(tune(samples=8).path))
    assert "is a run of stilt_finetune, not a pretraining run; name a run of stilt_mlm.py" in message


def test_a_model_that_is_not_the_one_of_the_summary_is_refused(tune: Tune, parent: Path, tmp_path: Path) -> None:
    run = copied_run(parent, tmp_path / "changed", parameters_sha256="0" * 64)
    assert "is not the model that was saved there: its parameters have sha256" in refused(tune, init_from=str(run))


def test_a_folder_that_is_neither_names_the_runs_in_it(tune: Tune, parent: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    message = refused(tune, init_from=str(tmp_path / "runs"))
    assert "is neither a run folder (settings.yaml, summary.json, model/) nor a saved model (config.json)" in message
    copied_run(parent, tmp_path / "runs" / "mine")
    assert f"type e.g. --init-from {tmp_path / 'runs' / 'mine'}" in refused(tune, init_from=str(tmp_path / "runs"))
    assert "there is no such folder" in refused(tune, init_from="./nowhere")


def test_a_name_that_the_hub_does_not_give_is_refused_with_the_flag_of_this_script(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncsgd.data.tokenization.hub_is_reachable", lambda: False)
    message = refused(tune, init_from="nobody/nothing")
    assert message.startswith("the tokenizer of nobody/nothing is not in the local cache and the Hub is unreachable")
    assert message.endswith("or use --init-from tiny or --init-from FOLDER")


def test_a_label_that_nobody_has_cannot_count_as_hateful(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("functionality,text,label\nslur_h,some text,1\n")
    here = str(tmp_path / "test.csv")
    assert "has no label 'hate'; say which labels count" in refused(tune, hatecheck=here)
    message = refused(tune, hatecheck=here, hatecheck_positive="a,b,c")
    assert "--hatecheck-positive names every label" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--init-from is missing"),
        ({"init_from": "tiny", "samples": 9, "epochs": 2}, "--epochs 2 and --samples 9 both say how long"),
        ({"init_from": "tiny", "label_column": "class"}, "--label-column does nothing for --data pydocs"),
        ({"init_from": "tiny", "hatecheck_positive": "a"}, "--hatecheck-positive does nothing without --hatecheck"),
        ({"init_from": "tiny", "split": "train"}, "--split must be one of test, validation, got 'train'"),
        ({"init_from": "tiny", "task": "regression"}, "--task must be one of classification, got 'regression'"),
        ({"init_from": "tiny", "warmup": -1}, "--warmup must be 0 or more, got -1"),
        ({"init_from": "tiny", "epochs": 0}, "--epochs must be more than 0, got 0.0"),
        ({"init_from": "tiny", "overwrite": True}, "--overwrite does nothing without --run-dir"),
        ({"init_from": "tiny", "momentum": 0.9}, "--momentum is for --optimizer sgd, got --optimizer adamw"),
        (
            {"init_from": "tiny", "optimizer": "sgd", "beta1": 0.5},
            "--beta1 is for --optimizer adamw, got --optimizer sgd",
        ),
        (
            {"init_from": "tiny", "evaluations": 5, "evaluate_every": "8"},
            "--evaluations 5 and --evaluate-every 8 both say when to evaluate",
        ),
        (
            {"init_from": "tiny", "keep_best": True},
            "--keep-best keeps a model, and without --save-model a fine-tuning run keeps none; add --save-model",
        ),
        (
            {"init_from": "tiny", "patience": 4},
            "--patience 4 ends no run of --evaluations 4, the last of which is at the end",
        ),
        (
            {"init_from": "tiny", "evaluate_every": "0epoch"},
            "--evaluate-every must be a number of samples from 1 up, or epochs, got",
        ),
        ({"init_form": "tiny"}, "unknown key 'init_form'; did you mean 'init_from'?"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_finetune_settings(values)
    assert str(error.value).startswith(message)


def test_the_settings_read_back_what_they_write(tmp_path: Path) -> None:
    some = make_finetune_settings({"init_from": "x", "samples": 7, "split": "validation", "class_weights": True})
    (tmp_path / "settings.yaml").write_text(FINETUNE_FLAGS.to_yaml(some))
    assert make_finetune_settings(FINETUNE_FLAGS.load_yaml(tmp_path / "settings.yaml")) == some
    assert FinetuneSettings(start=Start(init_from="x")) == make_finetune_settings({"init_from": "x"})


def test_several_seeds_make_a_run_each_in_one_process(
    posts: Path, parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = f"--init-from {parent} --data {posts} --cache-dir {tmp_path / 'cache'} --seq-len 24 --samples 16"
    code = stilt_finetune.run([*flags.split(), "--seeds", "0,3", "--runs-dir", str(tmp_path / "runs")], StopRequest())
    out = capsys.readouterr().out.splitlines()
    assert code == 0
    summaries = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/summary.json"))]
    assert [summary["seed"] for summary in summaries] == [0, 3]
    assert len({summary["parameters_sha256"] for summary in summaries}) == 2
    assert out[0].startswith("asyncsgd 0.1.0  fine-tuning, classification  2 runs, one after another  mode single")
    beginnings = [line.split()[0] for line in out]
    for word in ("run", "model", "labels", "step", "samples", "final", "done", "next"):
        assert beginnings.count(word) == 2, word
    assert any(line.startswith("final  eval loss ") and "macro_f1 0." in line for line in out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--init-from tiny --seeds 0,1 --run-dir x", "--run-dir is the folder of one run, and --seeds names several"),
        ("--init-from tiny --seeds 0,0", "--seeds 0,0 names a seed twice"),
        ("--init-from tiny --seeds 0;1", "--seeds must be whole numbers with commas between them"),
        ("--init-from tiny --seeds 0,1 --seed 4", "--seed 4 does nothing with --seeds 0,1"),
        ("--init-from tiny --sedes 0", "unknown flag --sedes; did you mean '--seeds'?"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    argv: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError) as error:
        stilt_finetune.run(argv.split(), StopRequest())
    assert str(error.value).startswith(message)


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="--mode single is one process, and the launcher started 2; type python"):
        stilt_finetune.run(["--init-from", "tiny", "--mode", "single"], StopRequest())


def test_a_sweep_can_ask_how_long_a_run_takes(posts: Path, parent: Path, tmp_path: Path) -> None:
    values = {"data": str(posts), "cache_dir": str(tmp_path), "seq_len": 24, "samples": 400}
    estimator = Estimator()
    jobs = [
        Job(PlannedRun("x", "finetune", "x", 0), values | more)
        for more in ({"init_from": str(parent)}, {"init_from": "tiny", "seed": 4})
    ]
    seconds = estimator.of(jobs[0])
    assert 0 < seconds < 60
    assert estimator.of(jobs[1]) == seconds  # measured once


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not beside the repository (../shared/data)")
def test_a_hate_speech_classifier_is_tested_by_functionality(tune: Tune) -> None:
    summary = tune(
        data=str(SHARED / "hate_davidson" / "small"),
        hatecheck=str(SHARED / "hatecheck" / "small"),
        hatecheck_positive="hate,offensive",
        train_samples=40,
        eval_samples=40,
        samples=16,
    ).summary
    assert (summary["status"], summary["labels"]) == ("DONE", ["hate", "offensive", "neither"])
    checked = summary["hatecheck"]
    assert (checked["num_cases"], len(checked["functionalities"])) == (290, 29)
    right = sum(item["accuracy"] * item["num_cases"] for item in checked["functionalities"].values())
    assert checked["accuracy"] == pytest.approx(right / 290)
