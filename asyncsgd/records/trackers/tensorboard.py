"""TensorBoard: an event file in the run folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from asyncsgd.records.events import DONE, FAILED
from asyncsgd.records.trackers.base import Identity, Point


class TensorBoard:
    """Writes ``RUN_DIR/tensorboard``. Steps are samples; the relative time is the training clock.

    The file is opened here, since tensorboard's own writer puts the host's name in the file's.
    """

    def __init__(self, identity: Identity) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._api, self._metadata, self._hparams = api_pb2, metadata, plugin_data_pb2
        self._began = time.time()
        folder = identity.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        file = open(folder / f"events.out.tfevents.{time.time_ns()}", "wb")  # noqa: SIM115 - closed by `close`
        self._writer = RecordWriter(file)
        self._write(wall_time=self._began, file_version="brain.Event:2")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=self._began)
        group = {} if identity.group is None else {"study": identity.group}
        for name, value in {**identity.settings, **group, **identity.tags}.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = str(value)
        self._write_session(metadata.SESSION_START_INFO_TAG, session_start_info=start)
        self._writer.flush()

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            seconds = self._began + point.train_seconds
            self._write(wall_time=seconds, step=point.num_samples, summary=self._summary(value=values))
        self._writer.flush()

    def close(self, status: str) -> None:
        shown = {DONE: "STATUS_SUCCESS", FAILED: "STATUS_FAILURE"}.get(status, "STATUS_UNKNOWN")
        end = self._hparams.SessionEndInfo(status=self._api.Status.Value(shown), end_time_secs=time.time())
        self._write_session(self._metadata.SESSION_END_INFO_TAG, session_end_info=end)
        self._writer.close()

    def _write_session(self, tag: str, **info: object) -> None:
        """For the table of settings (HPARAMS)."""
        content = self._hparams.HParamsPluginData(version=self._metadata.PLUGIN_DATA_VERSION, **info)
        value = self._summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = self._metadata.PLUGIN_NAME
        value.metadata.plugin_data.content = content.SerializeToString()
        self._write(wall_time=time.time(), summary=self._summary(value=[value]))

    def _write(self, **event: Any) -> None:
        self._writer.write(self._event(**event).SerializeToString())
