"""Somebody is lost: until all survivors have finished an op without him."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.faults.allfold_contestant import PROGRAM, VARIABLES, Allfold
from benchmarks.faults.measuring import Row, Sample, row_of, samples
from benchmarks.faults.options import Options
from benchmarks.faults.torch_contestants import TorchContestant, why_not
from chaos.faults import Kind
from chaos.fleet import Fleet, fleet


@dataclass(frozen=True)
class Loss:
    """A row of the table.

    Attributes:
        peer_kind: the same fault for a library without agents; ``None`` where it has no such part,
            or another row has it.
        away: orchestrator and Redis are killed before.
    """

    what: str
    kind: Kind
    target: str
    peer_kind: Kind | None
    away: bool = False


# torchft takes a replica for dead when its heartbeats have been missing for 5 s.
_TORCHFT_TARGET = "100 %, max <= 5.3 s"
LOSSES = {
    "kill-rank": Loss(
        "SIGKILL of a rank", Kind.KILL_RANK, "p50 <= 50 ms, p99 <= 250 ms", Kind.KILL_RANK
    ),
    "kill-agent": Loss("SIGKILL of an agent", Kind.KILL_AGENT, "p50 <= 50 ms, p99 <= 250 ms", None),
    "stop-agent": Loss("SIGSTOP of an agent", Kind.STOP_AGENT, "p99 <= 1.5 s", Kind.STOP_AGENT),
    "part": Loss("black hole around a node", Kind.PART, "p99 <= 1.5 s", None),
    "away": Loss(
        "a rank, no orchestrator, no Redis", Kind.KILL_RANK, "max <= 1 s", None, away=True
    ),
}


def rows(name: str, options: Options) -> Iterator[Row]:
    """Measure a loss at every number of nodes, Allfold first."""
    loss = LOSSES[name]
    for nodes in options.nodes:
        yield _ours(loss, nodes, options)
        if loss.peer_kind is not None:
            for peer in options.peers:
                yield _peer(loss, peer, loss.peer_kind, nodes, options)


def _ours(loss: Loss, nodes: int, options: Options) -> Row:
    with fleet(nodes, options.ranks, VARIABLES, PROGRAM) as found:
        contestant = Allfold(found, loss.kind, options.on_loss, options.timeout, away=loss.away)
        measured = list(samples(contestant, options.faults, options.patience, options.seed))
    return row_of(loss.what, "allfold", f"{nodes}x{options.ranks}", loss.target, measured)


def _peer(loss: Loss, library: str, kind: Kind, world: int, options: Options) -> Row:
    shape = f"{world}x1"
    if reason := why_not(library):
        return Row(loss.what, library, shape, note=reason)
    measured: Sequence[Sample]
    with ExitStack() as stack:
        ours = (
            stack.enter_context(fleet(world, 1, VARIABLES, PROGRAM)) if _has_ours(library) else None
        )
        contestant = stack.enter_context(
            TorchContestant(library, world, kind, options.timeout, _variables(ours) if ours else ())
        )
        measured = list(samples(contestant, options.faults, options.patience, options.seed))
    target = _TORCHFT_TARGET if ours else ""
    return row_of(loss.what, library, shape, target, measured)


def _has_ours(library: str) -> bool:
    """Tell if a library runs on Allfold."""
    return "allfold" in library


def _variables(ours: Fleet) -> list[dict[str, str]]:
    """Return the environment of each rank: it is alone with its agent."""
    services = ours.cluster
    return [services.env | {"ALLFOLD_SOCKET": services.socket_of(n)} for n in ours.nodes]
