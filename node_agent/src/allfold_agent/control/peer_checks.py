"""Checks of the way to one other agent, for ``allfold doctor``: both ports, and the link's speed.

A check sends 1 MiB, so that a running job hardly notices it, or 16 MiB where asked; a node does one
at a time, and each has a deadline.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Query

from allfold_agent.agent import NodeAgent
from allfold_agent.edges import link_probe
from allfold_agent.http import client
from allfold_agent.http.transport import Transport
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, PeerLost, ServiceError
from allfold_service.addresses import join, parse_address, service_url

Json = dict[str, Any]

_CONTROL_SECONDS = 2.0
_TURN_SECONDS = 10.0
_UNAUTHORIZED = 401


class WrongNode(Exception):
    """Another node answers at an address."""


def add_peer_checks(app: FastAPI, agent: NodeAgent) -> None:
    one_at_a_time = make_lock("peer check")

    @app.post("/v1/checks/peer")
    def check_peer(
        node: Annotated[str, Query(max_length=128)],
        control_url: Annotated[str, Query(max_length=512)],
        data_address: Annotated[str, Query(max_length=512)],
        thorough: bool = False,
    ) -> Json:
        """Check that this node reaches both ports of another one, and measure the link."""
        if not one_at_a_time.acquire(timeout=_TURN_SECONDS):
            raise ServiceError(f"node {agent.settings.name} is busy with other checks; try again")
        try:
            control = _checked(lambda: _check_control(agent.transport, control_url, node))
            if control.get("kind") == "wrong_node" and _on_one_host(control_url, data_address):
                return {"control": control, "data": control}  # or another node were measured
            data = _checked(lambda: _check_data(agent.transport, data_address, short=not thorough))
            return {"control": control, "data": data}
        finally:
            one_at_a_time.release()


def _check_control(transport: Transport, url: str, node: str) -> Json:
    """The time of one request to the control port, which must be that node's."""
    target = urlsplit(service_url(url, has_tls=transport.tls is not None))
    address = join(target.hostname or "", target.port or 80)
    began = perf_counter()
    found = client.get_json(transport, address, "/v1/facts", _CONTROL_SECONDS)
    if found.get("node") != node:
        raise WrongNode(f"node {found.get('node')!r} answers at {address}")
    return {"address": address, "seconds": perf_counter() - began}


def _check_data(transport: Transport, address: str, *, short: bool) -> Json:
    link = link_probe.measure(transport, address, short=short)
    is_local = transport.shortcut(*parse_address(address)) is not None
    return {
        "address": address,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
        "path": "machine" if is_local else "network",
    }


def _on_one_host(url: str, address: str) -> bool:
    return urlsplit(url).hostname == parse_address(address)[0]


def _checked(check: Callable[[], Json]) -> Json:
    """The outcome of a check; of one that failed the ``kind`` of the failure, and its text.

    Beside those of :func:`_kind` there are ``wrong_node`` and ``stalled``: single bytes went both
    ways, and many did not.
    """
    try:
        return {"ok": True, **check()}
    except WrongNode as error:
        return {"ok": False, "kind": "wrong_node", "problem": str(error)}
    except (AllfoldError, OSError) as error:
        # That a peer is lost says less than what the operating system has said.
        cause = error.__cause__ if isinstance(error, PeerLost) and error.__cause__ else error
        text = cause.message if isinstance(cause, AllfoldError) else str(cause)
        stalled = isinstance(error, PeerLost) and error.details.get("stalled")
        return {"ok": False, "kind": "stalled" if stalled else _kind(cause), "problem": text}


def _kind(cause: BaseException) -> str:
    """``refused``, ``silent``, ``no_route``, ``no_name``, ``token``, ``stranger`` or ``broken``."""
    match cause:
        case ConnectionRefusedError():
            return "refused"
        case socket.gaierror() | InvalidArgument():
            return "no_name"
        case OSError(errno=errno.EHOSTUNREACH | errno.ENETUNREACH):
            return "no_route"
        case LocalError() if cause.details.get("http_status") == _UNAUTHORIZED:
            return "token"
        case TimeoutError():
            return "silent"
        case OSError():
            return "broken"
        case _:
            return "stranger"
