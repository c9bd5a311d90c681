"""Addresses of this machine: whether one is its own, how it reaches another machine, and by which interface."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_NAME_LENGTH = 16


def resolve(host: str) -> list[str]:
    """The addresses of ``host``, the preferred one first.

    Raises:
        OSError: there are none.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one of more than 63 letters
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own(host: str) -> bool:
    """Whether one of the addresses of ``host`` belongs to this machine; False too if the name is unknown."""
    with contextlib.suppress(OSError):
        return any(_can_bind(address) for address in resolve(host))
    return False


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can be reached at ``address``."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address_towards(host: str) -> str | None:
    """The own address from which this machine would send to ``host``; None if it knows no way. Nothing is sent."""
    with contextlib.suppress(OSError):
        for address in resolve(host):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
    return None


def own_name_is_loopback() -> bool:
    """Whether gloo, which takes the address of the machine's own name, would take one that others cannot reach."""
    try:
        usable = [address for address in resolve(socket.gethostname()) if _can_bind(address)]
    except OSError:
        return True  # gloo takes 127.0.0.1 then
    return not usable or is_loopback(usable[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface with this address; None where it cannot be found, as on other systems than Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_LENGTH}s24x", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                if reply[_NAME_LENGTH + 4 : _NAME_LENGTH + 8] == wanted.packed:
                    return name
    return None


def _interface_of_ipv6(digits: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.split()[0] == digits), None)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
