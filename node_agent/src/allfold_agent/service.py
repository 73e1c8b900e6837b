"""One running agent: its ports, its event loop, its end."""

from __future__ import annotations

import json
import logging
from functools import partial

from allfold_agent.agent import NodeAgent
from allfold_agent.control.app import make_app
from allfold_agent.settings import AgentSettings
from allfold_service import addresses
from allfold_service.addresses import bind, bound
from allfold_service.descriptors import allow_descriptors
from allfold_service.server import Server, address_of, warn_if_open, write_ready_file

log = logging.getLogger("allfold_agent")

_GRACEFUL_SECONDS = 2
_KEEP_ALIVE_SECONDS = 30


async def serve(settings: AgentSettings, ready_file: str | None) -> None:
    """Run an agent until SIGTERM or SIGINT.

    Args:
        ready_file: written, as JSON, once ranks can connect.

    Raises:
        ServiceError: an address cannot be used, or another agent has the socket.
        InvalidArgument: the socket or the ready file cannot be used.
    """
    # Before the server, which lets in as many connections as there may be descriptors.
    allow_descriptors()
    credentials, options = settings.credentials, settings.options()
    control = bind(settings.control, str(options["control"]))
    data = bind(settings.data, str(options["data"]))
    ready = {
        "control_url": f"{credentials.scheme}://{addresses.local(bound(control))}",
        "data_address": addresses.local(bound(data)),
        "socket": settings.socket,
    }
    agent = NodeAgent(settings, control, data)
    server = Server(
        make_app(agent),
        credentials.tls,
        keep_alive=_KEEP_ALIVE_SECONDS,
        graceful=_GRACEFUL_SECONDS,
        drain=partial(agent.draining.end, settings.drain_seconds, settings.drain_for),
        lifespan="off",
    )
    # Before the agent is there: it leaves its groups at any signal from then on.
    server.end_at_signals()
    agent.start()
    warn_if_open(credentials, "read and disturb this node's groups", control, data)
    listening = address_of(control), address_of(data), settings.socket
    log.info("node %s listens: control %s, data %s, ranks %s", settings.name, *listening)
    try:
        if ready_file:
            write_ready_file(ready_file, json.dumps(ready))
        await server.serve(sockets=[control])
    finally:
        await agent.stop()
