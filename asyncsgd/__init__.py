"""asyncsgd: asynchronous and synchronous SGD, compared properly.

The public names are loaded when they are first used, so ``import asyncsgd`` imports neither torch nor transformers.
`asyncsgd.torchrun` relies on this, because torch calls it from inside ``import torch``.

Reading order: `asyncsgd.rules.contract`, `asyncsgd.rules.asynchronous`, `asyncsgd.records.events`,
`asyncsgd.core.protocol`, `asyncsgd.core.batches`, `asyncsgd.core.starts`, `asyncsgd.core.server`, `asyncsgd.core.loop`,
`asyncsgd.backends.virtual`, `asyncsgd.backends.segment`, `asyncsgd.backends.processes`, `asyncsgd.run.lifecycle`,
`asyncsgd.run.execute`, `asyncsgd.api`. A replay is `asyncsgd.backends.log`."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module of this package that defines it.
_HOME = {
    # what to call
    "train": "api",
    "replay": "api",
    "load_run": "api",
    "load": "api",
    "compare": "api",
    "study": "studies.from_python",
    "simulate": "simulation.simulate",
    "check": "run.dry_run",
    "seeded": "tasks.models",
    "dropout_seed": "data.random",
    "TrainedRun": "run.from_python",
    "Look": "run.callbacks",
    "Replayed": "run.replay",
    # what is learned
    "Task": "tasks.base",
    "TensorData": "tasks.tensors",
    "DatasetData": "tasks.map_style",
    "found": "tasks.base",
    "Batch": "tasks.base",
    "Sums": "tasks.base",
    # on what
    "InProcess": "run.runtimes",
    "AllReduce": "run.runtimes",
    "Pipeline": "run.runtimes",
    "Processes": "run.runtimes",
    "Hogwild": "run.runtimes",
    "Virtual": "run.runtimes",
    "SeveralHosts": "settings.several_hosts",
    # by what
    "SGD": "core.optimizers",
    "AdamW": "core.optimizers",
    "Optimizer": "core.optimizers",
    "OptimizerRecipe": "core.optimizers",
    "Rule": "rules.contract",
    "Arrival": "rules.contract",
    "Reply": "rules.contract",
    "Start": "rules.contract",
    "View": "rules.contract",
    "Held": "rules.contract",
    "parse_rule": "rules",
    "describe_rules": "rules",
    **dict.fromkeys(
        [
            *("Asynchronous", "Synchronous", "KSync", "FixedDelay", "SSP", "StalenessAware"),
            *("DelayAdaptive", "Koloskova", "Polynomial", "Hinge", "Rennala", "Ringmaster", "KAsync", "KBatchAsync"),
            *("FedBuff", "Downpour", "DCASGD", "DANA", "GapAware", "OrMo", "LocalSGD", "DiLoCo", "AsyncLocalSGD"),
            *("EASGD", "Ringleader", "IA2SGD", "Rescaled"),
        ],
        "rules",
    ),
    # how long gradients take
    **dict.fromkeys(
        [
            *("Constant", "Power", "TwoGroups", "Exponential", "ShiftedExponential", "HalfNormal", "LogNormal"),
            *("Pareto", "Outages", "Infinite", "Slow", "Trace", "Network", "Sampler", "parse_speeds"),
        ],
        "simulation.speeds",
    ),
    **dict.fromkeys(["Leave", "Join"], "simulation.churn"),
    # what is simulated, and for how long
    **dict.fromkeys(
        [
            *("Mode", "Quadratic", "Tridiagonal", "Heterogeneous", "Logistic", "LogisticData", "parse_problem"),
            *("dirichlet_shares", "hashed_bag_of_words"),
        ],
        "simulation.problems",
    ),
    "Instance": "simulation.instance",
    # without a server
    **dict.fromkeys(["ADPSGD", "SGP", "StreamingDiLoCo"], "rules"),
    "Limits": "core.limits",
    # what a run writes down
    **dict.fromkeys(["Event", "Membership", "Evaluation", "Gradient", "Taken"], "records.events"),
    # the parts
    "FlatModel": "core.flat",
    "parameters_sha256": "core.flat",
    "Server": "core.server",
    **dict.fromkeys(["Arrived", "Joined", "Left", "Step", "Work"], "core.protocol"),
    "Worker": "worker.worker",
    "Defaults": "settings.groups",
    "RunFolder": "records.run_folder",
    "UsageError": "errors",
    "RunError": "errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'asyncsgd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncsgd.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
