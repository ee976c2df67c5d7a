"""A runtime and the settings that ask for it."""

from __future__ import annotations

import dataclasses

import pytest

from asyncsgd import modes
from asyncsgd.modes import AllReduce, Hogwild, InProcess, Pipeline, Processes, Virtual, job_of, runtime_of
from asyncsgd.settings.training import Job
from asyncsgd.simulation.churn import Join, Leave
from asyncsgd.simulation.speeds import Exponential, Network

CHURN = (Leave(1, 2.5), Join(1, 1e3 / 3))

CHANGES = {
    InProcess(): {"accumulate": 3, "threads": 2, "all_gpus": True},
    AllReduce(2): {"num_workers": 3, "threads": 2, "speeds": Exponential(0.1)},
    Pipeline(4, 2): {
        **{"num_workers": 8, "stages": 4, "schedule": "gpipe", "threads": 2, "deepspeed_config": "a.json"}
    },
    Processes(2): {"num_workers": 3, "via": "process_group", "threads": 2, "speeds": Exponential(0.1)},
    Hogwild(2): {"num_workers": 3, "share_state": True, "threads": 2, "speeds": Exponential(0.1)},
    Virtual(2): {
        **{"num_workers": 3, "speeds": Exponential(0.1), "network": Network(1e6 / 3, (1e8, 5e7), 1e9), "churn": CHURN},
        "threads": 2,
    },
}


@pytest.mark.parametrize("runtime", CHANGES, ids=str)
def test_every_field_of_a_runtime_is_in_its_settings(runtime):
    changes = CHANGES[runtime]
    assert changes.keys() == {field.name for field in dataclasses.fields(runtime)}  # type: ignore[arg-type]
    one_by_one = [dataclasses.replace(runtime, **{name: value}) for name, value in changes.items()]  # type: ignore[type-var]
    for each in (runtime, *one_by_one, dataclasses.replace(runtime, **changes)):  # type: ignore[type-var]
        assert runtime_of(Job(**job_of(each)), each.threads) == each


def test_every_kind_of_runtime_is_looked_at():
    assert {type(runtime) for runtime in CHANGES} == set(modes.KINDS)
