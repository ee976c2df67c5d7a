"""asyncsgd: asynchronous and synchronous SGD, compared properly.

The public names are loaded when they are first used, so ``import asyncsgd`` imports neither torch nor transformers.
`asyncsgd.torchrun` relies on this, because torch calls it from inside ``import torch``.

Reading order: `asyncsgd.rules.base`, `asyncsgd.rules.asynchronous`, `asyncsgd.server`, `asyncsgd.runtime.fit`,
`asyncsgd.runtime.virtual`, `asyncsgd.runtime.workers`, `asyncsgd.execute`, `asyncsgd.training`, `asyncsgd.api`."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    # what to call
    "train": "api",
    "replay": "api",
    "load_run": "api",
    "load": "api",
    "compare": "api",
    "simulate": "simulation.simulate",
    "check": "checking",
    "seeded": "models",
    "dropout_seed": "data.random",
    "TrainedRun": "api",
    "Replayed": "replaying",
    # what is learned
    "Task": "tasks.base",
    "TensorData": "tasks.tensors",
    "found": "tasks.base",
    "Batch": "tasks.base",
    "Sums": "tasks.base",
    # on what
    "InProcess": "runtimes",
    "AllReduce": "runtimes",
    "Pipeline": "runtimes",
    "Processes": "runtimes",
    "Hogwild": "runtimes",
    "Virtual": "runtimes",
    # by what
    "SGD": "optimizers",
    "AdamW": "optimizers",
    "Optimizer": "optimizers",
    "OptimizerRecipe": "optimizers",
    "Rule": "rules.base",
    "Arrival": "rules.base",
    "Reply": "rules.base",
    "Start": "rules.base",
    "View": "rules.base",
    "Held": "rules.base",
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
    "Budget": "runtime.base",
    # what a run writes down
    **dict.fromkeys(["Event", "Membership", "Evaluation", "Gradient", "Taken"], "records.events"),
    # the parts
    "FlatModel": "flat",
    "parameters_sha256": "flat",
    "Server": "server",
    **dict.fromkeys(["Arrived", "Joined", "Left", "Step", "Work"], "flights"),
    "Worker": "worker",
    "Defaults": "settings.training",
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
