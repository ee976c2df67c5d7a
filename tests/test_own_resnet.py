"""The example of a network with BatchNorm: its images, its folder of images, and its models as they are given out."""

import json

import numpy as np
import pytest
import torch
from doors import UsageError, asyncsgd, check, cli, seeded
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from own_resnet import Images, made

SMALL = {"side": 8, "width": 4, "train_images": 200, "batch_size": 20}
TYPED = "own_resnet.py --side 8 --width 4 --train-images 200 --batch-size 20 --optimizer sgd --evaluations 2"


def with_ones(images):
    """Their pixels as rows, with a one behind each row."""
    pixels = images.flatten(1).double().numpy()
    return np.column_stack([pixels, np.ones(len(images))])


def test_no_linear_function_tells_made_images_apart_and_a_wave_s_energy_does():
    """Least squares on the pixels, against squares of the projections on waves of each class."""
    x, y = made(3000, 12, 0.5, seed=1)
    x_other, y_other = made(1000, 12, 0.5, seed=2)
    weights, *_ = np.linalg.lstsq(with_ones(x), np.eye(4)[y], rcond=None)
    predicted = (with_ones(x_other) @ weights).argmax(1)
    assert np.mean(predicted == y_other.numpy()) < 0.35
    axis = torch.arange(12) - 5.5
    down, across = torch.meshgrid(axis, axis, indexing="ij")
    phases = torch.stack([across, down, across + down, across - down])
    waves = torch.sin(0.8 * phases)
    waves /= waves.norm(dim=(1, 2), keepdim=True)
    energy = torch.einsum("bchw,khw->bk", x_other, waves).square()
    assert (energy.argmax(1) == y_other).double().mean() > 0.9


def test_made_images_are_the_same_in_every_process_and_the_evaluated_ones_are_others():
    data = Images(**SMALL).data(0)
    again = Images(**SMALL).data(7)
    assert torch.equal(data.train[0], again.train[0])
    assert not torch.equal(data.train[0][:100], data.evaluation["main"][0][0][:20].repeat(5, 1, 1, 1))
    assert sorted(check(Images(**SMALL)).statistics)[:2] == ["1.num_batches_tracked", "1.running_mean"]
    assert not check(Images(**SMALL, norm="group")).statistics


def test_a_folder_of_images_is_read_with_its_classes_in_the_order_of_their_names(tmp_path):
    for split, number in (("train", 6), ("test", 2)):
        for color in ("red", "blue", "lime"):
            folder = tmp_path / split / color
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (10 + index, 9), color).save(folder / f"{index}.png")
    task = Images(**SMALL | {"images": str(tmp_path), "batch_size": 6})
    data = task.data(0)
    assert task.classes() == ["blue", "lime", "red"]
    assert task.model(0)[-1].out_features == 3
    images, labels = data.evaluation["main"][0]
    channel = {0: 2, 1: 1, 2: 0}
    for image, label in zip(images, labels.tolist(), strict=True):
        assert image[channel[label]].unique().tolist() == [1.0]
        assert image.sum() == 8 * 8
    assert sorted(data.train[1].tolist()) == [0] * 6 + [1] * 6 + [2] * 6
    with pytest.raises(UsageError, match="must have a folder of images for each class"):
        Images(images=str(tmp_path / "test")).classes()


def recorded(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def loss_of(weights):
    task = Images(**SMALL)
    with seeded(0):
        model = task.model(0)
    model.load_state_dict(load_file(weights))
    model.eval()
    batches = task.data(0).evaluation["main"]
    with torch.no_grad():
        losses = []
        for x, y in batches:
            losses.append(float(nn.functional.cross_entropy(model(x), y, reduction="sum")))
    return sum(losses) / 1000


def test_models_that_are_given_out_have_the_statistics_of_their_evaluation(tmp_path):
    """At the end, from a checkpoint that was evaluated, and at a version of a replay."""
    run = tmp_path / "run"
    typed = f"{TYPED} --clock virtual --nproc 2 --samples 200 --batch-statistics reestimated --statistics-batches 3"
    ended = cli([*typed.split(), "--checkpoint-every", "100", "--run-dir", run])
    assert ended.code == 0, ended.err
    assert "batch statistics estimated again from 3 training batches" in ended.out
    losses = {}
    for record in recorded(run):
        if record.get("kind") == "evaluate":
            losses[record["version"]] = record["loss"]
    assert set(losses) == {0, 5, 10}
    task = ["--task", "own_resnet:Images"]
    for line in (
        ["export", run, "--checkpoint", "000000000100", "--out", tmp_path / "5", *task],
        ["export", run, "--out", tmp_path / "10", *task],
        ["replay", run, "--to", "5", "--out", tmp_path / "replayed", *task],
    ):
        ended = cli(["asyncsgd", *line])
        assert ended.code == 0, ended.err
    for name, version in (("5", 5), ("10", 10), ("replayed", 5)):
        assert loss_of(tmp_path / name / "model.safetensors") == pytest.approx(losses[version], rel=1e-5)


@pytest.mark.processes
def test_processes_train_it_and_a_replay_ends_at_the_same_bits(tmp_path):
    run = asyncsgd.train(
        Images(**SMALL),
        runtime=asyncsgd.Processes(2),
        samples=200,
        optimizer=asyncsgd.SGD(),
        batch_statistics="reestimated",
        folder=tmp_path / "run",
        quiet=True,
    )
    assert asyncsgd.replay(tmp_path / "run", Images).identical
    assert run.summary["batch_statistics"] == "reestimated"
