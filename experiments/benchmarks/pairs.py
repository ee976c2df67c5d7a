"""How long does a vector take to a worker of another host and back, beside a bare gloo send and torch's RPC?

    python experiments/benchmarks/pairs.py --floats 1500000 11000000 --turns 7

Two processes on this machine send each other a vector of so many float32, there and back, in every way in turn:

    gloo          one send and one receive of a process group, without tags
    trusted       a pair as --trust-network has it
    aes-gcm       a pair with a token, where both sides have the package cryptography
    hmac-sha256   a pair with a token, where one lacks it
    rpc           torch.distributed.rpc, if this build of torch has it

Printed are the median seconds of each way, and the median over the turns of its ratio to gloo in the same turn. A
machine that does something else at the same time says nothing."""

import argparse
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from asyncsgd.backends import seal
from asyncsgd.backends.link import Ready
from asyncsgd.backends.pair import Pair, Rendezvous

SERVER, WORKER = 0, 1
TOKEN = b"x" * 40
END_SECONDS = 10.0
WAYS = ("gloo", "trusted", "aes-gcm", "hmac-sha256", "rpc")


class Gloo:
    """A bare process group of two."""

    def __init__(self, folder, rank):
        self._peer = 1 - rank
        backend: Any = dist.ProcessGroupGloo  # its stub lacks what a group of two needs
        options = backend._Options()
        options._devices = [backend.create_device(hostname="127.0.0.1")]
        store = dist.PrefixStore("gloo", dist.FileStore(f"{folder}/store", 2))
        self._group = backend(store, rank, 2, options)

    def send_vector(self, vector):
        self._group.send([vector], self._peer, 0).wait()

    def receive_vector(self, vector):
        self._group.recv([vector], self._peer, 0).wait()


def pair_of(way, folder, rank):
    """A pair that both ends have opened."""
    algorithms = seal.available()
    if way == "hmac-sha256":
        algorithms = ("hmac-sha256",)
    seal.available = lambda: algorithms
    token = b"" if way == "trusted" else TOKEN
    pair = Pair(Rendezvous(folder, prefix=way, token=token), way, serves=rank == SERVER)
    pair.send(Ready(""))
    pair.receive()
    return pair


def echoed(vector):
    return vector


def with_rpc(folder, rank):
    """Whether torch's RPC is there; it is started."""
    try:
        from torch.distributed import rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", _transports=["uv"])
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    except (ImportError, RuntimeError, AttributeError):
        return False
    return True


def links_of(folder, rank):
    """Each way but RPC, opened in the same order on both sides."""
    available = seal.available
    links = {"gloo": Gloo(folder, rank)}
    for way in WAYS[1:4]:
        seal.available = available
        if way == "aes-gcm" and "aes-gcm" not in available():
            continue
        links[way] = pair_of(way, folder, rank)
    return links


def answer(folder, floats, turns):
    """The worker: receive a vector and send one back, in the order of the server."""
    torch.set_num_threads(1)
    links = links_of(folder, WORKER)
    has_rpc = with_rpc(folder, WORKER)
    for number in floats:
        vector = torch.ones(number)
        for _ in range(turns):
            for link in links.values():
                link.receive_vector(vector)
                link.send_vector(vector)
                if isinstance(link, Pair):
                    link.flush()
    if has_rpc:
        from torch.distributed import rpc

        rpc.shutdown()
    leave(links)


def leave(links):
    """End the threads of the pairs: one that comes out of gloo while the interpreter ends would abort the process."""
    pairs = [link for link in links.values() if isinstance(link, Pair)]
    for pair in pairs:
        pair.leave()
    for pair in pairs:
        pair.join(END_SECONDS)


def seconds_of(way, links, vector, back):
    """There and back once."""
    began = time.perf_counter()
    if way == "rpc":
        from torch.distributed import rpc

        back.copy_(rpc.rpc_sync("rank1", echoed, args=(vector,)))
    else:
        links[way].send_vector(vector)
        links[way].receive_vector(back)
    seconds = time.perf_counter() - began
    if not torch.equal(vector, back):
        raise SystemExit(f"{way} has brought another vector back")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floats", type=int, nargs="+", default=[1_500_000, 11_000_000])
    parser.add_argument("--turns", type=int, default=7, help="after one that does not count")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory())
        turns = arguments.turns + 1
        context = multiprocessing.get_context("spawn")
        worker = context.Process(target=answer, args=(folder, arguments.floats, turns), daemon=True)
        worker.start()
        links = links_of(folder, SERVER)
        ways = list(links)
        has_rpc = with_rpc(folder, SERVER)
        if has_rpc:
            ways.append("rpc")
        for number in arguments.floats:
            vector = torch.ones(number)
            back = torch.zeros(number)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(turns):
                for way in ways:
                    seconds[way].append(seconds_of(way, links, vector, back))
            for way in ways:
                ratios = [ours / bare for ours, bare in zip(seconds[way][1:], seconds["gloo"][1:], strict=True)]
                median = statistics.median(seconds[way][1:])
                print(f"{number:>11,} floats  {way:12} {median:8.4f} s  {statistics.median(ratios):5.2f} of gloo")
        if has_rpc:
            from torch.distributed import rpc

            rpc.shutdown()
        leave(links)
        worker.join()


if __name__ == "__main__":
    main()
