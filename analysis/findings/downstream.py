"""Scores after fine-tuning: per arm with intervals over pretraining seeds, and paired tests of the task's score.

The score is the macro-F1 of a classifier and the span F1 of a tagger.

The unit is the pretraining seed: the fine-tuning runs of one pretraining run are repetitions and are averaged first.
The baseline is the base model without intermediate training, fine-tuned in the same way with the same seeds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.findings.comparisons import FROM_SCRATCH, is_control
from analysis.findings.endpoints import COMPARED_BY_RANKS, DEFAULT_ALPHA, family_of
from analysis.findings.groups import Group, LeftOut
from analysis.findings.judging import Family, Paired, Question
from analysis.statistics.intervals import Interval, interval_over
from analysis.study.run import Run
from analysis.study.types import Arm, Study, StudyRun
from asyncsgd.study.finetuning import SCORES
from asyncsgd.study.plan import BASELINE


@dataclasses.dataclass(frozen=True)
class ClassScore:
    """The F1 of a class, or of a type of spans."""

    label: str
    f1: Interval


@dataclasses.dataclass(frozen=True)
class CheckScore:
    """Accuracy on one functional test of HateCheck."""

    functionality: str
    accuracy: Interval
    num_cases: int


@dataclasses.dataclass(frozen=True)
class DownstreamArm:
    """Scores after fine-tuning: the mean over fine-tuning seeds per pretraining seed, then over pretraining seeds."""

    arm: str
    label: str
    baseline: bool
    """Whether it had no intermediate training."""
    from_scratch: bool | None
    data: str
    num_finetuning_runs: int
    metric: str
    """What `score` is, of `SCORES`."""
    score: Interval
    accuracy: Interval | None
    per_seed: tuple[tuple[int, float], ...]
    """(pretraining seed, mean score of its fine-tuning runs), of the seeds in which none diverged."""
    num_diverged: int
    """Seeds in which one did; they are in no mean."""
    classes: tuple[ClassScore, ...]
    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Sum over runs; rows: true class, columns: predicted."""
    hatecheck: Interval | None
    functionalities: tuple[CheckScore, ...]


@dataclasses.dataclass(frozen=True)
class Scores:
    """The fine-tuning runs of a study that can be compared, and what is not among them."""

    runs: Mapping[str, Mapping[int, tuple[StudyRun, ...]]]
    """arm -> pretraining seed -> its fine-tuning runs, all of them with a result."""
    lost: Mapping[str, Mapping[int, str]]
    """arm -> pretraining seed -> why it is left out."""
    metric: str
    """What the scores are, of `SCORES`."""
    left_out: tuple[LeftOut, ...]

    def of_seed(self, arm: str, seed: int) -> float:
        """The mean score over the fine-tuning runs of one pretraining seed; below any other where one diverged."""
        return statistics.fmean(-math.inf if _diverged(run) else _score(run) for run in self.runs[arm][seed])


def scores_of(study: Study) -> Scores:
    """Collect the fine-tuning runs that were made with the same data and split."""
    finetuned = study.of("finetune")
    pretraining = {run.name: run for run in study.of("test")}
    left_out = []
    main = _main_data(finetuned)
    by_seed: dict[str, dict[int, list[StudyRun]]] = defaultdict(lambda: defaultdict(list))
    lost: dict[str, dict[int, str]] = defaultdict(dict)
    for run in finetuned:
        if run.seed is None:
            left_out.append(LeftOut(run.name, "nothing says which pretraining seed it belongs to"))
            continue
        parent = pretraining.get(run.parent or "")
        if run.run is None and parent is not None and parent.diverged:
            by_seed[run.arm][run.seed].append(run)  # nothing could be fine-tuned: that is its result
        elif not _usable(run):
            reason = run.unusable_because or f"it has no {' or '.join(SCORES)}"
            left_out.append(LeftOut(run.name, reason))
            lost[run.arm][run.seed] = f"no result came of {run.name}"
        elif run.run is not None and not _diverged(run) and _data_of(run.run) != main:
            left_out.append(
                LeftOut(run.name, "fine-tuned or scored on other data than the others: in no score with them")
            )
            lost[run.arm][run.seed] = f"{run.name} is on other data"
        else:
            by_seed[run.arm][run.seed].append(run)
    runs = {
        arm: {seed: tuple(own) for seed, own in sorted(of_arm.items()) if seed not in lost[arm]}
        for arm, of_arm in by_seed.items()
    }
    scored = [run for of_arm in runs.values() for own in of_arm.values() for run in own if not _diverged(run)]
    if not scored:
        runs = {}
    metrics = [metric for run in scored if (metric := metric_of(run)) is not None]
    return Scores(runs, lost, metrics[0] if metrics else next(iter(SCORES)), tuple(left_out))


