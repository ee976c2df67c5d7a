"""Stop and kill runs at moments drawn at random, let them go on, and ask what docs/running.md promises.

    python tests/kill_campaign.py --kills 10 --seed 0
    python tests/kill_campaign.py --study --kills 20 --seed 0

1. The status in summary.json and the exit code say how the run ended.
2. No process is left.
3. What one process, asynchronous workers or the virtual clock have recorded is replayed bit for bit.
4. A run that goes on ends as one that nobody stopped: with its parameters, where they do not depend on who was faster.

With --study it is a study on the virtual clock that is killed, with all its processes, and typed again until it ends.
All of its runs then have the parameters of a study that nobody killed, and the same is registered.

Exit code 1, and the runs' folders stay, where a promise was broken. The seed says what is hit, by what and when.
Needs Linux."""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import namedtuple
from pathlib import Path

import psutil

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "own_model.py"
SETTINGS = "--samples 3200 --batch-size 32 --width 32 --evaluations 3 --checkpoint-every 320"
REPLAY = "import sys, asyncsgd, own_model; sys.exit(not asyncsgd.replay(sys.argv[1], own_model.Shapes).identical)"
MODES = {
    "single": "--mode single",
    "async of 1": "--mode async --nproc 1",
    "async": "--mode async --nproc 2 --transport shared_memory",
    "async by messages": "--mode async --nproc 2 --transport process_group",
    "async that stops": "--mode async --nproc 2 --rule ringmaster:threshold=1,stops=true",
    "sync": "--mode sync --nproc 2",
    "hogwild": "--mode hogwild --nproc 2",
    "hogwild of 1": "--mode hogwild --nproc 1 --hogwild-state shared",
    "virtual": "--clock virtual --nproc 3 --speeds log_normal:1",
}
STUDY = {
    "name": "killed",
    "task": "own_model:Shapes",
    "base": {"samples": 1600, "width": 8, "train_images": 500, "evaluations": 3},
    "conditions": {"nproc": 3, "clock": "virtual", "speeds": "log_normal:1"},
    "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
    "seeds": [0, 1, 2],
    "tuning": {"grid": {"learning_rate": [1e-3, 3e-3]}, "seeds": [3]},
    "pilots": [4, 5],
    "analysis": {"reference": "sync", "primary": {"endpoint": "time_to_target"}},
}
# Where parameters depend on who was faster, and a run goes on without one of its workers.
RACES = ("async", "async by messages", "async that stops", "hogwild")
NO_REPLAY = ("sync", "hogwild", "hogwild of 1")
SIGNALS = ("SIGKILL", "SIGKILL", "SIGINT", "SIGINT SIGINT", "SIGTERM", "SIGHUP")
LATE = 0.7  # a run with this share of its records behind it may be DONE before it hears a signal
PATIENCE, ORPHANS = 300.0, 45.0  # seconds for a command, and for what is left after it (of a killed torchrun for 30)
# To "leader", "worker" or "all". The moment is a share of the records; below 0 before the first, above 1 after all.
Kill = namedtuple("Kill", "signals target moment")


