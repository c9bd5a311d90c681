"""The network interface that gloo uses between machines."""

from __future__ import annotations

import logging
import os
from typing import Any

from .addresses import interface_of, is_loopback, own_address_towards, own_name_is_loopback

_logger = logging.getLogger("flextrain")

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(store: Any, master: str, rank: int, world_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME if gloo would give its peers an address that they cannot reach; a collective.

    gloo listens at the address of the machine's own name. Debian's /etc/hosts gives 127.0.1.1 for it, and processes on
    other machines would then look for this one on their own. Nothing changes where the variable is set, where the own
    name has an address that others reach, or where all processes are on one machine.

    Args:
        store: one whose keys no other process group uses.
        master: name or address of rank 0's machine.
    """
    address = own_address_towards(master) or ""
    # All tell, because on rank 0's machine the master's name may stand for 127.0.1.1 too: it needs another one's address.
    store.set(f"address/{rank}", address)
    if os.environ.get(VARIABLE) or not own_name_is_loopback():
        return
    if not address or is_loopback(address):
        others = (text.decode() for text in store.multi_get([f"address/{other}" for other in range(world_size)]))
        away = next((other for other in others if other and not is_loopback(other)), None)
        address = (away and own_address_towards(away)) or ""
    if not address or is_loopback(address) or (name := interface_of(address)) is None:
        return
    os.environ[VARIABLE] = name
    _logger.warning(
        "%s is set to %s (%s) for gloo, because this machine's own name stands for an address that other machines cannot "
        "reach; set the variable yourself to choose another interface",
        VARIABLE,
        name,
        address,
    )
