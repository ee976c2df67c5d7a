"""The two ways a run can end badly, each with its exit code. Standard library only.

A message says what is wrong and what to type next; scripts print it without a traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable


class UsageError(ValueError):
    """What the user typed or pointed at cannot be used; scripts exit with code 2 before anything has run."""

    exit_code = 2


class RunError(RuntimeError):
    """A run that had started could not be finished (a lost rank, a full disk, a diverged loss); exit code 1."""

    exit_code = 1


OUT_OF_MEMORY = (
    "there is not enough memory; type --auto-batch, a larger --micro-batches, a smaller --batch-size or --seq-len, or "
    "ulimit -v unlimited"
)
NOT_ONE_SAMPLE = (
    "there is not enough memory for one sample of a batch; type --gradient-checkpointing, a smaller --seq-len or "
    "model, or ulimit -v unlimited"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch was refused memory; torch says so in a RuntimeError, which may be wrapped in another."""
    if isinstance(error, MemoryError):
        return True
    signs = ("DefaultCPUAllocator", "bad_alloc", "out of memory")
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


_ADVICE = {
    errno.EMFILE: "type ulimit -n 4096",
    errno.EFBIG: "type ulimit -f unlimited",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
}


def reason(error: OSError) -> str:
    """Return what the operating system refused and, where it follows from that, what to do.

    >>> reason(OSError(errno.EFBIG, "File too large"))
    'File too large: type ulimit -f unlimited'
    >>> reason(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    'No such file or directory'
    """
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.strerror or error}" + (f": {advice}" if advice else "")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice that looks most like `name`, or an empty string.

    A slip of the finger comes first, then initials and beginnings: what is called ``--lr`` and ``--batch`` elsewhere.

    >>> nearest("asynchronos", ["asynchronous", "synchronous"])
    "; did you mean 'asynchronous'?"
    >>> nearest("zzz", ["asynchronous"])
    ''
    >>> nearest("--lr", ["--rule", "--learning-rate"]), nearest("batch", ["tech", "batch_size"])
    ("; did you mean '--learning-rate'?", "; did you mean 'batch_size'?")
    >>> nearest("async", ["async_local_sgd", "asynchronous"])
    "; did you mean 'asynchronous'?"
    >>> nearest("margin", ["margin_reasons", "margins"])
    "; did you mean 'margins'?"
    """
    import difflib  # only a mistake needs it

    choices = list(choices)
    closest = difflib.get_close_matches(name, choices, n=1, cutoff=0.9)
    closest += sorted((choice for choice in choices if _is_short_for(_words(name), _words(choice))), key=len)
    closest += difflib.get_close_matches(name, choices, n=1)
    return f"; did you mean {closest[0]!r}?" if closest else ""


def _words(name: str) -> list[str]:
    return [word for word in name.replace("-", "_").split("_") if word]


def _is_short_for(short: list[str], words: list[str]) -> bool:
    """Whether they begin with it, or it is the initials of several."""
    beginning = "_".join(short)
    initials = "".join(word[0] for word in words)
    if len(beginning) > 1 and "_".join(words).startswith(beginning):
        return True
    return len(words) > 1 and beginning == initials