def downstream_arms(
    study: Study, scores: Scores, labels: Mapping[str, str], problems: list[str]
) -> tuple[DownstreamArm, ...]:
    """One row per arm that was fine-tuned, the baseline first."""
    names = [
        arm.name
        for arm in study.arms
        if any(math.isfinite(scores.of_seed(arm.name, seed)) for seed in scores.runs.get(arm.name, ()))
    ]
    names.sort(key=lambda name: name != BASELINE)
    return tuple(_downstream_arm(study, scores, name, labels[name], problems) for name in names)


def _downstream_arm(study: Study, scores: Scores, name: str, label: str, problems: list[str]) -> DownstreamArm:
    by_seed = scores.runs[name]
    folders = {
        seed: [run.run for run in runs if run.run is not None and not _diverged(run)] for seed, runs in by_seed.items()
    }
    everything = [run for runs in folders.values() for run in runs]
    scored = ((seed, scores.of_seed(name, seed)) for seed in by_seed)
    per_seed = tuple((seed, mean) for seed, mean in scored if math.isfinite(mean))
    score = interval_over(value for _, value in per_seed)
    assert score is not None
    classes = sorted({key for run in everything for key in _f1_of_classes(run)})
    class_order, confusion = _confusion(name, everything, problems)
    classes.sort(key=lambda one: class_order.index(one) if one in class_order else len(class_order))
    return DownstreamArm(
        arm=name,
        label=label,
        baseline=name == BASELINE,
        from_scratch=_marked(everything),
        data=next((str(run.summary["data"]) for run in everything if run.summary.get("data")), "unknown data"),
        num_finetuning_runs=sum(map(len, by_seed.values())),
        metric=scores.metric,
        score=score,
        accuracy=_over_seeds(folders, lambda run: run.metrics.get("accuracy")),
        per_seed=per_seed,
        num_diverged=len(by_seed) - len(per_seed),
        classes=tuple(_class_scores(folders, classes)),
        labels=class_order,
        confusion=confusion,
        hatecheck=_over_seeds(folders, lambda run: _mapping(run.summary.get("hatecheck")).get("accuracy")),
        functionalities=tuple(_checks(folders)),
    )


def downstream_questions(
    study: Study, groups: Sequence[Group], scores: Scores, *, exploratory: bool
) -> tuple[tuple[Question, ...], tuple[LeftOut, ...]]:
    """The score of every arm against the reference of its group, and of the reference against the baseline.

    Not of every arm against the baseline: that would ask one question many times, of the same baseline runs, and with
    few seeds the adjustment for so many would hide any answer.
    """
    questions, left_out = [], []
    for group in groups:
        if group.reference is None or group.reference not in scores.runs:
            continue
        for arm in group.arms[1:]:
            if arm in scores.runs:
                kind = family_of(study.registration, scores.metric, group, arm, exploratory=exploratory)
                question = _question(study, scores, arm, group.reference, group.name, kind)
                questions.append(question)
                for seed, why in _lost(scores, arm, group.reference).items():
                    left_out.append(LeftOut(f"seed {seed}, fine-tuning, {question.comparison}", f"no pair: {why}"))
    if BASELINE in scores.runs:
        kind = "exploratory" if exploratory or study.registration is None else "secondary"
        for group in groups:
            there = [arm for arm in group.arms if arm in scores.runs and not is_control(study, study.arm(arm))]
            for arm in [group.reference] if group.reference in there else there:
                question = _question(study, scores, arm, BASELINE, group.name, kind)
                if question.values.treatment:
                    questions.append(question)
                else:
                    told = "it has no seed in common with the baseline, so there are no pairs"
                    left_out.append(LeftOut(question.comparison, told))
    elif scores.runs:
        left_out.append(
            LeftOut("baseline", "no fine-tuning run of the base model: what intermediate training gives is not known")
        )
    return tuple(questions), tuple(left_out)


def _lost(scores: Scores, treatment: str, reference: str) -> dict[int, str]:
    """Seeds in which a fine-tuning run of one of the two arms was lost, and why."""
    lost = {**scores.lost.get(reference, {}), **scores.lost.get(treatment, {})}
    return {seed: lost[seed] for seed in sorted(lost)}


