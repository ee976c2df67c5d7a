"""What a setting of a run means: its value or default, and whether two values mean the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.runs import MACHINE
from asyncsgd.settings.groups import Budget, Defaults, Job, Machine, Output, Steps
from asyncsgd.settings.specs import specs_of
from asyncsgd.settings.yaml_reader import ABOUT_THE_RUN, OPTIMIZER_OPTIONS
from asyncsgd.simulation.churn import parse_churn
from asyncsgd.simulation.speeds import parse_network, parse_speeds
from asyncsgd.tasks import TASKS, task_class

# settings that name data or a model, of which the hashes that the run recorded are compared
BY_FINGERPRINT = ("data", "data_name", "eval_data", "split", "model", "model_name", "candidates")
NOT_COMPARED = {*specs_of(Output), *BY_FINGERPRINT, *MACHINE, *ABOUT_THE_RUN, "seed", "problem_seed", "predictions"}
"""Settings that are left out of `asked_of`: `gate.START_COLUMNS` and `runs.MACHINE` compare what the run recorded of
them, or they are seeds, paths, or say what is kept of predictions."""
NOT_KNOWN = "not known"
TEXT_WITHOUT_VALUE = re.compile(r"<.* at 0x[0-9a-f]+>|^<[\w ]+>$")
"""Matches the text of an object that does not say its value, such as ``<function f at 0x7f00>`` or ``<MyOption>``."""
PARSERS: Mapping[str, Callable[[str], Any]] = {
    "speeds": parse_speeds,
    "network": parse_network,
    "churn": lambda text: sorted(map(str, parse_churn(text))),
}
"""Setting -> what reads its text. Two texts mean the same where they are read as equal objects."""
RESOLVED_BY_SUMMARY = ("rule", "transport", "micro_batches", "batch_size", "sample_order", "normalises_over_batch")
"""Keys of summary.json that say what a setting became, and whether a layer normalises over the batch. They replace what
settings.yaml asked for, such as ``auto``."""


def asked_of(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was asked for, by setting, from settings.yaml and what summary.json resolves.

    The options of an optimizer become settings of their own; what is in `NOT_COMPARED` is left out.

    >>> asked_of({"width": 8, "optimizer": "Adagrad", "optimizer_options": {"eps": 1e-8}, "seed": 1}, {})
    {'width': 8, 'optimizer': 'Adagrad', 'eps': 1e-08}
    """
    asked = {**settings, **(settings.get(OPTIMIZER_OPTIONS) or {})}
    for key in RESOLVED_BY_SUMMARY:
        if summary.get(key) is not None:
            asked[key] = summary[key]
    return {key: value for key, value in asked.items() if key not in NOT_COMPARED}


def default_of(key: str, asked: Mapping[str, Any], task: str) -> Any:
    """The value that a setting has where a run with these other settings does not give it."""
    task_type: Any = task_class(task) if task in TASKS else None
    defaults = Defaults() if task_type is None else task_type.defaults
    has_samples = asked.get("samples") is not None or asked.get("epochs") is not None
    if key == "learning_rate":
        return defaults.rate(str(asked.get("optimizer", "adamw")))
    if key == "schedule":
        return defaults.schedule_of(has_samples)
    if key == "warmup":
        return defaults.warmup_of(has_samples)
    if key == "speeds" and asked.get("clock") == "virtual":
        return "constant:1"
    if key in ("weight_decay", "clip_norm"):
        return getattr(defaults, key)
    for flag_group in (Job, Budget, Steps, Machine, task_type):
        if flag_group is not None and key in specs_of(flag_group):
            return specs_of(flag_group)[key].default
    return NOT_KNOWN


def asked_or_default(key: str, run: Any) -> Any:
    """The value of a setting of a run."""
    if key in run.asked:
        return run.asked[key]
    return default_of(key, run.asked, run.task)


def meanings_in_runs(key: str, runs: Sequence[Any]) -> list[str]:
    """The `meaning` of a setting in each of `runs`."""
    texts = [meaning(key, asked_or_default(key, run)) for run in runs]
    if key == "rule" and len(set(texts)) > 1:
        from asyncsgd.rules import parse_rule  # torch takes a second to import

        texts = [_parsed(parse_rule, text) for text in texts]
    return texts


def meaning(key: str, value: Any) -> str:
    """A text that is equal for two values of a setting where they mean the same.

    A rule is not parsed here, since that imports torch: its texts are compared as they are written.
    `meanings_in_runs` parses two rules whose texts differ.
    """
    if value is None:
        return ""
    text = str(value)
    if TEXT_WITHOUT_VALUE.search(text):
        return NOT_KNOWN
    if key in PARSERS:
        return _parsed(PARSERS[key], text)
    try:
        return repr(float(text))
    except ValueError:
        if key == "optimizer":
            return text.casefold()
        return text


def means_the_same(key: str, here: Any, there: Any) -> bool:
    """Whether two values of a setting mean the same, as `meaning` has it.

    >>> means_the_same("samples", "1e3", 1000), means_the_same("speeds", "constant", "constant:1")
    (True, True)
    """
    return meaning(key, here) == meaning(key, there)


def _parsed(parse: Callable[[str], Any], text: str) -> str:
    try:
        return str(parse(text))
    except Exception:  # what somebody wrote into a file, or a rule of their own
        return text


def spelled_alike(key: str, texts: Iterable[str]) -> list[str]:
    """The texts of a setting, each replaced by the shortest of those that mean the same.

    >>> spelled_alike("speeds", ["slow:factor=3,worker=0", "slow:worker=0,factor=3,seconds=1.0"])
    ['slow:factor=3,worker=0', 'slow:factor=3,worker=0']
    """
    known = list(texts)
    shortest: dict[str, str] = {}
    for text in sorted(set(known), key=len):
        shortest.setdefault(meaning(key, text), text)
    return [shortest[meaning(key, text)] for text in known]
