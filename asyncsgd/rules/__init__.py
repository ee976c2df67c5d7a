"""The algorithms, by what they do with a gradient. `ALL` holds an example of each, for tests and ``--rule help``.

Importing this package imports torch; `asyncsgd.settings.groups` therefore keeps ``--rule`` as the text that was typed,
and `parse_rule` reads it where training starts."""

from __future__ import annotations

from asyncsgd.extensions import RULES, Registry
from asyncsgd.rules.asynchronous import (
    Asynchronous,
    DelayAdaptive,
    Hinge,
    Koloskova,
    Polynomial,
    Rescaled,
    Ringmaster,
    StalenessAware,
)
from asyncsgd.rules.bounded import SSP, FixedDelay
from asyncsgd.rules.collecting import KAsync, KBatchAsync, KSync, Rennala, Synchronous
from asyncsgd.rules.contract import PeerRule, Rule
from asyncsgd.rules.corrected import DANA, DCASGD, GapAware, OrMo
from asyncsgd.rules.gradient_tables import IA2SGD, Ringleader
from asyncsgd.rules.local_steps import EASGD, AsyncLocalSGD, DiLoCo, Downpour, FedBuff, LocalSGD
from asyncsgd.rules.without_server import ADPSGD, SGP, StreamingDiLoCo
from asyncsgd.settings.choices import Choices

ALL: tuple[Rule, ...] = (
    Asynchronous(),
    Synchronous(),
    KSync(quorum=2),
    KSync(quorum=2, interrupt=False),
    FixedDelay(delay=3),
    SSP(slack=1),
    StalenessAware(),
    DelayAdaptive(concurrency=2),
    Koloskova(),
    Polynomial(),
    Hinge(slope=1.0, allowed=1),
    Rennala(batch=3),
    Rennala(batch=3, interrupt=False),
    Ringmaster(threshold=4),
    Ringmaster(threshold=2, stops=True),
    KAsync(quorum=2),
    KBatchAsync(batch=3),
    FedBuff(buffer=2, num_local_steps=2),
    Downpour(n_push=2, n_fetch=4),
    DCASGD(compensation=0.5),
    DCASGD(compensation=0.5, adaptive=True),
    DANA(),
    GapAware(),
    OrMo(),
    LocalSGD(num_local_steps=3, post=2),
    DiLoCo(num_local_steps=2),
    AsyncLocalSGD(num_local_steps=3, dynamic=True),
    EASGD(num_local_steps=2),
    Ringleader(),
    IA2SGD(),
    Rescaled(),
)
"""Every rule of a server at least once, with parameters that a short test notices. A new rule is entered here, and
imported above; a rule that users import from `asyncsgd` also stands in `asyncsgd.__init__._HOME`."""

PEERS: tuple[PeerRule, ...] = (ADPSGD(), SGP(), StreamingDiLoCo())
"""The rules without a server, on the virtual clock."""

_OWN = {rule.name: type(rule) for rule in (*ALL, *PEERS)}
_CHOICES = Choices[Rule]("rule", "rules", "--rule", Registry("rule", RULES, _OWN, Rule))


def parse_rule(text: str) -> Rule:
    """Return the rule that ``NAME[:key=value,...]`` is, as ``--rule`` takes it.

    >>> parse_rule("k_sync:quorum=3")
    KSync(quorum=3, interrupt=True)

    Args:
        text: such as ``ringmaster:threshold=4``; `describe_rules` lists what there is.

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested), or a value out of range.
    """
    return _CHOICES.read(text)


def describe_rules() -> str:
    """The text of ``--rule help``: a line for each rule, with its parameters and their defaults."""
    return _CHOICES.help()
