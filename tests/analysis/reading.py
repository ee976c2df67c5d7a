"""The results of a synthetic study, and the parts of them that tests look at."""

import numpy
from synthetic import SyntheticArm

from analysis.findings.judging import Paired, Question
from analysis.findings.results import results
from analysis.study.read import load_study

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")


def results_of(folder):
    return results(load_study(folder), numpy.random.default_rng(0))


def row_of(found, endpoint, treatment=ASYNC.name, reference=SYNC.name):
    (row,) = [
        row for row in found.tests if (row.endpoint, row.treatment, row.reference) == (endpoint, treatment, reference)
    ]
    return row


def trust_of(found, title):
    (item,) = [item for item in found.trust if item.title == title]
    return item


def question(treatment, reference=None, **other):
    """About the difference of pairs, from a reference of 0 unless another is given; of times if there is a budget."""
    content = {"comparison": "", "treatment": "t", "reference": "r", "group": "g", "label": "", "unit": "nats"}
    content |= {"family": "f", "kind": "secondary", "lower_is_better": True, "margin": None, "alpha": 0.05, "notes": ()}
    content["endpoint"] = "loss_at_equal_samples" if other.get("budget") is None else "time_to_target"
    content["values"] = Paired(tuple(treatment), (0.0,) * len(treatment) if reference is None else tuple(reference))
    return Question(**content | other)
