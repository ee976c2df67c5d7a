"""The lab notes' table of a study and of a plain folder: exact losses, seconds, one row per mode, workers and batch."""

import json
import math
from pathlib import Path

import pytest
from doors import Finished
from synthetic import SyntheticArm, example_study, straight, write_finetuning, write_run, write_study

from analysis.lab_notes import PER_PROCESS, main
from analysis.lab_notes_rows import NOTES_ROWS
from asyncsgd.studies.config import read_config
from asyncsgd.studies.plan import make_plan

CONFIGS = Path(__file__).resolve().parents[2] / "asyncsgd" / "configs"

ONE = SyntheticArm("single", 1, "measured", None, batch_size=64)
SYNC = SyntheticArm("sync", 2, "measured", None, batch_size=32)
ASYNC = SyntheticArm("async", 2, "measured", None, batch_size=32)


def study_of(folder):
    curves = {
        ONE.name: [straight(6.0, 5.0, seconds=20.0), straight(6.0, 5.2, seconds=24.0)],
        SYNC.name: [straight(6.0, 5.1, seconds=10.0), straight(6.0, 5.1, seconds=14.0)],
        ASYNC.name: [straight(6.0, 5.3, seconds=8.0), [(0, 0.0, 6.0), (40, 2.0, None)]],
    }
    return write_study(folder, curves, [ONE, SYNC, ASYNC])


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def printed(folder, capsys):
    """All lines that the command prints."""
    assert main([str(folder), "--format", "md"]) == 0
    return capsys.readouterr().out.splitlines()


def ratios(lines):
    """The cells of the second table, which says what agrees."""
    (header,) = [place for place, line in enumerate(lines) if line.startswith("| processes |")]
    return [cells(line) for line in lines[header + 2 : header + 5]]


def notes_of(folder, capsys):
    """The rows of ours, and all lines that are printed."""
    lines = printed(folder, capsys)
    header, _, *rows = map(cells, lines[: lines.index("")])
    ours = []
    for row in rows:
        named = dict(zip(header, row, strict=True))
        if named["devices"] != "-":
            ours.append(named)
    return ours, lines


def test_a_row_of_ours_stands_beside_the_row_of_the_notes_with_the_same_processes_and_batch(tmp_path, capsys):
    header, _, *lines = printed(study_of(tmp_path), capsys)
    assert cells(header) == [
        *("mode", "devices", "processes x batch", "perplexity", "per process", "eval loss (exact)", "seconds", "runs"),
        *("notes: GPUs", "notes: perplexity", "notes: seconds"),
    ]
    ours = ["164.02", "-", "5.1000 ± 0.1414", "22.0 ± 2.8", "2/2"]  # e to 5.1
    assert cells(lines[0]) == ["single", "1 core", "1 x 64", *ours, "1", "258.66", "1259.63"]
    assert cells(lines[1])[-3:] == ["2", "239.79, 256.04", "819.22"]
    assert cells(lines[2])[:3] == ["async", "2 cores", "2 x 32"]
    assert cells(lines[2])[-4:] == ["1/2 (diverged 1/2)", "2", "252.46, 256.68", "670.78"]
    assert cells(lines[3]) == ["async", "-", "2 x 32", *["-"] * 5, "1", "356.05", "1442.69"]


def test_what_agrees_is_the_share_of_the_synchronous_seconds_and_perplexity(tmp_path, capsys):
    """Asynchronous: .8 of the seconds on the one seed that both have, and e to .2 times the perplexity."""
    lines = printed(study_of(tmp_path), capsys)
    assert ratios(lines) == [
        ["2 x 32", "measured", "0.80", "0.82", "1.221", "1.027", "yes"],
        ["3 x 32", "-", "-", "0.77", "-", "1.078", "-"],
        ["4 x 32", "-", "-", "0.75", "-", "1.084", "-"],
    ]


@pytest.mark.parametrize(("seconds", "loss", "word"), [(8.0, 4.9, "seconds only"), (12.0, 5.3, "perplexity only")])
def test_a_line_agrees_where_both_ratios_lie_on_the_side_of_the_notes(tmp_path, capsys, seconds, loss, word):
    for seed in (0, 1):
        write_run(tmp_path / f"s{seed}", SYNC, straight(6.0, 5.1, seconds=10.0), seed=seed)
        write_run(tmp_path / f"a{seed}", ASYNC, straight(6.0, loss, seconds=seconds + seed), seed=seed)
    line, *_ = ratios(printed(tmp_path, capsys))
    assert line[-1] == word
    low = seconds / 10
    high = (seconds + 1) / 10
    mean = math.sqrt(low * high)
    assert line[2] == f"{mean:.2f} ({low:.2f} to {high:.2f})"


