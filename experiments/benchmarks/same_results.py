"""Has a change of the code changed a result? Hashes of short runs in every mode are kept and compared.

    python experiments/benchmarks/same_results.py --write before.json      # on the old code
    python experiments/benchmarks/same_results.py --compare before.json    # on the new code

Every run is one whose bits do not depend on timing: one process, synchronous ranks, pipelines, one real asynchronous or
Hogwild worker, virtual workers under every rule, closed-form problems, gossip, every task. Some are resumed, and some
are replayed. same_results_cases.py has the list. A hash is kept of every field of a run:

    parameters_sha256, delay.mean, ...    of summary.json: how the run ended, the best model, how often the rule acted
    arrival.loss, join.uses, ...          of events.jsonl: what all records of a kind say there, in their order
    order, kinds                          of events.jsonl: the order of the records of the kinds known here, and of all
    clock.train_seconds, ...              the seconds of all records; only of a run on the virtual clock
    replay                                the last word of python -m asyncsgd replay

A field that is missing or null has no hash. Hashes belong to one machine and one version of torch: write and compare on
the same. Exits with 1 where a run failed or a hash differs, and names the fields and the runs, in the form of
tests/differences.md. A run that is replayed now, and was not when the file was written, does not differ by that.

Where a field is to be different, `--without FIELD` leaves it out, once for every field; the commit says why. A key that
gets another name gets a line in NEW_NAMES, and a command or a flag is changed in its case, whose name stays: so hashes
of the old code remain comparable."""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import sys
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from same_results_cases import Case, cases, write_data

EXPERIMENTS = Path(__file__).parents[1]
# What takes seconds to import is imported once, and every run is forked from there. Nothing of asyncsgd is among it.
IMPORTED_ONCE = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "yaml",
    "tokenizers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
)
# Keys of summary.json, by their names on 03c2f30.
SUMMARY = (
    *("status", "stopped_early", "num_samples", "num_updates", "num_samples_applied", "parameters_sha256"),
    *("final_eval_loss", "metrics", "details", "delay", "best", "rule_acted", "micro_batches"),
)
# Keys of the records, likewise. They are named, so that a record may be given a new one.
RECORDS: dict[str, tuple[str, ...]] = {
    "arrival": (
        *("worker", "dispatch", "batches", "read_version", "version", "arrival_delay", "outcome", "uses", "drops"),
        *("abandoned", "started", "loss", "weight", "num_samples", "total_samples", "num_local_steps"),
        *("learning_rate", "gradient_norm", "loss_scales", "micro_batches"),
    ),
    "evaluate": ("version", "total_samples", "loss", "weight", "metrics", "details", "worker_losses"),
    "join": ("worker", "version", "total_samples", "reason", "lost", "uses", "started", "drops", "abandoned"),
    "fault": ("message", "worker", "version"),
    "checkpoint": ("name", "version", "total_samples", "cut_short"),
    "resume": ("name", "version", "total_samples", "discarded"),
    "extend": ("started", "version", "total_samples"),
}
RECORDS["leave"] = RECORDS["join"]
SECONDS = ("train_seconds", "flight_seconds", "pull_seconds", "compute_seconds", "push_seconds", "wait_seconds")
# What has another name since: "arrival": "gradient" for a kind, "arrival.batches": "ranges" for a key of its records,
# "best": "model.best" for a key of the summary that is within another. The old name is read where the new one is not.
NEW_NAMES: dict[str, str] = {}


