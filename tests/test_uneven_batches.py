"""Batches that leave parameters unused or have no loss term, and forward passes that change what is trained."""

import dataclasses
import json
from typing import ClassVar

import pytest
import torch
from doors import (
    ADPSGD,
    ALL,
    EASGD,
    SGD,
    SGP,
    AllReduce,
    Asynchronous,
    AsyncLocalSGD,
    Downpour,
    Hogwild,
    InProcess,
    KSync,
    Pipeline,
    Processes,
    Synchronous,
    Task,
    Virtual,
    asyncsgd,
    seeded,
)
from marks import slow
from torch import nn
from torch_alone import groups_of

BATCHES = 16


class Experts(nn.Module):
    """Each row goes to one of three layers, by its first feature."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x):
        which = x[:, 0].clamp(0, 2).long()
        out = torch.zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            if bool((which == number).any()):
                out[which == number] = expert(x[which == number]).float()
        return out


class Fixed:
    """16 batches of 6 rows. Batch 0 uses all experts, each later one only one of them."""

    def __init__(self, empty, left_out=False):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(BATCHES, 6, 4, generator=draw)
        self.x[0, :, 0] = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 2.0])
        for batch in range(1, BATCHES):
            self.x[batch, :, 0] = float(batch % 3)
        self.y = torch.randint(0, 2, (BATCHES, 6), generator=draw)
        self.y[list(empty)] = -100
        self.order = [batch for batch in range(BATCHES) if not (left_out and batch in empty)]

    def batch(self, stream, index):
        number = self.order[index % len(self.order)]
        return {"x": self.x[number], "y": self.y[number]}

    @property
    def evaluation(self):
        return {"main": [self.batch(0, index) for index in (1, 2, 5, 7)]}


@dataclasses.dataclass(frozen=True)
class Uneven(Task):
    name: ClassVar[str] = "uneven"
    batch_size: int = 6
    empty: tuple[int, ...] = ()
    left_out: bool = False
    """Whether those that are empty are not there at all."""

    def model(self, seed):
        with seeded(seed):
            return Experts()

    def data(self, seed):
        return Fixed(self.empty, self.left_out)

    def outputs(self, model, batch):
        return model(batch["x"])[:, 0]

    def loss(self, outputs, batch):
        counts = batch["y"] >= 0
        losses = nn.functional.binary_cross_entropy_with_logits(
            outputs, batch["y"].clamp(0, 1).float(), reduction="none"
        )
        return (losses * counts).sum() / counts.sum()

    def weight(self, batch):
        return float((batch["y"] >= 0).sum())


def plain(task, groups, *, rate=0.5, decay=0.1):
    """Plain torch: a step for each group of batches, along the gradient of its mean loss; none where nothing counts."""
    model = task.model(0)
    data = task.data(0)
    optimizer = torch.optim.AdamW(groups_of(model, decay), lr=rate)
    for group in groups:
        batches = [data.batch(0, index) for index in group]
        total = sum(task.weight(batch) for batch in batches)
        if not total:
            continue
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for batch in batches:
            weight = task.weight(batch)
            if weight:
                outputs = task.outputs(model, batch)
                loss = task.loss(outputs, batch) * weight / total
                loss.backward()
        optimizer.step()
    with torch.no_grad():
        return torch.cat([parameter.flatten() for parameter in model.parameters()])


def trained(task, runtime, rule=None, samples=96, folder=None, **more):
    more = {"learning_rate": 0.5, "weight_decay": 0.1, "evaluations": 1, "quiet": True} | more
    return asyncsgd.train(task, runtime=runtime, rule=rule, samples=samples, folder=folder, **more)


def vector(run):
    with torch.no_grad():
        return torch.cat([parameter.flatten() for parameter in run.model().parameters()])


def in_groups(size):
    return [range(first, min(first + size, BATCHES)) for first in range(0, BATCHES, size)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("empty", [(), (1, 4, 5)], ids=["all count", "some batches have no target"])
def test_ranks_train_what_batches_leave_unused_as_one_process_does(ranks, parts, empty, tmp_path):
    task = Uneven(empty=empty)
    run = trained(task, AllReduce(ranks), folder=tmp_path / "run", micro_batches=parts)
    assert run.status == "DONE"
    torch.testing.assert_close(vector(run), plain(task, in_groups(ranks)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_an_update_without_a_loss_term_takes_no_step_in_one_process(accumulate, tmp_path):
    task = Uneven(empty=(3, 4, 5, 12, 13, 14, 15))
    run = trained(task, InProcess(accumulate=accumulate), folder=tmp_path / "run")
    torch.testing.assert_close(vector(run), plain(task, in_groups(accumulate)), rtol=1e-6, atol=1e-7)
    arrivals = arrivals_of(run.folder)
    assert run.summary["num_samples"] == 96
    dropped = {1: 7, 2: 6, 4: 4}[accumulate]
    assert sum(len(arrival["drops"]) for arrival in arrivals) == dropped
    assert run.summary["num_updates"] == {1: 9, 2: 5, 4: 3}[accumulate]
    assert {arrival["loss"] for arrival in arrivals if not arrival["weight"]} == {None}
    assert asyncsgd.replay(run.folder, task).identical


def arrivals_of(folder):
    records = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "arrival"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("runtime", "rule"),
    [(Virtual(1), Asynchronous()), (Processes(1), Asynchronous()), (Virtual(1), Synchronous()), (Hogwild(1), None)],
    ids=["virtual", "processes", "synchronous", "hogwild"],
)
def test_one_worker_leaves_such_batches_out_as_plain_torch_does(runtime, rule):
    task = Uneven(empty=(3, 4, 12))
    expected = plain(task, in_groups(1))
    torch.testing.assert_close(vector(trained(task, runtime, rule)), expected, rtol=1e-6, atol=1e-7)


def test_a_round_in_which_one_worker_has_nothing_is_the_mean_of_the_others():
    task = Uneven(empty=(1, 6, 7))
    run = trained(task, Virtual(2), Synchronous())
    torch.testing.assert_close(vector(run), plain(task, in_groups(2)), rtol=1e-6, atol=1e-7)


ONE_BY_ONE = [rule for rule in ALL if not rule.local_steps and rule.name not in ("k_batch_async", "rennala")]
KEEPS_SOMETHING = ("fixed_delay", "dana", "ormo", "ringleader", "ia2sgd")
"""Rules, by name, with a state that an empty batch would change."""
KEEPING = [rule for rule in ONE_BY_ONE if rule.name in KEEPS_SOMETHING]
OTHERS = slow(*[rule for rule in ONE_BY_ONE if rule.name not in KEEPS_SOMETHING])
WITH_OWN_PARAMETERS = [EASGD(alpha=0.3, num_local_steps=1), *slow(Downpour(n_push=1, n_fetch=2))]


@pytest.mark.parametrize("rule", [*KEEPING, *OTHERS, *WITH_OWN_PARAMETERS, ADPSGD(), SGP(delay=0)], ids=str)
def test_under_every_rule_one_worker_trains_as_if_a_batch_without_a_loss_term_were_not_there(rule, tmp_path):
    more = {"learning_rate": 0.1, "weight_decay": 0.0, "optimizer": SGD()}
    run = trained(Uneven(empty=(3, 4, 12)), Virtual(1), rule, folder=tmp_path / "run", **more)
    without = trained(Uneven(empty=(3, 4, 12), left_out=True), Virtual(1), rule, samples=78, **more)
    assert torch.equal(vector(run), vector(without))
    assert run.summary["num_updates"] == without.summary["num_updates"]
    empty = [arrival for arrival in arrivals_of(run.folder) if not arrival["weight"]]
    assert [arrival["outcome"] for arrival in empty] == ["dropped"] * 3
    for arrival in empty:
        assert arrival["uses"] == []
        assert arrival["drops"] == [arrival["dispatch"]]


def test_peers_do_not_meet_over_a_batch_without_a_loss_term(tmp_path):
    run = trained(Uneven(empty=(1, 2, 9)), Virtual(2), ADPSGD(), folder=tmp_path / "run")
    assert run.summary["num_updates"] == BATCHES - 3
    assert run.summary["num_samples"] == 96
    assert asyncsgd.replay(run.folder, Uneven(empty=(1, 2, 9))).identical


@pytest.mark.parametrize("rule", [KSync(quorum=2), AsyncLocalSGD(num_local_steps=2)], ids=str)
def test_other_rules_end_well_and_replay(rule, tmp_path):
    task = Uneven(empty=(1, 2, 3, 9))
    more = {"optimizer": SGD()} if rule.local_steps else {}
    run = trained(task, Virtual(3), rule, folder=tmp_path / "run", weight_decay=0.0, **more)
    assert run.status == "DONE"
    assert asyncsgd.replay(run.folder, task).identical


def test_evaluation_batches_without_a_loss_term_add_nothing():
    some = trained(Uneven(empty=(1, 2)), InProcess(), samples=0)
    data = Fixed((1, 2))
    model = Uneven().model(0)
    with torch.no_grad():
        batches = [data.batch(0, index) for index in (5, 7)]
        losses = []
        for batch in batches:
            losses.append(Uneven().loss(Uneven().outputs(model, batch), batch))
    assert some.evaluations[0].loss == pytest.approx(sum(float(loss) for loss in losses) / 2)
    with pytest.raises(asyncsgd.UsageError, match="no batch of the evaluation set 'main' has a loss term"):
        trained(Uneven(empty=(1, 2, 5, 7)), InProcess())


@dataclasses.dataclass(frozen=True)
class Silent(Uneven):
    """Does not say how many targets count."""

    weight = Task.weight


def test_a_task_that_does_not_count_its_targets_is_told_to():
    run = trained(Silent(empty=(3,)), InProcess())
    assert run.status == "DIVERGED"
    assert (
        "no target of batch 3 counts (all are -100), and Silent does not say so; give it weight(batch)"
        in (run.summary["message"])
    )


class Changing(nn.Module):
    """Changes what it is trained on at its fourth forward pass in training."""

    def __init__(self, how):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.how = how
        self.passes = 0
        if how == "thaw":
            self.first.weight.requires_grad_(False)

    def forward(self, x):
        self.passes += self.training
        if self.training and self.passes == 4:
            if self.how == "change":
                with torch.no_grad():
                    self.first.weight.mul_(0.5)
            else:
                self.first.weight.requires_grad_(self.how == "thaw")
        return self.last(self.first(x).tanh())


@dataclasses.dataclass(frozen=True)
class Changes(Uneven):
    how: str = "change"

    def model(self, seed):
        with seeded(seed):
            return Changing(self.how)


@pytest.mark.parametrize("how", ["change", "thaw"])
def test_a_forward_pass_that_changes_what_is_trained_ends_the_run_and_names_the_parameter(how, tmp_path):
    with pytest.raises(asyncsgd.RunError, match=r"the parameter 'first\.weight'"):
        trained(Changes(how=how), InProcess(), folder=tmp_path / "run", checkpoint_every=6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "FAILED"
    assert summary["num_updates"] == 3
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))


@pytest.mark.processes
@pytest.mark.parametrize("runtime", [Processes(2), pytest.param(Hogwild(2), marks=pytest.mark.slow)], ids=str)
def test_a_run_with_workers_ends_so_too_and_names_the_parameter(runtime):
    with pytest.raises(asyncsgd.RunError, match=r"worker \d: the forward pass changes the parameter 'first\.weight'"):
        trained(Changes(), runtime, optimizer=SGD(), weight_decay=0.0)


class Added(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return hidden + self.inner(hidden).tanh()


class Stack(nn.Module):
    """Blocks that a pipeline can cut, of which the first changes."""

    def __init__(self, how):
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.end = nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Added(inner) for inner in (Changing(how), nn.Linear(4, 4), nn.Linear(4, 4)))

    def forward(self, x):
        hidden = self.start(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.end(hidden)


@dataclasses.dataclass(frozen=True)
class Stacked(Changes):
    def model(self, seed):
        with seeded(seed):
            return Stack(self.how)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", ["change", "freeze"])
def test_a_stage_of_a_pipeline_does_not_change_what_is_trained_either(how):
    with pytest.raises(asyncsgd.RunError, match=r"the parameter '.*first\.weight'"):
        trained(Stacked(how=how), Pipeline(2, stages=2), micro_batches=2)


class Short(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rows = kind(3, 4, max_norm=1.0)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.rows(x[:, :1].clamp(0, 2).long()).reshape(len(x), 4))


@dataclasses.dataclass(frozen=True)
class Shortens(Uneven):
    kind: type = nn.Embedding

    def model(self, seed):
        with seeded(seed):
            return Short(self.kind)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_with_a_largest_norm_are_refused_before_anything_is_trained(kind):
    with pytest.raises(asyncsgd.UsageError, match="the module 'rows' has max_norm=1, so its forward pass changes"):
        asyncsgd.check(Shortens(kind=kind))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("empty", [(3,), (2, 9)], ids=["of rank 1", "of rank 0 and of rank 1"])
def test_ranks_whose_batch_has_no_loss_term_step_as_the_others_in_float16(empty):
    task = Uneven(empty=empty)
    more = {"optimizer": SGD(), "weight_decay": 0.0, "precision": "fp16"}
    together = trained(task, AllReduce(2), **more)
    alone = trained(task, InProcess(accumulate=2), **more)
    torch.testing.assert_close(vector(together), vector(alone), rtol=1e-4, atol=1e-5)
