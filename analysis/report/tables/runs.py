"""Tables of the runs: what was tried in tuning, how many there are, where they ran, every one, and what is left out."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from urllib.parse import quote

from analysis.findings.comparisons import FROM_SCRATCH
from analysis.findings.results import Results
from analysis.findings.tuning import TrialPoint
from analysis.report.tables.number_formats import nats, number
from analysis.report.tables.table import Cell, Table, badge, prose, tabled, value, words
from analysis.report.tables.text import MISSING, or_missing


def tuning(results: Results) -> Table:
    """Table 3: what was tried, with how many runs, and what was chosen."""
    rows = [
        [
            words("arm", results.labels.get(item.arm, item.arm)),
            value("trials", str(len(item.trials))),
            value("runs", str(item.num_runs)),
            words("seeds", ", ".join(map(str, sorted({seed for trial in item.trials for seed in trial.seeds})))),
            prose("grid: score (nats)", "; ".join(map(_trial, item.trials))),
            words("chosen", ", ".join(f"{key} {setting}" for key, setting in item.chosen) or MISSING),
            words("at the edge of the grid", Cell("yes", tone="warn") if item.at_edge else "no"),
        ]
        for item in results.tuning
    ]
    return tabled(
        "tuning",
        "Table 3. Tuning",
        rows,
        results.tuning,
        lead="On seeds that no test uses; a trial was chosen by its score, the mean final loss at equal samples, "
        "whatever the endpoint of the tests.",
    )


def _trial(trial: TrialPoint) -> str:
    rate = [] if trial.learning_rate is None else [or_missing(trial.learning_rate)]
    rest = [f"{key} {setting}" for key, setting in trial.settings if key != "learning_rate"]
    lost = sum(loss is None for loss in trial.losses)
    failed = f", {lost} of {len(trial.losses)} diverged or failed" if lost else ""
    return f"{', '.join([*rate, *rest]) or 'as it is'}: {nats(trial.score)}{failed}"


def counts(results: Results) -> Table:
    rows = [
        [
            words("arm", results.labels.get(item.arm, item.arm)),
            words("stage", item.stage),
            value("planned", or_missing(item.planned, ",")),
            value("finished", or_missing(item.finished, ",")),
            value("diverged", or_missing(item.diverged, ",")),
            value("failed", or_missing(item.failed, ",")),
            value("missing", or_missing(item.missing, ",")),
            value("set aside", or_missing(item.set_aside, ",")),
        ]
        for item in results.counts
    ]
    return tabled("counts", "Runs planned and finished", rows, results.counts)


def environment(results: Results) -> Table:
    """Table 4: hardware and versions, one column per distinct environment."""
    several = len(results.hardware) > 1
    found = [
        (f"environment {place} ({row.num_runs} runs)", dict(row.values) | {"arms": ", ".join(row.arms)})
        if several
        else ("value", dict(row.values))
        for place, row in enumerate(results.hardware, 1)
    ]
    names = dict.fromkeys(name for _, values in found for name in values)
    rows = [[words("what", name), *(prose(title, of.get(name, MISSING)) for title, of in found)] for name in names]
    return tabled("environment", "Table 4. Hardware and versions", rows, results.hardware)


def runs(results: Results, link: Callable[[str], str]) -> Table:
    rows = []
    for run in results.runs:
        seed = MISSING if run.seed is None else str(run.seed)
        seed += f", replicate {run.replicate}" * (run.replicate > 0)
        seed += "" if run.finetune_seed is None else f", fine-tuning {run.finetune_seed}"
        remarks = [
            run.remark,
            FROM_SCRATCH if run.from_scratch else "",
            "oversubscribed" if run.oversubscribed else "",
            f"from {run.parent}" if run.parent else "",
        ]
        rows.append(
            [
                words("run", Cell(run.name, href=link(run.name) if run.exists else "")),
                words("stage", run.stage),
                words("arm", run.arm),
                value("seed", seed),
                words("status", badge(run.status)),
                value("final loss (nats)", nats(run.loss)),
                value("score", nats(run.score)),
                value("seconds", number(run.train_seconds)),
                words("clock", run.clock),
                value("samples", or_missing(run.num_samples, ",")),
                value("learning rate", or_missing(run.learning_rate)),
                words("in the tests", "yes" if run.in_tests else "no"),
                prose("remark", "; ".join(text for text in remarks if text)),
            ]
        )
    return tabled("runs", "Every run", rows, results.runs)


def left_out(results: Results) -> Table:
    told = [(item.name, item.reason) for item in results.left_out]
    told += [("read, with a problem", problem) for problem in results.problems]
    rows = [[words("what", what), prose("why", why)] for what, why in told]
    return tabled("left-out", "Left out, and problems", rows, results.left_out)


def relative_link(prefix: str, name: str) -> str:
    """The address of a run folder as seen from the page; never one that begins with a scheme.

    >>> relative_link("runs", "test/sync-w4/s100"), relative_link(".", "javascript:alert(1)")
    ('./runs/test/sync-w4/s100/', './javascript%3Aalert%281%29/')
    """
    path = quote(posixpath.normpath(posixpath.join(prefix, name)), safe="/.-_~")
    return f"{path}/" if path.startswith((".", "/")) else f"./{path}/"