@pytest.mark.parametrize("name", ["lab_notes", "lab_notes_scratch", "lab_notes_encoder"])
def test_the_config_has_every_row_of_the_notes_but_the_one_that_needs_two_gpus(name):
    arms = make_plan(read_config(CONFIGS / f"{name}.yaml")).arms
    ours = set()
    for arm in arms:
        settings = {"batch_size": 32, "nproc": 1} | arm.settings
        ours.add((settings["mode"], settings["nproc"], settings["batch_size"]))
    assert {row.key for row in NOTES_ROWS} - ours == {("DataParallel", 1, 64)}


def test_a_plain_folder_gives_the_same_rows_and_fine_tuning_is_in_none(tmp_path, capsys):
    for number, loss in enumerate((5.0, 5.2)):
        write_run(tmp_path / f"one{number}", ONE, straight(6.0, loss, seconds=20.0), seed=number)
    write_finetuning(tmp_path / "ft", seed=0, macro_f1=0.5, parent=None)
    write_run(tmp_path / "head", ONE, straight(1.0, 0.5, seconds=20.0), task="classification", parent=None)
    (row,), _ = notes_of(tmp_path, capsys)
    assert row["mode"] == "single"
    assert row["processes x batch"] == "1 x 64"
    assert row["runs"] == "2/2"
    assert row["eval loss (exact)"].startswith("5.1000 ±")


def test_the_range_over_processes_is_of_what_each_measured_on_its_share(tmp_path, capsys):
    """Process 0 had 5.1 and 5.3 on its share, process 1 had 4.9 both times: e to 4.9 and to 5.2. One had no share."""
    for seed, losses in enumerate(([5.1, 4.9], [5.3, 4.9], [9.9, None])):
        path = write_run(tmp_path / f"s{seed}", ASYNC, straight(6.0, 5.0, seconds=4.0), seed=seed)
        events = path / "events.jsonl"
        *lines, last = events.read_text().splitlines()
        replaced = json.dumps(json.loads(last) | {"worker_losses": losses})
        events.write_text("\n".join([*lines, replaced, ""]))
        summary = Finished(path).summary
        for key in ("events_bytes", "last_record_sha256"):  # they are of the line that was replaced
            summary.pop(key)
        (path / "summary.json").write_text(json.dumps(summary))
    write_run(tmp_path / "b", SYNC, straight(6.0, 5.0, seconds=4.0))
    out = printed(tmp_path, capsys)
    assert [cells(line)[4] for line in out[2:4]] == ["-", "134.29 to 181.27"]  # sync stands first
    assert PER_PROCESS in out


def test_only_tests_are_in_the_table_of_a_sweep_and_clocks_are_never_in_one_mean(tmp_path, capsys):
    rows, lines = notes_of(example_study(tmp_path, seeds=3), capsys)
    assert len(rows) == 15
    for row in rows:
        _, number = row["runs"].split("/")
        assert number[0] == "3"  # tuning runs and replicates are not among them
    num_virtual = sum(row["seconds"].endswith(" virtual") for row in rows)
    assert 0 < num_virtual < 15
    assert any(line.startswith("WARNING: measured and virtual seconds") for line in lines)


def test_settings_in_which_rows_differ_get_a_column(tmp_path, capsys):
    for number, rate in enumerate((0.001, 0.002)):
        write_run(tmp_path / f"r{number}", ASYNC, straight(6.0, 5.0, seconds=4.0), learning_rate=rate)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "learning_rate 0.001" in out
    assert "learning_rate 0.002" in out


def test_what_makes_seconds_or_losses_less_comparable_is_told(tmp_path, capsys):
    for name, other in (("a", {}), ("b", {"data_fingerprint": "beef"})):
        summary = {"oversubscription": 2.0, "from_scratch": True} | other
        write_run(tmp_path / name, ASYNC, straight(6.0, 5.0, seconds=4.0), **summary)
    _, lines = notes_of(tmp_path, capsys)
    assert "NOTE: from scratch: not STILT" in lines
    assert any("more threads than cores" in line for line in lines)
    assert any("2 different data sets" in line for line in lines)
