"""Every failure that Allfold reports, in one tree.

    AllfoldError
    ├── LocalError                       this process broke the contract
    │   ├── InvalidArgument              a value that can never work
    │   │   └── UnknownArgument          a keyword argument that the function does not have
    │   ├── RankSourcesContradict        two sources name different ranks
    │   ├── RegisterNotFirstOperation    an op before ``init`` or after ``shutdown``
    │   ├── MultipleRegister             ``init`` twice, or a rank that is taken
    │   ├── MultipleUnregister           ``shutdown`` twice
    │   ├── RegisterParamsMismatch       registered with other parameters than the group
    │   └── LimitReached                 more groups or ranks than the agents' token may have
    ├── MismatchError                    the ranks of one op asked for different things
    │   ├── BroadcastNoTensor
    │   └── BroadcastMultipleTensors
    ├── PeerError                        someone else broke the contract, or is gone
    │   ├── PeerLost                     a rank or node died, left or cannot be reached
    │   │   ├── Evicted                  the group has gone on without this node
    │   │   ├── RootLost                 the root of the op died, and nobody has the result
    │   │   ├── WorldChanged             the op's tensors are made for the ranks of before
    │   │   └── BelowMinWorld            fewer ranks are left than the group asks for
    │   ├── PeerRefused                  a rank could not call the op; names it, and why
    │   ├── PeerMissing                  a deadline passed; names who did not come
    │   └── PeerSentIncoherentTensor     a peer's bytes do not fit what was agreed
    └── ServiceError                     a part of Allfold itself is not there
        ├── OrchestratorUnreachable
        ├── AgentUnreachable
        ├── AgentLost                    the local agent died or stopped answering
        ├── ArenaExhausted               no memory for an arena
        ├── GpuFailed                    a GPU or its driver refused what it was asked
        ├── NodeDraining                 the node takes no more ranks
        └── GroupFull                    a running group has max_world ranks

Each class has a stable ``code``, which is also its page in the documentation, and an HTTP
``status``. Errors travel as JSON between processes and come out as the class they went in.

A message says what happened, who, what was expected and what to do next. One that ends without a
full stop, or with a question, only says what happened, so that another message can quote it; the
class adds the next step when it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from allfold_core.schema import read_object

_CODE = re.compile(r"AF\d{3}")


class AllfoldError(RuntimeError):
    """The root of the tree; a ``RuntimeError``, as programs for torch expect of a collective.

    Attributes:
        message: the text, without code and class.
        details: the machine-readable facts of the message.
        advice: the next step; that of the class, unless whoever shows the error has a better one.
    """

    code: ClassVar[str] = "AF000"
    status: ClassVar[int] = 500
    advice: str = ""

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        shown = f"[{self.code} {type(self).__name__}] {self.message}"
        if not self.advice or shown.endswith("."):
            return shown
        return f"{shown}{'' if shown.endswith('?') else '.'} {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which :func:`from_dict` reads."""
        return {"code": self.code, "message": self.message, "details": self.details}


class LocalError(AllfoldError):
    """You broke the contract: the call cannot work as it was made, whatever the others do."""

    code = "AF100"
    status = 400


class InvalidArgument(LocalError, ValueError):
    """A value that can never work, refused before anything was sent."""

    code = "AF101"


class UnknownArgument(InvalidArgument, TypeError):
    """A keyword argument that the function does not have, refused before anything was sent."""

    code = "AF107"


class RankSourcesContradict(LocalError):
    """Two sources (arguments, torchrun, Slurm, MPI ...) name different ranks or sizes."""

    code = "AF102"


class RegisterNotFirstOperation(LocalError):
    """A collective was called before ``init`` or after ``shutdown``."""

    code = "AF103"
    status = 409


class MultipleRegister(LocalError):
    """The rank is registered already, by this process or by another one."""

    code = "AF104"
    status = 409


class MultipleUnregister(LocalError):
    """The rank is not registered any more."""

    code = "AF105"
    status = 409


class RegisterParamsMismatch(LocalError):
    """The rank came with other parameters than those the group was opened with.

    The offender gets this error; the group goes on waiting for a rank that fits.
    """

    code = "AF106"
    status = 409


class LimitReached(LocalError):
    """The group would be more than those may have open whose agents have a token of this name."""

    code = "AF108"
    status = 409


class MismatchError(AllfoldError):
    """The ranks of one op asked for different things. Every rank of the op gets this error.

    No data was folded, the tensors are as they were, and the next op works.
    """

    code = "AF200"
    status = 409


class BroadcastNoTensor(MismatchError):
    """A broadcast without a root, and no rank brought a tensor."""

    code = "AF201"


class BroadcastMultipleTensors(MismatchError):
    """A broadcast without a root, and several ranks brought a tensor."""

    code = "AF202"


