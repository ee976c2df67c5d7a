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
the same. Exits with 1 where a hash differs, and names the fields and the runs, in the form of tests/differences.md.

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
    run = folder / "runs" / hashlib.sha256(name.encode()).hexdigest()[:12]
    script, *arguments = case.command.split()
    where = "--runs-dir" if script == "simulate.py" else "--run-dir"
    printed = run_script(script, [*arguments, where, str(run)], run.with_suffix(".txt"))
    if script == "simulate.py":
        run = next(run.glob("simulate-*"), run)
    if case.cut:
        last = max(path.stem for path in (run / "checkpoints").iterdir())
        for path in (run / "checkpoints").glob(f"{last}.*"):
            path.unlink()
    if case.longer:
        more = [*arguments[: script == "train.py"], "--resume", str(run), *case.longer.split()]
        printed = run_script(script, more, run.with_suffix(".longer.txt"))
    summary = read(run / "summary.json")
    if summary.get("status") != case.status:
        raise Failed(f"{name}: the run is {summary.get('status')} and not {case.status}\n{case.command}\n{printed}")
    values = fields_of(run)
    if case.replayed:
        cache = [] if script == "simulate.py" else ["--cache-dir", str(folder / "cache")]
        replay = run_script("asyncsgd", ["replay", str(run), *cache], run.with_suffix(".replay.txt"))
        if not replay.endswith("identical\nexit code 0"):
            raise Failed(f"{name}: the replay is not identical\n{case.command}\n{replay}")
        values["replay"] = "identical"
    return {field: hashlib.sha256(text(value)).hexdigest()[:16] for field, value in values.items()}


def text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def fields_of(run: Path) -> dict[str, Any]:
    """What is hashed of a run folder: the value of every field that says something."""
    summary = read(run / "summary.json")
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = [record.get("kind") for record in records]
    old_names = {new: old for old, new in NEW_NAMES.items()}
    old_kinds = {kind: kind for kind in RECORDS} | {new: old for new, old in old_names.items() if old in RECORDS}
    known = [(old_kinds[kind], record) for kind, record in zip(kinds, records, strict=True) if kind in old_kinds]
    values: dict[str, Any] = {
        "kinds": [old_kinds.get(kind, kind) for kind in kinds],
        "order": [kind for kind, _ in known],
    }
    for key in SUMMARY:
        value = look(summary, key)
        parts = value if isinstance(value, dict) else {"": value}
        fields = {part: f"{key}.{part}".rstrip(".") for part in parts}
        values |= {old_names.get(field, field): [parts[part]] for part, field in fields.items()}
    for kind, keys in RECORDS.items():
        of_kind = [record for its_kind, record in known if its_kind == kind]
        values |= {f"{kind}.{key}": [look(record, key, f"{kind}.") for record in of_kind] for key in keys}
    if summary.get("clock") == "virtual":
        values |= {f"clock.{key}": [look(record, key, f"{kind}.") for kind, record in known] for key in SECONDS}
    return {field: value for field, value in values.items() if any(part is not None for part in value)}


def look(values: dict[str, Any], key: str, prefix: str = "") -> Any:
    """The value of a key, or None; a key with another name since is looked for under that one first."""
    found: Any = values
    for part in NEW_NAMES.get(prefix + key, key).split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return values.get(key) if found is None else found


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


Hashes = dict[str, dict[str, str]]
"""By run and field."""


def differences(before: Hashes, now: Hashes, without: Collection[str] = ()) -> list[str]:
    """A line for all runs that differ in the same fields, as tests/differences.md has them.

    >>> differences({"a": {"x": "1", "y": "1"}, "b": {"x": "1"}}, {"a": {"x": "2"}, "b": {"x": "2"}}, ["y"])
    ['- `x` in `a`, `b`']
    """
    runs: dict[str, list[str]] = {}
    for name in sorted(before.keys() | now.keys()):
        was = before.get(name)
        is_now = now.get(name)
        if was is None or is_now is None:
            what = "not made here, or not to its end" if is_now is None else "not made before"
        else:
            fields = [field for field in sorted({**was, **is_now}) if was.get(field) != is_now.get(field)]
            what = ", ".join(f"`{field}`" for field in fields if field not in without)
        if what:
            runs.setdefault(what, []).append(f"`{name}`")
    return [f"- {what} in {', '.join(names)}" for what, names in runs.items()]


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
    if unknown := set(arguments.without) - {field for fields in (before or {}).values() for field in fields}:
        parser.error(f"--without {min(unknown)}: no run to compare with has a field of this name")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(name)
        (folder / "runs").mkdir()
        write_data(folder)
        asked = {name: case for name, case in cases(folder).items() if re.search(arguments.only, name)}
        jobs = {name: pool.submit(hashes_of, folder, name, case) for name, case in asked.items()}
        now = {}
        failed = False
        for name, job in jobs.items():
            try:
                now[name] = job.result()
            except Failed as error:
                failed = True
                print(error, file=sys.stderr)
    if before is None and failed:
        return 1
    if before is None:
        arguments.write.write_text(json.dumps(now, indent=1) + "\n")
        print(f"the hashes of {len(now)} runs are in {arguments.write}")
        return 0
    before = {name: fields for name, fields in before.items() if re.search(arguments.only, name)}
    different = differences(before, now, arguments.without)
    num_same = sum(
        name in now and not differences({name: before[name]}, {name: now[name]}, arguments.without) for name in before
    )
    print("\n".join([*different, f"{num_same} of {len(before.keys() | asked.keys())} runs the same"]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
