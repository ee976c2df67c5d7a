"""A recorded run, executed again in one process, ends at the same bits; a changed log is found out at its change."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from running import Train
from transformers import AutoModelForMaskedLM

from asyncsgd.dispatcher import Launch
from asyncsgd.packing import pack
from asyncsgd.runtime.log import LoggedArrival
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch as Launcher
from asyncsgd.runtime.replay import follows
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.settings.training import FLAGS, make_settings
from asyncsgd.training import lead
from asyncsgd.worker import LossScale
from export import main as export
from replay import main as replay

pytestmark = pytest.mark.processes


def cache_of(run: Any) -> str:
    return str(run.settings.data.cache_dir)


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "async", "nproc": 2, "transport": "process_group", "dropout": 0.1},
        {"mode": "async", "nproc": 3, "rule": "ringmaster:threshold=1", "dropout": 0.1},
        {"mode": "single", "accumulate": 3},
        *slow(
            {"mode": "async", "nproc": 3},
            {"mode": "async", "nproc": 3, "rule": "staleness_aware", "clip_norm": 1.0},
            {"mode": "async", "nproc": 2, "rule": "synchronous", "evaluations": 3},
            {"mode": "async", "nproc": 2, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.05},
        ),
    ],
    ids=str,
)
def test_a_replayed_run_ends_at_the_same_parameters_bit_for_bit(
    values: dict[str, Any], train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(**values)
    capsys.readouterr()
    assert replay([str(run.path), "--cache-dir", cache_of(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(run.summary["parameters_sha256"]) == 2
    assert shown.startswith(f"updates    {run.summary['num_updates']} replayed, 20 losses compared\n")


@pytest.fixture
def fp16_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run whose loss scale doubles after every gradient until one overflows, so that it changes all the time."""
    monkeypatch.setattr(LossScale, "PATIENCE", 1)
    run = train(mode="async", nproc=3, clock="virtual", precision="fp16")
    monkeypatch.undo()
    return run


