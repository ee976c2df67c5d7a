"""Kill runs at moments drawn at random, damage what some have left, let them go on, and count how often they end as
docs/running.md promises.

    python experiments/benchmarks/resume.py --kills 40 --seed 0

Each trial starts a real command on a small text and kills every process of it, as a batch system does when the time is
up. Then the run goes on from its last checkpoint, and may be killed again. What has to be true at the end:

- one process, synchronous ranks, the virtual clock, fine-tuning and a sweep of the last two end with the parameters and
  the records of a run that nobody has stopped, but for seconds;
- a run of real workers is replayed bit for bit, the seams included;
- no batch is used twice, the budget is spent exactly, and every arrival that was computed again is in
  events.discarded-N.jsonl and counted by a ``resume`` record;
- a run that was killed before its first checkpoint says so and is begun anew;
- a damaged checkpoint is named and an older one is used; if there is none, or settings.yaml is another, the run is
  refused with one line and no byte of its folder changes.

``--seed`` and the trial's number decide what is killed and when. Prints a line per trial and a table. Exit code 0 when
every promise was kept, 1 when one was not. Linux only."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from campaign import EXPERIMENTS, PATIENCE, WORDS, living, read_lines, replay
from damages import DAMAGES, Damage, descriptions, go_on

from asyncsgd.records.events import DONE

CASES = ("single", "sync", "async", "virtual", "finetune", "sweep")
RULES = ("asynchronous", "synchronous", "ringmaster:threshold=2")
SHARED = EXPERIMENTS.parents[1] / "shared" / "data" / "hate_mlm" / "small"
"""The text, where there is one; otherwise one is written."""
NUM_SAMPLES = 240
"""Of every run but those of a sweep; a whole number of rounds for any number of workers here."""
EVERY = 24
"""Samples between two checkpoints."""
AGAIN = 0.35
"""How likely the run that goes on is killed as well."""
MOST_KILLS = 4
NO_CHECKPOINT = ("has no checkpoint to go on from", "is not a run folder")
"""What a run says that was killed before its first checkpoint, or before it had a folder."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a command is killed."""

    trains: bool
    """When its checkpoints have come to `share` of what was left to do; otherwise at any time, imports included."""
    share: float
    """Of the samples, or of the seconds, in [0, 1)."""
    later: float
    """Where between two checkpoints, in [0, 1)."""

    def __str__(self) -> str:
        return f"{'training' if self.trains else 'any time'} {self.share:.2f}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run and when it is killed."""

    number: int
    case: str
    rule: str
    """Of the case ``async``; the others have one each."""
    kills: tuple[Kill, ...]
    by_command: bool
    """Whether the first command is typed again, rather than ``--resume``."""
    damage: Damage | None = None
    """What is done to the folder of the killed run before it goes on."""

    def __str__(self) -> str:
        how = "the same command" if self.by_command else "--resume"
        damage = "" if self.damage is None else f", {self.damage.__name__.replace('_', ' ')}"
        return f"{self.case} {self.rule}".strip() + f", {how}, killed at {', '.join(map(str, self.kills))}{damage}"


def plan(num_trials: int, seed: int) -> list[Trial]:
    """The trials 0, 1, ...: every case once in six of them. In every second six all runs but the sweep's are damaged,
    by all kinds in turn. A longer plan begins with the shorter.
    """
    cases = random.Random(seed)
    order = list(itertools.chain.from_iterable(cases.sample(CASES, len(CASES)) for _ in range(num_trials)))
    damages = itertools.cycle(random.Random(seed).sample(DAMAGES, len(DAMAGES)))
    trials = []
    for number, case in enumerate(order[:num_trials]):
        damage = next(damages) if number // len(CASES) % 2 and case != "sweep" else None
        trials.append(draw_trial(random.Random(f"{seed} {number}"), number, case, damage))
    return trials


