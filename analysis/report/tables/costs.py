"""The table of what runs cost."""

from __future__ import annotations

from analysis.findings.costs import Cost
from analysis.report.tables.number_formats import number, percent
from analysis.report.tables.table import Headed, value

GIB = 2.0**30
ABOUT_COSTS = (
    "Computing, waiting, communicating: shares of the workers' time; in synchronous runs on processes gradients are "
    "exchanged while they are computed. Applying: share of the training clock. Memory: the sum of the peaks of a run's "
    "processes, shared pages counted in each. MFU: operations of the model over what a matrix product reached on as "
    "many devices. Means over runs."
)


def cost_cells(cost: Cost) -> list[Headed]:
    """The cells of one row."""
    return [
        value("computing", percent(cost.compute)),
        value("waiting", percent(cost.wait)),
        value("communicating", percent(cost.communicate)),
        value("applying", percent(cost.apply)),
        value("tokens/s", number(cost.tokens_per_second)),
        value("MFU", percent(cost.utilisation)),
        value("busy cores", number(cost.cores)),
        value("memory, GiB", number(None if cost.resident_bytes is None else cost.resident_bytes / GIB)),
        value("GPU, GiB", number(cost.gpu_bytes / GIB) if cost.gpu_bytes else "-"),
    ]
