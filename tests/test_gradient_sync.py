"""What every comparison rests on: whoever computes the gradients, the same batches give the same step.

To be read alone, from top to bottom. Beside torch there is `train` only, the library's public function (`doors` has all
of its public names). A plain loop on the model's own parameters says what is right."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from doors import (
    SGD,
    AllReduce,
    Constant,
    InProcess,
    Join,
    Leave,
    Processes,
    Synchronous,
    Task,
    TensorData,
    Virtual,
    seeded,
    train,
)
from torch import nn

BATCH = 8
STEPS = 10

pytestmark = pytest.mark.processes


def labelled_points(number, seed):
    """Points of three classes. One in three has no label, so batches of 8 points have different numbers of labels."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(number, 16, generator=draw)
    labels = points[:, :3].argmax(1)
    labels[torch.rand(number, generator=draw) < 1 / 3] = -100
    return points, labels


@dataclasses.dataclass(frozen=True)
class Classes(Task):
    """A linear classifier. The loss is the mean over the points of a batch that have a label."""

    name: ClassVar[str] = "three_classes"
    batch_size: int = BATCH

    def model(self, seed):
        with seeded(seed):
            return nn.Linear(16, 3, bias=False)

    def data(self, seed):
        return TensorData(labelled_points(100, 1), labelled_points(30, 2), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])

    def weight(self, batch):
        """How many terms the mean is over."""
        return float((batch[1] >= 0).sum())


TASK = Classes()


def weights_after(runtime, steps, batches_a_step=1, **more):
    """The model's weights after a training by the library."""
    samples = steps * batches_a_step * BATCH
    run = train(TASK, runtime=runtime, samples=samples, learning_rate=0.1, evaluations=1, quiet=True, **more)
    assert run.status == "DONE"
    assert run.summary["num_updates"] == steps
    return run.model().weight.detach()


def plain_loop(build_optimizer, steps, batches_a_step=1):
    """The same by torch alone: a step is along the gradient of the mean over all loss terms of its batches."""
    model = TASK.model(seed=0)
    data = TASK.data(seed=0)
    optimizer = build_optimizer(model.parameters(), lr=0.1)
    for step in range(steps):
        batches = [data.batch(0, step * batches_a_step + part) for part in range(batches_a_step)]
        points, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("runtime", [InProcess(), Processes(1), AllReduce(1), Virtual(1)], ids=str)
@pytest.mark.parametrize("ours", [SGD(momentum=0.9), None], ids=["momentum", "adamw"])
def test_one_worker_is_torch_optim_bit_for_bit(runtime, ours):
    def theirs(parameters, lr):
        if ours is None:  # asyncsgd's default, without weight decay
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, fused=True)
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)

    assert torch.equal(weights_after(runtime, STEPS, optimizer=ours), plain_loop(theirs, STEPS))


TWO_BATCHES_A_STEP = {
    "DDP": {"runtime": AllReduce(2)},
    "the rule synchronous on the server": {"runtime": Processes(2), "rule": Synchronous()},
    "accumulated batches": {"runtime": InProcess(accumulate=2)},
}
two_batches_a_step = pytest.mark.parametrize("way", TWO_BATCHES_A_STEP.values(), ids=TWO_BATCHES_A_STEP)


@two_batches_a_step
def test_ddp_and_the_synchronous_server_and_accumulated_batches_are_one_algorithm(way):
    weights = weights_after(**way, steps=STEPS, batches_a_step=2, optimizer=SGD(momentum=0.9))
    expected = plain_loop(lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9), STEPS, 2)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


@two_batches_a_step
def test_batches_of_different_sizes_give_the_mean_over_their_loss_terms_and_no_mean_of_means(way):
    batches = []
    for index in range(2):
        batches.append(TASK.data(seed=0).batch(0, index))
    means = []
    terms = torch.tensor([TASK.weight(batch) for batch in batches])
    assert terms[0] != terms[1]
    for points, labels in batches:
        model = TASK.model(seed=0)
        nn.functional.cross_entropy(model(points), labels).backward()
        means.append(model.weight.grad)
    over_terms = sum(share * mean for share, mean in zip(terms / terms.sum(), means, strict=True))

    start = TASK.model(seed=0).weight.detach()
    gradient = (start - weights_after(**way, steps=1, batches_a_step=2, optimizer=SGD())) / 0.1
    torch.testing.assert_close(gradient, over_terms, rtol=0, atol=1e-6)
    assert (gradient - sum(means) / 2).abs().max() > 1e-3


def test_a_lost_workers_batch_is_handed_out_again_and_every_batch_is_applied_once():
    seconds = {"speeds": Constant(1.0), "churn": (Leave(1, 2.5), Join(1, 5.5))}  # a gradient takes 1 s
    records = []
    train(
        TASK,
        rule=Synchronous(),
        runtime=Virtual(3, **seconds),
        samples=24 * BATCH,
        evaluations=1,
        quiet=True,
        report=records.append,
    )
    (left,) = (record for record in records if record.kind == "leave")
    arrivals = {record.dispatch: record for record in records if record.kind == "arrival"}
    assert left.worker == 1
    assert len(left.lost) == 1
    assert left.lost[0] not in arrivals
    applied = [arrivals[dispatch].batches for arrival in arrivals.values() for dispatch, _ in arrival.uses]
    assert sorted(applied) == [((0, batch, batch + 1),) for batch in range(24)]
