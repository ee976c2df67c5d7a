"""``python -m analysis tasks``: what it prints and draws of several studies, and which it refuses."""

import re
from pathlib import Path

import pytest
from synthetic import SyntheticArm, straight, write_study

from analysis.tasks import main, read_task
from asyncsgd.errors import UsageError

NAMES = ("performance-profile", "interquartile-mean", "probability-of-improvement")


def written_tasks(folder, number, seeds=6):
    """Studies in which async takes half of sync's seconds and makes 90 % of its improvement, on scales of their own."""
    sync = SyntheticArm("sync")
    late = SyntheticArm("async")
    for task in range(number):
        first = 6.0 + task
        gain = 1.0 + task
        ends = [first - gain * (1 + 0.01 * seed) for seed in range(seeds)]
        curves = {
            sync.name: [straight(first, end, seconds=10.0, evaluations=81) for end in ends],
            late.name: [straight(first, first - 0.9 * (first - end), seconds=5.0, evaluations=81) for end in ends],
        }
        registration = {"num_seeds": seeds, "targets": {sync.name: first - 0.5 * gain}}
        write_study(folder / f"task{task}", curves, [sync, late], registration=registration)
    return [str(folder / f"task{task}") for task in range(number)]


def test_three_studies_are_compared_on_the_scale_of_their_reference(tmp_path, capsys):
    assert main(written_tasks(tmp_path, 3)) == 0
    printed = capsys.readouterr().out
    assert "3 tasks (task0, task1, task2), 6 seeds each, virtual clock" in printed
    rows = {}
    for line in printed.splitlines():
        if line.startswith(("sync", "async")):
            rows[line.split()[0]] = line
    assert rows["sync"].split()[1] == "1.000"
    assert rows["async"].split()[1] == "0.900"
    # both see the same seeds; async's best share, .9 x 1.05 / 1.025, is below sync's worst
    assert "0.000 [0.000, 0.000]" in rows["async"]
    assert "unpaired; interval: paired bootstrap of whole seeds" in printed
    assert rows["async"].endswith("100 %  100 %   50 %    0 %    0 %")
    # to one loss async takes 1 / .9 of sync's share of a budget of half the seconds: sync takes 1.8 times as long
    found = re.search(r"sync ([0-9.]+), async 1.000", printed)
    assert found is not None
    assert float(found[1]) == pytest.approx((4 - 1.8) / 3, abs=0.05)  # up to a look


def test_two_studies_are_too_few_and_few_runs_have_no_interval(tmp_path, capsys):
    folders = written_tasks(tmp_path, 3, seeds=2)
    assert main(folders[:2]) == 2
    assert "2 tasks; a statement over tasks needs 3 studies or more" in capsys.readouterr().err
    assert main(folders) == 0
    reason = "3 tasks and 6 runs; an interval over tasks needs 3 and 15"
    assert f"no interval: {reason}" in capsys.readouterr().out
    assert main([*folders, "--figures", str(tmp_path / "pictures")]) == 0
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == {NAMES[0]}


def test_the_pictures_are_written_where_figures_says(tmp_path, capsys):
    folders = written_tasks(tmp_path, 3)
    pictures = tmp_path / "deep" / "pictures"
    assert main([*folders, "--figures", str(pictures)]) == 0
    paths = [str(pictures / f"{name}.{end}") for name in NAMES for end in ("png", "svg")]
    assert capsys.readouterr().out.splitlines()[-6:] == paths
    drawn = [Path(path).read_bytes() for path in paths]
    assert main([*folders, "--figures", str(pictures)]) == 0
    assert [Path(path).read_bytes() for path in paths] == drawn
    assert main([*folders, "--figures", folders[0] + "/analysis.yaml"]) == 2
    assert "analysis.yaml: File exists" in capsys.readouterr().err


def test_studies_on_different_clocks_are_not_one_comparison(tmp_path, capsys):
    folders = written_tasks(tmp_path, 2)
    measured = [SyntheticArm(name, 4, "measured", None) for name in ("sync", "async")]
    curves = {}
    for arm in measured:
        curves[arm.name] = [straight(6.0, 4.0, seconds=10.0)] * 6
    registration = {"primary": {"endpoint": "time_to_target", "num_workers": 4, "clock": "measured"}, "num_seeds": 6}
    write_study(tmp_path / "real", curves, measured, registration=registration)
    assert main([*folders, str(tmp_path / "real")]) == 2
    assert "studies of one clock and one reference go together" in capsys.readouterr().err


def test_a_study_that_is_given_twice_is_refused(tmp_path, capsys):
    first, *_ = folders = written_tasks(tmp_path, 3)
    assert main([*folders, f"{first}/../{Path(first).name}"]) == 2
    assert capsys.readouterr().err == "error: a study is given twice; name each once\n"


def test_a_run_that_diverged_made_none_of_the_improvement(tmp_path):
    arms = [SyntheticArm("sync"), SyntheticArm("async")]
    whole = [straight(6.0, 4.0 + 0.1 * number, seconds=10.0) for number in range(3)]
    curves = {arms[0].name: whole, arms[1].name: [*whole[:2], [(0, 0.0, 6.0), (40, 2.0, 9.0), (80, 4.0, None)]]}
    task = read_task(write_study(tmp_path, curves, arms, registration={"num_seeds": 3}))
    assert [*task.scores["async"]] == pytest.approx([2.0 / 1.9, 1.0, 0.0])


class OnSpeeds(SyntheticArm):
    @property
    def name(self):
        return f"{self.algorithm}-{self.speeds}"


def test_a_study_with_two_primary_conditions_is_no_task(tmp_path):
    arms = [OnSpeeds(name, speeds=speeds) for speeds in ("constant:1", "exponential:1") for name in ("sync", "async")]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] for arm in arms}
    write_study(tmp_path, curves, arms, registration={"num_seeds": 1})
    with pytest.raises(UsageError, match="registered several primary conditions"):
        read_task(tmp_path)
