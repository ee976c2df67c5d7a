"""What the project must show, on its real code path: which runs are the same run, and what their records say.

Every run here is one that ``experiments/stilt_mlm.py`` could have been asked for, on a small text. `Plain` is what they
are compared with: a loop on a model's own parameters with torch's own optimizer, without rules, server or flat vector.
"""

import math

import pytest
import torch
from doors import dropout_seed, prepared_task
from gallery import BATCH_SIZE
from marks import slow
from torch import nn
from torch.nn import functional
from torch_alone import groups_of

pytestmark = pytest.mark.processes


class Plain:
    """The model with its own parameters, torch's own optimizer in two groups, and a batch's gradient."""

    def __init__(self, run):
        self.settings = run.settings
        self.task = prepared_task("masked_lm", run)
        self.model = self.task.model(self.settings["seed"])
        self._batches = self.task.data(self.settings["seed"])
        self.evaluation = self._batches.evaluation["main"]
        self._parameters = list(self.model.parameters())
        groups = groups_of(self.model, self.settings["weight_decay"])
        if self.settings["optimizer"] == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=1.0, momentum=self.settings["momentum"], fused=True)
        else:
            betas = (self.settings["beta1"], self.settings["beta2"])
            self._optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, fused=True)

    def learning_rate(self, arrived):
        """After `arrived` samples."""
        peak = self.settings["learning_rate"]
        warmup = self.settings["warmup"]
        samples = self.settings["samples"]
        if arrived < warmup:
            return peak * arrived / warmup
        if self.settings["schedule"] == "constant":
            return peak
        share = min(1.0, (arrived - warmup) / (samples - warmup))
        return peak * (1.0 - 0.9 * share)

    def gradient(self, index, point=None):
        """Of batch `index`, at `point` or where the model is; and the masked tokens behind it."""
        here = self.point()
        if point is not None:
            self._go(point)
        self.model.zero_grad()
        torch.manual_seed(dropout_seed(self.settings["seed"], 0, index))
        batch = self._batches.batch(0, index)
        outputs = self.task.outputs(self.model, batch)
        loss = self.task.loss(outputs, batch)
        loss.backward()
        self._go(here)
        return [p.grad.clone() for p in self._parameters], num_masked(batch)

    def step(self, gradients, learning_rate):
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.settings["clip_norm"]:
            nn.utils.clip_grad_norm_(self._parameters, self.settings["clip_norm"])
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def point(self):
        return [p.detach().clone() for p in self._parameters]

    def flat(self):
        return torch.cat([p.flatten() for p in self.point()])

    def _go(self, point):
        with torch.no_grad():
            for parameter, value in zip(self._parameters, point, strict=True):
                parameter.copy_(value)

    def eval_loss(self):
        return eval_loss(self.model, self.evaluation)


def relative(some, others):
    """The length of the difference, as a share of the length of `others`."""
    return float((some - others).norm() / others.norm())


def num_masked(batch):
    return int((batch["labels"] != -100).sum())


def eval_loss(model, batches, shard=0, num_shards=1):
    """Mean loss per masked token from logits everywhere, summed in float64 by one process."""
    training = model.training
    model.eval()
    total = 0.0
    count = 0
    with torch.no_grad():
        for index in range(shard, len(batches), num_shards):
            batch = batches[index]
            outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            logits = outputs.logits.flatten(0, 1).double()
            labels = batch["labels"].flatten()
            total += float(functional.cross_entropy(logits, labels, reduction="sum"))
            count += num_masked(batch)
    model.train(training)
    return total / count


def same_evaluation(record, plain):
    tokens = sum(num_masked(plain.evaluation[index]) for index in range(len(plain.evaluation)))
    return record["weight"] == tokens and record["loss"] == pytest.approx(plain.eval_loss(), rel=1e-6)


OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
    "momentum": {"optimizer": "sgd", "learning_rate": 0.05, "momentum": 0.9},
    "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
}
SCHEDULES = {"constant": {"schedule": "constant"}, "linear": {"schedule": "linear", "warmup": 40}}
MODES = {
    "single": {"mode": "single"},
    "async": {"mode": "async", "nproc": 1},
    "process_group": {"mode": "async", "nproc": 1, "transport": "process_group"},
    "sync": {"mode": "sync", "nproc": 1},
    "hogwild": {"mode": "hogwild", "nproc": 1},
}


