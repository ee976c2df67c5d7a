"""What a run says of its cost, as columns of `runs`."""

import json
import math

import pytest

from analysis.run_files import read_run

SECONDS = {"compute": 12.0, "wait": 6.0, "communicate": 2.0, "apply": 1.0, "evaluate": 5.0}
MEMORY = {"leader": [100 * 2**30, 7 * 2**30], "workers": [[0, [10 * 2**30, 3 * 2**30]], [1, [20 * 2**30, 0]]]}
MIXED = {"mode": "async", "num_workers": 2, "train_seconds": 8.0}
UNKNOWN = [math.nan] * 3


@pytest.mark.parametrize(
    ("said", "costs"),
    [
        (MIXED | {"seconds": SECONDS, "memory": MEMORY}, [0.6, 0.3, 0.1, 130, 10]),  # 20 s of two workers, in 8
        ({"mode": "single", "num_workers": 1, "memory": MEMORY}, [*UNKNOWN, 100, 7]),  # leader and worker at once
        (MIXED, [*UNKNOWN, math.nan, math.nan]),  # an older run
    ],
    ids=["two workers", "one process", "older"],
)
def test_shares_of_the_time_are_of_all_workers_and_memory_is_of_all_processes(said, costs, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"schema": 2, "status": "DONE", **said}))
    row, _ = read_run(tmp_path)
    names = ("computing", "waiting", "communicating", "memory_gib", "gpu_gib")
    assert [row[name] for name in names] == pytest.approx(costs, nan_ok=True)
