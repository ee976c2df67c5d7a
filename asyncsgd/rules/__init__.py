"""The algorithms, one paper per file. `ALL` holds an example of each, for the contract tests and ``--rule help``.

Importing this package imports torch; `asyncsgd.settings.training` therefore keeps the text of ``--rule``, and
`parse_rule` reads it where training starts."""

from __future__ import annotations

from asyncsgd.named_choices import Kind
from asyncsgd.rules.async_local_sgd import AsyncLocalSGD
from asyncsgd.rules.asynchronous import Asynchronous
from asyncsgd.rules.base import PeerRule, Rule
from asyncsgd.rules.dana import DANA
from asyncsgd.rules.dc_asgd import DCASGD
from asyncsgd.rules.delay_scaled import DelayAdaptive, Hinge, Koloskova, Polynomial, StalenessAware
from asyncsgd.rules.diloco import DiLoCo
from asyncsgd.rules.downpour import Downpour
from asyncsgd.rules.easgd import EASGD
from asyncsgd.rules.fedbuff import FedBuff
from asyncsgd.rules.fixed_delay import FixedDelay
from asyncsgd.rules.gap_aware import GapAware
from asyncsgd.rules.gossip import ADPSGD, SGP
from asyncsgd.rules.ia2sgd import IA2SGD
from asyncsgd.rules.k_async import KAsync, KBatchAsync
from asyncsgd.rules.k_sync import KSync
from asyncsgd.rules.local_sgd import LocalSGD
from asyncsgd.rules.ormo import OrMo
from asyncsgd.rules.rennala import Rennala
from asyncsgd.rules.rescaled import Rescaled
from asyncsgd.rules.ringleader import Ringleader
from asyncsgd.rules.ringmaster import Ringmaster
from asyncsgd.rules.ssp import SSP
from asyncsgd.rules.streaming_diloco import StreamingDiLoCo
from asyncsgd.rules.synchronous import Synchronous

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
"""Every rule of a server at least once, with parameters that a short test notices."""

PEERS: tuple[PeerRule, ...] = (ADPSGD(), SGP(), StreamingDiLoCo())
"""The rules without a server, on the virtual clock."""

_KIND = Kind[Rule]("rule", "rules", "--rule", {rule.name: type(rule) for rule in (*ALL, *PEERS)})
parse_rule, describe_rules = _KIND.read, _KIND.help