@pytest.mark.parametrize(
    ("optimizer", "schedule", "modes"),
    [
        ("adamw", "linear", ["single", "async", "process_group", "sync", "hogwild"]),
        *slow(
            ("sgd", "constant", ["single", "async"]),
            ("momentum", "linear", ["single", "hogwild"]),
        ),
    ],
)
def test_one_worker_is_the_plain_loop_bit_for_bit_in_every_mode(train, optimizer, schedule, modes):
    values = OPTIMIZERS[optimizer] | SCHEDULES[schedule] | {"dropout": 0.1, "samples": 20 * BATCH_SIZE}
    runs = {mode: train(**values, **MODES[mode]) for mode in modes}
    plain = Plain(runs["single"])
    for index in range(20):
        gradients, _ = plain.gradient(index)
        plain.step(gradients, plain.learning_rate((index + 1) * BATCH_SIZE))
    for mode, run in runs.items():
        assert torch.equal(run.parameters(), plain.flat()), mode
        assert run.summary["num_updates"] == 20
        assert run.summary["delay"] == {"mean": 0.0, "p50": 0, "p95": 0, "max": 0}
    assert len({run.summary["parameters_sha256"] for run in runs.values()}) == 1


def test_another_seed_is_another_run(train):
    first = train(mode="single", seed=0)
    second = train(mode="single", seed=1)
    assert first.summary["parameters_sha256"] != second.summary["parameters_sha256"]
    assert first.summary["first_eval_loss"] != second.summary["first_eval_loss"]


SYNCHRONOUS = {
    "sync": {"mode": "sync"},
    "shared_memory": {"mode": "async", "rule": "synchronous", "transport": "shared_memory"},
    "process_group": {"mode": "async", "rule": "synchronous", "transport": "process_group"},
    "accumulate": {"mode": "single"},
}


def synchronous_run(train, name, num_workers, **values):
    if name == "accumulate":
        return train(**SYNCHRONOUS[name], accumulate=num_workers, **values)
    return train(**SYNCHRONOUS[name], nproc=num_workers, **values)


def accumulated(run, num_workers):
    """Several batches an update: the gradient of the mean loss per masked token of all of them together."""
    plain = Plain(run)
    num_batches = math.ceil(run.settings["samples"] / BATCH_SIZE)
    for first in range(0, num_batches, num_workers):
        indices = range(first, min(first + num_workers, num_batches))
        parts = [plain.gradient(index) for index in indices]
        total = sum(weight for _, weight in parts)
        mean = [torch.zeros_like(point, dtype=torch.float64) for point in plain.point()]
        for gradients, weight in parts:
            for of_parameter, gradient in zip(mean, gradients, strict=True):
                of_parameter += gradient.double() * (weight / total)
        arrived = BATCH_SIZE * (indices[-1] + 1)
        plain.step([gradient.float() for gradient in mean], plain.learning_rate(arrived))
    return plain


