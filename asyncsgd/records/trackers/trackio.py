"""Trackio: a database in its own folder."""

from __future__ import annotations

from collections.abc import Sequence

from asyncsgd.records.trackers.base import PROJECT, Identity, Point


class Trackio:
    """Writes where trackio writes by default, or where its own variables say (TRACKIO_DIR)."""

    def __init__(self, identity: Identity) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=identity.name,
            group=identity.group,
            config={**identity.settings, **identity.tags},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.num_samples)

    def close(self, status: str) -> None:
        self._run.finish()