class Trial:
    """One run in a folder of its own, from its first command to its end; `wrong` has the promises it broke."""

    def __init__(self, folder, mode, torchrun=False, whole=None):
        self.folder = folder
        self.run = folder / "run"
        self.mode = mode
        self.torchrun = torchrun
        self.whole = whole
        self.num_ranks = 2 if "--nproc 2" in MODES[mode] else 1
        self.wrong = []
        self.num_workers = self.num_ranks - (mode == "sync")  # processes; rank 0 is the script itself
        folder.mkdir()

    def promise(self, kept, otherwise):
        self.wrong += [] if kept else [otherwise]

    def text(self, name):
        if (self.folder / name).exists():
            return (self.folder / name).read_text(errors="replace")
        return ""

    def records(self):
        return self.text("run/events.jsonl").splitlines()

    def summary(self):
        return json.loads(self.text("run/summary.json") or "{}")

    def carry_out(self, kills):
        """Begin the run, hit it by each kill, let it go on after each, and ask the last two promises."""
        command = begin = f"{MODES[self.mode]} {SETTINGS} --run-dir {self.run}"
        for kill in [*kills, None]:
            self.start(command, kill)
            summary = self.summary()
            if self.mode not in NO_REPLAY and summary.get("parameters_sha256"):
                replay = [sys.executable, "-c", REPLAY, str(self.run)]
                done = subprocess.run(replay, cwd=SCRIPT.parent, capture_output=True, text=True, timeout=PATIENCE)
                self.promise(done.returncode == 0, f"it is not replayed: {done.stderr[-300:]}")
            if self.wrong or summary.get("status") == "DONE":
                break
            goes_on = any(self.run.glob("checkpoints/*.json"))
            command = f"--resume {self.run} --checkpoint-every 320" if goes_on else f"{begin} --overwrite"
        if self.whole and self.mode not in RACES and not self.wrong:
            same = summary["parameters_sha256"] == self.whole.summary()["parameters_sha256"]
            self.promise(same, "other parameters than the run that nobody stopped")

    def start(self, flags, kill):
        """Start a command, hit it, wait for its end, and ask the first two promises."""
        before = self.summary().get("status")
        mark = uuid.uuid4().hex
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {self.num_ranks}" * self.torchrun
        command = [sys.executable, *f"{torchrun} {SCRIPT} {flags}".split()]
        environment = os.environ | {"KILL_CAMPAIGN": mark, "TMPDIR": str(self.folder)}
        with open(self.folder / "out.txt", "wb") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        was_hit = kill is not None and self.strike(kill, mark, process)
        end = time.monotonic() + PATIENCE
        while (left := living(mark)) and time.monotonic() < end:
            time.sleep(0.1)
            if process.poll() is not None:
                end = min(end, time.monotonic() + ORPHANS)
        send("SIGKILL", left)
        self.promise(not left, f"{len(left)} processes are left")
        self.judge(process.wait(), kill if was_hit else None, before)

    def strike(self, kill, mark, process):
        """Send the signals at their moment; whether somebody was there to get them."""
        end = time.monotonic() + PATIENCE
        before = len(self.records())
        last = len(self.whole.records())
        if kill.moment >= 0:
            goal = before + max(1, min(kill.moment, 1) * (last - before))
        else:
            goal = 0
        while process.poll() is None and len(self.records()) < goal and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(-32 * kill.moment if kill.moment < 0 else max(kill.moment - 1, 0))
        while process.poll() is None and not targets(mark, kill.target, self.torchrun, self.num_workers):
            time.sleep(0.01)  # until the workers are there
        self.share = len(self.records()) / last
        was_hit = False
        for name in kill.signals.split():
            time.sleep(0.5 * was_hit)
            was_hit |= send(name, targets(mark, kill.target, self.torchrun, self.num_workers))
        return was_hit

    def judge(self, code, kill, before):
        """Whether the status is one that the kill may bring about, and the exit code says the same."""
        status = self.summary().get("status")
        may = {"DONE"}
        is_sudden = kill and kill.signals == "SIGKILL"
        to_worker = kill and kill.target == "worker"
        if is_sudden and not to_worker:
            may = {None, before, "DONE"}  # nobody was left to write a summary
        elif kill and not to_worker:
            if kill.moment >= 0:
                may = {"INTERRUPTED"}
            else:
                may = {"INTERRUPTED", None, before}
        elif is_sudden and self.mode not in RACES:
            may = {"FAILED"}
        elif is_sudden and self.share < LATE:
            leaves = [line for line in self.records() if '"leave"' in line and '"reason":""' not in line]
            self.promise(leaves, "no record says that the worker was lost")
        if kill and self.share >= LATE:
            may.add("DONE")
        self.promise(status in may, f"{status}, promised {may}: {self.text('out.txt')[-300:]}")
        self.promise(code != 0 or status == "DONE", f"exit code 0 with {status}")
        if status != before and not (kill and (self.torchrun or (is_sudden and not to_worker))):
            right = {"DONE": 0, "FAILED": 1, "INTERRUPTED": 130}[status]
            self.promise(code == right, f"exit code {code} with {status}")


def living(mark):
    """What a command has started and has not ended, itself included: what /proc says of each, by its number."""
    all_ = psutil.process_iter(["environ", "cmdline", "ppid", "status"])
    found = {}
    for process in all_:
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            found[process.pid] = process.info
    return {pid: info for pid, info in found.items() if (info["environ"] or {}).get("KILL_CAMPAIGN") == mark}


def targets(mark, target, torchrun, num_workers):
    """Whom a signal goes to; nobody while not all workers are there."""
    found = living(mark)
    if target == "leader":
        rank = "0" if torchrun else None
        script = str(SCRIPT)
        return [pid for pid, info in found.items() if script in info["cmdline"] and info["environ"].get("RANK") == rank]
    if target == "worker":
        servers = []
        for pid, info in found.items():
            if "multiprocessing.forkserver" in " ".join(info["cmdline"]):
                servers.append(pid)
        workers = [pid for pid in servers if found[pid]["ppid"] in servers]
        if len(workers) >= num_workers:
            return workers[-1:]
        return []
    return [*found]


