"""``python -m analysis.tasks``: what it prints of several studies, and which it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import SyntheticArm, straight, write_study

from analysis.tasks import main


def written_tasks(folder: Path, number: int, seeds: int = 6) -> list[str]:
    """Studies in which async takes half of sync's seconds and makes 90 % of its improvement, on scales of their own."""
    sync, late = SyntheticArm("sync"), SyntheticArm("async")
    for task in range(number):
        first, gain = 6.0 + task, 1.0 + task
        ends = [first - gain * (1 + 0.01 * seed) for seed in range(seeds)]
        curves = {
            sync.name: [straight(first, end, seconds=10.0) for end in ends],
            late.name: [straight(first, first - 0.9 * (first - end), seconds=5.0) for end in ends],
        }
        registration = {"num_seeds": seeds, "targets": {sync.name: first - 0.5 * gain}}
        write_study(folder / f"task{task}", curves, [sync, late], registration=registration)
    return [str(folder / f"task{task}") for task in range(number)]


def test_three_studies_are_compared_on_the_scale_of_their_reference(tmp_path: Path, capsys) -> None:
    assert main(written_tasks(tmp_path, 3)) == 0
    printed = capsys.readouterr().out
    assert "3 tasks (task0, task1, task2), 6 seeds each, virtual clock" in printed
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith(("sync", "async"))}
    assert rows["sync"].split()[1] == "1.000"
    assert rows["async"].split()[1] == "0.900"
    # both see the same seeds; async's best share, .9 x 1.05 / 1.025, is below sync's worst
    assert "0.000 [0.000, 0.000]" in rows["async"]
    assert rows["async"].endswith("100 %  100 %   50 %    0 %    0 %")
    # to one loss async takes 1 / .9 of sync's share of a budget of half the seconds: sync takes 1.8 times as long
    assert f"sync {(4 - 1.8) / 3:.3f}, async 1.000" in printed


def test_two_studies_are_too_few_and_few_runs_have_no_interval(tmp_path: Path, capsys) -> None:
    folders = written_tasks(tmp_path, 3, seeds=2)
    assert main(folders[:2]) == 2
    assert "2 tasks; a statement over tasks needs 3 studies or more" in capsys.readouterr().err
    assert main(folders) == 0
    assert "no interval: 3 tasks and 6 runs; an interval over tasks needs 3 and 15" in capsys.readouterr().out


def test_studies_on_different_clocks_are_not_one_comparison(tmp_path: Path, capsys) -> None:
    folders = written_tasks(tmp_path, 2)
    measured = [SyntheticArm(name, 4, "measured", None) for name in ("sync", "async")]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in measured}
    registration = {"primary": {"endpoint": "time_to_target", "num_workers": 4, "clock": "measured"}}
    write_study(tmp_path / "real", curves, measured, registration=registration)
    assert main([*folders, str(tmp_path / "real")]) == 2
    assert "studies of one clock and one reference go together" in capsys.readouterr().err


def test_a_study_without_a_registration_is_no_task(tmp_path: Path, capsys) -> None:
    folders = written_tasks(tmp_path, 3)
    (tmp_path / "task1" / "analysis.yaml").unlink()
    assert main(folders) == 2
    assert "task1: it registered no primary condition" in capsys.readouterr().err


@pytest.mark.parametrize("again", ["{0}", "{0}/", "{0}/../{0.name}"])
def test_a_study_that_is_given_twice_is_refused_with_what_to_type(tmp_path: Path, capsys, again: str) -> None:
    folders = written_tasks(tmp_path, 3)
    first = Path(folders[0])
    assert main([folders[0], again.format(first), again.format(first)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"is the same study as {first} and counts once; type: python -m analysis.tasks {first} ANOTHER_STUDY" in told
    assert main([*folders, again.format(first)]) == 2
    assert capsys.readouterr().err.endswith(f"type: python -m analysis.tasks {' '.join(folders)}\n")
