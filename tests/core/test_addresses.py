"""Addresses of this machine, and when gloo is told which interface to use (tests/cluster does it between machines)."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from flextrain.core.comm import rendezvous as addresses
from flextrain.core.comm.rendezvous import choose_interface


def test_own_addresses() -> None:
    assert addresses.is_own("localhost")
    assert not addresses.is_own("192.0.2.1")
    assert not addresses.is_own("no..such..host")
    assert addresses.own_address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.own_address_towards("no..such..host") is None
    assert [addresses.is_loopback(address) for address in ("127.0.1.1", "::1", "10.0.0.1", "fe80::1%eth0")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.skipif(
    not hasattr(socket, "AF_PACKET"), reason="interfaces have names that can be asked for on Linux only"
)
def test_interfaces_by_address() -> None:
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("192.0.2.1") is None
    if addresses.is_own("::1"):
        assert addresses.interface_of("::1") == "lo"


@pytest.mark.parametrize("name, is_loopback", [("localhost", True), ("no..such..host", True), ("192.0.2.1", True)])
def test_the_own_name(monkeypatch: pytest.MonkeyPatch, name: str, is_loopback: bool) -> None:
    """gloo takes 127.0.0.1 if the name has no address, or none of this machine's."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert addresses.own_name_is_loopback() is is_loopback


def test_nothing_is_chosen_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    store = torch.distributed.HashStore()
    store.set("address/1", "127.0.0.1")
    choose_interface(store, "127.0.0.1", 0, 2)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
