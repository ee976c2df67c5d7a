"""Lets ``torchrun script.py --nproc 4`` start. Standard library only.

torchrun parses *all* tokens for its own options, also those behind the script's name. It refuses ``--nproc`` as an
ambiguous abbreviation of ``--nproc-per-node`` and ``--nproc_per_node`` (pytorch/pytorch#120601). At the end of
``import torch``, before torchrun parses, torch calls the entry points of the group ``torch.backends``. `accept_nproc`
is one of them. It writes the token out in full. Without it that token is an error in torchrun, so nothing that works
changes."""

from __future__ import annotations

import os
import sys


def accept_nproc() -> None:
    """Rewrite ``--nproc`` and ``--nproc=N`` in `sys.argv` to ``--nproc-per-node``, only when the program is torchrun.

    Called by torch at the end of ``import torch``. An exception here would break every ``import torch`` of the
    environment, so all are caught."""
    try:
        if is_torchrun(sys.orig_argv):
            sys.argv[1:] = spell_out(sys.argv[1:])
    except Exception:
        return


def is_torchrun(orig_argv: list[str]) -> bool:
    """Say whether an interpreter's command line is torchrun: the console script, or ``-m torch.distributed.run``.

    `sys.argv[0]` cannot tell: under ``-m`` it is just ``-m`` while torch is being imported.

    >>> is_torchrun(["python", "/usr/bin/torchrun", "script.py"])
    True
    >>> is_torchrun(["python", "-u", "-m", "torch.distributed.run", "script.py"])
    True
    >>> is_torchrun(["python", "script.py", "torchrun"])
    False
    """
    program = next((token for token in orig_argv[1:] if not token.startswith("-")), "")
    return program == "torch.distributed.run" or os.path.splitext(os.path.basename(program))[0] == "torchrun"


def spell_out(arguments: list[str]) -> list[str]:
    """Return `arguments` with ``--nproc`` spelt ``--nproc-per-node``, up to a literal ``--``.

    >>> spell_out(["script.py", "--nproc", "4", "--", "--nproc=2"])
    ['script.py', '--nproc-per-node', '4', '--', '--nproc=2']
    >>> spell_out(["script.py", "--nproc=4", "--nprocs", "2"])
    ['script.py', '--nproc-per-node=4', '--nprocs', '2']
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [
        "--nproc-per-node" + token[len("--nproc") :] if token == "--nproc" or token.startswith("--nproc=") else token
        for token in arguments[:end]
    ]
    return head + arguments[end:]
