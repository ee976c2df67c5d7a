"""asyncsgd: asynchronous and synchronous SGD, compared properly.

The public names are loaded when they are first used, so that ``import asyncsgd`` imports neither torch nor
transformers; `asyncsgd.torchrun` relies on this, being called from inside ``import torch``.

Reading order: `asyncsgd.rules.base`, `asyncsgd.rules.asynchronous`, `asyncsgd.server`,
`asyncsgd.runtime.virtual`, `asyncsgd.runtime.parameter_server`, `asyncsgd.training`, ``experiments/stilt_mlm.py``."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Rule": "rules.base",
    "Arrival": "rules.base",
    "Reply": "rules.base",
    "Start": "rules.base",
    "View": "rules.base",
    "Asynchronous": "rules.asynchronous",
    "Synchronous": "rules.synchronous",
    "StalenessAware": "rules.staleness_aware",
    "Ringmaster": "rules.ringmaster",
    "FlatModel": "flat",
    "TensorData": "tasks.tensors",
    "seeded": "models",
    "Server": "server",
    "Optimizer": "server",
    "Worker": "worker",
    "Settings": "settings",
    "RunFolder": "record",
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
