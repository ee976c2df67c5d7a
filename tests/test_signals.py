"""However often and whenever a user asks a run to stop, its folder says how it ended."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from doors import Finished, StopRequest, asyncsgd
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
    assert summary["num_updates"] == 2
    assert summary["parameters_sha256"] is None
    assert not (tmp_path / "model").exists()


def test_a_run_that_is_stopped_as_soon_as_it_goes_on_says_so_and_goes_on_later(tmp_path):
    def train(report=None):
        return asyncsgd.train(
            Plane(batch_size=4), samples=80, folder=tmp_path, checkpoint_every=8, report=report, quiet=True, resume=True
        )

    def stop_at(kind):
        return lambda record: record.kind == kind and os.kill(os.getpid(), signal.SIGINT)

    assert train(stop_at("arrival")).status == "INTERRUPTED"
    begun_again = train(stop_at("resume"))
    assert begun_again.status == Finished(tmp_path).summary["status"] == "INTERRUPTED"
    assert "before training" in Finished(tmp_path).summary["message"]
    assert train().status == "DONE"


def test_a_hangup_that_nohup_ignores_stays_ignored_and_handlers_are_as_before_the_run(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handlers = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers.append(signal.getsignal(number))
        assert stopped(tmp_path, signal.SIGHUP).summary["status"] == "DONE"
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    finally:
        signal.signal(signal.SIGHUP, before)


def lock_in_c():
    """A lock of pthread, its library, a list, and a function that frees the lock and notes its argument in the list."""
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    called = []

    def let_go(name):
        called.append(name)
        libc.pthread_mutex_unlock(lock)

    return lock, libc, called, let_go


def test_a_second_signal_frees_a_main_thread_that_waits_in_c_and_hears_nothing():
    lock, libc, called, let_go = lock_in_c()
    for seconds in (0.2, 0.4):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
    listens = (functools.partial(let_go, name) for name in ("note", "free", "leave"))
    libc.pthread_mutex_lock(lock)
    with StopRequest() as stop, stop.during_a_run(), pytest.raises(KeyboardInterrupt), stop.watched(*listens):
        libc.pthread_mutex_lock(lock)
    assert called == ["free"]


def test_after_one_signal_a_step_that_does_not_end_is_noted_and_then_ended(monkeypatch):
    monkeypatch.setattr("asyncsgd.core.signals._NOTE_SECONDS", 0.2)
    monkeypatch.setattr("asyncsgd.core.signals._PATIENCE", 0.6)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    lock, libc, called, let_go = lock_in_c()
    listens = (functools.partial(called.append, "note"), functools.partial(let_go, "free"), called.clear)
    too_late = threading.Timer(30.0, let_go, ["too late"])  # so that the test ends also where nobody frees it
    too_late.start()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    libc.pthread_mutex_lock(lock)
    with StopRequest() as stop, stop.during_a_run(), pytest.raises(KeyboardInterrupt), stop.watched(*listens):
        libc.pthread_mutex_lock(lock)
    too_late.cancel()
    assert called == ["note", "free"]


def test_a_signal_to_a_process_that_is_forked_amid_a_run_is_no_request_of_the_run():
    with StopRequest() as stop, stop.during_a_run(), stop.watched(*3 * [lambda: None]):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert not stop()


STOPS = """
import os, signal, sys
from doors import asyncsgd
from tasks import Plane

def report(record):
    if record.kind == "arrival" and record.version == 2:
        os.kill(os.getpid(), signal.SIGTSTP)

asyncsgd.train(Plane(batch_size=4), samples=80, evaluations=2, folder=sys.argv[1], report=report, quiet=True)
"""


def test_seconds_in_which_ctrl_z_holds_a_run_are_no_seconds_of_training(tmp_path):
    # In a process group of its own, whose parent is in another: else the system ignores the signal.
    command = [sys.executable, "-c", STOPS, str(tmp_path / "run")]
    with subprocess.Popen(command, process_group=0, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}) as held:
        _, status = os.waitpid(held.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        began = time.monotonic()
        time.sleep(2.0)
        held_for = time.monotonic() - began
        os.kill(held.pid, signal.SIGCONT)
        assert held.wait(60) == 0
    assert Finished(tmp_path / "run").summary["status"] == "DONE"
    assert Finished(tmp_path / "run").summary["train_seconds"] < held_for
