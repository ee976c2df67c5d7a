"""Commands that tests start and kill, and waiting until something is seen."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from doors import marked

DEADLINE = 60.0


def until(seen, what, seconds=DEADLINE):
    """Look again and again until something is seen, and return it; an error after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = seen()
        if result:
            return result
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


class Command:
    """A command in a session of its own, its output in files; everything it starts carries a mark."""

    def __init__(self, words, folder):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="e2e-"))
        with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ | {"ASYNCSGD_TEST": self.mark, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def left(self):
        """Names in the folder of temporary files, but for the cache that torch makes when transformers is imported."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]

    def pids(self):
        """Everything living that came from the command."""
        return marked(self.mark)

    @property
    def err(self):
        return (self.folder / "err.txt").read_text()

    def end(self):
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        subprocess.run(["rm", "-rf", str(self.temporary)], check=True)
