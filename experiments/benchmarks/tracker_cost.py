"""What a tracker costs a run, also where its server is killed in the middle.

    python experiments/benchmarks/tracker_cost.py mlflow --rounds 5

Each round trains a small network in one process three times: in no tracker, in the tracker without a server
(W&B offline, MLflow's database), and, of wandb and mlflow, with a server that is killed when half of the samples have
arrived. W&B's server is a small one of this file that answers what the client asks. Every run is a process of its own.
Prints the ratio to the run without a tracker, round by round and then the median, of training seconds and of CPU
seconds of the run's process. (Target: at most 1.02.) Where other programs run, these ratios are mostly noise, so two
more numbers are printed: the CPU seconds that threads beside the training took until half of the samples had arrived
(imports and the connection are in them), and their share of the second half, in which a killed server is gone. The
share is an upper bound of what training lost there. (Target: at most 2 % above the run without a tracker.) Exits with 1
where a run is not DONE or its records are not those of the run without a tracker."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.server
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asyncsgd
from asyncsgd.records.trackers import ALL

PLAIN, WITHOUT_SERVER, KILLED = "no tracker", "no server", "server killed"
WITH_SERVER = ("mlflow", "wandb")


@dataclasses.dataclass(frozen=True)
class Digits(asyncsgd.Task):
    """A convolutional network, with some milliseconds per gradient, on noise."""

    name = "digits"
    batch_size: int = 32

    def model(self, seed: int) -> nn.Module:
        with asyncsgd.seeded(seed):
            layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 4))

    def data(self, seed: int) -> asyncsgd.TensorData:
        draw = torch.Generator().manual_seed(seed)
        images, labels = torch.randn(1000, 1, 16, 16, generator=draw), torch.randint(4, (1000,), generator=draw)
        return asyncsgd.TensorData((images, labels), (images, labels), self.batch_size, seed)

    def outputs(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(batch[0])

    def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class FakeWandB(http.server.BaseHTTPRequestHandler):
    """Answers as W&B's service does, as far as a run needs it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        project = {"id": "1", "name": "asyncsgd", "entity": {"id": "2", "name": "somebody"}}
        bucket: dict[str, Any] = {"id": "3", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0}
        bucket |= {"project": project}
        if b"upsertBucket" in asked:
            self._answer({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}})
        elif b"query" in asked[:20]:
            self._answer({"errors": [{"message": "this server knows one mutation only"}]})
        else:  # a part of the history
            self._answer({})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def train(folder: Path, tracker: str | None, samples: int, server: int | None) -> None:
    """Make one run and print what it cost; kill the process group `server` in the middle."""
    clocks: list[float] = []
    halves: list[tuple[float, float]] = []
    to_kill = [] if server is None else [server]

    def note(record: Any) -> None:
        if record.kind == "arrival":
            clocks.append(time.process_time())
            if record.total_samples >= (samples // 2, samples)[min(len(halves), 1)]:
                halves.append((time.perf_counter(), beside_training()))
            if to_kill and record.total_samples >= samples // 2:
                os.killpg(to_kill.pop(), signal.SIGKILL)

    run = asyncsgd.train(Digits(), folder=folder, samples=samples, track=tracker, report=note, quiet=True, device="cpu")
    facts = {key: run.summary.get(key) for key in ("status", "train_seconds", "parameters_sha256", "tracking")}
    (half, before), (end, after) = halves[0], halves[-1]
    share = (after - before) / (end - half)
    print(
        json.dumps(
            facts
            | {"cpu_seconds": clocks[-1] - clocks[0], "arrivals": len(clocks), "beside": before, "beside_share": share}
        )
    )


def beside_training() -> float:
    """CPU seconds of this process's threads other than the main one, in which the training runs."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        if thread.name != str(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                ticks += sum(map(int, (thread / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[tuple[dict[str, str], int]]:
    """A server of the tracker: what the environment of its client says, and its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    if name == "mlflow":
        words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        words += ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
        environment = {"MLFLOW_TRACKING_URI": address}
    else:
        words = [__file__, name, "--serve", str(port)]
        environment = {"WANDB_BASE_URL": address, "WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40}
    with open(folder / "server.txt", "wb") as log:
        server = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "server.txt").read_text())
            time.sleep(0.2)
        yield environment, server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measured(name: str, case: str, folder: Path, samples: int) -> dict[str, Any]:
    """Make one run in a process of its own: what `train` prints, and the number of arrivals in its records."""
    folder.mkdir()
    words = [__file__, name, "--samples", str(samples), "--train", str(folder / "run")]
    words += ["--plain"] if case == PLAIN else []
    with contextlib.ExitStack() as closing:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_"))}
        environment["TRACKIO_DIR"] = str(folder / "trackio")
        if case == KILLED:
            more, server = closing.enter_context(serving(name, folder))
            environment |= more
            words += ["--server", str(server)]
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    facts = json.loads(done.stdout.splitlines()[-1])
    facts["recorded"] = (folder / "run" / "events.jsonl").read_text().count('"kind":"arrival"')
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("name", choices=list(ALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=48_000)
    for flag, of in (("--train", Path), ("--server", int), ("--serve", int)):
        parser.add_argument(flag, type=of, help=argparse.SUPPRESS)  # for the processes that this one starts
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        http.server.ThreadingHTTPServer(("127.0.0.1", given.serve), FakeWandB).serve_forever()
    if given.train is not None:
        train(given.train, None if given.plain else given.name, given.samples, given.server)
        return 0
    cases = (PLAIN, WITHOUT_SERVER, *[KILLED] * (given.name in WITH_SERVER))
    ratios: dict[tuple[str, str], list[float]] = {}
    shares: dict[str, list[float]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        for number in range(given.rounds):
            rows = {
                case: measured(given.name, case, Path(temporary) / f"{number}-{case.replace(' ', '-')}", given.samples)
                for case in cases
            }
            plain = rows[PLAIN]
            for case, row in rows.items():
                same = ("status", "parameters_sha256", "arrivals", "recorded")
                wrong += any(row[key] != plain[key] for key in same) or row["status"] != "DONE"
                print(
                    f"round {number}: {case:13} {row['train_seconds']:6.2f} s, CPU {row['cpu_seconds']:6.2f} s, "
                    f"beside it {row['beside']:5.2f} s, then {row['beside_share']:.2%}  "
                    f"{(row['tracking'] or {}).get(given.name, '')}",
                    flush=True,
                )
                for key in ("train_seconds", "cpu_seconds"):
                    ratios.setdefault((case, key), []).append(row[key] / plain[key])
                shares.setdefault(case, []).append(row["beside_share"])
    for (case, key), each in ratios.items():
        if case != PLAIN:
            low, median, high = min(each), statistics.median(each), max(each)
            print(f"{given.name}, {case}, {key}: median {median:.3f} [{low:.3f}, {high:.3f}] n={len(each)} target 1.02")
    for case, each in shares.items():
        print(f"{given.name}, {case}, CPU beside training in the second half: median {statistics.median(each):.2%}")
    print(f"{wrong} runs lost something")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