@pytest.mark.parametrize(("optimizer", "clip_norm"), [("adamw", 0.5), *slow(("sgd", 0.0))])
def test_all_reduce_equals_the_rule_synchronous_equals_accumulated_batches(train, optimizer, clip_norm):
    values = OPTIMIZERS[optimizer] | {"clip_norm": clip_norm, "samples": 6 * 2 * BATCH_SIZE}
    runs = {name: synchronous_run(train, name, 2, **values) for name in SYNCHRONOUS}
    plain = accumulated(runs["accumulate"], 2)
    expected = plain.flat()
    initial = Plain(runs["accumulate"]).flat()
    assert relative(initial, expected) > 1e-3  # it has gone somewhere
    for name, run in runs.items():
        assert run.summary["num_updates"] == 6
        assert relative(run.parameters(), expected) <= 1e-5, name
        assert run.summary["final_eval_loss"] == pytest.approx(plain.eval_loss(), rel=1e-5)
        assert run.summary["delay"]["max"] == 0
    # The same sums in the same order: on the parameter server not even the last bit depends on what carries it.
    hashes = {runs[name].summary["parameters_sha256"] for name in ("shared_memory", "process_group", "accumulate")}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_last_round_with_fewer_batches_than_workers_counts_those_and_no_other(train, name):
    # 42 samples are 11 batches of 4: three rounds of three and one of two, 44 samples.
    run = synchronous_run(train, name, 3, **OPTIMIZERS["sgd"], samples=42)
    assert run.summary["num_updates"] == 4
    assert run.summary["num_samples"] == 44
    assert run.summary["num_samples_applied"] == 44
    expected = accumulated(run, 3).flat()
    assert relative(run.parameters(), expected) <= 1e-5
    uses = []
    for event in run.records("arrival"):
        if event["uses"]:
            uses.append([dispatch for dispatch, _ in event["uses"]])
    assert uses == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def replay(run):
    """Run the recorded order of arrivals again in a plain loop; compare every evaluation on the way, and count them."""
    plain = Plain(run)
    versions = [plain.point()]
    evaluations = 0
    for record in run.records("arrival", "evaluate"):
        if record["kind"] == "evaluate":
            assert record["version"] == len(versions) - 1
            assert same_evaluation(record, plain)
            evaluations += 1
        elif record["outcome"] == "applied":
            ((_, index, _),) = record["batches"]
            gradients, _ = plain.gradient(index, versions[record["read_version"]])
            plain.step(gradients, plain.learning_rate(record["total_samples"]))
            versions.append(plain.point())
    return plain, evaluations


ASYNCHRONOUS = [
    {"rule": "asynchronous", "nproc": 3, "transport": "process_group"},
    {"rule": "ringmaster:threshold=1", "nproc": 3},
]
ASYNCHRONOUS_VALUES = {
    "mode": "async",
    "dropout": 0.1,
    "samples": 32 * BATCH_SIZE,
    "evaluations": 4,
    **SCHEDULES["linear"],
}


@pytest.mark.parametrize("more", ASYNCHRONOUS, ids=lambda more: "-".join(map(str, more.values())))
def test_the_recorded_order_of_arrivals_gives_the_run_again_bit_for_bit_and_every_evaluation(train, more):
    run = train(**ASYNCHRONOUS_VALUES, **more)
    plain, evaluations = replay(run)
    assert evaluations == 5
    assert torch.equal(run.parameters(), plain.flat())


