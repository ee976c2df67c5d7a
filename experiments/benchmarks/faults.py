"""Kill, stop and interrupt runs at moments drawn at random, or take their console, and count how often a run ends as
docs/running.md promises.

    python experiments/benchmarks/faults.py --kills 60 --seed 0

Each trial starts ``experiments/stilt_mlm.py`` on a small text, in a session of its own, and does one thing to it.
``--seed`` and the trial's number decide what is done, to whom and when. So ``--only 17`` does trial 17 again. Prints a
line per trial and a table. Exit code 0 when every promise was kept, 1 when one was not. Linux only, since processes are
found in /proc. 60 trials take about fifteen minutes on two cores that have nothing else to do."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from campaign import EXPERIMENTS, PATIENCE, WORDS, living, read_lines, replay, words_of
from fault_trials import (
    CONSOLE,
    FAULTS,
    FILE,
    MODES,
    PIPE,
    PYTHON,
    SEVERAL,
    TERMINAL,
    TORCHRUN_ONE,
    TORCHRUN_RANKS,
    Trial,
    plan,
    promised,
)

from asyncsgd.models import saved_parameters_sha256
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
from asyncsgd.signals import NUMBERS

SCRIPT = str(EXPERIMENTS / "stilt_mlm.py")
FOLDER = "ü"
"""Of the run. Not every console can show this name."""
HEAD = "| head -n 1"
DEADLINE = 60.0
"""Seconds that a run may take to end after the fault; more on a machine so busy that four runs take longer."""
ORPHAN_SECONDS = 30.0
"""How long processes may outlive the one that was started."""
LATE = 0.7
"""A run that has this share of its samples behind it when it is told to stop may be DONE before it hears."""
_loading = threading.Lock()


def undisturbed(mode: str) -> Trial:
    """A trial whose run nothing is done to."""
    return dataclasses.replace(
        plan(1, 0)[0], mode=mode, launcher=PYTHON, moment="saving", train_seconds=1.0, slow=False, console=FILE
    )


class Lab:
    """The text, the prepared data and two measurements that all trials share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples_per_second, self.life_seconds = 200.0, 10.0
        draw = random.Random(0)
        for name, num_lines in (("train", 400), ("eval", 1600)):
            lines = (" ".join(draw.choices(WORDS, k=12)) + f" {name} {line}\n" for line in range(num_lines))
            (folder / f"{name}.txt").write_text("".join(lines))
        for mode in ("single", "async"):  # the first one fills the cache
            run = Run(undisturbed(mode), self, mode)
            if run.exit_code(PATIENCE) != 0:
                raise SystemExit(f"a run that nothing is done to does not work:\n{run.text('err.txt')}")
            if mode == "single":
                self.samples_per_second = run.summary()["samples_per_second"]
            self.life_seconds = time.monotonic() - run.began + 3.0  # most runs train for longer
        self.deadline = max(DEADLINE, 4 * self.life_seconds)

    def command(self, trial: Trial) -> list[str]:
        samples = round(trial.train_seconds * self.samples_per_second / 4) * 4
        mode = {
            "single": f"--mode single --seconds {trial.train_seconds}",
            "virtual": f"--clock virtual --workers 4 --samples {samples}",
            "async": f"--transport {trial.transport} --rule {trial.rule} --workers 2 --seconds {trial.train_seconds}",
        }.get(trial.mode, f"--mode {trial.mode} --workers 2 --seconds {trial.train_seconds}")
        flags = (
            f"{SCRIPT} --run-dir {FOLDER} --data {self.folder}/train.txt --eval-data {self.folder}/eval.txt"
            f" --cache-dir {self.folder}/cache --vocab-size 512 --seq-len 32 --batch-size 4"
            f" --eval-samples {1600 if trial.has_long_evaluations else 16} --evaluations {trial.num_evaluations}"
            f" {mode}{' --speeds constant:0.5' if trial.slow else ''}"
        )
        ranks = {PYTHON: "", TORCHRUN_ONE: "1", TORCHRUN_RANKS: "2"}[trial.launcher]
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} " if ranks else ""
        command = [sys.executable, *(torchrun + flags).split()]
        if trial.console.startswith(">") and trial.console != FILE:
            return ["bash", "-c", f'exec "$@" {trial.console}', "bash", *command]
        return command


