"""How tests start anything, and the only file of them that names the library: its public names, commands, simulations.

`cli` types a command line, `Finished` looks at the folder that it leaves, `simulated` runs a rule on a problem. All
public names of the library are here too, so that a test imports what it needs from `doors`."""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import yaml

import asyncsgd
from asyncsgd import *  # noqa: F403 - the public names
from asyncsgd import Event, Instance, Limits, Membership, Sampler

ROOT = Path(__file__).parents[1]
ALL = asyncsgd.rules.ALL
"""Every rule, once or more, with parameters that let it act."""
SPEEDS = importlib.import_module("asyncsgd.simulation.speeds").ALL
PROBLEMS = importlib.import_module("asyncsgd.simulation.problems").ALL
state_of, restore = (getattr(importlib.import_module("asyncsgd.core.state"), name) for name in ("state_of", "restore"))
read_back = importlib.import_module("asyncsgd.core.checkpoints").read_back
task_flags = importlib.import_module("asyncsgd.settings.task").task_flags
Given, fields_of, read_fields, run_of_folder, text_of, values_of = (
    getattr(importlib.import_module("asyncsgd.run.written"), name)
    for name in ("Given", "fields_of", "read_fields", "run_of_folder", "text_of", "values_of")
)
run_of = importlib.import_module("asyncsgd.run.run").run_of
setting = importlib.import_module("asyncsgd.settings.specs").setting
flags_of = importlib.import_module("asyncsgd.studies.arms").flags_of
make_plan = importlib.import_module("asyncsgd.studies.plan").make_plan
StopRequest = importlib.import_module("asyncsgd.core.signals").StopRequest
partners = importlib.import_module("asyncsgd.core.peers.gossip").partners
Prefetching = importlib.import_module("asyncsgd.worker.prefetching").Prefetching
move_last_bits = importlib.import_module("asyncsgd.backends.rounding").move_last_bits
DataWithOtherBits = importlib.import_module("asyncsgd.backends.rounding").DataWithOtherBits
TRACKERS = importlib.import_module("asyncsgd.records.trackers").ALL
IMPORTED_ONCE = (
    *("doors", "asyncsgd.backends.ranks", "asyncsgd.backends.worker_main", "asyncsgd.run.lifecycle"),
    *("asyncsgd.tasks.models", "torch._dynamo", "torch.distributed", "tokenizers", "pandas", "matplotlib.pyplot"),
    *("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"),
)
"""What takes seconds to import. None of it runs a tensor operation."""


class Ended(NamedTuple):
    """A command that has ended, and what it has printed."""

    code: int
    out: str
    err: str


def cli(line, *, alone=False):
    """``python experiments/LINE``, or ``python -m LINE``.

    Args:
        line: the script (stilt_mlm.py) or module (analysis.compare, asyncsgd), and its arguments.
        alone: in a process of its own, which may be stopped; else in this one.
    """
    name, *arguments = line.split() if isinstance(line, str) else map(str, line)
    if not alone and hasattr(_module(name), "main"):
        out = io.StringIO()
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _main(name, arguments)
        return Ended(code, out.getvalue(), err.getvalue())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_typed, args=(there, name, arguments))
    process.start()
    there.close()
    out_and_err = here.recv()
    process.join()
    return Ended(process.exitcode or 0, *out_and_err)


def _module(name):
    return importlib.import_module("asyncsgd.__main__" if name == "asyncsgd" else name.removesuffix(".py"))


