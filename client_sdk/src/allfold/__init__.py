"""Allfold: collective communication as a service.

    import allfold
    import numpy as np

    allfold.init()
    x = np.full(4, float(allfold.rank()))
    allfold.all_reduce(x)
    allfold.shutdown()

Every process is a *rank*. It talks to the *node agent* of its machine over a local socket; the
agents fold the tensors of their ranks and exchange the result with each other.
"""

from __future__ import annotations

from allfold._api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    empty,
    gather,
    init,
    is_initialized,
    new_group,
    rank,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    shutdown,
    start_round,
    world_size,
)
from allfold._group import Group
from allfold._handles.round import Round, RoundResult
from allfold._handles.work import Work
from allfold._process.draining import Drained
from allfold._process.ranks import SingleProcessWarning
from allfold._sampler import ElasticSampler
from allfold._state import State
from allfold_core.errors import (
    AgentLost,
    AgentUnreachable,
    AllfoldError,
    ArenaExhausted,
    BelowMinWorld,
    BroadcastMultipleTensors,
    BroadcastNoTensor,
    Evicted,
    GpuFailed,
    GroupFull,
    InvalidArgument,
    LimitReached,
    LocalError,
    MismatchError,
    MultipleRegister,
    MultipleUnregister,
    NodeDraining,
    OrchestratorUnreachable,
    PeerError,
    PeerLost,
    PeerMissing,
    PeerRefused,
    PeerSentIncoherentTensor,
    RankSourcesContradict,
    RegisterNotFirstOperation,
    RegisterParamsMismatch,
    RootLost,
    ServiceError,
    UnknownArgument,
    WorldChanged,
)
from allfold_core.operations import ReduceOp

__version__ = "0.3.0"

__all__ = [
    "AgentLost",
    "AgentUnreachable",
    "AllfoldError",
    "ArenaExhausted",
    "BelowMinWorld",
    "BroadcastMultipleTensors",
    "BroadcastNoTensor",
    "Drained",
    "ElasticSampler",
    "Evicted",
    "GpuFailed",
    "Group",
    "GroupFull",
    "InvalidArgument",
    "LimitReached",
    "LocalError",
    "MismatchError",
    "MultipleRegister",
    "MultipleUnregister",
    "NodeDraining",
    "OrchestratorUnreachable",
    "PeerError",
    "PeerLost",
    "PeerMissing",
    "PeerRefused",
    "PeerSentIncoherentTensor",
    "RankSourcesContradict",
    "ReduceOp",
    "RegisterNotFirstOperation",
    "RegisterParamsMismatch",
    "RootLost",
    "Round",
    "RoundResult",
    "ServiceError",
    "SingleProcessWarning",
    "State",
    "UnknownArgument",
    "Work",
    "WorldChanged",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "gather",
    "init",
    "is_initialized",
    "new_group",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shutdown",
    "start_round",
    "world_size",
]
