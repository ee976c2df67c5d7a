"""However often and whenever a user asks a run to stop, its folder says how it ended."""

import os
import signal

import pytest
from doors import Finished, asyncsgd
from tasks import Plane


def stopped(folder, *numbers):
    """Train, and send these signals at the second arrival."""

    def report(record):
        if record.kind == "arrival" and record.version == 2:
            for number in numbers:
                os.kill(os.getpid(), number)

    run = asyncsgd.train(
        Plane(batch_size=4), samples=80, evaluations=2, folder=folder, checkpoint_every=8, report=report, quiet=True
    )
    assert run.status == Finished(folder).summary["status"]
    return Finished(folder)


# A hangup that is passed on by several parents is one request.
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
def test_the_first_signal_saves(numbers, tmp_path):
    run = stopped(tmp_path, *numbers)
    assert run.summary["status"] == "INTERRUPTED"
    assert (tmp_path / "model").is_dir()
    assert sorted((tmp_path / "checkpoints").glob("*.pt"))[-1].stem == "000000000008"


@pytest.mark.parametrize("numbers", [[signal.SIGINT] * 2, [signal.SIGHUP, signal.SIGTERM]])
def test_the_second_signal_leaves_with_the_records_alone(numbers, tmp_path):
    summary = stopped(tmp_path, *numbers).summary
    assert summary["status"] == "INTERRUPTED"
    assert (summary["num_updates"], summary["parameters_sha256"]) == (2, None)
    assert not (tmp_path / "model").exists()


def test_a_hangup_that_nohup_ignores_stays_ignored_and_handlers_are_as_before_the_run(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        assert stopped(tmp_path, signal.SIGHUP).summary["status"] == "DONE"
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)
