"""Kill workers and hosts, and cut hosts off, at moments drawn at random, and ask what docs/machines.md promises.

    python tests/host_campaign.py --runs 20 --seed 0

Each run is asynchronous, with up to two workers on each of two hosts that are network namespaces (see hosts.py). In
about every second one host 1 is a mirror.

1. Unless host 0 is lost the run ends DONE, with every sample of its budget; no batch is counted twice or left out. If
   all workers are gone it is FAILED, and says so.
2. The run is replayed bit for bit.
3. Where host 0 is lost, the other host says so and ends with another exit code than 0. From a mirror that has a
   checkpoint the run goes on there, and 1 and 2 hold of it.
4. No process is left but for torchrun, which waits for a lost host.

Exit code 1 where a promise was broken; the folder of that run stays. Needs root and Linux."""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

import hosts
import psutil
from commands import until
from doors import marked

TOKEN = "0123456789abcdef" * 2
BATCH = 4
DEADLINE = 6
RULES = (
    *("asynchronous", "ssp:slack=2", "rennala:batch=3", "delay_adaptive", "local_sgd:num_local_steps=2"),
    "ringmaster:threshold=4",
)
TASKS = ("masked_lm", "causal_lm")
SCRIPT = hosts.ROOT / "experiments" / "train.py"
MIRROR = ("--mirror", "1", "--checkpoint-every", "160")
# To a worker or the whole of a host, once a share of the batches has arrived.
Harm = namedtuple("Harm", "kind host moment seconds")
KINDS = ("worker killed", "worker killed", "worker stopped", "host lost", "hosts cut off", "hosts cut off for too long")


def drawn(rng):
    """The task, the rule, the workers of each host, whether there is a mirror, and what happens when."""
    task = rng.choice(TASKS)
    has_mirror = rng.random() < 0.5
    rule = rng.choice(RULES)
    workers = (rng.choice((1, 2)), rng.choice((1, 2)))
    harms = []
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choice(KINDS)
        seconds = {"worker stopped": 3.0, "hosts cut off": 2.0, "hosts cut off for too long": 2.5 * DEADLINE}
        host = 1 if kind != "host lost" else rng.choice((0, 1, 1, 1))
        if kind.startswith("worker"):
            host = rng.choice((0, 1))
        harms.append(Harm(kind, host, rng.uniform(0.05, 0.8), seconds.get(kind, 0.0)))
    return task, rule, workers, has_mirror, sorted(harms, key=lambda harm: harm.moment)


def batches_of(two, host=0):
    """The batches of all arrivals, in the order of the record."""
    path = two.folders[host] / "run" / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    arrivals = [json.loads(line) for line in lines if '"arrival"' in line]
    batches = []
    for record in arrivals:
        for stream, first, end in record["batches"]:
            batches += [(stream, number) for number in range(first, end)]
    return batches


def workers_on(two, host):
    """The processes of workers on a host: children of a fork server."""
    pids = []
    for pid in two.pids(host):
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid).parent()
            if parent is not None and any("forkserver" in word for word in parent.cmdline()):
                pids.append(pid)
    return pids


def left_of(two):
    """The processes that are left, but for torchrun."""
    left = []
    for pid in marked(two.mark):
        with contextlib.suppress(psutil.Error):
            words = psutil.Process(pid).cmdline()
            if words and not any("torchrun" in word for word in words[:3]):
                left.append(" ".join(words)[:80])
    return left


def do(two, harm, rng):
    """Carry out a harm; whether something was there to be harmed."""
    if harm.kind == "host lost":
        two.kill(harm.host)
        return True
    if harm.kind.startswith("hosts cut off"):
        two.is_cut = True
        time.sleep(harm.seconds)
        two.is_cut = False
        return True
    pids = workers_on(two, harm.host)
    if not pids:
        return False
    pid = rng.choice(sorted(pids))
    with contextlib.suppress(ProcessLookupError):
        if harm.kind == "worker killed":
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGSTOP)
        time.sleep(harm.seconds)
        os.kill(pid, signal.SIGCONT)
    return True


