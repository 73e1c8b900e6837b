"""Calls of a small group, for tests of its agreement."""

from __future__ import annotations

from allfold_core.dtypes import DType, Wire
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.survival.reports import Call


def call_of(kind: Kind, view: int = 0, root: int = 0) -> Call:
    """The call of any rank; the rank ``root`` of the first epoch has the session ``r{root}``."""
    fingerprint = Fingerprint(
        kind,
        ReduceOp.SUM if kind.reduces else None,
        DType.FLOAT32,
        (4,),
        root if kind.has_root else -1,
        AUTO,
        Wire.NATIVE,
    )
    return Call(view, fingerprint, f"r{root}" if kind.has_root else "")
