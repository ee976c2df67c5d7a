"""A replay on another processor: what rounding explains is no difference, and what it does not explain is one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from doors import Asynchronous, DataWithOtherBits, Finished, InProcess, Virtual, asyncsgd, move_last_bits
from hypothesis import given
from hypothesis import strategies as st
from tasks import Plane

ELSEWHERE = {"cpu": "Intel Xeon", "processor": {"name": "Intel Xeon", "family": "6", "model": "207"}}


@pytest.fixture
def run(tmp_path):
    """A run of 24 updates whose environment says that another processor made it."""
    more = {"samples": 192, "learning_rate": 1e-2, "evaluations": 1, "quiet": True}
    asyncsgd.train(Plane(), rule=Asynchronous(), runtime=Virtual(2), folder=tmp_path / "run", **more)
    change(tmp_path / "run" / "environment.json", ELSEWHERE)
    return tmp_path / "run"


def test_data_with_other_bits_have_the_same_infinities():
    rows = torch.tensor([[1.0, -torch.inf, 2.0], [torch.inf, 0.0, -4.0]])
    other = DataWithOtherBits(asyncsgd.TensorData(rows, rows, 2, seed=0), 0).batch(0, 0)
    here = asyncsgd.TensorData(rows, rows, 2, seed=0).batch(0, 0)
    is_finite = torch.isfinite(here)
    assert torch.equal(other[~is_finite], here[~is_finite])
    assert 0 < (other - here)[is_finite].abs().max() <= 4 * 2**-23


def change(path, fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "removed"}))


def scale_losses(run, factors):
    """Multiply the logged losses of arrivals by these factors, by the arrival's number."""
    lines = (run / "events.jsonl").read_text().splitlines()
    arrivals = []
    for number, line in enumerate(lines):
        if json.loads(line)["kind"] == "arrival":
            arrivals.append(number)
    for arrival, factor in factors.items():
        record = json.loads(lines[arrivals[arrival]])
        record["loss"] *= factor
        lines[arrivals[arrival]] = json.dumps(record)
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=8).filter(any))
def test_parameters_are_moved_by_eight_of_their_last_bits(values):
    before = np.array(values, dtype=np.float32)
    after = torch.tensor(before)
    move_last_bits(after, torch.float32, draw=3)
    # A number just below a power of two may cross it, where last bits are twice as large.
    expected = np.where(before == 0, 0, 8 * np.spacing(np.abs(before)))
    moved = np.abs(after.double().numpy() - before.astype(np.float64))
    normal = np.abs(before) > 1e-30
    np.testing.assert_allclose(moved[normal], expected[normal], rtol=0.13)
    assert not moved[before == 0].any()


def test_equal_bits_are_identical_wherever_they_were_made(run):
    found = asyncsgd.replay(run, Plane())
    assert found.identical is True
    assert found.equal_to_rounding is True
    assert found.words == "identical"


def test_losses_that_differ_in_their_last_bits_are_equal_to_rounding(run):
    scale_losses(run, {number: 1 + (-1) ** number * 1e-7 for number in range(24)})
    found = asyncsgd.replay(run, Plane())
    assert found.identical is False
    assert found.difference == ""
    assert found.equal_to_rounding is True
    assert found.equal_up_to == 24
    assert found.num_updates == 24
    assert found.words.startswith("equal to rounding (recorded on Intel Xeon (")


def test_the_same_losses_in_the_runs_own_environment_are_different(run):
    scale_losses(run, {5: 1 + 1e-7})
    asyncsgd.train(Plane(), samples=8, folder=run.parent / "here", quiet=True)
    (run / "environment.json").write_bytes((run.parent / "here" / "environment.json").read_bytes())
    found = asyncsgd.replay(run, Plane())
    assert "the loss of dispatch 5" in found.difference
    assert found.words.startswith("different at update ")


@pytest.mark.parametrize("recorded", ["no environment.json", "no processor"])
def test_an_environment_that_is_not_recorded_is_another_one(run, recorded):
    scale_losses(run, {5: 1 + 1e-7})
    if recorded == "no environment.json":
        (run / "environment.json").unlink()
    else:
        change(run / "environment.json", {"processor": "removed"})
    assert asyncsgd.replay(run, Plane()).equal_to_rounding


