"""Shared memory is for processors that keep the order of stores; elsewhere it is refused."""

from __future__ import annotations

import platform

import pytest

from asyncsgd.errors import UsageError
from asyncsgd.modes import runtime_of
from asyncsgd.settings.training import Job


@pytest.fixture(params=["x86_64", "AMD64", "i686"])
def x86(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: request.param)


@pytest.fixture(params=["aarch64", "arm64", "ppc64le", ""])
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: request.param)


@pytest.mark.usefixtures("x86")
def test_x86_takes_shared_memory() -> None:
    for job in (Job(mode="async"), Job(mode="async", transport="shared_memory"), Job(mode="hogwild")):
        assert runtime_of(job, 1).transport == "shared_memory"
    assert runtime_of(Job(mode="async", transport="process_group"), 1).transport == "process_group"


@pytest.mark.usefixtures("other")
def test_other_processors_refuse_shared_memory_by_name_and_say_what_to_type() -> None:
    with pytest.raises(UsageError, match=r"--transport shared_memory .*; type --transport process_group"):
        runtime_of(Job(mode="async", transport="shared_memory"), 1)
    with pytest.raises(UsageError, match=r"--mode hogwild .*; type --mode async --transport process_group"):
        runtime_of(Job(mode="hogwild"), 1)
    assert runtime_of(Job(mode="async"), 1).transport == "process_group"


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("job", [Job(clock="virtual"), Job(mode="sync"), Job(mode="single")])
def test_what_does_not_read_while_another_process_writes_runs_on_every_processor(job: Job) -> None:
    assert runtime_of(job, 1).transport is None
