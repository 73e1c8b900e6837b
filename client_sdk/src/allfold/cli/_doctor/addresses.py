"""The addresses that nodes advertise: whether they lead others to them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

LISTEN_WIDELY = (
    "start the agent with --control 0.0.0.0:7411 --data 0.0.0.0:7412, and with --advertise HOST if "
    "others reach its machine at an address that it cannot find out"
)


def is_loopback(url: str) -> bool:
    """Return True if a URL leads every machine to itself."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def leading_astray(urls: Mapping[str, str]) -> set[str]:
    """Return the nodes whose addresses lead others elsewhere.

    Loopback is fine where all nodes are on one machine: then all advertise it, each with ports of
    its own.

    Args:
        urls: what each node advertises.
    """
    shared = Counter(urls.values())
    on_loopback = {node for node, url in urls.items() if is_loopback(url)}
    twice = {node for node, url in urls.items() if shared[url] > 1}
    is_one_machine = len(on_loopback) == len(urls) and not twice
    return twice | (set() if is_one_machine else on_loopback)
