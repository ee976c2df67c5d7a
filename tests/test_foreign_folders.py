"""A run folder may come from somebody else: it is data, and it runs no code and removes no file that it names."""

import dataclasses
import json
import sys
import types

import pytest
import yaml
from doors import UsageError, Virtual, asyncsgd, cli
from stopped_runs import sealed
from tasks import Plane

BELIEVED = "and a folder is not believed about code; type --task"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    asyncsgd.train(Plane(batch_size=4), runtime=Virtual(2), samples=40, folder=folder, quiet=True)
    return folder


@pytest.fixture
def crafted(trained, tmp_path):
    """Writes the run of `trained` with other settings."""

    def craft(**changes):
        path = tmp_path / "crafted"
        path.mkdir(exist_ok=True)
        for name in ("events.jsonl", "summary.json"):
            (path / name).write_bytes((trained / name).read_bytes())
        settings = yaml.safe_load((trained / "settings.yaml").read_text()) | changes
        (path / "settings.yaml").write_text(yaml.safe_dump(settings))
        if not (path / "model").exists():
            (path / "model").symlink_to(trained / "model")
        return path

    return craft


@pytest.fixture
def trap(monkeypatch, tmp_path):
    """A module that says when it is imported and a class that says when it is called."""
    sprung = []
    (tmp_path / "trap_file.py").write_text("import trap_calls\ntrap_calls.sprung.append('imported')\n")
    calls = types.ModuleType("trap_calls")
    calls.sprung = sprung
    calls.Trap = lambda **fields: sprung.append(fields)
    monkeypatch.setitem(sys.modules, "trap_calls", calls)
    monkeypatch.syspath_prepend(tmp_path)
    return sprung


@pytest.mark.parametrize(
    "named",
    [
        "trap_calls:Trap",
        "trap_file:Anything",
        "asyncsgd.tasks:trap_file.Anything",
        "asyncsgd.tasks.masked_lm:MaskedLM.model",
        "asyncsgd.tasks.masked_lm.MaskedLM:",
        "__main__:Trap",
        ["trap_calls:Trap"],
        None,
    ],
)
def test_a_folder_imports_and_calls_nothing_that_it_names(named, crafted, trap):
    path = crafted(task=named, args=["touch", "here"])
    for door in (lambda: asyncsgd.replay(path), lambda: asyncsgd.load_run(path).model()):
        with pytest.raises(UsageError, match=BELIEVED):
            door()
    ended = cli(["asyncsgd", "replay", path])
    assert ended.code == 2
    assert trap == []
    assert BELIEVED in ended.err


@pytest.mark.parametrize(
    "command", ["replay RUN", "replay RUN --to 1", "export RUN --out OUT", "predict RUN", "resume RUN"]
)
def test_no_command_imports_the_task_that_the_records_of_a_script_s_run_name(command, crafted, trap, tmp_path):
    path = crafted()
    settings = {"settings_format": 2, "task": "trap_file:Anything", "mode": "async", "seed": 0}
    (path / "settings.yaml").write_text(yaml.safe_dump(settings))
    header, rest = (path / "events.jsonl").read_text().split("\n", 1)
    header = json.dumps(json.loads(header) | {"task": "trap_file:Anything"})
    (path / "events.jsonl").write_text(f"{header}\n{rest}")
    summary = json.loads((path / "summary.json").read_text()) | {"clock": "measured"}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "model").unlink()
    (path / "checkpoints").mkdir()
    end = {"name": f"{40:012}", "total_samples": 40, "version": summary["num_updates"], "train_seconds": 1.0}
    (path / "checkpoints" / f"{40:012}.pt").write_bytes(b"")
    end |= {"eval_loss": None, "events_bytes": 0, "totals": {}, "sha256": EMPTY, "events_sha256": EMPTY, "schema": 8}
    (path / "checkpoints" / f"{40:012}.json").write_text(sealed(end))
    ended = cli(["asyncsgd", *command.replace("RUN", str(path)).replace("OUT", str(tmp_path / "out")).split()])
    assert ended.code == 2
    assert trap == []
    assert BELIEVED in ended.err


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""The sha256 of no bytes."""


@dataclasses.dataclass(frozen=True)
class Renamed(Plane):
    """Another class that learns the same."""


def test_a_class_that_is_given_has_the_fields_of_the_folder(trained, capsys):
    assert asyncsgd.replay(trained, Plane).identical  # of 4 samples a batch, where its default is 8
    assert asyncsgd.replay(trained, Plane(batch_size=4)).identical
    assert capsys.readouterr().out == ""
    assert cli(["asyncsgd", "replay", trained, "--task", "tasks:Plane"]).code == 0


def test_another_class_or_other_fields_than_the_folder_s_are_said(trained, capsys):
    assert asyncsgd.replay(trained, Renamed).identical
    assert capsys.readouterr().out == (
        "note   the run's task was tasks:Plane, and test_foreign_folders:Renamed was given\n"
    )
    asyncsgd.load_run(trained, Plane(batch_size=5)).model()
    assert capsys.readouterr().out == "note   the run's task had batch_size=4, and batch_size=5 was given\n"


def test_fields_that_the_class_does_not_take_are_refused_in_one_sentence(crafted):
    with pytest.raises(UsageError, match="Plane has other fields: it has no slope"):
        asyncsgd.replay(crafted(slope=2), Plane)
