"""The part of a job that one launcher starts: the command, the ranks, their environments."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allfold_core.errors import InvalidArgument

# Another job's ranks, when one job is started by another.
_NOT_PASSED_ON = ("ALLFOLD_RANK", "ALLFOLD_WORLD_SIZE")


@dataclass(frozen=True)
class LaunchSpec:
    """The part of a job that one launcher starts.

    Attributes:
        command: the same for every rank.
        nodes: what the ranks need to reach the agent, for each node that is started here.
        per_node: ranks per node.
        group: the name of the ranks' group.
        first_node: the number of the first node here; not 0 where several launchers share a job.
        total_nodes: of all launchers together.
        master: host and port at which rank 0 serves torch's store; ``None``: as the environment
            has it, and on one machine any free port of it.
    """

    command: Sequence[str]
    nodes: Sequence[Mapping[str, str]]
    per_node: int
    group: str
    first_node: int
    total_nodes: int
    master: tuple[str, int] | None = None

    @property
    def world_size(self) -> int:
        return self.total_nodes * self.per_node

    @property
    def ranks(self) -> range:
        """The ranks that are started here."""
        first = self.first_node * self.per_node
        return range(first, first + len(self.nodes) * self.per_node)

    def place(self, rank: int) -> str:
        """Return where a rank runs, in words: ``node 1``, with its machine where there are more."""
        node = f"node {rank // self.per_node}"
        is_whole = self.total_nodes == len(self.nodes)
        return node if is_whole else f"{node}, machine {socket.gethostname()}"

    def environment(self, rank: int) -> dict[str, str]:
        """Return a rank's own variables, beside those that all share: torchrun's and ours."""
        node, local_rank = divmod(rank, self.per_node)
        return {
            **self.nodes[node - self.first_node],
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "GROUP_RANK": str(node),
            # torchrun's mark: the ranks above were given to this very process.
            "TORCHELASTIC_RUN_ID": self.group,
            "ALLFOLD_GROUP": self.group,
            "PYTHONUNBUFFERED": "1",
        }


def make_group_name() -> str:
    """A name that no other run has."""
    return f"run-{secrets.token_hex(6)}"


def common_environment(
    env: Mapping[str, str], spec: LaunchSpec
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that all ranks share, and notes about those that were added."""
    ours = {name: value for name, value in env.items() if name not in _NOT_PASSED_ON}
    notes = []
    if "OMP_NUM_THREADS" not in ours and len(spec.ranks) > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // len(spec.ranks))
        ours["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"OMP_NUM_THREADS is not set: each rank gets {threads}, so that the {len(spec.ranks)} "
            "ranks share this machine's cores; set it to choose for yourself"
        )
    ours.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in native code tells the line of Python
    if spec.master is not None:
        host, port = spec.master
        ours |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    elif spec.total_nodes == len(spec.nodes) and "MASTER_ADDR" not in ours:
        # Scripts that call torch.distributed as well meet there.
        ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return ours, notes


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def place(nodes: int, nnodes: int | None, node_rank: int | None, group: str | None) -> int:
    """The number of the first node here; refuses combinations that cannot work.

    Args:
        nodes: how many are started here.
        nnodes: of all launchers together, when this is not the only one.
        node_rank: which of them this is.
    """
    if nnodes is None and node_rank is None:
        return 0
    if nnodes is None or node_rank is None:
        raise InvalidArgument("--nnodes and --node-rank belong together; give both or neither")
    if not 0 <= node_rank < nnodes:
        raise InvalidArgument(
            f"--node-rank is {node_rank}, but with --nnodes {nnodes} it goes from 0 to {nnodes - 1}"
        )
    if nodes != 1:
        raise InvalidArgument(f"with --nnodes, each launcher serves one agent, not {nodes}")
    if nnodes > 1 and not group:
        raise InvalidArgument("with --nnodes, give --group: all launchers must name the same one")
    return node_rank
