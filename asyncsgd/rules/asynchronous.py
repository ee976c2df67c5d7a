"""Asynchronous SGD: every gradient is applied when it arrives.

    x_{t+1} = x_t - eta * grad f(x_{t - tau}; batch),     tau = `delay`, the updates applied since the gradient's read

This is the asynchronous parameter server of Downpour SGD with n_push = n_fetch = 1 (Dean, Corrado, Monga, Chen, Devin,
Le, Mao, Ranzato, Senior, Tucker, Yang, Ng: Large Scale Distributed Deep Networks, NeurIPS 2012, section 4.1). Agarwal
and Duchi (NeurIPS 2011) analysed it as delayed SGD. Deviation: the server's optimizer takes the step, whichever it is,
in place of Adagrad.

With one worker every delay is 0 and the rule *is* the server's optimizer. With N always-busy workers the mean delay
is N - 1, whatever their speeds."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncsgd.rules.base import Arrival, Reply, Rule, Start, View


@dataclasses.dataclass(frozen=True)
class Asynchronous(Rule):
    """Apply every gradient as it comes and start its worker again.

    >>> str(Asynchronous())
    'asynchronous'
    """

    def arrive(self, state: Any, arrival: Arrival, view: View) -> Reply:
        return Reply(direction=arrival.gradient, uses=(arrival.dispatch,), start=(Start(arrival.worker),))
