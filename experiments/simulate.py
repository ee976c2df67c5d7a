r"""Simulate a rule on a closed-form problem under virtual time, with any number of workers.

    python experiments/simulate.py --rule ringmaster:threshold=6,stops=true --nproc 6174 --times half_normal \
        --problem tridiagonal --learning-rate 0.25 --seconds 500

It is ``asyncsgd simulate``, see `asyncsgd.scripts.simulate`."""

from __future__ import annotations

import sys

from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.simulate import run_as_script


def main() -> int:
    return run_script(run_as_script)


if __name__ == "__main__":
    sys.exit(run_script(run_as_script, ends_with_process=True))
