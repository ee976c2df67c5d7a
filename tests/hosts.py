"""Hosts made of network namespaces, joined by a relay of our own with a delay, losses and cuts. Needs root and Linux.

Each host has its own name, /etc/hosts, folder of temporary files and cache, and sees nothing of the others' folders. No
kernel here has netem, so a thread reads the packets of a TUN device in each namespace and carries each one to the
device of its destination."""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from commands import until
from doors import ROOT, marked

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
SCRIPT = ROOT / "experiments" / "stilt_mlm.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))

OWN_MODEL = """
import dataclasses

import torch

import asyncsgd


@dataclasses.dataclass(frozen=True)
class Line(asyncsgd.Task):
    batch_size: int = 4

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return torch.nn.Linear(3, 1)

    def data(self, seed):
        x = torch.arange(120.0).reshape(40, 3) / 120
        rows = (x, x.sum(1, keepdim=True))
        return asyncsgd.TensorData(rows, rows, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


if __name__ == "__main__":
    rule = asyncsgd.parse_rule("ssp:slack=2")
    asyncsgd.train(Line(), rule=rule, runtime=asyncsgd.Processes(3), samples=240, folder="run")
"""
"""A script that trains a model of one's own on processes."""


def why_not():
    """Why hosts cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if not Path("/dev/net/tun").exists() or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs /dev/net/tun, and the commands ip and unshare"
    name = f"try{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    if made.returncode != 0:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Hosts:
    """Two hosts or more; a context manager.

    Args:
        folder: in which each host gets its own.
        number: of hosts.
        delay: seconds that a packet takes from one to the other.
        loss: share of the packets that are lost, drawn from a seed.
        by_debian: whether a host's own name means 127.0.1.1, as Debian's installer has it.
    """

    def __init__(self, folder, number=2, delay=0.0, loss=0.0, by_debian=False):
        self.addresses = [f"10.99.0.{host + 1}" for host in range(number)]
        self.by_debian = by_debian
        self.delay = delay
        self.loss = loss
        self.is_cut = False
        self.names = [f"h{os.getpid()}-{host}" for host in range(number)]
        self.folders = [folder / f"host{host}" for host in range(number)]
        self._temporary = [tempfile.mkdtemp(prefix="host-") for _ in range(number)]  # short: sockets lie there
        self.mark = f"hosts-{os.getpid()}-{time.monotonic_ns()}"
        self._random = random.Random(0)
        self._devices = []
        self._over = False
        self._relay = threading.Thread(target=self._carry, daemon=True)
        self._started = []

    def __enter__(self):
        known = "127.0.0.1 localhost\n"
        for name, address in zip(self.names, self.addresses, strict=True):
            known += f"{address} {name}\n"
        for number, name in enumerate(self.names):
            own = f"127.0.1.1 {name}\n" if self.by_debian else ""
            settings = Path("/etc/netns") / name
            settings.mkdir(parents=True)
            (settings / "hosts").write_text(own + known)
            subprocess.run(["ip", "netns", "add", name], check=True)
            self._devices.append(_tun_in(name, self.addresses[number]))
            (self.folders[number] / "cache").mkdir(parents=True)
        self._relay.start()
        return self

    def __exit__(self, *exception):
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()
        self._over = True
        self._relay.join()
        for device in self._devices:
            os.close(device)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=True)
            shutil.rmtree(Path("/etc/netns") / name)
        for temporary in self._temporary:
            shutil.rmtree(temporary, ignore_errors=True)

    def start(self, host, *words, **variables):
        """Start a command on a host, in its folder."""
        folder = self.folders[host]
        inside = f"hostname {self.names[host]}; "
        for other, hidden in enumerate(self.folders):
            if other != host:
                inside += f"mount -t tmpfs hidden {shlex.quote(str(hidden))}; "
        inside += 'exec "$@"'
        entered = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount", "sh", "-c", inside, "sh"]
        environment = os.environ | {
            "ASYNCSGD_TEST": self.mark,
            "TMPDIR": self._temporary[host],
            "XDG_CACHE_HOME": str(folder / "cache"),
            **variables,
        }
        with open(folder / "out.txt", "wb") as out:
            process = subprocess.Popen(
                [*entered, *map(str, words)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def torchrun(self, *words, workers=(1, 1), tokens=(None, None), variables=({}, {})):
        """Start torchrun on all hosts, of which host 0 leads; its processes.

        Args:
            workers, tokens, variables: of each host: how many, its token, and what its environment has besides.
        """
        processes = []
        for host in range(len(self.folders)):
            variables_here = dict(variables[host])
            if tokens[host] is not None:
                variables_here["ASYNCSGD_TOKEN"] = tokens[host]
            place = f"--nnodes {len(self.folders)} --node-rank {host}".split()
            place += f"--master-addr {self.addresses[0]} --master-port 29500".split()
            local = ["--nproc-per-node", workers[host]]
            processes.append(self.start(host, TORCHRUN, *place, *local, *words, **variables_here))
        return processes

    def come(self, host, *words, endpoint=0, most=3, workers=1, restarts=0, token=None):
        """Start torchrun on one host, which takes part in a run of up to `most` hosts that come and go; its process.

        Args:
            endpoint: the host of torchrun's rendezvous.
            restarts: how often torchrun starts all ranks again after one has failed.
        """
        place = f"--nnodes 1:{most} --rdzv-backend c10d --rdzv-id job --rdzv-conf last_call_timeout=2".split()
        place += f"--rdzv-endpoint {self.addresses[endpoint]}:29400 --local-addr {self.addresses[host]}".split()
        variables = {} if token is None else {"ASYNCSGD_TOKEN": token}
        local = ["--nproc-per-node", workers, "--max-restarts", restarts]
        return self.start(host, TORCHRUN, *place, *local, *words, **variables)

    def said(self, host):
        return (self.folders[host] / "out.txt").read_text(errors="replace")

    def pids(self, host):
        """All processes of a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, host):
        """End all that runs on a host at once, as when its power fails."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ended(self, process, seconds=240.0):
        """Wait for a process; its exit code."""
        until(lambda: process.poll() is not None, "the command ends", seconds)
        return process.returncode

    def end_well(self, *processes):
        """Wait for processes, of which each ends without an error."""
        codes = [self.ended(process) for process in processes]
        assert set(codes) == {0}, [self.said(host) for host in range(len(self.folders))]

    def _carry(self):
        waiting = []
        number = 0
        while not self._over:
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, _, device, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(device, packet)
            patience = 0.01
            if waiting:
                patience = max(0.0, min(patience, waiting[0][0] - now))
            readable, _, _ = select.select(self._devices, [], [], patience)
            for device in readable:
                packet = os.read(device, 65536)
                if self.is_cut or self._random.random() < self.loss:
                    continue
                there = self._device_of(packet)
                if there is not None:
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay, number, there, packet))

    def _device_of(self, packet):
        """Of the host that a packet is for; None where there is no such host, as for IPv6."""
        address = ".".join(map(str, packet[16:20]))  # the destination in a header of IPv4
        if packet[0] >> 4 != 4 or address not in self.addresses:
            return None
        return self._devices[self.addresses.index(address)]


def arrivals_of(all_hosts, host=0):
    """The arrivals in the folder of a host, as far as they are written."""
    path = all_hosts.folders[host] / "run" / "events.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["kind"] == "arrival"]


def counts_each_batch_once(all_hosts, num_batches, host=0):
    """Whether each of so many batches has arrived, and none again."""
    batches = Counter(tuple(batch) for record in arrivals_of(all_hosts, host) for batch in record["batches"])
    return len(batches) == num_batches and set(batches.values()) == {1}


def _tun_in(namespace, address):
    """A TUN device in a namespace, which this process reads and writes; one thread alone enters the namespace."""
    made = []

    def enter():
        system = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{namespace}") as handle:
            if system.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", b"tun0", _IFF_TUN_NO_PI))
        made.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    for words in (
        f"addr add {address}/24 dev tun0",
        "link set tun0 mtu 1500 up",
        "link set lo up",
    ):
        subprocess.run(["ip", "-n", namespace, *words.split()], check=True)
    return made[0]
