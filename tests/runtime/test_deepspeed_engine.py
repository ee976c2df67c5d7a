"""DeepSpeed's pipeline on real processes: its gradients are those of one process, and nothing else is changed."""

from __future__ import annotations

import datetime
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel
from asyncsgd.runtime.deepspeed_engine import DeepSpeedEngine, load_helper, read_config

SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "configs" / "ds_config.json"
CPU = torch.device("cpu")
STEPS = (2, 2, 3, 8, 1, 4)
"""Micro-batches of each step."""

with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs the extra deepspeed: python -m pip install -c constraints.txt -e '.[deepspeed]'",
)


class Stage(nn.Module):
    """Two layers of a chain of `2 * num_stages`; the last one ends in a squared error."""

    def __init__(self, position: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(position)
        self.micro_batches: Sequence[tuple[Tensor, Tensor]] = ()
        self.losses: list[float] = []
        self._first, self._last = position == 0, position == num_stages - 1
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        inputs, targets = self.micro_batches[int(index)]
        result = self.down(torch.tanh(self.up(inputs if hidden is None else hidden)))
        if not self._last:
            return result
        loss = (result - targets).square().sum()
        self.losses.append(float(loss.detach()))
        return loss.reshape(1)


def micro_batches(step: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Each of another length."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(length, 8, generator=generator), torch.randn(length, 8, generator=generator))
        for length in range(2 + step, 2 + step + number)
    ]


def serve(rank: int, num_stages: int, folder: Path, extensions: Path) -> None:
    """Train this rank's stage and write the losses and the gradient of every step."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), num_stages)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_stages, timeout=datetime.timedelta(seconds=60)
    )
    stage = Stage(rank, num_stages)
    flat = FlatModel(stage)
    engine = DeepSpeedEngine(stage, device=CPU, config=read_config(SHIPPED), extensions=extensions)
    steps = []
    for step, number in enumerate(STEPS):
        stage.micro_batches = micro_batches(step, number)
        flat.gradients.zero_()
        stage.losses = []
        engine.run(stage, torch.Size([1, 8]), number)
        flat.check()
        steps.append((stage.losses, flat.gradients.clone()))
        with torch.no_grad():
            flat.parameters -= 1e-3 * flat.gradients
    torch.save(steps, folder / f"rank{rank}.pt")
    dist.barrier()
    os._exit(0)


def in_one_process(num_stages: int) -> list[list[tuple[list[float], Tensor]]]:
    """What `serve` should write, for every rank."""
    stages = [Stage(position, num_stages) for position in range(num_stages)]
    flats = [FlatModel(stage) for stage in stages]
    written: list[list[tuple[list[float], Tensor]]] = [[] for _ in stages]
    for step, number in enumerate(STEPS):
        losses = []
        for flat in flats:
            flat.gradients.zero_()
        for stage in stages:
            stage.micro_batches = micro_batches(step, number)
        for index in range(number):
            hidden = None
            for stage in stages:
                hidden = stage(hidden, index=torch.tensor([index]))
            assert hidden is not None
            hidden.backward()
            losses.append(hidden.item())
        for rank, flat in enumerate(flats):
            written[rank].append((losses if rank == num_stages - 1 else [], flat.gradients.clone()))
            with torch.no_grad():
                flat.parameters -= 1e-3 * flat.gradients
    return written


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The helper, compiled. Later sessions find it compiled, as pytest keeps the folder above a session's own."""
    folder = tmp_path_factory.getbasetemp().parent / "deepspeed"
    load_helper(folder, CPU)
    return folder


def load_in_a_new_process(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process loads the helper once."""
    load = f"load_helper(pathlib.Path({str(folder)!r}), torch.device('cpu'))"
    imports = "import pathlib, torch; from asyncsgd.runtime.deepspeed_engine import load_helper"
    return subprocess.run(
        [sys.executable, "-c", f"{imports}; {load}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@with_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
def test_gradients_and_losses_are_those_of_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], extensions: Path, num_stages: int
) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=serve, args=(r, num_stages, tmp_path, extensions)) for r in range(num_stages)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    printed = capfd.readouterr()
    assert [process.exitcode for process in ranks] == [0] * num_stages, printed.err
    assert printed.out == ""
    for rank, expected in enumerate(in_one_process(num_stages)):
        steps = torch.load(tmp_path / f"rank{rank}.pt")
        for (losses, gradient), (expected_losses, expected_gradient) in zip(steps, expected, strict=True):
            assert losses == pytest.approx(expected_losses, rel=1e-5)
            assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
            assert expected_gradient.norm() > 1  # or the clipping that is DeepSpeed's default would not show


@with_deepspeed
@pytest.mark.slow
def test_a_build_that_was_killed_holds_nobody_up(extensions: Path) -> None:
    (helper,) = extensions.glob("*/*/deepspeed_shm_comm.so")
    abandoned = helper.with_name("lock")
    abandoned.touch()
    loaded = load_in_a_new_process(extensions)
    assert loaded.returncode == 0, loaded.stderr
    assert not abandoned.exists()


@with_deepspeed
@pytest.mark.slow
def test_a_missing_compiler_is_said(tmp_path: Path) -> None:
    loaded = load_in_a_new_process(tmp_path, CXX="/nowhere/c++")
    assert "UsageError: the helper of DeepSpeed must be compiled, and there is no C++ compiler" in loaded.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0; this library needs 0.0 there"),
        ({"zero_optimization": {"stage": 1}}, 'this library needs {"stage": 0} there'),
        ({"bf16": {"enabled": True}}, "bf16 has no effect here"),
    ],
)
def test_a_configuration_that_would_change_the_step_is_refused(tmp_path: Path, changes: dict, named: str) -> None:
    path = tmp_path / "ds_config.json"
    shipped = json.loads(SHIPPED.read_text())
    path.write_text(json.dumps(shipped))
    assert read_config(path) == shipped
    path.write_text(json.dumps(shipped | changes))
    with pytest.raises(UsageError, match=named):
        read_config(path)


def test_a_missing_package_is_said_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UsageError, match=r"type python -m pip install -c constraints.txt -e '\.\[deepspeed\]'"):
        load_helper(tmp_path, CPU)