class Run:
    """A trial's run, in a session of its own with a TMPDIR of its own; all that it starts carries a mark."""

    def __init__(self, trial: Trial, lab: Lab, name: str) -> None:
        self.trial, self.lab, self.folder, self.path = trial, lab, lab.folder / name, lab.folder / name / FOLDER
        self.temporary = self.folder / "t"
        self.temporary.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex
        self.mark = f"ASYNCSGD_FAULTS={mark}"
        environment = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
        environment |= {"ASYNCSGD_FAULTS": mark, "TMPDIR": str(self.temporary)}
        self.began = time.monotonic()
        if "=" in trial.console:
            name, _, value = trial.console.partition("=")
            environment[name] = value
        self.reader, console = self._console()
        has_terminal = trial.console == TERMINAL
        # The system tells a session whose terminal is closed.
        command = [*(["setsid", "--ctty"] if has_terminal else []), *lab.command(trial)]
        with open(self.folder / "err.txt", "wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=console if has_terminal else subprocess.DEVNULL,
                stdout=console,
                stderr=console if self.reader else err,
                start_new_session=not has_terminal,
            )
        os.close(console)
        self.pids_seen = {self.process.pid}
        self.evaluations: list[dict[str, Any]] = []
        self.evaluated_at = 0.0
        """When the last evaluation was first seen in the folder."""
        self._size = 0

    def _console(self) -> tuple[subprocess.Popen[bytes] | None, int]:
        """What shows the run's console, in out.txt, and the end that the run writes to."""
        console = self.trial.console
        with open(self.folder / "out.txt", "wb") as out:
            if console not in (TERMINAL, PIPE, HEAD):
                return None, os.dup(out.fileno())
            shown, written = os.openpty() if console == TERMINAL else os.pipe()
            words = ["head", "-n", "1"] if console == HEAD else ["cat"]
            reader = subprocess.Popen(words, stdin=shown, stdout=out, stderr=subprocess.DEVNULL)
        os.close(shown)
        return reader, written

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def summary(self) -> dict[str, Any]:
        return json.loads(self.text(f"{FOLDER}/summary.json") or "{}")

    def until(self, seen: Callable[[], Any], seconds: float = PATIENCE) -> bool:
        """Wait until something is seen; False if the run ends, or `seconds` pass, before. Notes evaluations."""
        deadline, events = time.monotonic() + seconds, self.path / "events.jsonl"
        while not seen():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            if events.exists() and (size := events.stat().st_size) != self._size:
                self._size = size
                evaluations = [record for record in read_lines(events)[0] if record["kind"] == "evaluate"]
                if len(evaluations) > len(self.evaluations):
                    self.evaluations, self.evaluated_at = evaluations, time.monotonic()
            time.sleep(0.002)
        return True

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() >= end, seconds + 1.0)

    def is_saving(self) -> bool:
        return any(self.path.glob("model*"))

    def comes_to_its_moment(self) -> bool:
        trial, share = self.trial, self.trial.share
        if trial.moment == "any time":
            return self.wait(share * self.lab.life_seconds)
        if trial.moment == "first evaluation":
            # Nothing says that it begins. One process evaluates soon after environment.json, workers start before.
            alone = trial.mode in ("single", "virtual")
            return self.until((self.path / "environment.json").exists) and self.wait(share * (1.5 if alone else 4.0))
        if trial.moment == "saving":
            return self.until(self.is_saving) and self.wait(share * 0.05)
        if not self.until(lambda: self.evaluations):
            return False
        if trial.moment == "later evaluation":
            seconds = trial.train_seconds / trial.num_evaluations
            return self.wait(seconds + share * (self.evaluations[0]["eval_seconds"] or 1.0))
        return self.wait(share * 0.8 * trial.train_seconds)

    def pids(self) -> list[int]:
        """Everything living that came from this run, in the order it was started."""
        pids = living(self.mark)
        self.pids_seen.update(pids)
        return pids

    def targets(self) -> list[int]:
        """Whom the trial's fault is for; empty while there is nobody of that kind."""
        trial = self.trial
        if trial.target == "agent" or (trial.target == "leader" and trial.launcher == PYTHON):
            return [self.process.pid]
        pids, ranks, workers = self.pids(), {}, []
        if trial.target == "group":
            return pids
        for pid in pids:
            rank = [word[5:] for word in words_of(pid, "environ") if word.startswith("RANK=")]
            if rank and SCRIPT in words_of(pid, "cmdline"):
                ranks[int(rank[0])] = pid
            elif is_of_fork_server(pid) and (stat := words_of(pid, "stat")) and is_of_fork_server(int(stat[1])):
                workers.append(pid)
        if trial.target == "leader":
            return [ranks[0]] if 0 in ranks else []
        workers += [pid for rank, pid in ranks.items() if rank > 0]
        all_there = len(workers) == (1 if (trial.mode, trial.launcher) == ("sync", TORCHRUN_RANKS) else 2)
        return [workers[trial.number % len(workers)]] if all_there else []  # in sync rank 0 leads

    def await_targets(self) -> list[int]:
        targets: list[int] = []

        def are_there() -> list[int]:
            targets[:] = self.targets()
            return targets

        self.until(are_there)
        return targets

    def send(self, number: signal.Signals, pids: list[int]) -> bool:
        """Whether anybody was there to get it."""
        if number == signal.SIGHUP and self.trial.console == TERMINAL and self.process.poll() is None:
            self.close_console()  # the system tells the session
            return True
        if number == signal.SIGINT and self.trial.target == "group" and self.process.poll() is None:
            os.killpg(self.process.pid, number)  # as a terminal does; a batch system sends to every process
            return True
        sent = False
        for pid in pids:
            if self.mark in words_of(pid, "environ"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    sent = True
        return sent

    def close_console(self) -> None:
        if self.reader is not None:
            self.reader.kill()
            self.reader.wait()

    def strike(self, pids: list[int]) -> bool:
        """Do the trial's fault; whether anybody was there."""
        trial = self.trial
        if trial.fault == CONSOLE:
            if trial.console == PIPE:
                self.close_console()
            return True
        first, *others = trial.stops or (trial.fault,)
        sent = self.send(signal.Signals[first], pids)
        if trial.fault == "SIGSTOP":
            time.sleep(trial.gap_seconds or 0.0)
            self.send(signal.SIGCONT, pids)
        for each in others if sent else ():
            if trial.gap_seconds is None and self.until(self.is_saving, 5.0):
                time.sleep(0.03 * trial.share)
            if self.wait(trial.gap_seconds or 0.0):
                self.send(signal.Signals[each], pids)
        return sent

    def exit_code(self, seconds: float) -> int | None:
        self.pids()  # to know later whose shared memory is whose
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def orphans(self) -> list[int]:
        """Who is left long after the end. Where torchrun alone was killed, the run may come to its own end."""
        deadline = time.monotonic() + (self.lab.deadline if self.trial.target == "agent" else ORPHAN_SECONDS)
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def left_in_shared_memory(self) -> list[str]:
        """By name: ours carry the number of the process that made them."""
        names = {name: {int(number) for number in re.findall(r"\d+", name)} for name in os.listdir("/dev/shm")}
        return [name for name, numbers in names.items() if numbers & self.pids_seen]

    def left_in_temporary(self) -> list[str]:
        return [path.name for pattern in ("asyncsgd-*", "pymp-*") for path in self.temporary.glob(pattern)]

    def end(self) -> None:
        self.send(signal.SIGKILL, self.pids())
        self.process.wait(10)
        self.close_console()


def is_of_fork_server(pid: int) -> bool:
    return any("multiprocessing.forkserver" in word for word in words_of(pid, "cmdline"))


def model_of(run: Run) -> str:
    """``absent``, ``complete`` or what is wrong with the saved model."""
    folder, recorded = run.path / "model", run.summary().get("parameters_sha256")
    if not folder.exists():
        return "absent"
    try:
        json.loads((folder / "tokenizer.json").read_text())
        with _loading:
            saved = saved_parameters_sha256(folder)
    except Exception as error:  # whatever the libraries raise for a file that is not whole
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "complete" if recorded in (None, saved) else "not the parameters of the summary"


def try_once(trial: Trial, lab: Lab) -> tuple[dict[str, Any], list[str], Run]:
    """Do one trial: what came out, which promises were broken, and the run."""
    run = Run(trial, lab, f"{trial.number}")
    try:
        # Saving takes no longer than to look for processes, so that is done before.
        pids = run.await_targets() if trial.moment == "saving" and run.until(lambda: run.evaluations) else []
        comes = run.comes_to_its_moment() and (pids := pids or run.await_targets())
        before = run.evaluations[-1] if run.evaluations else {"total_samples": 0, "train_seconds": 0.0}
        spoke, struck_at, evaluated_at = bool(run.text("out.txt")), time.monotonic(), run.evaluated_at
        hit = bool(comes) and run.strike(pids)
        exit_code = run.exit_code(lab.deadline)
        orphans = run.orphans()
    finally:
        run.end()
    records, damaged = read_lines(run.path / "events.jsonl")
    arrivals = [record for record in records if record["kind"] == "arrival"]
    last = arrivals[-1] if arrivals else before
    summary, model = run.summary(), model_of(run)
    status = summary.get("status")
    late = status == DONE and before["total_samples"] >= LATE * last["total_samples"]
    statuses, code = promised(trial) if hit else ({DONE}, 0)
    wrong = []

    def promise(kept: Any, otherwise: str) -> None:
        if not kept:
            wrong.append(otherwise)

    promise(exit_code is not None, f"runs {lab.deadline:.0f} s after the fault")
    has_folder = (run.path / "settings.yaml").exists()
    if has_folder or INTERRUPTED not in statuses:
        listed = " or ".join(sorted(str(each) for each in statuses))
        promise(status in statuses or (hit and late), f"{status or 'no summary'}, promised {listed}")
    if (spoke or code == 0) and exit_code is not None and not (hit and late and trial.launcher != PYTHON):
        expected = 0 if late else code
        promise(expected in (None, exit_code), f"exit code {exit_code}, promised {expected}")
    if status == DONE or (status == INTERRUPTED and arrivals and trial.fault != SEVERAL):
        promise(model == "complete", f"model: {model}")
    elif not trial.may_leave:
        promise(model in ("absent", "complete"), f"model: {model}")
    if status == DONE:
        last_line = run.text(f"{FOLDER}/console.log").rpartition("\n")[0].rpartition("\n")[2]
        promise(last_line == f"done   {FOLDER}", f"console.log ends with {last_line!r}")
    if status == FAILED and statuses == {FAILED}:
        promise(re.match(r"rank \d is lost", summary["message"]), f"names no rank: {summary['message']}")
        promise(model == "absent", "a model of a run that failed")
        promise(summary.get("parameters_sha256") is None, "a hash of a run that failed")
    promise(not orphans, f"{len(orphans)} processes left")
    promise(not (left := run.left_in_shared_memory()), f"shared memory left: {left}")
    promise(trial.may_leave or not run.left_in_temporary(), f"temporary folders left: {run.left_in_temporary()}")
    torn = damaged == [-1]
    promise(not damaged or (torn and trial.may_leave), f"{len(damaged)} damaged lines")
    lost_seconds = None
    if trial.may_leave and trial.target != "agent" and trial.moment in ("training", "any time") and evaluated_at:
        trained = struck_at - evaluated_at
        if trial.mode != "virtual" and before["train_seconds"] + trained < trial.train_seconds:
            lost_seconds = trained - (last["train_seconds"] - before["train_seconds"])
            longest = max([0.5, *(max(each["flight_seconds"], each["compute_seconds"]) for each in arrivals)])
            promise(lost_seconds < 1.0 + longest, f"{lost_seconds:.1f} s of records lost")
    replayed = None
    if trial.mode in ("single", "async", "virtual") and summary.get("parameters_sha256"):
        replayed, last_line = replay(run.path, lab.folder / "cache")
        promise(replayed, f"replay: {last_line}")
    came_out = {"hit": hit, "status": status, "exit_code": exit_code, "message": summary.get("message")}
    came_out |= {"num_arrivals": len(arrivals), "model": model, "torn": torn, "lost_seconds": lost_seconds}
    return came_out | {"replayed": replayed, "seconds": time.monotonic() - run.began}, wrong, run


def next_start(lab: Lab, runs: list[Run]) -> list[str]:
    """Start a run where killed ones have left their temporary folders; what it does not clean up."""
    temporary = lab.folder / "next" / "t"
    temporary.mkdir(parents=True)
    for run in runs:
        for name in run.left_in_temporary():
            shutil.move(run.temporary / name, temporary / name)
    run = Run(undisturbed("async"), lab, "next")
    code = run.exit_code(PATIENCE)
    run.end()
    return [*run.left_in_temporary(), *([] if code == 0 else [f"exit code {code}"])]


def main() -> int:
    parser = argparse.ArgumentParser(description="A campaign of faults, and which promises were kept.")
    parser.add_argument("--kills", type=int, default=60, help="number of trials")
    parser.add_argument("--quick", action="store_true", help="10 trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one trial to do")
    parser.add_argument("--jobs", type=int, default=1, help="trials beside one another")
    parser.add_argument("--out", type=Path, help="write what came out here, as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials with a broken promise")
    arguments = parser.parse_args()
    if min(arguments.kills, arguments.jobs) < 1:
        parser.error("--kills and --jobs must be 1 or more")
    trials = plan(10 if arguments.quick else max(arguments.kills, (arguments.only or 0) + 1), arguments.seed)
    if arguments.only is not None:
        trials = trials[arguments.only : arguments.only + 1]
    torch.set_num_threads(1)
    for number in NUMBERS:  # a shell lets what it starts with & or nohup ignore them, and so its children
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    lab = Lab(folder)
    results, killed = [], []
    try:
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for trial, (came_out, wrong, run) in zip(trials, pool.map(lambda t: try_once(t, lab), trials), strict=True):
                results.append({**dataclasses.asdict(trial), **came_out, "wrong": wrong})
                hit = "" if came_out["hit"] else " (over before)"
                code = f"{came_out['status'] or 'no summary'}, exit {came_out['exit_code']}"
                print(f"{trial.number:3} {trial}{hit}: {code}: {'; '.join(wrong) or 'ok'}", flush=True)
                if trial.may_leave:
                    killed.append(run)
                elif not (wrong and arguments.keep):
                    shutil.rmtree(run.folder)
        left = next_start(lab, killed)
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    print(f"\nkept    {'':14}" + "".join(f"{mode:>10}" for mode in MODES))
    for fault in FAULTS:
        cells = [[not r["wrong"] for r in results if (r["fault"], r["mode"]) == (fault, mode)] for mode in MODES]
        print(f"        {fault:14}" + "".join(f"{sum(kept)}/{len(kept)}".rjust(10) for kept in cells))
    kept = sum(not result["wrong"] for result in results)
    print(f"\nnext start: {'temporary folders of killed runs cleaned up' if not left else f'leaves {left}'}")
    print(f"{kept} of {len(results)} as promised" + (f"; kept {folder}" if arguments.keep else ""))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"trials": results, "left_by_next_start": left}, indent=2) + "\n")
    return 0 if kept == len(results) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
