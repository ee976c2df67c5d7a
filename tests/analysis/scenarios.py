"""Studies of two or more arms in which a verdict could mislead, and the words that are read first in their report.

A scenario makes a study, and the fixture `approved` compares the words of its results, which hold the family, the word
and the reason of every row, with ``tests/analysis/approved/NAME.txt``. A better sentence changes that file alone.
"""

from doors import asyncsgd
from synthetic import SyntheticArm, straight, write_study

TARGET = 5.0
"""The registered target of every scenario, and `BUDGET_SECONDS` is what every run was given."""
BUDGET_SECONDS = 100.0
FIRST_LOSS = 6.0
LOSSES_DECIDE = {"primary": {"endpoint": "loss_at_equal_samples", "num_workers": 4, "clock": "virtual"}, "targets": {}}
SYNC, ASYNC = (SyntheticArm(name, settings={"seconds": BUDGET_SECONDS}) for name in ("sync", "async"))


def reaches(seconds, *, evaluations=21, samples=1600, end=BUDGET_SECONDS):
    """A straight curve that is at the target after `seconds`."""
    slope = (FIRST_LOSS - TARGET) / seconds
    curve = []
    for number in range(evaluations):
        share = number / (evaluations - 1)
        loss = FIRST_LOSS - slope * end * share
        curve.append((round(samples * share), end * share, loss))
    return curve


def ends_at(loss, *, first=FIRST_LOSS, evaluations=21, end=BUDGET_SECONDS):
    """A straight curve from `first` to `loss`."""
    return straight(first, loss, seconds=end, samples=1600, evaluations=evaluations)


def diverges(curve, at):
    """The same curve, whose loss is no number from evaluation `at` on."""
    return [*curve[:at], (*curve[at][:2], None)]


EIGHT = (60, 62, 64, 66, 68, 70, 72, 74)
"""Seconds to the target in eight seeds of a reference."""
SOONER = (40, 41, 42, 43, 44, 45, 46, 48)
"""Of a treatment that is sooner in every seed."""


def two_arms(folder, reference, treatment, *, arms=(SYNC, ASYNC), registration=None, afterwards=None):
    """As `study_of`, of two `arms` (reference, treatment)."""
    both = list(zip(arms, (reference, treatment), strict=True))
    return study_of(folder, both, registration=registration, afterwards=afterwards)


def study_of(folder, arms, *, registration=None, afterwards=None):
    """A registered study of arms with their curves, the reference first; a curve is a seed from 100 on.

    Args:
        registration: other values of analysis.yaml.
        afterwards: changes the written folder before it is read.
    """
    (reference, curves), *_ = arms
    declared = {"num_seeds": len(curves), "targets": {reference.name: TARGET}}
    if reference.clock == "measured":
        declared["primary"] = {"endpoint": "time_to_target", "num_workers": 4, "clock": "measured"}
    named = {arm.name: of_arm for arm, of_arm in arms}
    write_study(folder, named, [arm for arm, _ in arms], registration=declared | dict(registration or {}))
    if afterwards is not None:
        afterwards(folder)
    return results_of(folder)


results_of = asyncsgd.load


def row_of(study, endpoint, treatment=ASYNC.name, reference=SYNC.name):
    """The row of `tests` on an endpoint of two arms."""
    tests = study.tests
    of_arms = (tests["treatment"] == treatment) & (tests["reference"] == reference)
    (row,) = tests[of_arms & (tests["endpoint"] == endpoint)].itertuples()
    return row


def trust_of(study, title):
    """The check with this title."""
    (item,) = study.trust[study.trust["title"] == title].itertuples()
    return item


def words(found):
    """What a report says at its top: headlines with their small type, and the verdict of every row with its reason."""
    lines = [found.verdict, ""]
    for row in found.tests.itertuples():
        lines.append(f"{row.family} | {row.treatment} vs {row.reference} | {row.endpoint} | {row.word} | {row.reason}")
        lines += [f"  {note}" for note in row.notes]
    return "\n".join(lines) + "\n"