def _question(study: Study, scores: Scores, treatment: str, reference: str, group: str, kind: Family) -> Question:
    registration = study.registration
    ours, theirs = scores.runs[treatment], scores.runs[reference]
    seeds = [seed for seed in ours if seed in theirs]
    notes = []
    if lost := _lost(scores, treatment, reference):
        notes.append(f"{len(lost)} pair{'s' * (len(lost) != 1)} left out (seed {', '.join(map(str, lost))})")
    for name, own in ((treatment, ours), (reference, theirs)):
        diverged = sum(any(_diverged(run) for run in own[seed]) for seed in seeds)
        if diverged:
            notes += [f"{name}: diverged {diverged}/{len(seeds)}", COMPARED_BY_RANKS]
    if any(_finetune_seeds(ours[seed]) != _finetune_seeds(theirs[seed]) for seed in seeds):
        notes.append("the fine-tuning seeds of the two arms differ")
    both = [run.run for seed in seeds for run in (*ours[seed], *theirs[seed]) if run.run is not None]
    notes += [FROM_SCRATCH] * (_marked(both) is True)
    parents = {run.parent for seed in seeds for run in (*ours[seed], *theirs[seed])}
    if any(run.run.settings.get("seconds") for run in study.of("test") if run.run is not None and run.name in parents):
        notes.append("from models at the end of equal seconds, not of equal samples")
    algorithm = BASELINE if reference == BASELINE else study.arm(reference).algorithm
    title = f"{_algorithm(study, treatment)} vs {algorithm}, {group}"
    return Question(
        comparison=title,
        treatment=treatment,
        reference=reference,
        group=group,
        endpoint=scores.metric,  # type: ignore[arg-type]  # of SCORES, which Endpoint has
        label=f"{SCORES[scores.metric]} after fine-tuning",
        unit=SCORES[scores.metric],
        # every arm meets the same runs of the baseline: what intermediate training gives is asked once, not per group
        family=kind if kind == "primary" else f"{kind} {scores.metric} {reference if algorithm == BASELINE else group}",
        kind=kind,
        values=Paired(
            tuple(scores.of_seed(treatment, seed) for seed in seeds),
            tuple(scores.of_seed(reference, seed) for seed in seeds),
            nothing_because=_nothing_learned({treatment: ours, reference: theirs}, seeds),
        ),
        lower_is_better=False,
        margin=None if registration is None else registration.margins.get(scores.metric),
        margin_reason="" if registration is None else registration.margin_reasons.get(scores.metric, ""),
        alpha=DEFAULT_ALPHA if registration is None else registration.alpha,
        notes=tuple(notes),
        improvement=_improvement(scores, reference, seeds),
    )


def _nothing_learned(arms: Mapping[str, Mapping[int, Sequence[StudyRun]]], seeds: Sequence[int]) -> str:
    """Why the scores of arms, each with its runs by seed, decide nothing; empty where all of them have learned."""
    names = [arm for arm, runs in arms.items() if not_learned(run for seed in seeds for run in runs[seed])]
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} no better than a tagger that gives every word the commonest tag"


def _improvement(scores: Scores, reference: str, seeds: Sequence[int]) -> float | None:
    """What intermediate training gave the reference over the baseline in these seeds; None where that is not known."""
    before = scores.runs.get(BASELINE, {})
    if reference == BASELINE or not seeds or not all(seed in before for seed in seeds):
        return None
    if any(_diverged(run) for arm in (reference, BASELINE) for seed in seeds for run in scores.runs[arm][seed]):
        return None
    gains = [scores.of_seed(reference, seed) - scores.of_seed(BASELINE, seed) for seed in seeds]
    return math.fsum(gains) / len(gains)


def _algorithm(study: Study, arm: str) -> str:
    found: Arm = study.arm(arm)
    return found.algorithm


def _finetune_seeds(runs: Sequence[StudyRun]) -> list[int | None]:
    return sorted((run.finetune_seed for run in runs), key=str)


def _usable(run: StudyRun) -> bool:
    return run.diverged or (run.usable and metric_of(run) is not None)


def _diverged(run: StudyRun) -> bool:
    """Also a run that was never made, because the one it would have started from diverged."""
    return run.run is None or run.diverged


def metric_of(run: StudyRun) -> str | None:
    """What a fine-tuned model is judged by; None where nothing says how good it is."""
    if run.run is None:
        return None
    return next((name for name in SCORES if run.run.metrics.get(name) is not None), None)


def _score(run: StudyRun) -> float:
    metric = metric_of(run)
    assert run.run is not None
    assert metric is not None
    value = run.run.metrics[metric]
    assert value is not None
    return value


