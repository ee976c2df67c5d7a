"""On what bits of results depend: the processor, what limits its instructions, and libraries. Torch is not imported."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
)
"""Environment variables by which torch, oneDNN, MKL, OpenBLAS and numpy choose other instructions."""
BITS = (
    "device",
    "processor",
    "instruction_limits",
    "cpu_capability",
    "torch_build",
    "numpy",
    "threads_per_worker",
    "gpus",
    "gpu_libraries",
)
"""Facts of an environment that may change the last bit of a sum."""

_X86 = {"vendor": "vendor_id", "family": "cpu family", "model": "model", "stepping": "stepping", "flags": "flags"}
_ARM = {
    "vendor": "CPU implementer",
    "family": "CPU architecture",
    "model": "CPU part",
    "stepping": "CPU revision",
    "flags": "Features",
}


def processor() -> dict[str, str | None]:
    """The processor's name, vendor, family, model and stepping, and a hash of its flags, which are the instructions it
    has. Names alone do not tell processors apart: "Intel(R) Xeon(R) Processor" stands for several. What the system does
    not tell is None.
    """
    if sys.platform == "darwin":
        return _from_sysctl()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return processor_in(text)


def processor_in(cpuinfo: str) -> dict[str, str | None]:
    """The first processor that Linux names in ``/proc/cpuinfo``; see `processor`.

    >>> processor_in("model name\\t: AMD EPYC\\ncpu family\\t: 25\\nmodel\\t\\t: 1\\nstepping\\t: 1\\n\\nmodel name: B")
    {'name': 'AMD EPYC', 'vendor': None, 'family': '25', 'model': '1', 'stepping': '1', 'flags': None}
    >>> processor_in("CPU implementer: 0x41\\nCPU architecture: 8\\nCPU part: 0xd0c")["name"]
    'ARM 0x41 0xd0c'
    """
    first = cpuinfo.strip().partition("\n\n")[0]
    told = dict(re.findall(r"^(.+?)[ \t]*:[ \t]*(.*?)[ \t]*$", first, re.MULTILINE))
    keys = _ARM if "CPU part" in told else _X86
    found: dict[str, str | None] = {key: told.get(name) for key, name in keys.items()}
    if found["flags"] is not None:
        found["flags"] = _digest(found["flags"])
    name = told.get("model name") or told.get("Model")
    if name is None and "CPU part" in told:  # Linux has no names of ARM's processors
        name = f"ARM {found['vendor']} {found['model']}"
    return {"name": name or platform.processor() or None, **found}


def _from_sysctl() -> dict[str, str | None]:
    """As `processor`, of macOS."""
    names = {"vendor": "vendor", "family": "family", "model": "model", "stepping": "stepping", "flags": "features"}
    found = {key: _sysctl(f"machdep.cpu.{name}") for key, name in names.items()}
    if found["flags"] is not None:
        found["flags"] = _digest(found["flags"])
    return {"name": _sysctl("machdep.cpu.brand_string") or platform.processor() or None, **found}


def _sysctl(name: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip() or None
    return None


def _digest(flags: str) -> str:
    """A short hash of flags, in whatever order the system lists them."""
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]


def instruction_limits() -> dict[str, str]:
    """The environment variables among `LIMITS` that are set."""
    return {name: os.environ[name] for name in LIMITS if os.environ.get(name)}


def environments_of(folder: Path) -> list[dict[str, Any]]:
    """The environments in which a run was made: of every rank, and of all that went on with it. Those that cannot be
    read are left out as if nothing were recorded.
    """
    found = []
    for path in sorted(folder.glob("environment*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        if not isinstance(content, dict):
            content = {}
        versions = content.get("versions")
        if isinstance(versions, dict):
            content["numpy"] = versions.get("numpy")
        ranks = content.get("hardware_of_ranks")
        if not isinstance(ranks, list):
            ranks = [{}]
        found += [content | rank for rank in ranks if isinstance(rank, dict)]
    return found


def rounds_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two environments are known to differ in what the last bit of a sum may depend on.

    >>> rounds_otherwise({"cpu_capability": "AVX2"}, {"cpu_capability": "AVX512"})
    True
    >>> rounds_otherwise({}, {"cpu_capability": "AVX512"})
    False
    """
    return any(name in one and name in other and one[name] != other[name] for name in BITS)


def unlike(recorded: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> str:
    """Whether a result that was recorded elsewhere may have other bits here, as a sentence for brackets; empty where
    all that bits depend on is recorded and equal.

    >>> here = dict.fromkeys(BITS, "") | {"cpu": "Intel Xeon", "cpu_capability": "AVX512"}
    >>> unlike([here], here)
    ''
    >>> unlike([here | {"cpu": "AMD EPYC", "processor": {"family": "25"}}], here)
    'recorded on AMD EPYC (AVX512), replayed on Intel Xeon (AVX512)'
    >>> unlike([here | {"cpu_capability": "AVX2"}, here], here)
    'recorded on Intel Xeon (AVX2), replayed on Intel Xeon (AVX512)'
    """
    if not recorded:
        return f"recorded in an unknown environment, replayed on {_described(here, BITS)}"
    for environment in recorded:
        missing = [name for name in BITS if name not in environment]
        differing = [name for name in BITS if environment.get(name) != here.get(name)]
        if differing:
            said = _described(environment, differing)
            if missing:
                said += f"; its {_listed(missing)} {'is' if len(missing) == 1 else 'are'} not recorded"
            return f"recorded on {said}, replayed on {_described(here, differing)}"
    return ""


def _described(environment: Mapping[str, Any], named: Sequence[str]) -> str:
    """The processor or the GPUs, and in brackets what is among `named` and a person may want to read."""
    gpus = environment.get("gpus")
    name = environment.get("cpu") or "an unknown processor"
    if gpus and environment.get("device") == "cuda":
        name = str(gpus[0])
    facts = [environment.get("cpu_capability")]
    if "torch_build" in named and environment.get("torch_build"):
        facts.append(f"torch {environment['torch_build']}")
    if "threads_per_worker" in named and environment.get("threads_per_worker"):
        facts.append(f"{environment['threads_per_worker']} threads")
    limits = environment.get("instruction_limits")
    if "instruction_limits" in named and isinstance(limits, dict):
        facts += [f"{key}={value}" for key, value in limits.items()]
    shown = ", ".join(str(fact) for fact in facts if fact)
    return f"{name} ({shown})" if shown else str(name)


def _listed(names: Sequence[str]) -> str:
    words = [name.replace("_", " ") for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
