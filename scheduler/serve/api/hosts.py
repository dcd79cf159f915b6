"""Names of hosts, as requests and options have them: is it this machine alone, and does a page of another site ask?"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OF_THE_USER = ("same-origin", "none")  # browsers' words for a request that no other site has made


def is_loopback(host: str) -> bool:
    """Return whether a name without a port can only be that of the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_of_loopback(headers: Headers) -> bool:
    """Return whether the client has asked for a loopback name: a page whose own name leads here asks for that one."""
    return is_loopback(_hostname(f"//{headers.get('host', '')}"))


def is_cross_site(method: str, headers: Headers) -> bool:
    """Return whether a browser asks to change something on behalf of a page that is not this server's."""
    if method in SAFE_METHODS:
        return False
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in OF_THE_USER
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _hostname(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
