"""Shared memory is for processors that keep the order of stores; elsewhere it is refused."""

from __future__ import annotations

import pytest

from asyncsgd.errors import UsageError
from asyncsgd.prepare import check_transport, transport_of
from asyncsgd.settings import Job


@pytest.mark.parametrize("processor", ["x86_64", "AMD64", "i686"])
def test_x86_takes_shared_memory(processor: str) -> None:
    for job in (Job(), Job(transport="shared_memory"), Job(mode="hogwild")):
        check_transport(job, processor)
        assert transport_of(job, processor) == "shared_memory"
    assert transport_of(Job(transport="process_group"), processor) == "process_group"


@pytest.mark.parametrize("processor", ["aarch64", "arm64", "ppc64le", ""])
def test_other_processors_refuse_shared_memory_by_name_and_say_what_to_type(processor: str) -> None:
    with pytest.raises(UsageError, match=r"--transport shared_memory .*; type --transport process_group"):
        check_transport(Job(transport="shared_memory"), processor)
    with pytest.raises(UsageError, match=r"--mode hogwild .*; type --mode async --transport process_group"):
        check_transport(Job(mode="hogwild"), processor)
    assert transport_of(Job(), processor) == "process_group"


@pytest.mark.parametrize("job", [Job(), Job(clock="virtual"), Job(mode="sync"), Job(mode="single")])
def test_what_does_not_read_while_another_process_writes_runs_on_every_processor(job: Job) -> None:
    check_transport(job, "aarch64")