def test_one_loss_that_rounding_does_not_explain_is_different(run):
    scale_losses(run, {7: 1 + 1e-4})
    found = asyncsgd.replay(run, Plane())
    assert found.difference.startswith("the loss of dispatch 7 at version ")
    assert "they are 1.0e-04 apart, and rounding explains " in found.difference
    assert found.identical is False
    assert found.equal_to_rounding is False


def test_a_rate_that_is_one_percent_higher_is_different(run):
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    settings["learning_rate"] *= 1.01
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert "the loss of dispatch 2" in asyncsgd.replay(run, Plane()).difference


def test_batches_and_versions_must_be_equal_on_every_processor(run):
    scale_losses(run, dict.fromkeys(range(24), 1 + 1e-07))
    lines = (run / "events.jsonl").read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "arrival")
    lines[last] = json.dumps(json.loads(lines[last]) | {"version": 30})
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert "version of line" in asyncsgd.replay(run, Plane()).difference


def test_the_model_in_the_folder_has_to_be_the_runs(run):
    scale_losses(run, {5: 1 + 1e-7})
    change(run / "summary.json", {"parameters_sha256": "0" * 64})
    with pytest.raises(asyncsgd.UsageError, match="is not the run's model"):
        asyncsgd.replay(run, Plane())


RECORD = """
import sys
from doors import Asynchronous, InProcess, Virtual, asyncsgd
from own_model import Shapes

for rate in (1e-3, 1e-2):
    for name, runtime, rule in (("single", InProcess(), None), ("async", Virtual(4), Asynchronous())):
        more = {"samples": 32 * 120, "learning_rate": rate, "evaluations": 1, "quiet": True}
        folder = f"{sys.argv[1]}/{name}-{rate}"
        asyncsgd.train(Shapes(train_images=320, width=8), runtime=runtime, rule=rule, folder=folder, **more)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("limits", [{"ATEN_CPU_CAPABILITY": "default"}, {"ONEDNN_MAX_CPU_ISA": "SSE41"}], ids=str)
def test_no_run_of_other_instructions_is_different_and_another_rate_is(limits, tmp_path):
    from own_model import Shapes

    (name,) = limits
    if name in os.environ:
        pytest.skip(f"{name} is set for this process too")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(tmp_path)], env=os.environ | limits | {"PYTHONPATH": paths}, timeout=300
    )
    assert done.returncode == 0
    for run in sorted(tmp_path.iterdir()):
        found = asyncsgd.replay(run, Shapes(train_images=320, width=8))
        assert found.difference == "", run.name
        settings = yaml.safe_load((run / "settings.yaml").read_text())
        settings["learning_rate"] *= 1.01
        (run / "settings.yaml").write_text(yaml.safe_dump(settings))
        assert asyncsgd.replay(run, Shapes(train_images=320, width=8)).difference, run.name


def test_a_simulation_is_compared_as_a_run_is(tmp_path):
    from doors import cli

    words = ["--nproc", "3", "--samples", "24", "--problem", "heterogeneous", "--runs-dir", tmp_path]
    assert cli(["simulate.py", *words]).code == 0
    (path,) = tmp_path.glob("simulate-*")
    change(path / "environment.json", ELSEWHERE)
    scale_losses(Finished(path).path, {8: 1 + 1e-7})
    ended = cli(["asyncsgd", "replay", path])
    assert ended.code == 0
    assert "\nequal to rounding (recorded on Intel Xeon" in ended.out
    scale_losses(path, {8: 1 + 1e-4})
    ended = cli(["asyncsgd", "replay", path])
    assert ended.code == 1
    assert "\ndifferent at update " in ended.out


def test_loading_a_run_that_goes_on_elsewhere_needs_all_its_environments(run, tmp_path):
    here = tmp_path / "here"
    asyncsgd.train(Plane(), runtime=InProcess(), samples=8, folder=here, quiet=True)
    ours = json.loads((here / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(ours))
    (run / "environment.resumed-1.json").write_text(json.dumps(ours | ELSEWHERE))
    scale_losses(run, {5: 1 + 1e-7})
    assert asyncsgd.replay(run, Plane()).equal_to_rounding
