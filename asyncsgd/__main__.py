"""``python -m asyncsgd``: what is installed here, and what to type next."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncsgd import __version__

NEXT = """\
  python -m analysis                                         tables, pictures and verdicts from run folders"""

CHECKOUT = """\
  torchrun experiments/stilt_mlm.py --mode async --nproc 4   train a model
  python experiments/sweep.py --help                         run a study"""

NO_CHECKOUT = """\
  The experiments run from a checkout of the repository. This installation has the library and the analysis only.
  In a checkout, type: python -m pip install -c constraints.txt -e ."""


def main(argv: list[str]) -> int:
    if argv:
        print(f"error: python -m asyncsgd takes no arguments, got {argv[0]!r}", file=sys.stderr)
        return 2
    home = Path(__file__).parent
    has_experiments = (home.parent / "experiments" / "stilt_mlm.py").is_file()
    print(f"asyncsgd {__version__} in {home}")
    print(CHECKOUT if has_experiments else NO_CHECKOUT)
    print(NEXT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
