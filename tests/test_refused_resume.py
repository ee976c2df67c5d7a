"""A resume that is refused leaves the folder of the run as it was, byte by byte; any resume leaves the user's files."""

import dataclasses
import os
import shutil
import signal

import pytest
import torch
from doors import Exponential, Leave, Network, Synchronous, TensorData, UsageError, Virtual, seeded
from stopped_runs import SAMPLES, Noisy, files_in, train

LONGER = {"samples": 2 * SAMPLES}
DATA = Noisy.data
IN_ROUNDS = {"runtime": Virtual(3, Exponential()), "rule": Synchronous()}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a run that is DONE, and has checkpoints and a model."""
    folder = tmp_path_factory.mktemp("done") / "run"
    train(folder, checkpoint_every=80)
    assert {path.name for path in folder.iterdir()} >= {"checkpoints", "model", "summary.json", "settings.yaml"}
    return folder


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in files_in(folder)}


def other_weights(task, seed):
    with seeded(seed + 1):
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def other_labels(task, seed):
    """The data of Noisy with one other label in the evaluation."""
    x, y = (torch.cat(parts) for parts in zip(*DATA(task, seed).evaluation["main"], strict=True))
    changed = y.clone()
    changed[40] = 1 - changed[40]
    return TensorData((x, y), (x, changed), task.batch_size, seed)


def refuses(task, seed, cache):
    raise UsageError("the file is not there")


@pytest.mark.parametrize(
    ("arguments", "method", "refusal"),
    [
        ({}, None, "is DONE"),
        ({"seed": 7}, None, "other settings"),
        (IN_ROUNDS, None, "other settings"),
        (LONGER | {"track": "crayons"}, None, "crayons"),
        (LONGER, ("model", other_weights), "other initial parameters"),
        (LONGER, ("data", other_labels), "other data"),
        (LONGER, ("prepare", refuses), "the file is not there"),
    ],
    # a name that holds an address is another one in each test process
    ids=lambda value: f"{value[0]}-{value[1].__name__}" if isinstance(value, tuple) else None,
)
def test_a_refused_resume_leaves_every_byte_of_a_finished_run(arguments, method, refusal, done, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(done, path)
    if method is not None:
        monkeypatch.setattr(Noisy, *method)
    with pytest.raises(UsageError, match=refusal):
        train(path, resume=True, **arguments)
    assert content(path) == content(done)


def test_a_run_goes_on_on_another_processor_where_initial_parameters_are_drawn_with_other_bits(
    done, tmp_path, monkeypatch
):
    path = tmp_path / "run"
    shutil.copytree(done, path)
    (path / "environment.json").write_text(
        (path / "environment.json").read_text().replace('"cpu_capability": "', '"cpu_capability": "not ')
    )
    monkeypatch.setattr(Noisy, "model", other_weights)
    assert train(path, resume=True, **LONGER).status == "DONE"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"network": None}, r"network bytes=1000.0,worker=1000.0,server=1000.0 -> None"),
        ({"threads": 2}, r"threads 1 -> 2"),
    ],
)
def test_a_run_goes_on_with_the_runtime_that_it_began_with(changes, refusal, tmp_path):
    runtime = Virtual(3, Exponential(), Network(1e3, (1e3,), 1e3), (Leave(1, 4.0),))
    train(tmp_path / "run", samples=24, runtime=runtime, checkpoint_every=8)
    before = content(tmp_path / "run")
    with pytest.raises(UsageError, match=refusal):
        train(tmp_path / "run", samples=48, runtime=dataclasses.replace(runtime, **changes), resume=True)
    assert content(tmp_path / "run") == before
    assert train(tmp_path / "run", samples=48, runtime=runtime, resume=True).status == "DONE"


def test_a_resume_that_is_stopped_before_it_trains_leaves_every_byte(done, tmp_path, monkeypatch):
    shutil.copytree(done, tmp_path / "run")

    def stopped(task, seed, cache):
        os.kill(os.getpid(), signal.SIGINT)
        return task

    with monkeypatch.context() as patch:
        patch.setattr(Noisy, "prepare", stopped)
        assert train(tmp_path / "run", resume=True, **LONGER).status == "INTERRUPTED"
    assert content(tmp_path / "run") == content(done)
    assert train(tmp_path / "run", resume=True, **LONGER).status == "DONE"