def draw_trial(draw: random.Random, number: int, case: str, damage: Damage | None) -> Trial:
    kills = [draw_kill(draw)]
    while len(kills) < MOST_KILLS and draw.random() < AGAIN:
        kills.append(draw_kill(draw))
    if damage is not None:  # where the run has some checkpoints
        kills = [Kill(True, 0.4 + 0.5 * draw.random(), draw.random())]
    rule = draw.choice(RULES) if case == "async" else ""
    return Trial(number, case, rule, tuple(kills), draw.random() < 0.5 or case == "sweep", damage)


def draw_kill(draw: random.Random) -> Kill:
    return Kill(draw.random() < 0.8, draw.random(), draw.random())


class Lab:
    """Texts, prepared data, and one run of every case that nobody has stopped."""

    def __init__(self, folder: Path, cases: Iterable[str]) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.posts = folder / "posts"
        self.posts.mkdir()
        draw = random.Random(0)
        texts = {}
        for side, num_lines in (("train", 400), ("validation", 40)):
            lines = [" ".join(draw.choices(WORDS, k=12)) + f" {side} {line}" for line in range(num_lines)]
            path = texts[side] = SHARED / f"{side}.txt" if SHARED.is_dir() else folder / f"{side}.txt"
            if not path.exists():
                path.write_text("\n".join(lines) + "\n")
            table = ["text,label", *(f"{line},{'even' if number % 2 else 'odd'}" for number, line in enumerate(lines))]
            (self.posts / f"{'train' if side == 'train' else 'test'}.csv").write_text("\n".join(table) + "\n")
        text = {"data": str(texts["train"]), "eval_data": str(texts["validation"]), "cache_dir": str(self.cache)}
        small = {"seq_len": 16, "batch_size": 2, "evaluations": 4, "checkpoint_every": str(EVERY)}
        self.pretrain = {**text, **small, "vocab_size": 512, "eval_samples": 16, "samples": NUM_SAMPLES}
        labelled = {"data": str(self.posts), "cache_dir": str(self.cache), "seq_len": 16, "batch_size": 4}
        self.finetune = {**labelled, "samples": NUM_SAMPLES, "evaluations": 4, "checkpoint_every": str(EVERY)}
        self.config = folder / "sweep.json"  # JSON is YAML
        self.config.write_text(json.dumps(self._sweep()))
        self.unbroken: dict[str, Life] = {}
        for case in sorted({"single", *cases}):  # the first one fills the cache
            life = Life(self, folder / f"unbroken-{case}", dataclasses.replace(plan(1, 0)[0], case=case, kills=()))
            code = life.begin(life.command(anew=False), None)
            if code != 0:
                raise SystemExit(f"a run that nothing is done to does not work:\n{life.errors()}")
            self.unbroken[case] = life

    def _sweep(self) -> dict[str, Any]:
        base = {key: value for key, value in self.pretrain.items() if key != "vocab_size"}
        tuned = {key: value for key, value in self.finetune.items() if key != "samples"}
        return {
            "name": "killed",
            "base_model": {**self.pretrain, "samples": 48, "evaluations": 1},
            "base": {**base, "samples": 120, "evaluations": 2},
            "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
            "conditions": {"nproc": 2, "clock": "virtual", "speeds": "slow:worker=0,factor=3"},
            "seeds": [1],
            "finetune": {**tuned, "samples": 120, "baseline": False},
        }


