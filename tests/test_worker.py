"""A worker's loss scale, and what half precision changes of a run."""

from __future__ import annotations

import pytest
from marks import slow
from running import Train
from torch import nn

from asyncsgd.flat import FlatModel
from asyncsgd.worker import LossScale


def flat_with(gradient: float) -> FlatModel:
    flat = FlatModel(nn.Linear(3, 2))
    flat.gradients.fill_(gradient)
    return flat


def test_an_overflowed_gradient_halves_the_scale_and_is_computed_again() -> None:
    scale = LossScale()
    assert not scale.accept(flat_with(float("inf")))
    assert scale.value == 2.0**15
    assert scale.accept(flat_with(1.0))


def test_the_scale_doubles_after_a_run_of_good_gradients() -> None:
    scale = LossScale()
    for _ in range(LossScale.PATIENCE - 1):
        assert scale.accept(flat_with(1.0))
    assert scale.value == 2.0**16
    assert scale.accept(flat_with(1.0))
    assert scale.value == 2.0**17


def test_an_overflow_that_no_scale_explains_is_passed_on() -> None:
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
def test_half_precision_ends_near_single_precision_and_not_at_it(
    precision: str, values: dict[str, object], train: Train
) -> None:
    half, full = train(precision=precision, **values), train(**values)
    difference = (half.parameters() - full.parameters()).norm() / full.parameters().norm()
    assert 0 < float(difference) < 0.02
    assert half.summary["final_eval_loss"] == pytest.approx(full.summary["final_eval_loss"], abs=0.02)
