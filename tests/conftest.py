"""What all tests share: one thread, and the same examples on every machine of the continuous integration."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)  # bits depend on the number of threads, and test processes share the machine

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