def send(name, pids):
    """Send a signal to processes, of which some may be gone; whether there was one."""
    subprocess.run(["kill", "-s", name.removeprefix("SIG"), *map(str, pids)], stderr=subprocess.DEVNULL)
    return len(pids) > 0


def killed_study(config, out, moment=None):
    """Type a study, and kill all of its processes after so many seconds; its exit code, None where it was killed."""
    command = [sys.executable, "-m", "asyncsgd", "study", str(config), "--out", str(out), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent), "TMPDIR": str(config.parent)}
    with open(config.with_suffix(".txt"), "ab") as printed:
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=printed, start_new_session=True)
        try:
            return process.wait(PATIENCE if moment is None else moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def results_of(out):
    """How every run of a study ended, with which parameters, and what was registered."""
    results = {"analysis.yaml": (out / "analysis.yaml").read_text()}
    for file in out.rglob("summary.json"):
        summary = json.loads(file.read_text())
        if ".before-" not in str(file):
            results[str(file.relative_to(out))] = (summary["status"], summary["parameters_sha256"])
    return results


def kill_studies(folder, num_kills, draw):
    """Kill one study after the other until there were enough kills; how many ended otherwise than one in peace."""
    config = folder / "study.yaml"
    config.write_text(json.dumps(STUDY))
    begin = time.monotonic()
    assert killed_study(config, folder / "whole") == 0, config.with_suffix(".txt").read_text()
    seconds = time.monotonic() - begin
    expected = results_of(folder / "whole")
    print(f"a study of {len(expected) - 1} runs in {seconds:.0f} s", flush=True)
    num_wrong = 0
    for number in itertools.count():
        if num_kills <= 0:
            return num_wrong
        out = folder / f"study-{number}"
        moments = []
        code = None
        while code is None:
            moments.append(draw.uniform(0, seconds))
            code = killed_study(config, out, moments[-1])
        is_same = code == 0 and results_of(out) == expected
        num_wrong += not is_same
        num_kills -= len(moments) - 1
        killed = ", ".join(f"{moment:.1f}" for moment in moments[:-1])
        print(f"{number} killed after {killed} s:", "ok" if is_same else f"exit code {code}, other results", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Kill runs at random moments, and ask what was promised.")
    parser.add_argument("--kills", type=int, default=10, help="number of runs, or of kills of studies (default: 10)")
    parser.add_argument("--study", action="store_true", help="kill studies")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # what nohup lets this process ignore, a run would ignore too
        signal.signal(signal.Signals[name], signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    if arguments.study:
        if kill_studies(folder, arguments.kills, random.Random(arguments.seed)):
            sys.exit(f"see {folder}")
        shutil.rmtree(folder)
        return
    wholes = {}
    num_kept = 0
    for number in range(arguments.kills):
        draw = random.Random(f"{arguments.seed} {number}")
        mode = list(MODES)[(number + arguments.seed) % len(MODES)]
        if mode not in wholes:
            wholes[mode] = Trial(folder / mode.replace(" ", "-"), mode)
            wholes[mode].carry_out([])
            assert not wholes[mode].wrong, (wholes[mode].folder, wholes[mode].wrong)
        trial = Trial(folder / str(number), mode, torchrun=draw.random() < 0.3, whole=wholes[mode])
        names = ["leader", "all"]
        # torchrun ends all of its ranks when one ends; where there is a server, workers are none of its ranks
        if trial.num_ranks == 2 and (not trial.torchrun or mode in RACES):
            names.append("worker")
        kills = []
        for _ in range(2):
            kills.append(Kill(draw.choice(SIGNALS), draw.choice(names), draw.uniform(-0.25, 1.1)))
        kills = kills[: draw.choice([1, 1, 2])]
        trial.carry_out(kills)
        num_kept += not trial.wrong
        hits = ", then ".join(f"{kill.signals} to {kill.target} at {kill.moment:.2f}" for kill in kills)
        print(f"{number} {mode}{' by torchrun' * trial.torchrun}, {hits}:", "; ".join(trial.wrong) or "ok", flush=True)
    print(f"{num_kept} of {arguments.kills} as promised")
    if num_kept < arguments.kills:
        sys.exit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
