"""MLflow: a run of its server, or of a database beside the run folders."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from asyncsgd.records.events import DONE, INTERRUPTED
from asyncsgd.records.locks import wait_for_lock
from asyncsgd.records.trackers.base import PROJECT, Identity, Point

MOST_METRICS = 1000
"""In one request; MLflow takes no more."""

MOST_PARAMS = 100


class MLflow:
    """Sends to MLFLOW_TRACKING_URI. Without it, to ``mlflow.db`` in the folder that the run folder is in.

    The step is the samples; the time of a point is the beginning plus the training clock.
    """

    def __init__(self, identity: Identity) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{identity.shared / 'mlflow.db'}"
        self._began = time.time()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with open(identity.shared / ".lock-mlflow", "a", encoding="utf-8") as file:
            wait_for_lock(file)  # two runs that begin together would both make the database, and one would fail
            self._client = MlflowClient(uri)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        group = {} if identity.group is None else {"study": identity.group}
        run = self._client.create_run(experiment_id, run_name=identity.name, tags={**group, **identity.tags})
        self._run_id = run.info.run_id
        params = [Param(key, str(value)) for key, value in identity.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def send(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(name, value, int(1000 * (self._began + point.train_seconds)), point.num_samples)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST_METRICS])

    def close(self, status: str) -> None:
        shown = {DONE: "FINISHED", INTERRUPTED: "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._run_id, status=shown)
