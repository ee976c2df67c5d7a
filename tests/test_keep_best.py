"""The model with the lowest evaluation loss is kept beside the last one, in every mode and over a resume."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_resume import SAMPLES, Noisy, results
from test_resume import train as train_noisy
from torch import nn

import asyncsgd
from asyncsgd import UsageError, modes
from asyncsgd.checkpoints import find
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.init_from import read_origin
from asyncsgd.records.run_folder import BEST_MODEL
from asyncsgd.simulation.speeds import Exponential
from export import main as export

# At this learning rate the loss rises and falls, so that the best version is neither the first nor the last.
CHOSEN = {"learning_rate": 0.3, "evaluate_every": 12, "evaluations": 8, "keep_best": True}


def loss_of(model):
    batches = list(Noisy().data(0).evaluation["main"])
    with torch.no_grad():
        total = sum(float(nn.functional.cross_entropy(model(x), y, reduction="sum")) for x, y in batches)
    return total / sum(len(y) for _, y in batches)


def kept(run):
    """What was kept, after it was compared with the run's evaluations."""
    best = dict(run.summary["best"])
    lowest = min(run.evaluations, key=lambda evaluation: evaluation.loss)
    assert (best["version"], best["num_samples"], best["eval_loss"]) == (
        lowest.version,
        lowest.total_samples,
        lowest.loss,
    )
    model = run.model(best=True)
    flat = FlatModel(model)
    assert parameters_sha256(flat.layout, flat.parameters) == best["parameters_sha256"]
    assert loss_of(model) == pytest.approx(best["eval_loss"], rel=1e-6)
    return best


IN_ONE_PROCESS = {
    "single": {},
    "accumulated": {"runtime": modes.InProcess(accumulate=3)},
    "virtual": {"runtime": modes.Virtual(3, Exponential())},
    "until nothing improves": {"patience": 3},
}


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
@given(share=st.floats(0.0, 0.9))
@settings(deadline=None, max_examples=3, suppress_health_check=list(HealthCheck))
def test_the_best_model_is_kept_and_a_resumed_run_keeps_the_same(name, share, tmp_path_factory):
    root, arguments = tmp_path_factory.mktemp("best"), CHOSEN | IN_ONE_PROCESS[name]
    plain = train_noisy(root / "plain", **arguments | {"keep_best": False})
    whole = train_noisy(root / "whole", **arguments)
    best = kept(whole)
    assert 0 < best["version"] < whole.summary["num_updates"]
    assert whole.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    assert plain.summary["best"] is None
    assert not (root / "plain" / BEST_MODEL).exists()
    stop = 1 + int(share * whole.summary["num_samples"])
    train_noisy(root / "run", stop_at=stop, **arguments)
    train_noisy(root / "run", resume=True, **arguments)
    assert results(root / "run") == results(root / "whole")
    one, other = [(root / run / BEST_MODEL / "model.safetensors").read_bytes() for run in ("run", "whole")]
    assert one == other
    read = FlatModel(asyncsgd.load_run(root / "run", Noisy()).model(best=True))
    assert parameters_sha256(read.layout, read.parameters) == best["parameters_sha256"]


def test_without_a_folder_the_best_model_is_there_too_and_one_that_was_not_kept_is_asked_for_by_name():
    run = asyncsgd.train(Noisy(), samples=SAMPLES, quiet=True, device="cpu", **CHOSEN)
    kept(run)
    last = asyncsgd.train(Noisy(), samples=20, quiet=True, device="cpu")
    with pytest.raises(UsageError, match=r"kept its last model only; train with keep_best=True, or type --keep-best$"):
        last.model(best=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("runtime", [modes.AllReduce(2), modes.Processes(2), modes.Hogwild(2)], ids=str)
def test_processes_hand_over_the_best_model(runtime, tmp_path):
    kept(train_noisy(tmp_path / "run", runtime=runtime, checkpoint_every=100, **CHOSEN))
    state = find(tmp_path / "run").load()
    assert state["judge"]["best_parameters"].shape == state.get("server", state)["parameters"].shape


def test_the_best_model_is_exported_and_fine_tuned_as_the_last_one_is(train, tmp_path):
    run = train(keep_best=True, evaluations=4, learning_rate=0.05, checkpoint_every="20")
    best = run.summary["best"]
    folder = run.path / BEST_MODEL
    origin, last = read_origin(str(folder)), read_origin(str(run.path))
    assert (origin.model, origin.from_scratch) == (str(folder), last.from_scratch)
    assert origin.parent == {**(last.parent or {}), "parameters_sha256": best["parameters_sha256"]}
    assert origin.parameters_sha256 == best["parameters_sha256"]
    card = (folder / "README.md").read_text()
    assert f"It has seen {best['num_samples']} samples in {best['version']} updates." in card
    assert "It is the version with the lowest evaluation loss of its run." in card
    cache = str(run.path.parent / "cache")
    for name in ([], ["--checkpoint", find(run.path).checkpoint.name]):
        out = tmp_path / f"out{len(name)}"
        assert export([str(run.path), "--best", *name, "--cache-dir", cache, "--out", str(out)]) == 0
        assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