class Life:
    """A trial's run from its first command to its end, in a folder of its own."""

    def __init__(self, lab: Lab, folder: Path, trial: Trial) -> None:
        self.lab, self.folder, self.trial, self.path = lab, folder, trial, folder / "run"
        (folder / "t").mkdir(parents=True)
        self.seconds = self.train_seconds = 0.0
        """Of the last command: from its start to its end, and from when it had prepared its data."""
        self.num_samples = 0
        """Of all runs; once it is done."""

    def command(self, *, anew: bool) -> list[str]:
        """What begins the run, or, with `anew`, begins it once more where a part of it lies."""
        trial, lab = self.trial, self.lab
        if trial.case == "sweep":
            return [str(EXPERIMENTS / "sweep.py"), str(lab.config), "--out", str(self.path), "--jobs", "2"]
        start = {
            "single": "--mode single",
            "sync": "--mode sync --workers 2",
            "async": f"--mode async --workers 2 --rule {trial.rule or RULES[0]}",
            "virtual": "--clock virtual --workers 4 --speeds log_normal:0.5",
            "finetune": "--init-from tiny",
        }[trial.case].split()
        settings = lab.finetune if trial.case == "finetune" else lab.pretrain
        flags = itertools.chain.from_iterable((_flag(name), str(value)) for name, value in settings.items())
        return [self._script(), *start, *flags, "--run-dir", str(self.path), *(["--overwrite"] if anew else [])]

    def go_on(self) -> list[str]:
        """What lets the run go on."""
        if self.trial.by_command:
            return self.command(anew=False)
        every = ["--checkpoint-every", str(self.lab.pretrain["checkpoint_every"])]
        return [self._script(), "--resume", str(self.path), *every, "--cache-dir", str(self.lab.cache)]

    def _script(self) -> str:
        return str(EXPERIMENTS / f"stilt_{'finetune' if self.trial.case == 'finetune' else 'mlm'}.py")

    def begin(self, words: Sequence[str], kill: Kill | None) -> int | None:
        """Start a command and wait for its end, or kill it and all it has started.

        Args:
            kill: when; None: never.

        Returns:
            The exit code; None if it was killed.
        """
        mark, began = f"ASYNCSGD_RESUME={uuid.uuid4().hex}", time.monotonic()
        name, _, value = mark.partition("=")
        environment = {key: each for key, each in os.environ.items() if key not in ("WORLD_SIZE", "RANK")}
        environment |= {name: value, "TMPDIR": str(self.folder / "t"), "HF_HUB_OFFLINE": "1"}
        prepared = self._num_prepared()
        with open(self.folder / "out.txt", "wb") as out, open(self.folder / "err.txt", "wb") as err:
            command = [sys.executable, *words]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)

        def ends_before(seen: Callable[[], bool]) -> bool:
            while process.poll() is None:
                if seen():
                    return False
                if time.monotonic() > began + PATIENCE:
                    raise TimeoutError(f"trial {self.trial.number} hangs: {self.errors()}")
                time.sleep(0.005)
            return True

        def passed(since: float, seconds: float) -> Callable[[], bool]:
            return lambda: time.monotonic() >= since + seconds

        def comes_to(kill: Kill, whole: Life) -> Iterator[Callable[[], bool]]:
            if not kill.trains:
                yield passed(began, kill.share * whole.seconds)
                return
            yield lambda: self._num_prepared() > prepared
            behind = self.samples_behind()
            goal = behind + kill.share * (whole.num_samples - behind)
            yield lambda: self.samples_behind() >= goal - EVERY
            yield passed(time.monotonic(), kill.later * whole.train_seconds * EVERY / whole.num_samples)

        try:
            if kill is None:
                ended, since = ends_before(lambda: self._num_prepared() > prepared), time.monotonic()
                ended = ended or ends_before(lambda: False)
                self.num_samples = self.samples_behind()
            else:
                ended, since = any(map(ends_before, comes_to(kill, self.lab.unbroken[self.trial.case]))), began
            self.seconds, self.train_seconds = time.monotonic() - began, time.monotonic() - since
            return process.returncode if ended else None
        finally:
            while pids := living(mark):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            process.wait(10)

    def ended(self, words: Sequence[str]) -> tuple[int | None, str]:
        """Start a command and wait for its end; its exit code, and what it wrote to stderr."""
        return self.begin(words, None), self.errors()

    def samples_behind(self) -> int:
        """Samples of all runs that no kill can lose any more."""
        return sum(map(samples_behind, self.runs().values()))

    def _num_prepared(self) -> int:
        """How many times a run has said where it runs, the last thing before it trains."""
        names = (name for _, _, names in os.walk(self.folder) for name in names)  # glob fails if a folder is renamed
        return sum(name.startswith("environment") and name.endswith(".json") for name in names)

    def errors(self) -> str:
        path = self.folder / "err.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def is_done(self) -> bool:
        return summary_of(self.path).get("status") == DONE

    def runs(self) -> dict[str, Path]:
        """The folders of its runs by name: its own, or all of its sweep, without those that were set aside."""
        if self.trial.case != "sweep":
            return {"": self.path}
        plan = read_json(self.path / "plan.json") or {"runs": []}
        return {run["folder"]: self.path / run["folder"] for run in plan["runs"]}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_json(path: Path) -> dict[str, Any]:
    """What is in the file; nothing where it is absent or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def summary_of(path: Path) -> dict[str, Any]:
    return read_json(path / "summary.json")


def samples_behind(path: Path) -> int:
    """Samples before the last checkpoint of the run at `path`, all of them once it is done."""
    if (summary := summary_of(path)).get("status") == DONE:
        return int(summary["num_samples"])
    return max((int(description.stem) for description in (path / "checkpoints").glob("*.json")), default=0)


def comparable(records: Iterable[Mapping[str, Any]], *, virtual: bool) -> list[dict[str, Any]]:
    """What must be the same in a run that was stopped: all records but those of checkpoints, and all but measured
    seconds. On the virtual clock only evaluations and updates take measured ones.
    """
    measured = ("eval_seconds", "apply_seconds")
    return [
        {key: value for key, value in record.items() if not (key in measured if virtual else key.endswith("_seconds"))}
        for record in records
        if record["kind"] not in ("checkpoint", "memory", "resume")
    ]


def first_difference(records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str:
    """Where two lists of records part; empty if they do not."""
    for number, (one, other) in enumerate(itertools.zip_longest(records, others)):
        if one != other:
            return f"record {number} is {one}, without a stop {other}"
    return ""


def arrivals(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in records if record["kind"] == "arrival"]


def wrongly_used(records: Sequence[Mapping[str, Any]], num_samples: int) -> list[str]:
    """What a run's records say that must not be: a batch that arrived twice, a budget that is not spent exactly."""
    wrong = []
    ranges: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for record in arrivals(records):
        for stream, first, after in record["batches"]:
            ranges[stream].append((first, after))
    for stream, used in ranges.items():
        for (_, after), (first, _) in itertools.pairwise(sorted(used)):
            if first < after:
                wrong.append(f"batch {first} of stream {stream} arrived twice")
    total = sum(record["num_samples"] for record in arrivals(records))
    counted = [record["total_samples"] for record in arrivals(records)]
    if total != num_samples or counted[-1:] != [num_samples] or counted != sorted(set(counted)):
        wrong.append(f"{total} samples arrived, counted as {counted[-1:]}, of {num_samples}")
    return wrong


