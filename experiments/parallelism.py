"""Ways to spread one training over processes, compared on the same work: data parallel, pipelines, asynchronous.

    python experiments/parallelism.py --quick
    python -m analysis parallelism runs/parallelism-quick --out report.html

It is ``sweep.py`` with configs that compare arms after equal samples; experiments/configs/parallelism.yaml has SQuAD
2.0."""

from __future__ import annotations

import sys

import sweep


def main() -> int:
    return sweep.main("parallelism.py", str(__doc__), "parallelism")


if __name__ == "__main__":
    sys.exit(main())
