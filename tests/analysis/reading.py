"""The results of a synthetic study, and the parts of them that tests look at."""

from pathlib import Path

import numpy
from synthetic import SyntheticArm

from analysis.findings.results import Results, results
from analysis.study.read import load_study

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")


def results_of(folder: Path) -> Results:
    return results(load_study(folder), numpy.random.default_rng(0))


def row_of(found: Results, endpoint: str, treatment: str = ASYNC.name, reference: str = SYNC.name):
    (row,) = [
        row for row in found.tests if (row.endpoint, row.treatment, row.reference) == (endpoint, treatment, reference)
    ]
    return row


def trust_of(found: Results, title: str):
    (item,) = [item for item in found.trust if item.title == title]
    return item
