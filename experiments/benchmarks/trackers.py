"""Do the trackers of ``--track`` get what they should, and what do they cost? Each has an environment of its own.

    python experiments/benchmarks/trackers.py --out /tmp/trackers mlflow wandb

MLflow and trackio want older packages than constraints.txt has, so no environment holds all of them. Each takes a few
gigabytes and minutes. Without a name, all four are tested. After the tests `tracker_cost.py` measures what the tracker
costs a run, also where its server is killed in the middle. Exits with 1 where a test fails or a run loses something."""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from asyncsgd.records.trackers import ALL

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    flags = argparse.ArgumentParser(
        description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)} (default: all)")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the environments are made, or are")
    flags.add_argument("--rounds", type=int, default=5, help="runs of each kind that are measured (default: 5)")
    given = flags.parse_args()
    if unknown := sorted(set(given.names) - set(ALL)):
        flags.error(f"{unknown[0]} is no tracker")
    return max(tested(name, given.out / name, given.rounds) for name in given.names or ALL)


def tested(name: str, folder: Path, rounds: int) -> int:
    """Make the environment where it is not there yet, run the tests and measure in it; the higher exit code."""
    python = folder / "bin" / "python"
    constraints = ROOT / "experiments" / "constraints" / f"{name}.txt"
    if not python.is_file():
        venv.create(folder, with_pip=True)
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", constraints, "-e", f".[test,{name}]"], cwd=ROOT, check=True
    )
    print(f"{name} in {folder}", flush=True)
    tests = ["tests/test_trackers.py", "-m", "slow or not slow", "-rs"]
    failed = subprocess.run([python, "-m", "pytest", *tests], cwd=ROOT).returncode
    cost = ROOT / "experiments" / "benchmarks" / "tracker_cost.py"
    return max(failed, subprocess.run([python, cost, name, "--rounds", str(rounds)], cwd=ROOT).returncode)


if __name__ == "__main__":
    sys.exit(main())
