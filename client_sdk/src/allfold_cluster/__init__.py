"""Start an Allfold on one machine: orchestrator, agents, a Redis, and networks between nodes.

    from allfold_cluster import Cluster

    with Cluster() as cluster:
        cluster.start_orchestrator()
        cluster.start_agents("a", "b")

``cluster`` has the class, ``redis_server`` a private store, ``network`` nodes behind links with a
rate or a delay; ``processes`` and ``signals`` are what all of them stand on. It needs the two
services: ``pip install "allfold[local]"``.
"""

from allfold_cluster.cluster import AgentProcess, Cluster
from allfold_cluster.environment import free_address, free_port
from allfold_cluster.redis_server import RedisServer

__all__ = ["AgentProcess", "Cluster", "RedisServer", "free_address", "free_port"]
