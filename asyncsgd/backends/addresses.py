"""Addresses of this host: on which of them another host reaches it, and which network interface has one.

A host's own name is often no help: Debian's installers let it mean 127.0.1.1, where nobody else can reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from asyncsgd.errors import UsageError


def address_towards(host: str) -> str:
    """Return the address of this host from which it sends to another one. Nothing is sent.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'

    Raises:
        UsageError: if there is no way to that host.
    """
    for family, kind, _, _, address in _addresses_of(host):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise UsageError(f"there is no way from here to the host {host}; check its address and the network between you")


def is_loopback(address: str) -> bool:
    """Whether no other host can reach this address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1")
    (True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of_interface(name: str) -> str:
    """The address of a network interface of this host.

    Raises:
        UsageError: if no interface has this name, or the interface has no address.
    """
    interfaces = psutil.net_if_addrs()
    if name not in interfaces:
        raise UsageError(f"--interface {name} is not there; this host has {', '.join(sorted(interfaces))}")
    for entry in interfaces[name]:
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return entry.address.partition("%")[0]
    raise UsageError(f"--interface {name} has no address; type another one of {', '.join(sorted(interfaces))}")


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address; None if no interface of this host has it.

    >>> interface_of("127.0.0.1") in psutil.net_if_addrs()
    True
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def _addresses_of(host: str) -> Iterator[tuple[Any, ...]]:
    try:
        # Any port will do, since nothing is sent.
        yield from socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"the host {host} is not known here ({error.strerror}); check its name") from error