def test_a_float16_run_is_replayed_with_the_loss_scales_that_its_workers_had(
    fp16_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    scales = [scale for event in fp16_run.records("arrival") for scale in event["loss_scales"]]
    assert len(scales) == 20
    assert len(set(scales)) > 2
    assert any(later < earlier for earlier, later in itertools.pairwise(scales))  # one has overflowed
    capsys.readouterr()
    assert replay([str(fp16_run.path), "--cache-dir", cache_of(fp16_run)]) == 0
    assert capsys.readouterr().out.count(fp16_run.summary["parameters_sha256"]) == 2


@pytest.mark.slow
def test_local_steps_in_float16_are_replayed_with_a_loss_scale_each(train: Train) -> None:
    run = train(mode="async", nproc=2, rule="async_local_sgd", precision="fp16", samples=64)
    events = run.records("arrival")
    assert all(len(event["loss_scales"]) == event["num_local_steps"] for event in events)
    assert max(event["num_local_steps"] for event in events) > 1
    assert replay([str(run.path), "--cache-dir", cache_of(run)]) == 0


def test_a_float16_log_without_loss_scales_is_refused(
    fp16_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(fp16_run.path, tmp_path / "run")
    records = [json.loads(line) for line in (fp16_run.path / "events.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("loss_scales", None)
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    assert replay([str(tmp_path / "run"), "--cache-dir", cache_of(fp16_run)]) == 2
    first = next(number for number, record in enumerate(records, 1) if record["kind"] == "arrival")
    assert capsys.readouterr().err == (
        f"error: events.jsonl, line {first}: the arrival has 0 loss_scales and 1 gradient in float16; a run whose "
        f"log does not have all scales cannot be replayed, run it again\n"
    )


def test_two_arrivals_in_flight_together_swapped_are_found_out(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # On the virtual clock three workers of one speed arrive in turn, and each had started before the other arrived.
    run = train(mode="async", nproc=3, clock="virtual")
    shutil.copytree(run.path, tmp_path / "run")
    lines = (run.path / "events.jsonl").read_text().splitlines()
    first, second = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"][-2:]
    earlier, later = json.loads(lines[first]), json.loads(lines[second])
    assert earlier["worker"] != later["worker"]
    assert later["read_version"] < earlier["version"]
    earlier["started"] = []  # which does not arrive
    # All that can be told from the two lines is mended, so that only the order in which they were applied is wrong.
    for name in ("version", "total_samples", "learning_rate", "train_seconds"):
        earlier[name], later[name] = later[name], earlier[name]
    earlier["uses"] = [[earlier["dispatch"], earlier["version"] - 1 - earlier["read_version"]]]
    later["uses"] = [[later["dispatch"], later["version"] - 1 - later["read_version"]]]
    lines[first], lines[second] = json.dumps(later), json.dumps(earlier)
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert replay([str(tmp_path / "run"), "--cache-dir", cache_of(run)]) == 1
    assert "all compared losses agree, the final parameters do not" in capsys.readouterr().out


def test_a_run_that_was_stopped_at_its_end_and_went_on_there_is_replayed(train: Train) -> None:
    """Its workers leave and join again after the last gradient, as a run says that goes on for its last evaluation."""
    run = train(mode="async", nproc=2, clock="virtual")
    last = run.records("evaluate")[-1]
    reply = {"reason": "", "lost": [], "uses": [], "started": [], "drops": [], "abandoned": []}
    clock = {name: last[name] for name in ("version", "total_samples", "train_seconds")}
    with open(run.path / "events.jsonl", "a") as log:
        for kind, worker in (("leave", 0), ("leave", 1), ("join", 0), ("join", 1)):
            log.write(json.dumps({"kind": kind, "worker": worker, **clock, **reply}) + "\n")
    assert replay([str(run.path), "--cache-dir", cache_of(run)]) == 0


def test_a_replay_to_a_version_saves_the_model_of_that_version(train: Train, tmp_path: Path) -> None:
    run = train(mode="async", nproc=2, evaluations=4)
    version = run.records("evaluate")[2]["version"]
    arguments = [str(run.path), "--cache-dir", cache_of(run), "--to", str(version), "--out", str(tmp_path / "model")]
    assert replay(arguments) == 0
    again = train(mode="single", model=str(tmp_path / "model"), samples=0, vocab_size=8192)
    assert again.records("evaluate")[0]["loss"] == pytest.approx(run.records("evaluate")[2]["loss"], rel=1e-6)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path / "model"), torch.nn.Module)


@pytest.mark.parametrize(("mode", "reason"), [("hogwild", "without locks"), ("sync", "in no recorded order")])
def test_runs_whose_reads_are_not_recorded_are_refused_with_the_reason(
    mode: str, reason: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(mode=mode, nproc=2)
    assert replay([str(run.path)]) == 2
    assert f"a run of mode {mode} cannot be replayed" in (shown := capsys.readouterr().err)
    assert reason in shown


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err


def test_the_model_of_a_checkpoint_is_the_one_that_a_replay_to_its_version_saves(train: Train, tmp_path: Path) -> None:
    run = train(mode="single", checkpoint_every="32")
    (name, *_) = sorted(path.stem for path in (run.path / "checkpoints").glob("*.pt"))
    version = json.loads((run.path / "checkpoints" / f"{name}.json").read_text())["version"]
    exported, replayed = tmp_path / "exported", tmp_path / "replayed"
    without = shutil.copytree(run.path, tmp_path / "without", ignore=shutil.ignore_patterns("checkpoints"))
    arguments = [str(run.path), "--cache-dir", cache_of(run), "--out"]
    assert export([*arguments, str(exported), "--checkpoint", name]) == 0
    assert replay([str(without), *arguments[1:], str(replayed), "--to", str(version)]) == 0
    assert (exported / "model.safetensors").read_bytes() == (replayed / "model.safetensors").read_bytes()
    assert export([*arguments, str(exported)]) == 2  # it is there already


def model_at(run: Path, version: int, cache: str, out: Path) -> bytes:
    assert replay([str(run), "--to", str(version), "--out", str(out), "--cache-dir", cache]) == 0
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "single", "accumulate": 2, "dropout": 0.1, "checkpoint_every": "24"},
        {"clock": "virtual", "nproc": 3, "speeds": "exponential:1", "checkpoint_every": "24", "clip_norm": 1.0},
        {"clock": "virtual", "nproc": 3, "rule": "local_sgd:num_local_steps=2", "checkpoint_every": "24"},
        {
            "clock": "virtual",
            "nproc": 3,
            "rule": "easgd",
            "optimizer": "sgd",
            "weight_decay": 0,
            "checkpoint_every": "24",
        },
    ],
    ids=str,
)
def test_a_replay_to_a_version_begins_at_the_nearest_checkpoint_and_gives_the_same_bits(
    values: dict[str, Any], train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(**({"keep": 9} | values))
    without = shutil.copytree(run.path, tmp_path / "without", ignore=shutil.ignore_patterns("checkpoints"))
    for version in (run.summary["num_updates"] - 1, run.summary["num_updates"] // 2):
        capsys.readouterr()
        near = model_at(run.path, version, cache_of(run), tmp_path / f"near-{version}")
        shown = capsys.readouterr().out
        assert shown.startswith("from       checkpoint ")
        assert 0 < int(shown.splitlines()[0].rpartition(" ")[2]) <= version
        assert near == model_at(without, version, cache_of(run), tmp_path / f"far-{version}")
        assert capsys.readouterr().out.startswith("updates ")


def arrival(dispatch: int, read_version: int) -> LoggedArrival:
    reply = {"worker": 0, "uses": None, "drops": None, "abandoned": None, "started": ()}
    counts = {"outcome": None, "loss": None, "weight": None, "num_samples": None, "flight_seconds": 0.0}
    state = {"line": 9, "kind": "arrival", "version": 6, "total_samples": None, "batches": (), "loss_scales": ()}
    return LoggedArrival(**state, **reply, **counts, dispatch=dispatch, read_version=read_version, micro_batches=())


def test_a_log_follows_from_a_checkpoint_that_has_every_point_its_gradients_were_computed_at() -> None:
    def state(point: torch.Tensor | None) -> dict[str, Any]:
        launches = pack([Launch(0.0, 4, point, None)])
        return {"server": {"version": 5, "in_flight": [[0, 7, 4, 1]]}, "dispatcher": {"launches": launches}}

    assert follows(state(None), [arrival(7, read_version=5), arrival(8, read_version=5)])
    assert not follows(state(None), [arrival(7, read_version=4)])
    assert follows(state(torch.zeros(3)), [arrival(7, read_version=4)])
    assert not follows(state(torch.zeros(3)), [arrival(6, read_version=4)])


def test_a_replay_of_real_workers_gives_the_same_bits_wherever_it_can_begin(train: Train, tmp_path: Path) -> None:
    run = train(mode="async", nproc=3, checkpoint_every="24", keep=9)
    without = shutil.copytree(run.path, tmp_path / "without", ignore=shutil.ignore_patterns("checkpoints"))
    near = model_at(run.path, 15, cache_of(run), tmp_path / "near")
    assert near == model_at(without, 15, cache_of(run), tmp_path / "far")


def test_a_replay_of_real_workers_begins_where_the_run_went_on(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(mode="async", nproc=2, samples=40, schedule="constant", checkpoint_every="24", keep=9)
    path = shutil.copytree(first.path, tmp_path / "run")
    (path / "summary.json").unlink()
    longer = make_settings(FLAGS.load_yaml(path / "settings.yaml") | {"samples": 80, "resume": str(path)})
    longer = dataclasses.replace(longer, data=dataclasses.replace(longer.data, cache_dir=cache_of(first)))
    folder = open_run_folder("tests", longer, "tests")
    assert lead(pretraining(longer), Launcher(2, None, False), folder, fork_server("tiny")) == 0
    capsys.readouterr()
    model_at(path, 18, cache_of(first), tmp_path / "near")
    assert capsys.readouterr().out.startswith("from       checkpoint 0000000000")  # 40, or a later one by chance
    shutil.rmtree(path / "checkpoints")
    model_at(path, 18, cache_of(first), tmp_path / "far")
    near, far = (tmp_path / name / "model.safetensors" for name in ("near", "far"))
    assert near.read_bytes() == far.read_bytes()