@pytest.mark.parametrize(
    "more",
    [
        MODES["single"],
        {"mode": "sync", "nproc": 3},
        {"mode": "async", "nproc": 3},
        {"mode": "hogwild", "nproc": 2},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_first_and_final_evaluation_are_those_of_one_process_with_the_initial_and_the_saved_model(train, more):
    run = train(**more)
    plain = Plain(run)
    assert len(plain.evaluation) == 7
    first, *_, last = run.records("evaluate")
    assert first["version"] == 0
    assert last["version"] == run.summary["num_updates"]
    assert same_evaluation(first, plain)
    assert run.summary["first_eval_loss"] == first["loss"]
    assert run.summary["final_eval_loss"] == last["loss"]
    assert last["loss"] == pytest.approx(eval_loss(run.model(), plain.evaluation), rel=1e-6)
    assert last["loss"] < first["loss"]
    workers = run.settings["nproc"]
    shares = []
    for worker in range(workers):
        shares.append(eval_loss(run.model(), plain.evaluation, worker, workers))
    assert last["worker_losses"] == pytest.approx(shares, rel=1e-6)


MORE_MODES = MODES | {"virtual": {"mode": "async", "nproc": 2, "clock": "virtual"}}
some_modes = pytest.mark.parametrize("mode", ["single", "virtual", *slow("async", "sync", "hogwild")])


@some_modes
def test_evaluations_come_at_every_so_many_samples_and_at_the_end_and_change_no_bit(train, mode):
    values = MORE_MODES[mode] | {"dropout": 0.1}
    one = train(**values, evaluations=1)
    run = train(**values, evaluate_every="28", evaluations=8)
    at = train(**values, evaluations=1, evaluate_at=50)
    assert len(run.records("evaluate")) == 4
    batch_size = run.settings["batch_size"]
    if mode == "sync":
        batch_size *= run.settings["nproc"]
    first_from_50 = math.ceil(50 / batch_size) * batch_size
    if mode != "hogwild":
        assert [e["total_samples"] for e in run.records("evaluate")] == [0, 28, 56, 80]
        assert [e["total_samples"] for e in at.records("evaluate")] == [0, first_from_50, 80]
    assert run.summary["parameters_sha256"] == at.summary["parameters_sha256"]
    assert one.summary["parameters_sha256"] == at.summary["parameters_sha256"]
    assert run.summary["final_eval_loss"] == one.summary["final_eval_loss"]


@some_modes
def test_patience_ends_a_run_at_the_first_evaluation_after_so_many_without_a_new_lowest_loss(train, mode):
    more = {"learning_rate": 0.05, "schedule": "constant", "evaluate_every": "8", "samples": 80, "evaluations": 8}
    run = train(**MORE_MODES[mode], **more, patience=3)
    patient = train(**MORE_MODES[mode], **more)
    losses = [e["loss"] for e in run.records("evaluate")]
    summary = run.summary
    best = losses.index(min(losses))
    assert len(losses) - 1 == best + 3
    for k in range(len(losses) - 1):
        assert k - losses.index(min(losses[: k + 1])) < 3
    assert summary["status"] == "DONE"
    assert summary["final_eval_loss"] == losses[-1]
    assert summary["stopped_early"] == {
        "evaluations_without_improvement": 3,
        "best_loss": min(losses),
        "best_samples": run.records("evaluate")[best]["total_samples"],
    }
    said = "stopped early: 3 evaluations without a loss below"
    assert summary["message"].startswith(said)
    assert said in (run.path / "printed.txt").read_text()
    assert patient.summary["stopped_early"] is None
    if mode in ("single", "virtual", "sync"):
        assert [e["loss"] for e in patient.records("evaluate")][: len(losses)] == losses


COUNTED = [
    *({**more, **ASYNCHRONOUS_VALUES} for more in ASYNCHRONOUS),
    {"mode": "sync", "nproc": 2},
    {"mode": "sync", "nproc": 3, "samples": 42},
    {"mode": "async", "nproc": 3, "rule": "synchronous", "samples": 42},
    {"mode": "single", "accumulate": 3, "samples": 42},
    {"mode": "hogwild", "nproc": 3, "samples": 160},
]


@pytest.mark.parametrize("more", COUNTED, ids=lambda more: "-".join(map(str, list(more.values())[:4])))
def test_every_batch_of_the_budget_arrives_once_and_the_counts_follow_what_arrived(train, more):
    run = train(**SCHEDULES["linear"] | more)
    plain = Plain(run)
    summary = run.summary
    events = run.records("arrival")
    num_batches = math.ceil(run.settings["samples"] / BATCH_SIZE)
    assert summary["status"] == "DONE"
    in_flight = 0
    if run.settings["mode"] == "async" and run.settings["rule"] != "synchronous":
        in_flight = run.settings["nproc"] - 1  # discarded, when the last sample has arrived
    assert len(events) == num_batches
    assert summary["num_samples"] == len(events) * BATCH_SIZE
    assert [event["total_samples"] for event in events] == [(k + 1) * BATCH_SIZE for k in range(len(events))]
    assert {event["num_samples"] for event in events} == {BATCH_SIZE}
    dispatches = [event["dispatch"] for event in events]
    assert len(set(dispatches)) == len(events)
    missing = set(range(len(events) + in_flight)) - set(dispatches)
    assert len(missing) == in_flight
    for event in events:
        index = event["dispatch"]
        assert event["batches"] == [[0, index, index + 1]]
    version = 0
    seconds = 0.0
    taken = []
    num_applied = 0
    for event in events:
        assert event["arrival_delay"] == version - event["read_version"] >= 0
        assert event["version"] == version + bool(event["uses"])
        version = event["version"]
        if event["outcome"] == "applied":
            assert event["learning_rate"] == plain.learning_rate(event["total_samples"])
        assert event["train_seconds"] >= seconds
        seconds = event["train_seconds"]
        num_applied += len(event["uses"])
        taken += [dispatch for dispatch, _ in event["uses"]]
        taken += event["drops"]
    assert summary["num_updates"] == version
    assert summary["num_samples_applied"] == num_applied * BATCH_SIZE
    assert sorted(taken) == sorted(dispatches)
    num_workers = run.settings["accumulate"] * run.settings["nproc"]
    assert {event["worker"] for event in events} <= set(range(num_workers))
