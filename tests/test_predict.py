"""``python -m asyncsgd predict`` lays a measured run beside its prediction on the virtual clock."""

import re

import pytest
from doors import cli

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def rows(folder):
    text = (folder / "prediction.md").read_text()
    return {cells[0]: cells[1:] for cells in (re.split(r" *\| *", line.strip("| ")) for line in text.splitlines()[2:])}


@pytest.mark.parametrize(
    "values", [{"mode": "async"}, {"mode": "sync"}, {"mode": "async", "rule": "ringmaster"}], ids=str
)
def test_a_measured_run_is_predicted_with_its_own_times_and_its_own_samples(values, train):
    run = train(nproc=2, evaluations=2, speeds="two_groups:share=0.5,factor=3,seconds=0.05", **values)
    ended = cli(["asyncsgd", "predict", run.path, "--cache-dir", run.cache])
    assert ended.code == 0, ended.err
    # a table of the run and its prediction would be one of two clocks, and readers leave the prediction out
    assert "analysis.compare" not in ended.out
    table = rows(run.path / "predicted-1")
    measured, predicted, ratio = map(float, table["seconds in all"])
    assert measured == pytest.approx(run.summary["train_seconds"], rel=1e-3)
    assert ratio == pytest.approx(predicted / measured, rel=1e-3)
    assert 0.5 < ratio < 2.0  # wide: how close it comes is a measurement
    assert {"loss at 40 samples", "loss at 80 samples"} <= table.keys()


def test_times_may_come_from_another_run(train):
    run = train(mode="async", nproc=2)
    slow = train(mode="async", nproc=2, speeds="constant:0.2")
    command = ["asyncsgd", "predict", run.path, "--times-from", slow.path, "--cache-dir", run.cache]
    assert cli(command).code == 0
    assert float(rows(run.path / "predicted-1")["seconds in all"][1]) >= 2.0  # 10 gradients each at 0.2 s


def test_what_cannot_be_predicted_is_refused(train, tmp_path):
    virtual = train(mode="async", nproc=2, clock="virtual")
    for run, said in (
        (virtual.path, "has a virtual clock already"),
        (train(mode="single").path, "give a DONE run of mode async or sync"),
        (tmp_path, "holds no finished run"),
    ):
        ended = cli(["asyncsgd", "predict", run])
        assert ended.code == 2
        assert said in ended.err
