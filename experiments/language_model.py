"""A language model's three comparisons: one process against several, learning rate x batch x length, number formats.

    python experiments/language_model.py experiments/configs/language_model-quick.yaml
    python -m analysis language_model runs/language_model-quick --out report.html

Runs are made one at a time, since their seconds are compared. What is finished is skipped, so the same command goes on
where it was stopped. The config's own comments say what it may hold."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncsgd.scripts.base import run_script
from asyncsgd.settings.flags import Parser
from asyncsgd.signals import StopRequest
from asyncsgd.study.comparisons import make_all, planned


def run(argv: list[str], stop: StopRequest) -> int:
    parser = Parser(prog="language_model.py", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="experiments/configs/language_model.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs (default: runs/NAME)")
    arguments = parser.parse_args(argv)
    out, jobs = planned(arguments.config, arguments.out)
    make_all(out, jobs, stop)
    print(f"next   python -m analysis language_model {out} --out report.html")
    return 0


def main() -> int:
    return run_script(run, goes_on=True)


if __name__ == "__main__":
    sys.exit(main())
