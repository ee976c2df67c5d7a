"""Asynchronous training on two hosts: workers of both, a replay, and who is lost with whom."""

import json
import shutil
import signal
import sys
import time

import hosts
import pytest
from commands import until
from doors import ROOT, cli, marked
from hosts import arrivals_of, counts_each_batch_once

TOKEN = "0123456789abcdef" * 2
REASON = hosts.why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
SCRIPT = hosts.SCRIPT
IN_TURNS = ["--rule", "ssp:slack=2"]
"""Nobody is done with the run before the workers of the other host have begun."""
PREPARE = """
    def prepare(self, seed, cache):
        import time

        print("prepares", flush=True)
        time.sleep(20)
        return self

    def model"""
"""A method more of a task, for `hosts.OWN_MODEL`."""


@pytest.fixture
def flags(gallery):
    words = f"--mode async --data {gallery}/train.txt --seq-len 32 --batch-size 4 --vocab-size 512 --eval-samples 8"
    return [*words.split(), "--evaluations", "1", "--run-dir", "run"]


@pytest.fixture
def plane(monkeypatch):
    """A script and its flags: a model that needs no transformers, whose gradients take 20 ms."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    words = "--mode async --batch-size 4 --speeds constant:0.02 --evaluations 1 --run-dir run"
    return [ROOT / "experiments" / "train.py", "tasks:Plane", *words.split()]


def summary_of(two, host=0):
    return json.loads((two.folders[host] / "run" / "summary.json").read_text())


def end_of(two, host=0):
    """Wait for the end of the run, and return its status, how many workers it had and how many samples."""
    until(lambda: (two.folders[host] / "run" / "summary.json").exists(), "the run ends", 240)
    summary = summary_of(two, host)
    return [summary[key] for key in ("status", "num_workers", "num_samples")]


def has_trained(two, number=8):
    return len(arrivals_of(two)) >= number


@pytest.mark.slow
def test_workers_of_two_hosts_train_one_model_and_the_run_replays(flags, tmp_path):
    with hosts.Hosts(tmp_path, delay=0.01) as two:
        words = [*flags, *IN_TURNS, "--samples", "160"]
        started = two.torchrun(SCRIPT, *words, workers=(1, 2), tokens=(TOKEN, TOKEN))
        two.end_well(*started)
        assert end_of(two) == ["DONE", 3, 160]
        arrived = arrivals_of(two)
        assert {record["worker"] for record in arrived} == {0, 1, 2}
        batches = [batch for record in arrived for batch in map(tuple, record["batches"])]
        assert len(batches) == len(set(batches)) == 40
        assert f"host 1 of 2: workers 1 to 2; {two.addresses[0]} leads" in two.said(1)
        assert not (two.folders[1] / "run").exists()
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
        until(lambda: marked(two.mark) == [], "all processes end")
    replay = cli(["asyncsgd", "replay", two.folders[0] / "run", "--cache-dir", tmp_path / "cache"])
    assert replay.out.endswith("identical\n")


@pytest.mark.slow
def test_a_script_with_a_model_of_one_s_own_trains_on_two_hosts(tmp_path):
    with hosts.Hosts(tmp_path) as two:
        for folder in two.folders:
            (folder / "mine.py").write_text(hosts.OWN_MODEL)
        started = two.torchrun("mine.py", workers=(1, 2), tokens=(TOKEN, TOKEN))
        two.end_well(*started)
        assert end_of(two) == ["DONE", 3, 240]
        assert {record["worker"] for record in arrivals_of(two)} == {0, 1, 2}
        replay = two.start(0, sys.executable, "-m", "asyncsgd", "replay", "run", "--task", "mine:Line")
        assert two.ended(replay) == 0, two.said(0)
        assert "identical" in two.said(0)


@pytest.mark.hosts
def test_what_a_host_lacks_comes_from_rank_0_once(gallery, tmp_path):
    line = "--data texts/train.txt --seq-len 32 --batch-size 4 --eval-samples 8 --evaluations 1"
    words = line.split()
    with hosts.Hosts(tmp_path) as two:
        (two.folders[0] / "texts").mkdir()
        text = (gallery / "train.txt").read_text()
        (two.folders[0] / "texts" / "train.txt").write_text(text)
        small = ["--samples", "8", "--vocab-size", "512", "--run-dir", "first"]
        two.end_well(two.start(0, sys.executable, SCRIPT, *words, *small))
        for run_dir in ("run", "again"):
            more = ["--mode", "async", *IN_TURNS, "--model", "first", "--samples", "160", "--run-dir", run_dir]
            started = two.torchrun(SCRIPT, *words, *more, tokens=(TOKEN, TOKEN))
            two.end_well(*started)
            received = two.said(1).count("from rank 0 (")
            assert received == (2 if run_dir == "run" else 0)  # the rows, and the model with its tokenizer
        assert {record["worker"] for record in arrivals_of(two)} == {0, 1}
        first = two.folders[0] / "first" / "model" / "model.safetensors"
        copied = list((two.folders[1] / "cache").rglob("model.safetensors"))
        assert [path.read_bytes() for path in copied] == [first.read_bytes()]


@pytest.mark.slow
def test_a_host_with_another_token_is_refused_on_both_sides(plane, tmp_path):
    with hosts.Hosts(tmp_path) as two:
        started = two.torchrun(*plane, "--samples", "64", tokens=(TOKEN, TOKEN[::-1]))
        codes = [two.ended(process) for process in started]
        assert 0 not in codes
        assert "it does not prove that it has the token; give all hosts the same one" in two.said(0)
        assert "it does not prove that it has the token; give all hosts the same one" in two.said(1)
        assert summary_of(two)["status"] == "FAILED"


@pytest.mark.slow
def test_a_lost_host_takes_its_workers_along_and_nothing_else(plane, tmp_path):
    with hosts.Hosts(tmp_path) as two:
        two.torchrun(*plane, "--samples", "1600", tokens=(TOKEN, TOKEN))
        until(lambda: has_trained(two), "the hosts train", 120)
        two.kill(1)
        assert end_of(two) == ["DONE", 2, 1600]
        assert counts_each_batch_once(two, 400)


@pytest.mark.slow
def test_where_the_leader_is_lost_the_other_host_ends_and_says_what_is_left(plane, tmp_path):
    with hosts.Hosts(tmp_path) as two:
        _, other = two.torchrun(*plane, "--samples", "100000", tokens=(TOKEN, TOKEN))
        until(lambda: has_trained(two), "the hosts train", 120)
        two.kill(0)
        until(lambda: "with it the run; its folder lies on that host" in two.said(1), "host 1 says so", 90)
        assert two.ended(other) != 0


def how_it_goes_on(two, other):
    """What the mirror says of that when host 0 is lost behind the second checkpoint."""
    copies = two.folders[1] / "run" / "checkpoints"
    until(lambda: len(list(copies.glob("*.json"))) > 1, "two checkpoints are copied", 120)
    two.kill(0)
    until(lambda: "goes on on this host with " in two.said(1), "host 1 says what is left", 90)
    assert two.ended(other) != 0
    return two.said(1).partition("goes on on this host with ")[2].splitlines()[0]


@pytest.mark.hosts
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_where_the_leader_is_lost_the_run_goes_on_from_the_mirror(mode, gallery, tmp_path):
    """Without the leader's disk: its data are on no other host, but as copies."""
    words = f"--mode {mode} --data texts/train.txt --seq-len 32 --batch-size 4 --vocab-size 512 --eval-samples 8"
    more = "--evaluations 1 --samples 2000 --checkpoint-every 40 --mirror 1 --run-dir run"
    with hosts.Hosts(tmp_path) as two:
        (two.folders[0] / "texts").mkdir()
        shutil.copy(gallery / "train.txt", two.folders[0] / "texts")
        _, other = two.torchrun(SCRIPT, *words.split(), *more.split(), tokens=(TOKEN, TOKEN))
        assert how_it_goes_on(two, other) == "python experiments/stilt_mlm.py --resume run"
        two.end_well(two.start(1, sys.executable, SCRIPT, "--resume", "run"))
        assert end_of(two, host=1) == ["DONE", 2, 2000]
        if mode == "async":
            assert two.ended(two.start(1, sys.executable, "-m", "asyncsgd", "replay", "run")) == 0
            assert "identical" in two.said(1)
        else:
            shutil.copytree(two.folders[0] / "texts", two.folders[1] / "texts")
            alone = [*words.split(), *more.replace("--mirror 1 --run-dir run", "--run-dir alone --nproc 2").split()]
            assert two.ended(two.start(1, sys.executable, SCRIPT, *alone)) == 0, two.said(1)
            whole = json.loads((two.folders[1] / "alone" / "summary.json").read_text())
            assert summary_of(two, host=1)["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.hosts
def test_where_the_leader_is_lost_a_script_of_one_s_own_goes_on_from_the_mirror(tmp_path):
    meeting = 'hosts=asyncsgd.SeveralHosts(token_file="token", mirror=1), checkpoint_every=40'
    script = hosts.OWN_MODEL.replace("samples=240", f"samples=4000, {meeting}").replace("Processes(3)", "Processes(2)")
    with hosts.Hosts(tmp_path, delay=0.01) as two:
        for folder in two.folders:
            (folder / "mine.py").write_text(script)
            (folder / "token").write_text(TOKEN)
            (folder / "token").chmod(0o600)
        _, other = two.torchrun("mine.py")
        assert how_it_goes_on(two, other) == "the same script, where train is given folder='run' and resume=True"
        (two.folders[1] / "mine.py").write_text(script.replace('folder="run"', 'folder="run", resume=True'))
        two.end_well(two.start(1, sys.executable, "mine.py"))
        assert end_of(two, host=1) == ["DONE", 2, 4000]
        replay = two.start(1, sys.executable, "-m", "asyncsgd", "replay", "run", "--task", "mine:Line")
        assert two.ended(replay) == 0
        assert "identical" in two.said(1)


@pytest.mark.hosts
def test_three_hosts_of_which_one_is_lost_and_one_has_other_instructions(flags, tmp_path):
    """The record names the hardware of each worker, and the replay asks for no more bits than it can have."""
    tokens = [TOKEN] * 3
    variables = [{}, {}, {"ATEN_CPU_CAPABILITY": "default"}]
    with hosts.Hosts(tmp_path, number=3) as three:
        words = [*flags, *IN_TURNS, "--samples", "800"]
        leader, _, last = three.torchrun(SCRIPT, *words, workers=(1, 1, 2), tokens=tokens, variables=variables)
        until(lambda: has_trained(three), "the hosts train", 120)
        three.kill(1)
        assert end_of(three) == ["DONE", 4, 800]
        assert counts_each_batch_once(three, 200)
        assert {record["worker"] for record in arrivals_of(three)} >= {0, 2, 3}
        environment = json.loads((three.folders[0] / "run" / "environment.json").read_text())
        ranks = {hardware["cpu_capability"]: hardware["ranks"] for hardware in environment["hardware_of_ranks"]}
        assert ranks["DEFAULT"] == [2, 3]
        for process in (leader, last):
            process.send_signal(signal.SIGKILL)  # torchrun waits for minutes for the lost host
        until(lambda: marked(three.mark) == [], "all processes end")
        replay = three.start(0, sys.executable, "-m", "asyncsgd", "replay", "run")
        assert three.ended(replay) == 0, three.said(0)
        assert "equal to rounding" in three.said(0)


@pytest.mark.hosts
def test_a_cut_of_twenty_seconds_loses_nobody(flags, tmp_path):
    in_step = ["--rule", "ssp:slack=0"]  # no worker goes on without the other
    with hosts.Hosts(tmp_path, delay=0.05, loss=0.01) as two:
        started = two.torchrun(SCRIPT, *flags, *in_step, "--samples", "80", tokens=(TOKEN, TOKEN))
        until(lambda: has_trained(two), "the hosts train", 180)
        two.is_cut = True
        time.sleep(20)
        two.is_cut = False
        two.end_well(*started)
        assert summary_of(two)["num_updates"] == 20
        assert [record["worker"] for record in arrivals_of(two)].count(1) == 10


@pytest.mark.hosts
def test_a_host_that_is_cut_off_for_longer_than_the_deadline_is_lost_on_both_sides(flags, tmp_path):
    in_step = ["--rule", "ssp:slack=0", "--worker-deadline", "4"]
    with hosts.Hosts(tmp_path) as two:
        _, other = two.torchrun(SCRIPT, *flags, *in_step, "--samples", "8000", tokens=(TOKEN, TOKEN))
        until(lambda: has_trained(two), "the hosts train", 180)
        two.is_cut = True
        until(lambda: "rank 0 on 10.99.0.1 is lost (no sign of life for 4 s)" in two.said(1), "host 1 says so", 60)
        assert two.ended(other) != 0
        assert end_of(two) == ["DONE", 2, 8000]
        assert "no sign of life for 4 s" in two.said(0)


@pytest.mark.hosts
@pytest.mark.parametrize("busy", [0, 1])
def test_a_host_that_is_cut_off_while_the_run_is_prepared_is_lost_on_both_sides(busy, tmp_path):
    two_workers = "Processes(2), hosts=asyncsgd.SeveralHosts(worker_deadline=4)"
    script = hosts.OWN_MODEL.replace("Processes(3)", two_workers)
    with hosts.Hosts(tmp_path) as two:
        for folder in two.folders:
            (folder / "mine.py").write_text(script)
        (two.folders[busy] / "mine.py").write_text(script.replace("    def model", PREPARE))
        two.torchrun("mine.py", tokens=(TOKEN, TOKEN))
        until(lambda: "prepares" in two.said(busy), "the run is prepared", 120)
        time.sleep(8)
        assert "no sign of life" not in two.said(0) + two.said(1)  # the busy host lives
        two.is_cut = True
        for host in (0, 1):
            until(lambda: "no sign of life for 4 s" in two.said(host), f"host {host} says so", 60)  # noqa: B023


@pytest.mark.hosts
def test_a_run_that_ends_as_a_cut_ends_has_ended_on_both_hosts(flags, tmp_path):
    with hosts.Hosts(tmp_path, delay=0.05) as two:
        started = two.torchrun(SCRIPT, *flags, "--samples", "320", tokens=(TOKEN, TOKEN))
        until(lambda: has_trained(two), "the hosts train", 180)
        two.is_cut = True  # the last evaluation waits for the other host, and nothing else does
        time.sleep(20)
        two.is_cut = False
        two.end_well(*started)


@pytest.mark.slow
def test_synchronous_ranks_find_each_other_where_a_hosts_own_name_is_of_no_use(flags, tmp_path):
    """And a host gets what rank 0 has prepared, and the checkpoint from which the run goes on."""
    words = ["sync" if word == "async" else word for word in flags] + ["--schedule", "constant"]
    cli([SCRIPT.name, *words, "--samples", "128", "--nproc", "3", "--run-dir", tmp_path / "alone"])
    expected = json.loads((tmp_path / "alone" / "summary.json").read_text())["parameters_sha256"]
    with hosts.Hosts(tmp_path, by_debian=True) as two:
        started = two.torchrun(SCRIPT, *words, "--samples", "64", "--checkpoint-every", "4", workers=(1, 2))
        two.end_well(*started)
        assert end_of(two) == ["DONE", 3, 64]
        assert "host 1 of 2: ranks 1 to 2; 10.99.0.1 leads, and has the run's folder" in two.said(1)
        assert two.said(1).count("from rank 0 (") == 2  # rows and tokenizer
        resumed = ["--mode", "sync", "--resume", "run", "--samples", "128"]
        started = two.torchrun(SCRIPT, *resumed, workers=(1, 2))
        two.end_well(*started)
        assert end_of(two) == ["DONE", 3, 128]
        assert summary_of(two)["parameters_sha256"] == expected
        assert two.said(1).count("from rank 0 (") == 1  # the checkpoint


@pytest.mark.hosts
@pytest.mark.parametrize(("schedule", "workers"), [("1f1b", (1, 3)), ("2bw", (1, 1))])
def test_the_two_stages_of_a_pipeline_lie_on_two_hosts(schedule, workers, flags, tmp_path):
    """And the run goes on from a checkpoint that only rank 0's host has."""
    words = ["pipeline" if word == "async" else word for word in flags] + ["--schedule", "constant"]
    words += f"--pipeline-schedule {schedule} --stages 2 --micro-batches 4 --clip-norm 0".split()
    more = ["--samples", "128", "--nproc", str(sum(workers)), "--run-dir", tmp_path / "alone"]
    alone = cli([SCRIPT.name, *words, *more])
    assert alone.code == 0, alone.err
    expected = json.loads((tmp_path / "alone" / "summary.json").read_text())["parameters_sha256"]
    with hosts.Hosts(tmp_path, by_debian=True) as two:
        two.end_well(*two.torchrun(SCRIPT, *words, "--samples", "64", "--checkpoint-every", "8", workers=workers))
        assert "10.99.0.1 leads, and has the run's folder" in two.said(1)
        words = [*words[words.index("--pipeline-schedule") :], "--mode", "pipeline", "--resume", "run"]
        two.end_well(*two.torchrun(SCRIPT, *words, "--samples", "128", workers=workers))
        assert end_of(two) == ["DONE", sum(workers), 128]
        assert summary_of(two)["parameters_sha256"] == expected


@pytest.mark.slow
def test_a_torchrun_that_would_wait_in_silence_says_what_to_type(plane, tmp_path):
    with hosts.Hosts(tmp_path, by_debian=True) as two:
        form = f"--nnodes 2 --rdzv-backend c10d --rdzv-id a --rdzv-endpoint {two.addresses[0]}:29400".split()
        typed = [["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", two.addresses[host]] for host in (0, 1)]
        for host in (0, 1):
            two.start(host, hosts.TORCHRUN, *form, *plane)
        for host in (0, 1):
            until(lambda: " ".join(typed[host]) in two.said(host), "the advice is given")  # noqa: B023
            two.kill(host)
        started = []
        for host in (0, 1):
            words = [*form, *typed[host], *plane, "--samples", "64"]
            started.append(two.start(host, hosts.TORCHRUN, *words, ASYNCSGD_TOKEN=TOKEN))
        two.end_well(*started)
