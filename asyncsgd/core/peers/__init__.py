"""What decides in a run without a server: workers that keep models of their own, for `asyncsgd.core.loop`."""

from __future__ import annotations

from typing import Any

from asyncsgd.core.peers.gossip import Averaging, Pushing
from asyncsgd.core.peers.models import Peers
from asyncsgd.core.peers.streaming import Streaming
from asyncsgd.errors import UsageError
from asyncsgd.rules.contract import PeerRule, Rule
from asyncsgd.rules.without_server import ADPSGD, SGP, StreamingDiLoCo

_OF_RULE: dict[type[Rule], type[Peers[Any]]] = {ADPSGD: Averaging, SGP: Pushing, StreamingDiLoCo: Streaming}


def peers_of(rule: PeerRule, *arguments: Any, **named: Any) -> Peers[Any]:
    """The peers that follow `rule`; the other arguments are those of `Peers`.

    Raises:
        UsageError: if the rule is none of the library's own.
    """
    if type(rule) not in _OF_RULE:
        names = ", ".join(known.name for known in _OF_RULE)
        raise UsageError(f"rule {rule.name} has no server, and a package can bring no such rule: there are {names}")
    return _OF_RULE[type(rule)](rule, *arguments, **named)


def check_virtual(rule: Rule, *, network: bool, churn: bool) -> None:
    """Refuse what a rule without a server has no answer to.

    Raises:
        UsageError: for a network, whose link is the server's, and for workers that leave and join.
    """
    if isinstance(rule, PeerRule) and (network or churn):
        flag = "--network" if network else "--churn"
        raise UsageError(f"{flag} is for rules of a server; {rule.name} has none; drop it")
