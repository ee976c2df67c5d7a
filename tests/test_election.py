"""Who leads a run in which hosts come and go, and what cannot take part in one."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from doors import UsageError, cli
from hypothesis import given
from hypothesis import strategies as st

from asyncsgd.backends.election import agree, parts_of
from asyncsgd.backends.launch import Launch
from asyncsgd.backends.link import Claim
from asyncsgd.backends.pair import Rendezvous
from asyncsgd.errors import RunError

CLAIMS = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 5)), min_size=1, max_size=5)


def claims_of(drawn):
    return [
        Claim(f"name{number}", ranks, f"10.0.0.{number}", num_samples, "", 0)
        for number, (ranks, num_samples) in enumerate(drawn)
    ]


@given(CLAIMS)
def test_the_newest_checkpoint_leads_and_hosts_and_workers_are_numbered_without_gaps(drawn):
    claims = claims_of(drawn)
    parts = parts_of(claims)
    assert sorted(part.number for part in parts) == list(range(len(claims)))
    workers = []
    for claim, part in zip(claims, parts, strict=True):
        workers += range(part.first, part.first + claim.num_ranks)
    assert sorted(workers) == list(range(len(workers)))
    (leader,) = [number for number, part in enumerate(parts) if part.number == 0]
    assert parts[leader].first == 0
    assert {part.leader for part in parts} == {claims[leader].address}
    known = [num_samples for _, num_samples in drawn if num_samples is not None]
    if known:
        assert claims[leader].num_samples == max(known)
    else:
        assert leader == 0


def test_a_run_that_lies_on_a_host_that_is_gone_is_not_begun_again():
    here = [Claim("b", 1, "10.0.0.2", None, "a", 320), Claim("c", 1, "10.0.0.3", None, "", 0)]
    with pytest.raises(RunError, match="the run lies on a, which is not here; start torchrun there too"):
        parts_of(here)
    copy = Claim("c", 1, "10.0.0.3", 320, "", 0)
    parts = parts_of([here[0], copy])
    assert [part.number for part in parts] == [1, 0]
    assert "a, which led this run from 320 samples on, is not here" in parts[1].note
    newer = Claim("c", 1, "10.0.0.3", 640, "", 0)
    assert parts_of([here[0], newer])[1].note == ""


def test_a_host_with_another_token_is_left_out():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = probe.getsockname()
    told = []
    claims = claims_of([(1, None), (2, 320), (1, 640)])

    def take_part(number):
        token = b"another token" if number == 2 else b"the token"
        way = Rendezvous(store=store, prefix="election", token=token)
        return agree(number, 3, claims[number], way, None, 20.0, lambda: None, told.append)

    with ThreadPoolExecutor() as threads:
        first, second, stranger = [threads.submit(take_part, number) for number in range(3)]
        assert [first.result().number, first.result().first] == [1, 2]
        assert [second.result().number, second.result().num_hosts, second.result().num_samples] == [0, 2, 320]
        with pytest.raises(RunError, match="it does not prove that it has the token"):
            stranger.result()
    (note,) = told
    assert "torchrun's host 2 does not take part: it does not prove that it has the token" in note


def test_a_host_that_led_and_is_here_leads_on_without_a_checkpoint():
    claims = [Claim("a", 1, "10.0.0.1", None, "b", 0), Claim("b", 2, "10.0.0.2", None, "", 0)]
    assert [(part.number, part.first) for part in parts_of(claims)] == [(1, 2), (0, 0)]


def test_where_hosts_come_and_go_there_are_at_most_as_many_workers_as_all_hosts_have():
    one = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "ASYNCSGD_MOST_HOSTS": "3"}
    alone = Launch.read(one, 1, nproc_given=False)
    assert [alone.num_workers, alone.rank, alone.several_hosts] == [3, 0, True]
    two = one | {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Launch.read(two, 5, nproc_given=True).num_workers == 5
    with pytest.raises(UsageError, match="the launcher started 4 processes, more than --nproc 3"):
        Launch.read(two, 3, nproc_given=True)


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        ("--mode sync", {}, "synchronous ranks cannot come and go"),
        ("--mode async --trust-network", {"TORCHELASTIC_RUN_ID": "none"}, "type --rdzv-id NAME as well"),
        ("--mode async --trust-network", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "in front of torchrun"),
        ("--mode async --trust-network", {}, "type --run-dir FOLDER on every host"),
        ("--mode async --trust-network --run-dir run --overwrite", {}, "drop --overwrite"),
        ("--mode async", {}, "need a token"),
    ],
)
def test_what_cannot_come_and_go_is_refused_with_what_to_type(flags, variables, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASYNCSGD_TOKEN", raising=False)
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    launched |= {"ASYNCSGD_MOST_HOSTS": "2", "TORCHELASTIC_RUN_ID": "job"}
    for name, value in {**launched, **variables}.items():
        monkeypatch.setenv(name, value)
    ended = cli(f"stilt_mlm.py {flags}")
    assert ended.code == 2
    assert said in ended.err
    assert list(tmp_path.iterdir()) == []