class PeerError(AllfoldError):
    """Someone else broke the contract, or is gone."""

    code = "AF300"
    status = 424


class PeerLost(PeerError):
    """A rank or a node of the group died, left, or cannot be reached any more."""

    code = "AF301"
    advice = (
        "Look at what the lost rank or its agent printed last. The group is usable with the ranks "
        "that are left."
    )


class Evicted(PeerLost):
    """The group goes on without this node, which lives, but was cut off or silent for too long."""

    code = "AF304"
    advice = (
        "This rank's inputs are unchanged. Look at the load and the network of this node at that "
        "time. To have all ranks again, restart the job, or call shutdown and init on all of them."
    )


class RootLost(PeerLost):
    """The root of a broadcast or reduce died, and no rank that is left has the result."""

    code = "AF305"
    advice = "Call again with a root that is left; the group is usable."


class WorldChanged(PeerLost):
    """The group has other ranks than the caller knew: some were lost, or have joined.

    Raised by an op whose tensor shapes depend on the world size; with ``on_loss="raise"``, by any
    op. No tensor was changed.
    """

    code = "AF306"
    advice = "Make the tensors for the ranks that the group has now, and call again; it is usable."


class BelowMinWorld(PeerLost):
    """Fewer ranks are left than ``min_world``."""

    code = "AF307"
    advice = "Start more ranks, if the group is elastic; or restart it with a smaller min_world."


class PeerRefused(PeerError):
    """A rank could not call the op, as what it was given cannot work: its own error says why.

    That rank goes on with the next op, as all others do. No input was changed.
    """

    code = "AF308"


class PeerMissing(PeerError, TimeoutError):
    """A deadline passed; the message names who did not come and what the others waited for.

    Attributes:
        work: the handle of an op that is still open, whose outcome can be waited for again.
    """

    code = "AF302"
    status = 504
    work: Any = None

    @property
    def decided(self) -> bool:
        """True if the op has failed; False where it is open, and its tensors are still in use."""
        return bool(self.details.get("decided", True))


class PeerSentIncoherentTensor(PeerError):
    """A peer's bytes do not fit what was agreed: wrong size, wrong place, broken checksum."""

    code = "AF303"
    status = 502


class ServiceError(AllfoldError):
    """A part of Allfold itself is not there."""

    code = "AF400"
    status = 503


class OrchestratorUnreachable(ServiceError):
    """The orchestrator did not answer before the deadline."""

    code = "AF401"
    advice = (
        "Check that it runs, and that ALLFOLD_ORCHESTRATOR_URL is its address as seen from this "
        "machine; /readyz of that address says if it is ready."
    )


class AgentUnreachable(ServiceError):
    """No node agent listens on the local socket."""

    code = "AF402"


class AgentLost(ServiceError):
    """The local node agent died or stopped answering while it was needed."""

    code = "AF403"
    advice = (
        "Look at the agent's log, and start it again. The ranks on other nodes are told that those "
        "of this one are lost. To have all ranks again, restart the job, or call shutdown and init "
        "on all of them."
    )


class ArenaExhausted(ServiceError, MemoryError):
    """The machine has no memory left for a rank's arena."""

    code = "AF404"
    status = 507


class GpuFailed(ServiceError):
    """A GPU, or its driver, refused what it was asked; names the call and CUDA's error."""

    code = "AF405"
    status = 500


class NodeDraining(ServiceError):
    """The node takes no more ranks: an operator drains it, or its agent was told to end."""

    code = "AF406"
    advice = "Start the rank on another node. A node takes ranks again when its agent is restarted."


class GroupFull(ServiceError):
    """The group has ``max_world`` ranks: another one can join when one of them has left."""

    code = "AF407"
    advice = (
        "Start no more processes than max_world, open the group with a larger one, or give this "
        "rank more time with ALLFOLD_INIT_TIMEOUT or init_timeout=."
    )


def _tree(root: type[AllfoldError]) -> list[type[AllfoldError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def error_classes() -> dict[str, type[AllfoldError]]:
    """Every class of the tree by its stable code."""
    return {cls.code: cls for cls in _tree(AllfoldError)}


def from_dict(data: Mapping[str, Any]) -> AllfoldError:
    """The error that :meth:`AllfoldError.to_dict` wrote; one of a later version keeps its message.

    Raises:
        ValueError: it is no such error, but, say, that of a gateway in between.
    """
    code, details = data.get("code"), data.get("details", {})
    if not isinstance(code, str) or not _CODE.fullmatch(code) or not isinstance(details, dict):
        raise ValueError(f"no error of Allfold: {data!r:.200}")
    kind = error_classes().get(code, AllfoldError)
    return kind(str(data.get("message", "no message")), **details)


def from_json(text: str | bytes) -> AllfoldError:
    """The error in a JSON object, as :func:`from_dict`; ``ValueError`` where there is none."""
    return from_dict(read_object(text))
