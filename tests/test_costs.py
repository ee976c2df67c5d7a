"""What a run says of its cost, as columns of `runs`."""

import json

import pytest

from analysis.read import read_run

SECONDS = {"compute": 12.0, "wait": 6.0, "communicate": 2.0, "apply": 1.0, "evaluate": 5.0}
MEMORY = {"leader": [100 * 2**30, 7 * 2**30], "workers": [[0, [10 * 2**30, 3 * 2**30]], [1, [20 * 2**30, 0]]]}


@pytest.fixture
def cost(tmp_path):
    def of(**said):
        (tmp_path / "summary.json").write_text(json.dumps({"schema": 2, "status": "DONE", **said}))
        row, _ = read_run(tmp_path)
        return [row[name] for name in ("computing", "waiting", "communicating", "memory_gib", "gpu_gib")]

    return of


def test_shares_of_the_time_are_of_all_workers_and_memory_is_of_all_processes(cost):
    said = {"mode": "async", "num_workers": 2, "seconds": SECONDS, "memory": MEMORY}
    assert cost(**said, train_seconds=10.0) == [0.6, 0.3, 0.1, 130, 10]
    assert cost(**said, train_seconds=8.0) == [0.6, 0.3, 0.1, 130, 10]  # workers go on meanwhile


def test_one_process_is_leader_and_worker_at_once(cost):
    assert cost(mode="single", num_workers=1, memory=MEMORY)[3:] == [100, 7]


def test_an_older_run_says_nothing_of_its_cost(cost):
    assert [one != one for one in cost(mode="async", num_workers=2, train_seconds=10.0)] == [True] * 5
