"""The verdict of a synthetic study, and the parts of it that tests look at."""

from doors import asyncsgd
from synthetic import SyntheticArm

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")


def results_of(folder):
    return asyncsgd.load(folder)


def row_of(study, endpoint, treatment=ASYNC.name, reference=SYNC.name):
    """The row of `tests` on an endpoint of two arms."""
    (row,) = [
        row
        for row in study.tests.itertuples()
        if (row.endpoint, row.treatment, row.reference) == (endpoint, treatment, reference)
    ]
    return row


def trust_of(study, title):
    """The check with this title."""
    (item,) = [item for item in study.trust.itertuples() if item.title == title]
    return item
