"""A worker's loss scale, what half precision changes of a run, and gradients in parts."""

import math

import pytest
import torch
import torch.distributed as dist
from marks import slow
from tasks import Classes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncsgd
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel
from asyncsgd.settings.finetuning import make_finetune_settings
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.training import make_settings
from asyncsgd.tasks import task_class
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.worker import LossScale, Worker


def flat_with(gradient):
    flat = FlatModel(nn.Linear(3, 2))
    flat.gradients.fill_(gradient)
    return flat


def test_an_overflowed_gradient_halves_the_scale_and_is_computed_again():
    scale = LossScale()
    assert not scale.accept(flat_with(float("inf")))
    assert scale.value == 2.0**15
    assert scale.accept(flat_with(1.0))


def test_the_scale_doubles_after_a_run_of_good_gradients():
    scale = LossScale()
    for _ in range(LossScale.PATIENCE - 1):
        assert scale.accept(flat_with(1.0))
    assert scale.value == 2.0**16
    assert scale.accept(flat_with(1.0))
    assert scale.value == 2.0**17


def test_an_overflow_that_no_scale_explains_is_passed_on():
    scale = LossScale()
    for _ in range(16):
        assert not scale.accept(flat_with(float("nan")))
    assert scale.value == 1.0
    assert scale.accept(flat_with(float("nan")))


@pytest.mark.processes
@pytest.mark.parametrize(
    "values", [{"mode": "async", "nproc": 1}, *slow({"mode": "single"}, {"mode": "sync", "nproc": 2})]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_ends_near_single_precision_and_not_at_it(precision, values, train):
    half, full = train(precision=precision, **values), train(**values)
    difference = (half.parameters() - full.parameters()).norm() / full.parameters().norm()
    assert 0 < float(difference) < 0.02
    assert half.summary["final_eval_loss"] == pytest.approx(full.summary["final_eval_loss"], abs=0.02)


INDEX = 5


def gradient_of(task, micro_batches):
    """Of batch `INDEX`, in so many parts."""
    worker = Worker(FlatModel(task.model(0)), task, task.data(0), seed=0, micro_batches=micro_batches)
    return worker.gradient(INDEX), worker.flat.gradients


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_the_gradient_in_parts_is_that_of_the_whole_batch(micro_batches):
    task = Classes()
    parts = task.split(task.data(0).batch(0, INDEX), micro_batches)
    assert len({task.weight(part) for part in parts}) > 1  # otherwise a mean of means would do
    (whole, expected), (in_parts, gradient) = gradient_of(task, 1), gradient_of(task, micro_batches)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6
    assert in_parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (in_parts.weight, in_parts.num_samples) == (whole.weight, whole.num_samples)


def test_every_part_has_dropout_of_its_own_and_the_whole_batch_that_of_its_first_part():
    seeds = [[dropout_seed(0, 0, index, part) for part in range(5)] for index in range(5)]
    assert len({seed for of_batch in seeds for seed in of_batch}) == 25
    assert [of_batch[0] for of_batch in seeds] == [dropout_seed(0, 0, index) for index in range(5)]


def test_an_overflow_in_any_part_computes_all_parts_again_at_one_scale():
    task = Classes()
    # As a factor that overflows in the second part at every scale above 2^12 does.
    worker = Worker(FlatModel(task.model(0)), task, task.data(0), seed=0, micro_batches=2, precision=torch.float16)
    scales = []
    loss_of = worker.loss.forward

    def overflows(batch):
        loss = loss_of(batch)
        scales.append(scale := worker.state_dict()["value"])
        return loss * math.inf if len(scales) % 2 == 0 and scale > 2.0**12 else loss

    worker.loss.forward = overflows  # type: ignore[method-assign]
    gradient = worker.gradient(3)
    assert scales == [scale for power in (16, 15, 14, 13, 12) for scale in [2.0**power] * 2]
    assert gradient.loss_scales == (2.0**12,)
    again = worker.gradient(3)
    assert again.loss == gradient.loss


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "single"},
        {"mode": "async", "nproc": 3, "clock": "virtual"},
        *slow(
            {"mode": "single", "accumulate": 2},
            {"mode": "sync", "nproc": 2},
            {"mode": "async", "nproc": 1},
            {"mode": "async", "nproc": 2, "rule": "local_sgd:num_local_steps=2", "clock": "virtual"},
        ),
    ],
    ids=str,
)
def test_a_run_in_parts_ends_where_the_run_in_whole_batches_does(values, train):
    values |= {"optimizer": "sgd", "learning_rate": 0.1}
    whole, parts = train(**values), train(**values, micro_batches=3)
    assert parts.summary["parameters_sha256"] != whole.summary["parameters_sha256"]
    assert torch.allclose(parts.parameters(), whole.parameters(), atol=1e-5)
    assert parts.summary["final_eval_loss"] == pytest.approx(whole.summary["final_eval_loss"], rel=1e-5)


def test_ranks_exchange_the_gradients_of_all_parts_at_once():
    task = Classes()
    worker = Worker(FlatModel(task.model(0)), task, task.data(0), seed=0, micro_batches=4)
    exchanged = []

    def count(state, bucket):  # torch reads annotations here, and takes no text for them
        exchanged.append(bucket.is_last())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        worker.loss = DistributedDataParallel(worker.loss)
        worker.loss.register_comm_hook(None, count)
        gradient = worker.gradient(INDEX)
    finally:
        dist.destroy_process_group()
    assert exchanged.count(True) == 1
    assert gradient.loss == gradient_of(task, 4)[0].loss
    assert torch.equal(worker.flat.gradients, gradient_of(task, 4)[1])


def test_more_parts_than_samples_are_refused_before_there_is_a_run():
    values = {"batch_size": 4, "micro_batches": 5}
    of_tags = task_flags(task_class("token_classification")).make
    for make in (make_settings, of_tags, lambda values: make_finetune_settings({"init_from": "tiny", **values})):
        with pytest.raises(UsageError, match="--micro-batches 5 cuts a batch into more parts than its 4 samples; type"):
            make(values)
    with pytest.raises(UsageError, match="micro_batches=5 cuts a batch into more parts than its 4 samples; give 4 or"):
        asyncsgd.train(MaskedLM(batch_size=4), samples=8, micro_batches=5)