def broken_promises(two, words, workers, harms, rng):
    """Train, harm, and look; the promises that were broken, in words."""
    wrong = []
    leader, other = two.torchrun(SCRIPT, *words, workers=workers, tokens=(TOKEN, TOKEN))
    num_batches = int(words[words.index("--samples") + 1]) // BATCH
    summary_path = two.folders[0] / "run" / "summary.json"
    leader_lost = False
    lost = [0, 0]  # workers, on each host
    for harm in harms:

        def is_due(harm=harm):
            return len(batches_of(two)) >= harm.moment * num_batches or leader.poll() is not None

        if not leader_lost:
            until(is_due, "it trains", 240)
        if summary_path.exists() or leader_lost:
            break
        if do(two, harm, rng):
            if harm.kind == "worker killed":
                lost[harm.host] += 1
            elif harm.kind in ("host lost", "hosts cut off for too long"):
                lost[harm.host] = workers[harm.host]
        leader_lost |= harm.kind == "host lost" and harm.host == 0
    if leader_lost:
        with contextlib.suppress(AssertionError):
            two.ended(other, 120)
        if other.poll() in (None, 0):
            wrong.append(f"host 1 ended with {other.poll()} after host 0 was lost")
        if "with it the run" not in two.said(1):
            wrong.append("host 1 does not say that rank 0 is lost")
        if "goes on on this host with" in two.said(1):
            resumed = two.start(1, sys.executable, SCRIPT, words[0], "--resume", "run")
            if two.ended(resumed) != 0:
                wrong.append(f"the run does not go on from the mirror: {two.said(1)[-300:]}")
            wrong += broken_by_the_end(two, 1, num_batches)
        return wrong
    try:
        until(summary_path.exists, "the run ends", 240)
        until(lambda: not workers_on(two, 0), "the workers of host 0 end", 60)
    except AssertionError as error:
        return [*wrong, str(error)]
    summary = json.loads(summary_path.read_text())
    if all(gone >= there for gone, there in zip(lost, workers, strict=True)) and summary["status"] == "FAILED":
        if "no worker is left" not in summary["message"]:
            wrong.append("it does not say that no worker is left")
        return wrong
    return [*wrong, *broken_by_the_end(two, 0, num_batches)]


def broken_by_the_end(two, host, num_batches):
    """What of the first two promises and the last does not hold of the run in the folder of a host."""
    wrong = []
    summary = json.loads((two.folders[host] / "run" / "summary.json").read_text())
    if (summary["status"], summary["num_samples"]) != ("DONE", num_batches * BATCH):
        wrong.append(f"{summary['status']} with {summary['num_samples']} samples: {summary['message']}")
    batches = batches_of(two, host)
    if len(batches) != len(set(batches)):
        wrong.append(f"{len(batches) - len(set(batches))} batches counted twice")
    if len(batches) != num_batches:
        wrong.append(f"{len(batches)} batches counted, not {num_batches}")
    with contextlib.suppress(AssertionError):
        until(lambda: not left_of(two), "all processes end")
    if left := left_of(two):
        wrong.append(f"left: {left}")
    replay = two.start(host, sys.executable, "-m", "asyncsgd", "replay", "run")
    if two.ended(replay) != 0 or "identical" not in two.said(host):
        wrong.append(f"the replay: {two.said(host)[-300:]}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run")
    arguments = parser.parse_args()
    if reason := hosts.why_not():
        raise SystemExit(reason)
    num_broken = 0
    for number in range(arguments.first, arguments.first + arguments.runs):
        rng = random.Random(f"{arguments.seed} {number}")
        task, rule, workers, has_mirror, harms = drawn(rng)
        folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        text = folder / "text.txt"
        text.write_text("\n".join(f"line {line} has the words {line % 7} and {line % 11}" for line in range(600)))
        words = [task, "--mode", "async", "--data", str(text), "--rule", rule, "--run-dir", "run", "--samples", "1600"]
        words += f"--seq-len 32 --batch-size {BATCH} --vocab-size 512 --eval-samples 8 --evaluations 1".split()
        words += ["--worker-deadline", str(DEADLINE), *(MIRROR if has_mirror else ())]
        with hosts.Hosts(folder, delay=rng.choice((0.0, 0.005))) as two:
            wrong = broken_promises(two, words, workers, harms, rng)
            said = [two.said(host)[-1500:] for host in (0, 1)]
        told = "; ".join(f"{harm.kind} (host {harm.host}) at {harm.moment:.0%}" for harm in harms)
        mirrored = ", a mirror" if has_mirror else ""
        run = f"{task}, {rule}, {workers} workers{mirrored}, {told}"
        print(f"{number:3} {run}: {'; '.join(wrong) or 'as promised'}", flush=True)
        if wrong:
            num_broken += 1
            print(folder, *said, sep="\n", flush=True)
        else:
            shutil.rmtree(folder)
    print(f"{arguments.runs - num_broken} of {arguments.runs} as promised")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
