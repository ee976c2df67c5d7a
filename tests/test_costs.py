"""The means over runs of what they say of their cost."""

from pathlib import Path

import pandas

from analysis.findings.costs import cost_of
from analysis.study.run import Run


def recorded(**summary):
    return Run(Path("run"), "run", {"status": "DONE", **summary}, pandas.DataFrame(), ())


def test_shares_of_the_time_are_of_all_workers_and_memory_is_of_all_processes():
    memory = {"leader": [100, 0], "workers": [[0, [10, 3]], [1, [20, 4]]]}
    seconds = {"compute": 12.0, "wait": 6.0, "communicate": 2.0, "apply": 1.0, "evaluate": 5.0, "checkpoint": 0.5}
    usage = {"cores": {"leader": 0.5, "worker 0": 1.0}}
    said = {"num_workers": 2, "train_seconds": 10.0, "seconds": seconds, "memory": memory, "usage": usage}
    cost = cost_of([recorded(mode="async", **said)])
    assert (cost.compute, cost.wait, cost.communicate, cost.apply) == (0.6, 0.3, 0.1, 0.1)
    assert (cost.evaluate, cost.checkpoint, cost.cores) == (5.0, 0.5, 1.5)
    assert (cost.resident_bytes, cost.gpu_bytes) == (130, 7)
    evaluated = cost_of([recorded(mode="async", **said | {"train_seconds": 8.0})])  # workers go on meanwhile
    assert (evaluated.compute, evaluated.wait, evaluated.communicate, evaluated.apply) == (0.6, 0.3, 0.1, 0.125)


def test_one_process_is_leader_and_worker_at_once():
    memory = {"leader": [100, 7], "workers": [[0, [100, 7]]]}
    assert cost_of([recorded(mode="single", memory=memory)]).resident_bytes == 100


def test_an_older_run_says_nothing_of_its_cost():
    cost = cost_of([recorded(mode="async", num_workers=2, train_seconds=10.0)])
    assert {value for name, value in vars(cost).items() if name != "n"} == {None}