def not_learned(runs: Iterable[StudyRun]) -> bool:
    """Whether taggers are no better, in the mean of their span F1 or of their accuracy, than one that gives every word
    the commonest tag; False where nothing says what that one would reach.
    """
    told = [run.run for run in runs if run.run is not None and not run.diverged]
    told = [run for run in told if _mapping(run.details.get("majority"))]
    for metric in ("span_f1", "accuracy"):
        pairs = [(run.metrics.get(metric), _mapping(run.details["majority"]).get(metric)) for run in told]
        known = [(own, least) for own, least in pairs if own is not None and isinstance(least, int | float)]
        if known and math.fsum(own - least for own, least in known) <= 0:
            return True
    return False


def _data_of(run: Run) -> tuple[str | None, Any]:
    return run.evaluation_set, run.summary.get("split")


def _main_data(runs: Sequence[StudyRun]) -> tuple[str | None, Any]:
    told = Counter(_data_of(run.run) for run in runs if run.run is not None and _usable(run) and not _diverged(run))
    if not told:
        return None, None
    return sorted(told, key=lambda one: (-told[one], str(one)))[0]


def _marked(runs: Sequence[Run]) -> bool | None:
    told = {run.summary.get("from_scratch") for run in runs}
    return True if True in told else False if False in told else None


def _over_seeds(folders: Mapping[int, Sequence[Run]], value: Any) -> Interval | None:
    """The mean over the fine-tuning runs of every seed, then the interval over the seeds that have a value."""
    means = []
    for runs in folders.values():
        known = [value(run) for run in runs]
        known = [float(one) for one in known if isinstance(one, int | float) and not isinstance(one, bool)]
        if known:
            means.append(statistics.fmean(known))
    return interval_over(means)


def _class_scores(folders: Mapping[int, Sequence[Run]], classes: Sequence[str]) -> list[ClassScore]:
    found = []
    for label in classes:
        interval = _over_seeds(folders, lambda run, label=label: _f1_of_classes(run).get(label))
        if interval is not None:
            found.append(ClassScore(label, interval))
    return found


def _f1_of_classes(run: Run) -> Mapping[str, Any]:
    """Of a classifier's classes, or a tagger's types of spans."""
    of_types = _mapping(run.details.get("per_type"))
    return _mapping(run.details.get("per_class_f1")) or {kind: _mapping(of_types[kind]).get("f1") for kind in of_types}


def _checks(folders: Mapping[int, Sequence[Run]]) -> list[CheckScore]:
    def of(run: Run, name: str) -> Mapping[str, Any]:
        return _mapping(_mapping(_mapping(run.summary.get("hatecheck")).get("functionalities")).get(name))

    runs = [run for own in folders.values() for run in own]
    names = sorted(
        {name for run in runs for name in _mapping(_mapping(run.summary.get("hatecheck")).get("functionalities"))}
    )
    found = []
    for name in names:
        interval = _over_seeds(folders, lambda run, name=name: of(run, name).get("accuracy"))
        cases = [of(run, name).get("num_cases") for run in runs]
        known = [case for case in cases if isinstance(case, int)]
        if interval is not None:
            found.append(CheckScore(name, interval, max(known, default=0)))
    return found


def _confusion(
    arm: str, runs: Sequence[Run], problems: list[str]
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The labels, and the sum of the runs' confusion matrices over them; nothing where they do not fit together."""
    told = {tuple(map(str, run.summary["labels"])) for run in runs if isinstance(run.summary.get("labels"), list)}
    if len(told) != 1:
        if told:
            problems.append(f"{arm}: its fine-tuning runs have different labels; there is no confusion matrix")
        return (), ()
    (labels,) = told
    if not any("confusion" in run.details for run in runs):  # of taggers
        return labels, ()
    size = len(labels)
    total = [[0] * size for _ in range(size)]
    for run in runs:
        matrix = _matrix(run)
        if matrix is None or len(matrix) != size:
            problems.append(f"{run.name}: its confusion matrix is damaged; there is none of {arm}")
            return labels, ()
        for row, own in zip(total, matrix, strict=True):
            for place, cell in enumerate(own):
                row[place] += cell
    return labels, tuple(tuple(row) for row in total)


def _matrix(run: Run) -> list[list[int]] | None:
    """The confusion matrix of a run, (true class, predicted class); None where there is none, or it is damaged."""
    matrix = run.details.get("confusion")
    if not isinstance(matrix, list) or not matrix:
        return None
    sound = all(
        isinstance(row, list) and len(row) == len(matrix) and all(isinstance(cell, int) for cell in row)
        for row in matrix
    )
    return matrix if sound else None


def num_predicted_classes(run: StudyRun) -> int | None:
    """How many classes a fine-tuned classifier ever predicted; None where nothing says it."""
    matrix = None if run.run is None else _matrix(run.run)
    return None if matrix is None else sum(any(column) for column in zip(*matrix, strict=True))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
