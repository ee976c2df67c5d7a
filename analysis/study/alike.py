"""Which runs are alike, as their summaries and settings say: whose losses may be compared, which may share a mean."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from analysis.study.run import Condition, Run, labels

_OF_THE_CONDITION = frozenset(("mode", "rule", "nproc", "workers", "batch_size", "clock"))
"""Settings that `Condition` already holds."""

ALIKE_IN_SPITE_OF = frozenset(
    (
        *("seed", "evaluations", "evaluate_every"),
        *("data", "eval_data", "text_column", "eval_samples", "eval_mask", "eval_mask_prob"),  # see `EvaluatedOn`
    )
)
"""Settings in which runs that share a mean may differ."""


@dataclasses.dataclass(frozen=True)
class EvaluatedOn:
    """What the losses of runs have to share to be compared; None where a run does not say."""

    task: str | None
    data: str | None
    """See `Run.evaluation_set`."""
    loss_terms: float | None
    """In the evaluation set."""

    @classmethod
    def of(cls, run: Run) -> EvaluatedOn:
        seen = run.evaluations["weight"].dropna()
        loss_terms = float(seen.iloc[-1]) if len(seen) else run.summary.get("eval_weight")
        # Runs from before the task was written down are of masked language models, or of a closed-form problem.
        task = run.summary.get("task") or (None if loss_terms is None else "masked_lm")
        return cls(task, run.evaluation_set, loss_terms)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorting key, with what is not known last."""
        return tuple((value is None, value or 0) for value in (self.data, self.task, self.loss_terms))


def by_evaluation(runs: Iterable[Run]) -> dict[EvaluatedOn, list[Run]]:
    """The runs whose losses may be compared, in order. A run that ended before its first evaluation is among those on
    its data, where these have one evaluation set.
    """
    evaluated = [(run, EvaluatedOn.of(run)) for run in runs]
    known: dict[tuple[str | None, str | None], set[EvaluatedOn]] = defaultdict(set)
    for _, on in evaluated:
        if on.loss_terms is not None:
            known[on.task, on.data].add(on)
    groups: dict[EvaluatedOn, list[Run]] = defaultdict(list)
    for run, on in evaluated:
        alike = known[on.task, on.data]
        groups[next(iter(alike)) if on.loss_terms is None and len(alike) == 1 else on].append(run)
    return dict(sorted(groups.items(), key=lambda item: item[0].order))


def told_apart(evaluations: Collection[EvaluatedOn]) -> dict[EvaluatedOn, dict[str, str]]:
    """What each of them is called beside the others: the parts in which they differ, by name.

    >>> one, other = EvaluatedOn("masked_lm", "f00d", 64.0), EvaluatedOn("causal_lm", "f00d", 900.0)
    >>> told_apart([one, other])[one]
    {'task': 'masked_lm'}
    >>> told_apart([one, EvaluatedOn("masked_lm", "f00d", 500.0)])[one]
    {'loss terms': '64'}
    """
    several_tasks = len({on.task for on in evaluations}) > 1
    several_data = len({on.data for on in evaluations}) > 1
    number = Counter((on.task, on.data) for on in evaluations)
    return {
        on: {
            **({"task": str(on.task or "unknown")} if several_tasks else {}),
            **({"data": str(on.data or "unknown")} if several_data else {}),
            **(
                {"loss terms": "unknown" if on.loss_terms is None else f"{on.loss_terms:.15g}"}
                if number[on.task, on.data] > 1
                else {}
            ),
        }
        for on in evaluations
    }


def unlike(runs: Iterable[Run]) -> list[str]:
    """The names of what keeps runs of one condition out of one mean, each once."""
    evaluations = by_evaluation(runs)
    names = told_apart(evaluations)
    parts: dict[Condition, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    settings: set[str] = set()
    for on, group in evaluations.items():
        for run in group:
            for name, value in names[on].items():
                parts[run.condition][name].add(value)
        settings |= {key for kind in by_kind(group, ALIKE_IN_SPITE_OF) for key, _ in kind.settings}
    differing = {name for of in parts.values() for name, values in of.items() if len(values) > 1}
    return [name for name in ("task", "data", "loss terms") if name in differing] + sorted(settings)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What runs share that are alike."""

    condition: Condition
    settings: tuple[tuple[str, Any], ...] = ()
    """(key, value) of every other setting in which runs of this condition differ, the same keys in each of its kinds.
    """


def by_kind(runs: Iterable[Run], ignored: Collection[str]) -> dict[Kind, list[Run]]:
    """The runs of each kind.

    Args:
        ignored: settings that make no difference; the seed is one of them.
    """
    by_condition: dict[Condition, list[Run]] = defaultdict(list)
    for run in runs:
        by_condition[run.condition].append(run)
    kinds: dict[Kind, list[Run]] = defaultdict(list)
    for condition, group in by_condition.items():
        keys = {key for run in group for key in run.settings} | {"speeds"}
        varying = [
            key
            for key in sorted(keys - _OF_THE_CONDITION - set(ignored))
            if len({_hashable(setting(run, key)) for run in group}) > 1
        ]
        for run in group:
            kinds[Kind(condition, tuple((key, _hashable(setting(run, key))) for key in varying))].append(run)
    return dict(kinds)


def kind_labels(kinds: Iterable[Kind]) -> dict[Kind, str]:
    """A name for every kind, in order: that of its condition, and the settings that tell it from others of the same."""
    kinds = list(kinds)
    conditions = labels(kind.condition for kind in kinds)
    order = list(conditions)
    names = {}
    for kind in sorted(kinds, key=lambda kind: (order.index(kind.condition), repr(kind.settings))):
        shown = "".join(f", {key} {'not given' if value is None else value}" for key, value in kind.settings)
        names[kind] = conditions[kind.condition] + shown
    return names


def setting(run: Run, key: str) -> Any:
    """A run's value of a setting; None where nothing says it."""
    if key == "speeds" and run.summary.get("speeds") is not None:
        return run.summary["speeds"]
    return run.settings.get(key)


def _hashable(value: Any) -> Any:
    return (
        value if isinstance(value, str | int | float | bool | None) else json.dumps(value, sort_keys=True, default=str)
    )
