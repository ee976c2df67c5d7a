"""Tables of the scores after fine-tuning: per arm, per class, per functional test."""

from __future__ import annotations

from analysis.findings.results import Results
from analysis.report.tables.number_formats import between, nats
from analysis.report.tables.table import Cell, Table, tabled, value, words
from analysis.report.tables.text import or_missing
from asyncsgd.study.finetuning import SCORES


def downstream(results: Results) -> Table:
    rows = [
        [
            words(
                "arm",
                Cell(item.label, "no intermediate training" * (item.baseline and "intermediate" not in item.label)),
            ),
            words("data", item.data),
            value(f"{SCORES[item.metric]} [95 % CI]", between(item.score, nats)),
            value("accuracy [95 % CI]", between(item.accuracy, nats)),
            value("HateCheck accuracy [95 % CI]", between(item.hatecheck, nats)),
            value(
                "fine-tuning runs",
                Cell(str(item.num_finetuning_runs), f"{item.num_diverged} seeds diverged" if item.num_diverged else ""),
            ),
        ]
        for item in results.downstream
    ]
    return tabled(
        "downstream",
        "Scores after fine-tuning",
        rows,
        results.downstream,
        lead="Mean over the fine-tuning runs of a pretraining seed, then over pretraining seeds, with 95 % t "
        "intervals.",
    )


def classes(results: Results) -> Table:
    arms = [item for item in results.downstream if item.classes]
    names = list(dict.fromkeys(score.label for item in arms for score in item.classes))
    rows = []
    for item in arms:
        scores = {score.label: score.f1 for score in item.classes}
        rows.append(
            [
                words("arm", item.label),
                *(value(f"F1 of {name} [95 % CI]", between(scores.get(name), nats)) for name in names),
            ]
        )
    return tabled("classes", "F1 per class", rows, arms)


def hatecheck(results: Results) -> Table:
    arms = [item for item in results.downstream if item.functionalities]
    cases = {check.functionality: check.num_cases for item in arms for check in item.functionalities}
    found = [(item.label, {check.functionality: check.accuracy for check in item.functionalities}) for item in arms]
    rows = [
        [
            words("functional test", name),
            value("cases", or_missing(num_cases, ",")),
            *(value(f"{label} [95 % CI]", between(scores.get(name), nats)) for label, scores in found),
        ]
        for name, num_cases in cases.items()
    ]
    return tabled("hatecheck", "HateCheck: accuracy per functional test", rows, arms)
