"""``python -m asyncsgd``: what is installed here; ``python -m asyncsgd COMMAND RUN`` does something with a run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from asyncsgd import __version__
from asyncsgd.errors import UsageError, nearest, reason
from asyncsgd.records.console import best_effort

COMMANDS = {
    "resume": "go on with it where it was stopped",
    "replay": "run it again in one process, and compare it bit for bit",
    "export": "write its model, or that of a checkpoint, for transformers",
    "predict": "predict it on the virtual clock, and compare",
}

CHECKOUT = """\
  torchrun experiments/stilt_mlm.py --mode async --nproc 4   train a model
  python experiments/sweep.py --help                         run a study"""

NO_CHECKOUT = """\
  The experiments run from a checkout of the repository. This installation has the library and the analysis only.
  In a checkout, type: python -m pip install -c constraints.txt -e ."""


@best_effort()
def main(argv: list[str] | None = None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        home = Path(__file__).parent
        print(f"asyncsgd {__version__} in {home}")
        print(CHECKOUT if (home.parent / "experiments" / "stilt_mlm.py").is_file() else NO_CHECKOUT)
        for command, what in COMMANDS.items():
            print(f"  {f'python -m asyncsgd {command} RUN':58} {what}")
        print(f"  {'python -m analysis':58} tables, pictures and verdicts from run folders")
        return 0
    try:
        if name not in COMMANDS:
            raise UsageError(f"{name!r} is no command of python -m asyncsgd{nearest(name, COMMANDS)}")
        return int(importlib.import_module(f"asyncsgd.scripts.{name}").run(arguments))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {reason(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
