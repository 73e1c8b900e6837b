"""The tables of docs/ that follow from the code: rooms, locks, bytes on the wire."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import struct
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from allfold_agent.runtime.locks import ORDER
from allfold_core import operations
from allfold_core.dtypes import DType, Wire
from allfold_core.operations import Kind, ReduceOp
from allfold_core.protocol import frames, peer_link, rank_messages
from allfold_core.short_lane import page
from tools.pages import ROOT, Blocks, markdown, table

SIZES = {"B": 1, "H": 2, "I": 4, "i": 4, "Q": 8, "q": 8, "d": 8, "x": 1}
TYPES = {
    "B": "u8", "H": "u16", "I": "u32", "i": "i32", "Q": "u64", "q": "i64", "d": "f64", "x": "zero",
}  # fmt: skip


# --- Rooms


def contracts() -> dict[str, list[str]]:
    """The rooms of each package in the order in which they may import, from the top."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {
        each["containers"][0]: each["layers"]
        for each in linter["contracts"]
        if each["type"] == "layers" and "containers" in each
    }


def rooms(package: str) -> str:
    lines = []
    for layer in contracts()[package]:
        for name in re.split(r" [|:] ", layer):
            about = _docstring_of(f"{package}.{name}").split("\n\n")[0]
            lines.append([f"`{name}`", markdown(about)])
    return table(["room", "what it is"], lines)


def _docstring_of(module: str) -> str:
    """Return a module's docstring, also where what it imports is not installed."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""


# --- Structs


def layout(structure: struct.Struct, fields: Sequence[str]) -> str:
    """The byte table of a little-endian struct whose parts have these names."""
    lines, offset, names = [], 0, iter(fields)
    for count, code in re.findall(r"(\d*)([a-zA-Z])", structure.format.lstrip("<")):
        if code == "s":
            size, kind = int(count), f"{count} bytes"
            lines.append([str(offset), kind, next(names)])
            offset += size
            continue
        repeat = int(count or 1)
        if code == "x":
            lines.append([str(offset), f"{repeat} zero", ""])
            offset += repeat
            continue
        for _ in range(repeat):
            lines.append([str(offset), TYPES[code], next(names)])
            offset += SIZES[code]
    packed = _joined_zeros(lines)
    assert next(names, None) is None
    assert offset == structure.size
    return table(["byte", "type", "field"], packed)


def _joined_zeros(lines: list[list[str]]) -> list[list[str]]:
    joined: list[list[str]] = []
    for line in lines:
        if line[1] == "1 zero" and joined and joined[-1][1].endswith("zero"):
            joined[-1][1] = f"{int(joined[-1][1].split()[0]) + 1} zero"
        else:
            joined.append(line)
    return joined


def frame_header() -> str:
    body = struct.Struct("<" + frames._BODY.format.lstrip("<") + "I")
    return layout(body, ["`magic`, 0xAF01", *_fields(frames.FrameHeader), "CRC-32 of the others"])


def shared_range() -> str:
    body = struct.Struct("<" + frames._RANGE.format.lstrip("<"))
    return layout(body, _fields(frames.SharedRange))


def link_header() -> str:
    header = struct.Struct("<" + peer_link._HEADER.format.lstrip("<") + "I")
    names = ["`magic`, 0xAF02", "`type`", "`length` of the body", "CRC-32 of the body"]
    return layout(header, [*names, "CRC-32 of the others"])


def link_ping() -> str:
    return layout(peer_link._PING, ["number", "number of groups"])


def link_group() -> str:
    return layout(peer_link._GROUP, ["opening", "length of the name"])


def op_message() -> str:
    names = ["type, 9", "group", "seq", "timeout", "source segment", "target segment"]
    return layout(rank_messages._OP, [*names, "source offset", "target offset", "fence", "view"])


def p2p_message() -> str:
    names = ["type, 12 or 13", "dtype", "group", "seq", "timeout", "peer", "segment", "tag"]
    return layout(
        rank_messages._PAIR, [*names, "offset", "nbytes", "fence", "view", "width of an alias"]
    )


def fence() -> str:
    return layout(rank_messages._FENCE, ["segment", "value", "offset"])


def outcome() -> str:
    return layout(
        rank_messages.OUTCOME,
        ["type, 10 or 11", "group", "seq", "epoch", "participants", "boundary"],
    )


def segment() -> str:
    return layout(rank_messages.SEGMENT, ["type, 3", "number", "size"])


def post() -> str:
    return layout(page._HEADER, _fields(page.PostHeader))


def fingerprint() -> str:
    names = ["kind", "reduction, 0 for none", "dtype", "number of dimensions", "wire format"]
    names += [
        "length of an alias",
        "ranks of a quorum, 0 for all",
        "root, -1 for none",
        "number of counts",
        "width of an alias",
        "factor of a `premul_sum`, weight in a `weighted_mean`",
        "feedback series",
    ]
    return layout(operations._HEADER, [*names, "strategy, ASCII, padded with zeros"])


def codes() -> str:
    """The numbers that stand for kinds, reductions, dtypes and wire formats."""
    fields: dict[str, type[Kind] | type[ReduceOp] | type[DType] | type[Wire]] = {
        "kind": Kind, "reduction": ReduceOp, "dtype": DType, "wire format": Wire,
    }  # fmt: skip
    lines = [
        [name, ", ".join(f"{each.code} `{each.label}`" for each in members)]
        for name, members in fields.items()
    ]
    return table(["field", "codes"], lines)


def envelope() -> str:
    structure = importlib.import_module("allfold_core.mailbox")._ENVELOPE
    names = [
        "source",
        "target",
        "tag",
        "dtype",
        "length of an alias",
        "width of an alias",
        "nbytes",
    ]
    return layout(structure, names)


def _fields(named_tuple: Any) -> list[str]:
    return [f"`{name}`" for name in named_tuple._fields]


def locks() -> str:
    """The locks of the agent, in the order in which they may be taken."""
    return table(["lock", "protects"], [[f"`{name}`", what] for name, what in ORDER.items()])


MODULES: Blocks = {
    "rooms of the services": partial(rooms, "allfold_service"),
    "rooms of the control messages": partial(rooms, "allfold_control"),
    "rooms of the core": partial(rooms, "allfold_core"),
    "rooms of the SDK": partial(rooms, "allfold"),
    "rooms of the cluster": partial(rooms, "allfold_cluster"),
    "rooms of the agent": partial(rooms, "allfold_agent"),
    "rooms of the orchestrator": partial(rooms, "allfold_orchestrator"),
}
THREADS: Blocks = {"locks": locks}
PROTOCOL: Blocks = {
    "post": post,
    "frame header": frame_header,
    "shared range": shared_range,
    "envelope": envelope,
    "header of a link's message": link_header,
    "ping": link_ping,
    "group of a link's message": link_group,
    "fingerprint": fingerprint,
    "codes": codes,
    "segment": segment,
    "op": op_message,
    "fence": fence,
    "send and receive": p2p_message,
    "outcome": outcome,
}
