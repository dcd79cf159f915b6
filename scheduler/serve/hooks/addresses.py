"""Tells where the addresses of a host lead: out into the world, into the inner network, or where none may post to."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

Reach = Literal["public", "private", "loopback", "forbidden"]
"""`forbidden`: link-local (where clouds have their secrets), multicast, unspecified, reserved, and tunnels."""

TUNNELS = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")))


def reach(address: str) -> Reach:
    """Tell where an address of version 4 or 6 leads; one that is mapped into version 6 is what is mapped."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return reach(str(ip.ipv4_mapped))
        if any(ip in tunnel for tunnel in TUNNELS):
            return "forbidden"
    if ip.is_loopback:
        return "loopback"
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local or ip.is_reserved:
        return "forbidden"
    return "public" if ip.is_global else "private"


def dial(allowed: frozenset[Reach], host: str, port: int, seconds: float) -> socket.socket:
    """A connection to an address of a host that may be reached, the very one that was looked at. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    fit = [address for address in addresses if reach(address) in allowed]
    problem = OSError("none of its addresses may be posted to: see --webhook-hosts")
    for address in fit:
        try:
            return socket.create_connection((address, port), seconds)
        except OSError as error:
            problem = error
    raise problem
