"""Has a change of the code changed a result? Hashes of short runs in every mode are kept and compared.

    python experiments/benchmarks/same_results.py --write before.json      # on the old code
    python experiments/benchmarks/same_results.py --compare before.json    # on the new code

Every run is one whose bits do not depend on timing: one process, synchronous ranks, one real asynchronous or Hogwild
worker, virtual workers under many rules, closed-form problems, fine-tuning. A hash covers the final parameters, every
evaluation and every arrival: its worker, batches, read and written versions, uses and loss. Of fine-tuning it covers no
arrivals, since earlier versions did not keep them. It belongs to one machine and one version of torch: write and
compare on the same. Exits with 1 where a hash differs, and names the runs."""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parents[1]
ARRIVAL = ("worker", "dispatch", "batches", "read_version", "version", "outcome", "uses", "drops", "abandoned", "loss")
EVALUATION = ("version", "total_samples", "loss")
RULES = (
    "asynchronous",
    "synchronous",
    "staleness_aware",
    "gap_aware",
    "k_sync:quorum=2",
    "rennala:batch=3",
    "ringmaster:threshold=2,stops=true",
    "fixed_delay:delay=2",
    "dc_asgd",
    "ringleader",
    "fedbuff",
    "diloco:num_local_steps=2",
    "easgd:num_local_steps=2",
)


def commands(folder: Path) -> dict[str, list[str]]:
    """By name, what is run; `folder` holds the data."""
    mlm = f"stilt_mlm.py --data {folder}/train.txt --eval-data {folder}/eval.txt --vocab-size 512 --seq-len 32"
    mlm += f" --batch-size 8 --samples 160 --evaluations 3 --warmup 32 --cache-dir {folder}/cache --dropout 0.1"
    simulated = "simulate.py --workers 7 --samples 210 --evaluations 3"
    found = {
        "single": f"{mlm} --mode single",
        "single, sgd, 3 batches an update": f"{mlm} --mode single --accumulate 3 --optimizer sgd --learning-rate .1",
        "single, words masked": f"{mlm} --mode single --mask word --schedule cosine --clip-norm 1",
        "sync, 2 ranks": f"{mlm} --mode sync --nproc 2",
        "async, shared memory": f"{mlm} --mode async --nproc 1 --transport shared_memory",
        "async, process groups": f"{mlm} --mode async --nproc 1 --transport process_group",
        "async, local steps": f"{mlm} --mode async --nproc 1 --rule diloco:num_local_steps=2",
        "hogwild": f"{mlm} --mode hogwild --nproc 1",
        "fine-tuning": f"stilt_finetune.py --init-from tiny --data {folder}/labelled --seq-len 32 --batch-size 8"
        f" --samples 160 --cache-dir {folder}/cache",
        "fine-tuning, classes weighed": f"stilt_finetune.py --init-from tiny --data {folder}/labelled --seq-len 32"
        f" --batch-size 8 --samples 160 --class-weights --dropout 0 --cache-dir {folder}/cache",
    }
    for rule in RULES:
        found[f"virtual, {rule}"] = f"{mlm} --clock virtual --nproc 4 --speeds exponential:1 --rule {rule}"
        found[f"simulation, {rule}"] = f"{simulated} --rule {rule}"
    found["simulation, ad_psgd"] = f"{simulated} --rule ad_psgd"
    return {name: command.split() for name, command in found.items()}


def write_data(folder: Path) -> None:
    """Two texts, and labelled sentences of which some words tell the label."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("bdfgklmnprst", k=1) + draw.choices("aeiou", k=1)) * draw.randint(1, 3) for _ in "x" * 300
    ]
    for name, number in (("train", 300), ("eval", 100)):
        lines = (" ".join(draw.choices(words, k=draw.randint(3, 25))) for _ in range(number))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (folder / "labelled").mkdir()
    for name, number in (("train", 200), ("test", 80)):
        with open(folder / "labelled" / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            for k in range(number):
                class_words = words[k % 3 :: 3][:40]
                rows.writerow([" ".join(draw.choices(class_words, k=draw.randint(3, 12))), "abc"[k % 3]])


def hash_of(folder: Path, name: str, command: list[str]) -> str:
    """Run `command` and hash what its run folder says of the result."""
    runs = folder / "runs" / hashlib.sha256(name.encode()).hexdigest()[:12]
    script, *arguments = command
    done = subprocess.run(
        [sys.executable, str(EXPERIMENTS / script), *arguments, "--runs-dir", str(runs)], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    (run,) = runs.iterdir()
    seen: list[Any] = [json.loads((run / "summary.json").read_text())["parameters_sha256"]]
    for line in (run / "events.jsonl").read_text().splitlines():
        record = json.loads(line)
        # Fine-tuning has kept its arrivals only since it trains on the one path.
        arrival = () if script == "stilt_finetune.py" else ARRIVAL
        fields = {"arrival": arrival, "evaluate": EVALUATION}.get(record.get("kind"), ())
        if fields:
            seen.append([record.get(field) for field in fields])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="run everything and keep the hashes")
    what.add_argument("--compare", type=Path, metavar="FILE", help="run everything and compare with these hashes")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(name)
        write_data(folder)
        asked = commands(folder)
        hashes = dict(zip(asked, pool.map(lambda item: hash_of(folder, *item), asked.items()), strict=True))
    if arguments.write:
        arguments.write.write_text(json.dumps(hashes, indent=1) + "\n")
        print(f"{len(hashes)} hashes in {arguments.write}")
        return 0
    before = json.loads(arguments.compare.read_text())
    for name in sorted(before.keys() | hashes.keys()):
        if before.get(name) != hashes.get(name):
            print(f"differs: {name}")
    same = sum(before.get(name) == found for name, found in hashes.items())
    print(f"{same} of {len(hashes)} the same")
    return 0 if hashes == before else 1


if __name__ == "__main__":
    sys.exit(main())
