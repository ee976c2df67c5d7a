"""The lab notes' table of a sweep and of a plain folder: exact losses, seconds, one row per mode, workers and batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import SyntheticArm, example_study, straight, write_finetuning, write_run, write_study

from analysis.lab_notes import EXACT_ONLY, PER_WORKER, lab_notes, main, parser
from analysis.study.read import load_study

ONE = SyntheticArm("single", 1, "measured", None, batch_size=64)
SYNC, ASYNC = (SyntheticArm(name, 2, "measured", None, batch_size=32) for name in ("sync", "async"))


def study_of(folder: Path) -> Path:
    curves = {
        ONE.name: [straight(6.0, 5.0, seconds=20.0), straight(6.0, 5.2, seconds=24.0)],
        SYNC.name: [straight(6.0, 5.1, seconds=10.0), straight(6.0, 5.1, seconds=14.0)],
        ASYNC.name: [straight(6.0, 5.3, seconds=8.0), [(0, 0.0, 6.0), (40, 2.0, None)]],
    }
    return write_study(folder, curves, [ONE, SYNC, ASYNC])


def test_the_table_has_a_row_per_mode_workers_and_batch(tmp_path, capsys):
    assert main([str(study_of(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "mode    workers  batch  eval loss (exact)     seconds                runs",
        "-------------------------------------------------------------------------",
        "single  1           64    5.1000 ± 0.1414  22.0 ± 2.8                 2/2",
        "sync    2           32    5.1000 ± 0.0000  12.0 ± 2.8                 2/2",
        "async   2           32             5.3000         8.0  1/2 (diverged 1/2)",
    ]
    assert lines[6:8] == [EXACT_ONLY, "not in the means:"]
    assert lines[8] == "  test/async-w2/s101: DIVERGED"


def test_as_markdown_it_has_the_same_cells(tmp_path, capsys):
    assert main([str(study_of(tmp_path)), "--format", "md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| mode | workers | batch | eval loss (exact) | seconds | runs |"
    assert lines[2] == "| single | 1 | 64 | 5.1000 ± 0.1414 | 22.0 ± 2.8 | 2/2 |"


def test_a_plain_folder_gives_the_same_rows_and_fine_tuning_is_in_none(tmp_path):
    for number, loss in enumerate((5.0, 5.2)):
        write_run(tmp_path / f"one{number}", ONE, straight(6.0, loss, seconds=20.0), seed=number)
    write_finetuning(tmp_path / "ft", seed=0, macro_f1=0.5, parent=None)
    (row,) = lab_notes(load_study(tmp_path)).rows
    assert (row.mode, row.num_workers, row.batch_size, row.num_done) == ("single", 1, 64, 2)
    assert row.exact_loss.mean == pytest.approx(5.1)


def test_the_column_per_worker_is_there_only_where_a_run_recorded_it(tmp_path, capsys):
    path = write_run(tmp_path / "a", ASYNC, straight(6.0, 5.0, seconds=4.0))
    lines = (path / "events.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"worker_losses": [5.1, 4.9]}
    (path / "events.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    write_run(tmp_path / "b", SYNC, straight(6.0, 5.0, seconds=4.0))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split("  ")[0] == "mode"
    assert "eval loss per worker" in out[0]
    assert "4.9000 to 5.1000" in out[3]  # async; sync stands before it, without any
    assert PER_WORKER in out


def test_only_tests_are_in_the_table_of_a_sweep_and_clocks_are_never_in_one_mean(tmp_path):
    notes = lab_notes(load_study(example_study(tmp_path, seeds=3)))
    assert {row.num_all for row in notes.rows} == {3}  # tuning runs and replicates are not among them
    assert {row.clock for row in notes.rows} == {"measured", "virtual"}
    assert len(notes.rows) == 15
    assert any(line.startswith("WARNING: measured and virtual seconds") for line in notes.lines)


def test_settings_in_which_rows_differ_get_a_column(tmp_path, capsys):
    for number, rate in enumerate((0.001, 0.002)):
        write_run(tmp_path / f"r{number}", ASYNC, straight(6.0, 5.0, seconds=4.0), learning_rate=rate)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "learning_rate 0.001" in out
    assert "learning_rate 0.002" in out


def test_what_makes_seconds_or_losses_less_comparable_is_told(tmp_path):
    for name, other in (("a", {}), ("b", {"data_fingerprint": "beef"})):
        write_run(
            tmp_path / name, ASYNC, straight(6.0, 5.0, seconds=4.0), oversubscription=2.0, from_scratch=True, **other
        )
    lines = lab_notes(load_study(tmp_path)).lines
    assert "NOTE: from scratch: not STILT" in lines
    assert any("oversubscribed machine" in line for line in lines)
    assert any("2 different data sets" in line for line in lines)


def test_a_folder_without_runs_is_a_usage_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "make a run with" in capsys.readouterr().err


def test_help_names_the_folder_that_the_sweep_of_the_notes_writes():
    assert "python -m analysis.lab_notes runs/lab_notes " in parser().format_help()


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'pandas', 'scipy'} & set(sys.modules)"
    code = f"import sys; from analysis import lab_notes; lab_notes.parser(); print(sorted({heavy}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.strip() == "[]"
