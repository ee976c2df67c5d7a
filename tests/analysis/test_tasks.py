"""Scores over several tasks against direct computations, and the resampling of paired tables."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from synthetic import SyntheticArm, straight, write_study

from analysis.statistics.intervals import Refused
from analysis.tasks import (
    iqm,
    main,
    mean_improvement,
    performance_score,
    score_distribution,
    stratified_bootstrap,
)

INF, NAN = math.inf, math.nan
examples = settings(derandomize=True, deadline=None, max_examples=50)


def generator() -> np.random.Generator:
    return np.random.default_rng(4)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=40))
@examples
def test_the_interquartile_mean_is_the_trimmed_mean(scores: list[int]) -> None:
    assert iqm(scores) == pytest.approx(stats.trim_mean(scores, 0.25))
    assert iqm(scores[::-1]) == iqm(scores)


def test_the_score_distribution_falls_from_one_to_zero() -> None:
    scores = generator().random((5, 3))
    shares = score_distribution(scores, np.linspace(-0.1, 1.1, 50))
    assert (shares[0], shares[-1]) == (1.0, 0.0)
    assert (np.diff(shares) <= 0).all()
    assert score_distribution([[0.5, 0.5]], [0.5]).tolist() == [0.0]  # above, not at


def test_mean_improvement_is_the_mean_of_the_tasks() -> None:
    # task 1: x always larger; task 2: always equal
    assert mean_improvement([[2, 1], [3, 1]], [[1, 1], [0, 1], [1, 1]]) == 0.75


def test_a_bootstrap_takes_the_same_seeds_of_all_tables_within_a_task() -> None:
    a = generator().normal(0, 1, (5, 3))
    b = a - [0.1, 0.2, 0.3]  # the same seeds, apart by a constant per task
    found = stratified_bootstrap([a, b], lambda x, y: float(np.mean(x - y)), generator(), resamples=200)
    assert (found.estimate, found.low, found.high) == (pytest.approx(0.2), pytest.approx(0.2), pytest.approx(0.2))
    assert (found.n, found.level) == (15, 0.95)
    # never a score of another task
    far_apart = np.arange(5)[:, None] + [0.0, 100.0, 10_000.0]
    seen: list[np.ndarray] = []
    stratified_bootstrap([far_apart], lambda x: float(seen.append(x) or 0.0), generator(), resamples=20)
    for resample in seen:
        assert (resample // 100 == [[0, 1, 100]] * 5).all()
    assert any(resample[:, 0].tolist() != (resample[:, 1] - 100).tolist() for resample in seen[1:])  # drawn per task


def test_a_bootstrap_does_not_see_the_order_of_the_seeds() -> None:
    a, b = generator().normal(0, 1, (2, 6, 3))
    order = [3, 1, 5, 0, 2, 4]
    found = stratified_bootstrap([a, b], lambda x, y: iqm(x) - iqm(y), generator(), resamples=300)
    assert stratified_bootstrap([a[order], b[order]], lambda x, y: iqm(x) - iqm(y), generator(), resamples=300) == found
    assert found.low < found.estimate < found.high


def test_a_bootstrap_of_many_seeds_covers_the_mean() -> None:
    draws = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        found = stratified_bootstrap([draws.normal(0, 1, (30, 3))], lambda x: float(x.mean()), draws, resamples=200)
        hits += found.low <= 0 <= found.high
    assert 0.89 <= hits / 200 <= 0.99


def test_few_tasks_or_runs_are_refused_with_the_reason() -> None:
    reason = "2 tasks and 40 runs; an interval over tasks needs 3 and 15"
    assert stratified_bootstrap([np.ones((20, 2))], iqm, generator()) == Refused(reason)
    few = stratified_bootstrap([np.ones((4, 3))], iqm, generator())
    assert few == Refused("3 tasks and 12 runs; an interval over tasks needs 3 and 15")
    assert performance_score([[1.0, 2.0], [1.0, 2.0]]) == Refused("2 workloads; one number over workloads needs 3")


def test_the_performance_score_is_the_area_under_the_profile() -> None:
    times = generator().uniform(10, 60, (5, 3))
    times[1, 2] = INF
    ratios = times / times.min(axis=1, keepdims=True)
    scores = performance_score(times)
    for ratio, score in zip(ratios.T, scores, strict=True):
        taus = 1 + 3 * (np.arange(30_000) + 0.5) / 30_000
        assert score == pytest.approx((ratio[:, None] <= taus).mean(), abs=1e-4)
    assert performance_score(7 * times) == pytest.approx(scores)
    assert performance_score(times[:, ::-1]) == pytest.approx(scores[::-1])


def test_a_workload_that_nobody_finished_gives_nobody_anything() -> None:
    assert performance_score([[1, 1], [1, 5], [INF, INF]]) == pytest.approx([2 / 3, 1 / 3])


REFUSED = [
    (lambda: iqm([]), "all of them finite"),
    (lambda: iqm([1.0, NAN]), "all of them finite"),
    (lambda: mean_improvement([[1.0]], [[1.0, 2.0]]), "x has 1 tasks and y 2"),
    (lambda: stratified_bootstrap([], iqm, generator()), "one table of scores per method"),
    (lambda: stratified_bootstrap([np.ones((5, 3)), np.ones((6, 3))], iqm, generator()), "tables of one shape"),
    (lambda: stratified_bootstrap([np.full((5, 3), NAN)], iqm, generator()), r"scores\[0, 0\] is nan"),
    (lambda: performance_score([[1.0, NAN]] * 3), "all above 0"),
    (lambda: performance_score([[1.0, 0.0]] * 3), "all above 0"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[f"{i}-{message}" for i, (_, message) in enumerate(REFUSED)])
def test_what_cannot_be_used_is_refused_with_a_message(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
