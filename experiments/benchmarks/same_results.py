"""Has a change of the code changed a result? Hashes of short runs in every mode are kept and compared.

    python experiments/benchmarks/same_results.py --write before.json      # on the old code
    python experiments/benchmarks/same_results.py --compare before.json    # on the new code

Every run is one whose bits do not depend on timing: one process, synchronous ranks, pipelines, one real asynchronous or
Hogwild worker, virtual workers under every rule, closed-form problems, gossip, every task. Some are resumed, and some
are replayed. same_results_cases.py has the list. There are four hashes of a run:

    result    of the summary: how the run ended, the final parameters, the best model, how often the rule acted
    records   of events.jsonl: the kinds in their order, and all fields that are no seconds
    clock     of the seconds of the virtual clock; of none in a run on real time
    replay    of what experiments/replay.py says

They belong to one machine and one version of torch: write and compare on the same. Exits with 1 where a hash differs,
and names the runs."""

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
RESULT = (
    *("status", "stopped_early", "num_samples", "num_updates", "num_samples_applied", "parameters_sha256"),
    *("final_eval_loss", "metrics", "details", "delay", "best", "rule_acted", "micro_batches"),
)
# Fields are named, so that a record may be given a new one. Of kinds that are not here, the place in the log counts.
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


def run_here(script: str, arguments: list[str], output: Path) -> None:
    """Be ``python experiments/SCRIPT ARGUMENTS``, whose output goes to a file."""
    with open(output, "a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    path = str(EXPERIMENTS / script)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


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
        more = ["--resume", str(run), *case.longer.split()]
        printed = run_script(script, more, run.with_suffix(".longer.txt"))
    summary = read(run / "summary.json")
    if summary.get("status") != case.status:
        raise Failed(f"{name}: the run is {summary.get('status')} and not {case.status}\n{case.command}\n{printed}")
    replay = None
    if case.replayed:
        cache = [] if script == "simulate.py" else ["--cache-dir", str(folder / "cache")]
        replay = run_script("replay.py", [str(run), *cache], run.with_suffix(".replay.txt"))
        if not replay.endswith("identical\nexit code 0"):
            raise Failed(f"{name}: the replay is not identical\n{case.command}\n{replay}")
    parts = parts_of(run) | ({} if replay is None else {"replay": replay})
    return {part: hashlib.sha256(json.dumps(value).encode()).hexdigest() for part, value in parts.items()}


def parts_of(run: Path) -> dict[str, Any]:
    """What is hashed of a run folder."""
    summary, records, clock = read(run / "summary.json"), [], []
    for line in (run / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        kind = record.get("kind")
        records.append([kind, *(record.get(field) for field in RECORDS.get(kind, ()))])
        if summary.get("clock") == "virtual":
            clock.append([record.get(field) for field in SECONDS])
    return {"result": [summary.get(field) for field in RESULT], "records": records, "clock": clock}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def differences(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """A line for every run whose hashes are not the same, or that is on one side only."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name, {}), now.get(name, {})
        parts = [part for part in {**was, **is_now} if was.get(part) != is_now.get(part)]
        if parts:
            lines.append(f"differs: {name} ({', '.join(parts)})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="run everything and keep the hashes")
    what.add_argument("--compare", type=Path, metavar="FILE", help="run everything and compare with these hashes")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="only runs whose names match, e.g. 'resumed|sync'"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    arguments = parser.parse_args()
    before = None if arguments.compare is None else json.loads(arguments.compare.read_text())
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(name)
        (folder / "runs").mkdir()
        write_data(folder)
        asked = {name: case for name, case in cases(folder).items() if re.search(arguments.only, name)}
        jobs = {name: pool.submit(hashes_of, folder, name, case) for name, case in asked.items()}
        now, failed = {}, False
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
    different = differences({name: of for name, of in before.items() if re.search(arguments.only, name)}, now)
    print(
        "\n".join(
            [*different, f"{sum(before.get(name) == of for name, of in now.items())} of {len(asked)} runs the same"]
        )
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
