"""The model with the lowest evaluation loss is kept beside the last one, in every mode."""

import pytest
import torch
from doors import (
    AllReduce,
    Exponential,
    FlatModel,
    Hogwild,
    InProcess,
    Processes,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
    parameters_sha256,
)
from stopped_runs import SAMPLES, Noisy, checkpointed
from stopped_runs import train as train_noisy
from torch import nn

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
    assert best["version"] == lowest.version
    assert best["num_samples"] == lowest.total_samples
    assert best["eval_loss"] == lowest.loss
    model = run.model(best=True)
    flat = FlatModel(model)
    assert parameters_sha256(flat.layout, flat.parameters) == best["parameters_sha256"]
    assert loss_of(model) == pytest.approx(best["eval_loss"], rel=1e-6)
    return best


IN_ONE_PROCESS = {
    "single": {},
    "accumulated": {"runtime": InProcess(accumulate=3)},
    "virtual": {"runtime": Virtual(3, Exponential())},
    "until nothing improves": {"patience": 3},
}


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_the_best_model_is_kept_and_read_again_and_changes_no_bit_of_the_run(name, tmp_path):
    arguments = CHOSEN | IN_ONE_PROCESS[name]
    plain = train_noisy(tmp_path / "plain", **arguments | {"keep_best": False})
    run = train_noisy(tmp_path / "run", **arguments)
    best = kept(run)
    assert 0 < best["version"] < run.summary["num_updates"]
    assert run.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    assert plain.summary["best"] is None
    assert not (tmp_path / "plain" / "best_model").exists()
    read = FlatModel(asyncsgd.load_run(tmp_path / "run", Noisy()).model(best=True))
    assert parameters_sha256(read.layout, read.parameters) == best["parameters_sha256"]


def test_without_a_folder_the_best_model_is_there_too_and_one_that_was_not_kept_is_asked_for_by_name():
    run = asyncsgd.train(Noisy(), samples=SAMPLES, quiet=True, device="cpu", **CHOSEN)
    kept(run)
    last = asyncsgd.train(Noisy(), samples=20, quiet=True, device="cpu")
    with pytest.raises(UsageError, match=r"kept its last model only; train with keep_best=True, or type --keep-best$"):
        last.model(best=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("runtime", [AllReduce(2), Processes(2), Hogwild(2)], ids=str)
def test_processes_hand_over_the_best_model(runtime, tmp_path):
    kept(train_noisy(tmp_path / "run", runtime=runtime, checkpoint_every=100, **CHOSEN))


def test_the_best_model_is_exported_and_trained_further_as_the_last_one_is(train, tmp_path):
    run = train(keep_best=True, evaluations=4, learning_rate=0.05, checkpoint_every="20")
    best = run.summary["best"]
    folder = run.path / "best_model"
    card = (folder / "README.md").read_text()
    assert f"It has seen {best['num_samples']} samples in {best['version']} updates." in card
    assert "It is the version with the lowest evaluation loss of its run." in card
    last = f"{checkpointed(run.path)[-1]:012}"
    for name in ([], ["--checkpoint", last]):
        out = tmp_path / f"out{len(name)}"
        assert cli(["asyncsgd", "export", run.path, "--best", *name, "--cache-dir", run.cache, "--out", out]).code == 0
        assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    further = train(model=folder, samples=0, vocab_size=8192)
    assert further.summary["parameters_sha256"] == best["parameters_sha256"]
    assert further.summary["from_scratch"] is False
    assert further.summary["final_eval_loss"] == pytest.approx(best["eval_loss"], rel=1e-6)