def _main(name, arguments):
    module = _module(name)
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        return int((module.main(arguments) if name == "asyncsgd" else module.main()) or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    finally:
        sys.argv = before


def _typed(pipe, name, arguments):
    """Be the command; file descriptors are caught, so that its children's words are there too."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the fork server holds signals back for the sake of workers
    texts = [os.memfd_create(kind) for kind in ("out", "err")]
    for number, text in enumerate(texts, start=1):
        os.dup2(text, number)
    sys.argv = [name, *arguments]
    code = 0
    try:
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / "experiments" / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        code = end.code
    sys.stdout.flush(), sys.stderr.flush()
    pipe.send([os.pread(text, 1 << 24, 0).decode(errors="replace") for text in texts])
    pipe.close()
    os._exit(code if isinstance(code, int) else 1 if code else 0)


def marked(mark):
    """The living processes with ``ASYNCSGD_TEST=mark`` in their environment."""
    processes = psutil.process_iter(["environ"])
    marks = {}
    for one in processes:
        marks[one.pid] = (one.info["environ"] or {}).get("ASYNCSGD_TEST")
    return [pid for pid, its in marks.items() if its == mark]


class Finished(NamedTuple):
    """The folder of a run."""

    path: Path

    @property
    def cache(self):
        """Of prepared data, beside the runs."""
        return self.path.parent / "cache"

    @property
    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    @property
    def settings(self):
        return yaml.safe_load((self.path / "settings.yaml").read_text())

    def records(self, *kinds):
        records = map(json.loads, (self.path / "events.jsonl").read_text().splitlines())
        return [record for record in records if not kinds or record["kind"] in kinds]

    def model(self):
        from transformers import AutoModelForMaskedLM

        return AutoModelForMaskedLM.from_pretrained(self.path / "model")

    def parameters(self):
        return torch.cat([p.detach().flatten() for p in self.model().parameters()])


def prepared_task(name, run):
    """The library's task of that name with the settings of `run`, prepared with the cache beside the run."""
    kind = asyncsgd.tasks.task_class(name)
    settings = run.settings
    spelled = {"model_name": "model", "data_name": "data", "eval_split": "split"}
    names = {}
    for field in dataclasses.fields(kind):
        names[field.name] = spelled.get(field.name, field.name)
    task = kind(**{field: settings[flag] for field, flag in names.items() if flag in settings})
    return task.prepare(settings["seed"], run.cache)


class Watched(Instance):
    """A problem that remembers every gradient that was computed: (worker, sample, point, gradient)."""

    def __init__(self, instance):
        self._instance = instance
        self.num_parameters = instance.num_parameters
        self.computed = []

    def initial(self):
        return self._instance.initial()

    def gradient(self, x, worker, index, out):
        loss = self._instance.gradient(x, worker, index, out)
        self.computed.append((worker, index, x.copy(), out.copy()))
        return loss

    def loss(self, x):
        return self._instance.loss(x)


def drawn(num_workers, seconds):
    """A gradient takes the seconds that a function of (worker, draw) gives; inf where it has none."""

    def one(worker, draw):
        try:
            return seconds(worker, draw)
        except IndexError:
            return math.inf

    return Sampler(num_workers, lambda worker, block: [one(worker, 32 * block + place) for place in range(32)])


def arrival(number, worker=0, **more):
    """The `number`-th record of an arrival, from 0: 4 samples and half a second later than the one before."""
    facts = {
        **{"dispatch": number, "worker": worker, "batches": ((0, number, number + 1),), "read_version": number},
        **{"version": number + 1, "arrival_delay": 0, "outcome": "applied", "uses": ((number, number),), "drops": ()},
        **{"abandoned": (), "started": (), "loss": 1.0, "weight": 1.0, "num_samples": 4, "learning_rate": 0.5},
        **{"train_seconds": 0.5 * (number + 1), "total_samples": 4 * (number + 1)},
    }
    return Event(**facts | more)


class Simulated(NamedTuple):
    """A simulation that has ended."""

    done: Any
    points: torch.Tensor
    """The parameters of every version, `(T + 1, P)`."""
    records: list[Any]
    computed: list[tuple[int, int, np.ndarray, np.ndarray]]
    """Of `Watched`."""

    @property
    def events(self):
        return [record for record in self.records if isinstance(record, Event)]

    @property
    def delays(self):
        return [delay for event in self.events for _, delay in event.uses]

    @property
    def times(self):
        """When each version came to be, in seconds; the first at 0."""
        times = [0.0]
        version = 0
        for event in self.events:
            times += [event.train_seconds] * (event.version - version)
            version = event.version
        return np.array(times)

    def points_of(self, worker):
        """Where `worker` computed its gradients, in order."""
        return np.stack([point for who, _, point, _ in self.computed if who == worker])

    @property
    def abandoned(self):
        return {dispatch for event in self.events for dispatch in event.abandoned}

    def started(self):
        """dispatch -> (worker, version, seconds, batches)."""
        records = [record for record in self.records if isinstance(record, Event | Membership)]
        return {
            dispatch: (worker, record.version, record.train_seconds, batches)
            for record in records
            for worker, dispatch, batches, _ in record.started
        }


def simulated(rule, sampler, problem, *, learning_rate, evaluations=1, budget=None, **more):
    """`asyncsgd.simulate`, and every version of its parameters.

    Args:
        more: the budget's parts, or arguments of `asyncsgd.simulate`.
    """
    parts = {}
    for name in ("samples", "seconds", "target_loss"):
        if name in more:
            parts[name] = more.pop(name)
    watched = Watched(problem)
    records = list[Any]()
    points = [torch.from_numpy(problem.initial())]
    done = asyncsgd.simulate(
        rule,
        watched,
        sampler,
        num_workers=sampler.num_workers,
        learning_rate=learning_rate,
        budget=budget or Limits(**parts),
        evaluations=evaluations,
        report=records.append,
        each_version=lambda version, parameters: points.append(parameters.clone()),
        **more,
    )
    return Simulated(done, torch.stack(points), records, watched.computed)