def run_here(script: str, arguments: list[str], output: Path) -> None:
    """Be ``python experiments/SCRIPT ARGUMENTS`` or ``python -m asyncsgd``, whose output goes to a file."""
    with open(output, "a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    path = str(EXPERIMENTS / script)
    sys.argv = [path, *arguments]
    if script.endswith(".py"):
        runpy.run_path(path, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


# A process's exit code can be read once, and `start` asks for those of all processes that have ended.
_ONE_ASKS = threading.Lock()


def run_script(script: str, arguments: list[str], output: Path) -> str:
    """Run a script in a process of its own and return what it has printed; the exit code is the last line."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run_here, args=(script, arguments, output))
    with _ONE_ASKS:
        process.start()
    multiprocessing.connection.wait([process.sentinel])
    with _ONE_ASKS:
        process.join()
    return f"{output.read_text()}exit code {process.exitcode}"


class Failed(Exception):
    """A run did not end as it should, or was not replayed."""


def hashes_of(folder: Path, name: str, case: Case) -> dict[str, str]:
    """Do what `case` says and hash what it leaves."""
    run = folder / "runs" / hash_of(name)[:12]
    script, *arguments = case.command.split()
    is_simulation = script == "simulate.py"
    folder_flag = "--runs-dir" if is_simulation else "--run-dir"
    printed = run_script(script, [*arguments, folder_flag, str(run)], run.with_suffix(".txt"))
    if is_simulation:
        run = next(run.glob("simulate-*"), run)
    if case.cut:
        remove_last_checkpoint(run / "checkpoints")
    if case.longer:
        resume = ["--resume", str(run), *case.longer.split()]
        if script == "train.py":
            resume.insert(0, arguments[0])  # the task
        printed = run_script(script, resume, run.with_suffix(".longer.txt"))
    status = read(run / "summary.json").get("status")
    if status != case.status:
        raise Failed(f"{name}: the run is {status} and not {case.status}\n{case.command}\n{printed}")
    values = fields_of(run)
    if case.replayed:
        replay = ["replay", str(run)]
        if not is_simulation:
            replay += ["--cache-dir", str(folder / "cache")]
        printed = run_script("asyncsgd", replay, run.with_suffix(".replay.txt"))
        if not printed.endswith("identical\nexit code 0"):
            raise Failed(f"{name}: the replay is not identical\n{case.command}\n{printed}")
        values["replay"] = "identical"
    return {field: hash_of(json.dumps(value, sort_keys=True))[:16] for field, value in values.items()}


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def remove_last_checkpoint(folder: Path) -> None:
    last = max(path.stem for path in folder.iterdir())
    for path in folder.glob(f"{last}.*"):
        path.unlink()


def fields_of(run: Path) -> dict[str, Any]:
    """What is hashed of a run folder: the value of every field that says something."""
    summary = read(run / "summary.json")
    old_names = {new: old for old, new in NEW_NAMES.items()}
    values: dict[str, list[Any]] = {"kinds": [], "order": []}
    known = []
    for line in (run / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind = record.get("kind")
        kind = old_names.get(kind, kind)
        values["kinds"].append(kind)
        if kind in RECORDS:
            values["order"].append(kind)
            known.append((kind, record))
    for key in SUMMARY:
        value = look(summary, key)
        if not isinstance(value, dict):
            values[key] = [value]
            continue
        for part, number in value.items():
            field = f"{key}.{part}"
            values[old_names.get(field, field)] = [number]
    for kind, record in known:
        for key in RECORDS[kind]:
            field = f"{kind}.{key}"
            values.setdefault(field, []).append(look(record, key, field))
        if summary.get("clock") == "virtual":
            for key in SECONDS:
                seconds = look(record, key, f"{kind}.{key}")
                values.setdefault(f"clock.{key}", []).append(seconds)
    return {field: column for field, column in values.items() if any(value is not None for value in column)}


def look(values: dict[str, Any], key: str, field: str = "") -> Any:
    """The value of a key, or None; where the field has another name since, it is looked for under that one first."""
    value: Any = values
    for part in NEW_NAMES.get(field or key, key).split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return values.get(key) if value is None else value


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


Hashes = dict[str, dict[str, str]]
"""By run and field."""


def differences(before: Hashes, now: Hashes, without: Collection[str] = ()) -> list[str]:
    """A line for all runs that differ in the same fields, as tests/differences.md has them.

    >>> differences({"a": {"x": "1", "y": "1"}, "b": {"x": "1"}}, {"a": {"x": "2"}, "b": {"x": "2"}}, ["y"])
    ['- `x` in `a`, `b`']
    >>> differences({"a": {"x": "1"}}, {"a": {"x": "1", "replay": "2"}})
    []
    """
    runs: dict[str, list[str]] = {}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            difference = "not made here, or not to its end"
        elif name not in before:
            difference = "not made before"
        else:
            different = {field for field, _ in before[name].items() ^ now[name].items()}
            if "replay" not in before[name]:
                different.discard("replay")
            fields = sorted(different.difference(without))
            difference = ", ".join(f"`{field}`" for field in fields)
        if difference:
            runs.setdefault(difference, []).append(f"`{name}`")
    return [f"- {difference} in {', '.join(names)}" for difference, names in runs.items()]


def run_cases(pattern: str, num_jobs: int) -> tuple[Hashes, set[str]]:
    """The hashes of the runs whose names match, and the names of those that failed, which are printed."""
    hashes: Hashes = {}
    failed = set()
    with tempfile.TemporaryDirectory() as temporary, concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        folder = Path(temporary)
        (folder / "runs").mkdir()
        write_data(folder)
        jobs = {}
        for name, case in cases(folder).items():
            if re.search(pattern, name):
                jobs[name] = pool.submit(hashes_of, folder, name, case)
        for name, job in jobs.items():
            try:
                hashes[name] = job.result()
            except Failed as error:
                failed.add(name)
                print(error, file=sys.stderr)
    return hashes, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="run everything and keep the hashes")
    what.add_argument("--compare", type=Path, metavar="FILE", help="run everything and compare with these hashes")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="only runs whose names match, e.g. 'resumed|sync'"
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FIELD",
        help="leave a field out of the comparison; repeatable",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    arguments = parser.parse_args()
    before = None if arguments.compare is None else json.loads(arguments.compare.read_text())
    known_fields = set[str]().union(*(before or {}).values())
    unknown = set(arguments.without) - known_fields
    if unknown:
        parser.error(f"--without {min(unknown)}: no run to compare with has a field of this name")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
    now, failed = run_cases(arguments.only, arguments.jobs)
    if not now and not failed:
        parser.error(f"--only {arguments.only}: no run has a name that matches")
    if before is None:
        if failed:
            return 1
        arguments.write.write_text(json.dumps(now, indent=1) + "\n")
        print(f"the hashes of {len(now)} runs are in {arguments.write}")
        return 0
    before = {name: fields for name, fields in before.items() if re.search(arguments.only, name)}
    different = differences(before, now, arguments.without)
    num_same = 0
    for name in before.keys() & now.keys():
        if not differences({name: before[name]}, {name: now[name]}, arguments.without):
            num_same += 1
    num_runs = len(before.keys() | now.keys() | failed)
    for line in different:
        print(line)
    print(f"{num_same} of {num_runs} runs the same")
    return 1 if different or failed else 0


if __name__ == "__main__":
    sys.exit(main())
