"""Asynchronous training on hosts that come and go: who leads, what is lost, and the replay of all that."""

import json
import sys

import hosts
import pytest
from commands import until
from doors import marked
from hosts import arrivals_of, counts_each_batch_once

TOKEN = "0123456789abcdef" * 2
REASON = hosts.why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
SLOWLY = ["--speeds", "constant:0.1"]
"""So that hosts have the time to come: torchrun takes some seconds to start all ranks again."""


@pytest.fixture
def words(gallery):
    flags = f"--mode async --data {gallery}/train.txt --seq-len 32 --batch-size 4 --vocab-size 512 --eval-samples 8"
    return [hosts.SCRIPT, *flags.split(), "--evaluations", "1", "--run-dir", "run", *SLOWLY]


def number_by(all_hosts, host, worker):
    return sum(record["worker"] == worker for record in arrivals_of(all_hosts, host))


def ends_well(all_hosts, host, num_batches, *task):
    """The run in the folder of a host is DONE, counts each batch once, and replays bit for bit."""
    summary = json.loads((all_hosts.folders[host] / "run" / "summary.json").read_text())
    assert [summary["status"], summary["num_updates"]] == ["DONE", num_batches]
    assert counts_each_batch_once(all_hosts, num_batches, host)
    until(lambda: marked(all_hosts.mark) == [], "all processes end")
    replay = all_hosts.start(host, sys.executable, "-m", "asyncsgd", "replay", "run", *task)
    assert all_hosts.ended(replay) == 0, all_hosts.said(host)
    assert "identical" in all_hosts.said(host)


@pytest.mark.slow
def test_a_host_comes_whose_address_sorts_first_and_the_one_with_the_folder_leads_on(tmp_path):
    runtime = "asyncsgd.Processes(2, speeds=asyncsgd.parse_speeds('constant:0.1'))"
    script = hosts.OWN_MODEL.replace("asyncsgd.Processes(3)", runtime).replace("samples=240", "samples=800")
    script = script.replace('folder="run"', 'folder="run", resume=True')
    with hosts.Hosts(tmp_path, delay=0.005) as two:
        for folder in two.folders:
            (folder / "mine.py").write_text(script)
        first = two.come(1, "mine.py", endpoint=1, most=2, token=TOKEN)
        until(lambda: number_by(two, 1, 0) > 20, "the first host trains", 120)
        second = two.come(0, "mine.py", endpoint=1, most=2, token=TOKEN)
        two.end_well(first, second)
        assert f"host 1 of 2: worker 1; {two.addresses[1]} leads" in two.said(0)
        assert number_by(two, 1, 1) > 20
        assert not (two.folders[0] / "run").exists()
        ends_well(two, 1, 200, "--task", "mine:Line")


@pytest.mark.hosts
def test_a_host_that_is_lost_takes_nothing_along_and_comes_again(words, tmp_path):
    words += ["--samples", "2400", "--nproc", "3"]
    with hosts.Hosts(tmp_path, delay=0.005) as two:
        leads = two.come(0, *words, workers=2, token=TOKEN)
        until(lambda: number_by(two, 0, 1) > 10, "the first host trains", 120)
        two.come(1, *words, token=TOKEN)
        until(lambda: number_by(two, 0, 2) > 10, "the second host trains", 120)
        two.kill(1)
        until(lambda: "worker 2 is lost" in two.said(0), "it is lost")
        again = two.come(1, *words, token=TOKEN)
        before = number_by(two, 0, 2)
        until(lambda: number_by(two, 0, 2) > before, "it trains again", 120)
        two.end_well(leads, again)
        ends_well(two, 0, 600)


@pytest.mark.hosts
def test_where_the_leader_is_lost_the_mirror_leads_on(words, tmp_path):
    words += ["--samples", "1200", "--mirror", "1", "--checkpoint-every", "40", "--nproc", "2"]
    with hosts.Hosts(tmp_path, delay=0.005) as two:
        started = [two.come(host, *words, endpoint=1, restarts=3, token=TOKEN) for host in (1, 0)]
        copies = two.folders[1] / "run" / "checkpoints"
        until(lambda: list(copies.glob("*.json")), "a copy of a checkpoint is on the mirror", 120)
        two.kill(0)
        assert two.ended(started[0]) == 0, two.said(1)
        ends_well(two, 1, 300)