def wrongly_discarded(
    records: Sequence[Mapping[str, Any]], discarded: Sequence[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Whether the ``resume`` records of a run that is DONE count what lies in its files of discarded records."""
    resumes = [record for part in (records, *discarded) for record in part if record["kind"] == "resume"]
    counted, there = sum(record["discarded"] for record in resumes), sum(len(arrivals(part)) for part in discarded)
    return [f"resume records count {counted} discarded arrivals, the files hold {there}"] * (counted != there)


def try_once(trial: Trial, lab: Lab) -> dict[str, Any]:
    """Do one trial: what came out, and in `wrong` the promises that were broken."""
    began, life = time.monotonic(), Life(lab, lab.folder / str(trial.number), trial)
    num_kills = num_refused = num_damaged = 0
    wrong: list[str] = []
    command = life.command(anew=False)
    for kill in (*trial.kills, None):
        if kill is None and trial.damage is not None and len(descriptions(life.path)) > 1:
            num_damaged += 1
            code, broken = go_on(life.path, trial.damage, trial.number, partial(life.ended, command))
            wrong += broken
        else:
            code = life.begin(command, kill)
        if code == 2 and any(each in life.errors() for each in NO_CHECKPOINT):
            num_refused += 1
            code = life.begin(life.command(anew=True), kill)
        num_kills += code is None
        if code is not None:
            if code != 0:
                wrong.append(f"exit code {code}: {life.errors().strip().splitlines()[-1:]}")
            break
        if life.is_done() and trial.case != "sweep":
            break  # killed after its last word
        command = life.go_on()
    counts = {"kills": num_kills, "damaged": num_damaged, "resumes": 0, "discarded": 0}
    # The same command begins a run anew without a word where there is no checkpoint yet.
    counts["anew"] = max(num_refused, len(list(life.folder.rglob("*.before-*"))))
    if not wrong:
        for name, path in life.runs().items():
            num_resumes, num_discarded = judge(name, path, life, wrong)
            counts["resumes"] += num_resumes
            counts["discarded"] += num_discarded
    return {**counts, "wrong": wrong, "seconds": time.monotonic() - began}


def judge(name: str, path: Path, life: Life, wrong: list[str]) -> tuple[int, int]:
    """Add to `wrong` what the run at `path` has not kept; how often it went on, and how many arrivals it discarded."""
    case, lab = life.trial.case, life.lab
    found: list[str] = []
    records, damaged = read_lines(path / "events.jsonl")
    discarded = [read_lines(each)[0] for each in sorted(path.glob("events.discarded-*.jsonl"))]
    summary = summary_of(path)
    if damaged:
        found.append(f"{len(damaged)} damaged lines")
    found += wrongly_discarded(records, discarded)
    budget = NUM_SAMPLES if case == "async" else summary_of(lab.unbroken[case].runs()[name])["num_samples"]
    found += wrongly_used(records, budget)
    if case == "async":
        is_same, last_line = replay(path, lab.cache)
        if not is_same:
            found.append(f"replay: {last_line}")
    else:
        whole = lab.unbroken[case].runs()[name]
        if summary.get("parameters_sha256") != summary_of(whole)["parameters_sha256"]:
            found.append("not the parameters of a run without a stop")
        virtual = case == "virtual" or name.startswith("test/")
        compared = (comparable(each, virtual=virtual) for each in (records, read_lines(whole / "events.jsonl")[0]))
        if difference := first_difference(*compared):
            found.append(difference)
    wrong += [f"{name}: {each}" if name else each for each in found]
    resumes = sum(record["kind"] == "resume" for part in (records, *discarded) for record in part)
    return resumes, sum(len(arrivals(part)) for part in discarded)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """A line per case: what was done to it, and how often it ended as promised."""
    columns = ("kills", "damaged", "resumes", "anew", "discarded")
    lines = [f"{'':10}{'trials':>10}" + "".join(f"{name:>10}" for name in columns) + f"{'kept':>10}"]
    for case in CASES:
        chosen = [result for result in results if result["case"] == case]
        sums = [sum(result[name] for result in chosen) for name in columns]
        kept = f"{sum(not result['wrong'] for result in chosen)}/{len(chosen)}"
        lines.append(f"{case:10}{len(chosen):10}" + "".join(f"{each:10}" for each in sums) + f"{kept:>10}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="A campaign of kills, and whether the runs go on as promised.")
    parser.add_argument("--kills", type=int, default=40, help="number of trials; each is killed at least once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one trial to do")
    parser.add_argument("--jobs", type=int, default=1, help="trials beside one another")
    parser.add_argument("--keep", action="store_true", help="keep the folders of trials with a broken promise")
    arguments = parser.parse_args()
    if min(arguments.kills, arguments.jobs) < 1:
        parser.error("--kills and --jobs must be 1 or more")
    trials = plan(max(arguments.kills, (arguments.only or 0) + 1), arguments.seed)
    if arguments.only is not None:
        trials = trials[arguments.only : arguments.only + 1]
    folder = Path(tempfile.mkdtemp(prefix="resume-"))
    results = []
    try:
        lab = Lab(folder, {trial.case for trial in trials})
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for trial, result in zip(trials, pool.map(lambda trial: try_once(trial, lab), trials), strict=True):
                results.append({"case": trial.case, **result})
                said = "; ".join(result["wrong"]) or "ok"
                print(f"{trial.number:3} {trial}: {result['seconds']:.0f} s, {said}", flush=True)
                if not (result["wrong"] and arguments.keep):
                    shutil.rmtree(folder / str(trial.number))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder)
    kept = sum(not result["wrong"] for result in results)
    print(f"\n{table(results)}\n\n{kept} of {len(results)} as promised" + f"; kept {folder}" * arguments.keep)
    return 0 if kept == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
