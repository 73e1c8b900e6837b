"""Round trips of everything that travels between processes: errors, plans, codes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core import errors
from allfold_core.dtypes import DType
from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind, ReduceOp, kind_from_code, reduce_op_from_code
from allfold_core.plan import Plan
from allfold_core.topology import LinkModel, Member

CLASSES = list(errors.error_classes().values())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
members = st.builds(
    Member,
    st.text(min_size=1),
    st.text(),
    st.text(),
    st.lists(st.integers(0, 1000), max_size=4, unique=True).map(tuple),
    st.sampled_from(["cpu", "cuda"]),
    st.text(max_size=5),
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_comes_out_as_the_class_it_went_in(cls: type[errors.AllfoldError]) -> None:
    error = cls("rank 3 on node b is late", rank=3, missing=[1, 2], message="kept")
    wire = json.loads(json.dumps(error.to_dict()))
    back = errors.from_dict(wire)
    assert type(back) is cls
    assert (back.message, back.details) == (error.message, error.details)
    assert str(back) == str(error)
    assert str(back).startswith(f"[{cls.code} {cls.__name__}] rank 3 on node b is late")


@pytest.mark.parametrize("cls", [errors.PeerLost, errors.OrchestratorUnreachable, errors.AgentLost])
def test_who_reads_that_something_is_gone_reads_what_to_do(cls: type[errors.AllfoldError]) -> None:
    """Once: a message of whole sentences has said it already."""
    shown = str(errors.from_dict(cls("node b is gone: Connection refused").to_dict()))
    assert shown == f"[{cls.code} {cls.__name__}] node b is gone: Connection refused. {cls.advice}"
    assert cls.advice.endswith(".")
    assert str(cls("node b is gone. Restart it.")).endswith("node b is gone. Restart it.")
    assert str(cls("is it b?")).endswith(f"] is it b? {cls.advice}")
    assert cls("node b is gone").message == "node b is gone"  # for other messages to quote


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_a_page_a_status_and_a_docstring(cls: type[errors.AllfoldError]) -> None:
    assert cls.code.startswith("AF")
    assert 400 <= cls.status < 600
    assert cls.__doc__


def test_error_codes_are_unique() -> None:
    def tree(cls: type[errors.AllfoldError]) -> list[type[errors.AllfoldError]]:
        return [cls, *(leaf for child in cls.__subclasses__() for leaf in tree(child))]

    classes = tree(errors.AllfoldError)
    assert len({cls.code for cls in classes}) == len(classes) == len(CLASSES)
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in classes)


@given(details=st.dictionaries(st.text(), json_values), message=st.text())
def test_any_details_survive(details: dict[str, Any], message: str) -> None:
    back = errors.from_dict(errors.PeerLost(message, **details).to_dict())
    assert (back.message, back.details) == (message, details)


def test_an_unknown_error_keeps_its_message() -> None:
    back = errors.from_dict({"code": "AF999", "message": "from the future"})
    assert type(back) is errors.AllfoldError
    assert back.message == "from the future"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "{}", '{"details": "none"}', '{"code": ["AF301"]}'),
        '{"code": 503, "message": "a gateway\'s"}',
        '{"code": "Unavailable", "message": "a gateway\'s"}',
        '{"code": "AF301", "details": [{}]}',
        '{"code": "AF301", "details": null}',
    ],
)
def test_what_is_no_error_is_none(text: str) -> None:
    whole = errors.from_json(json.dumps(errors.PeerLost("gone", node="b").to_dict()))
    assert (type(whole), whole.details) == (errors.PeerLost, {"node": "b"})
    with pytest.raises(ValueError, match=r"JSON|no error of Allfold|Expecting"):
        errors.from_json(text)


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.PeerMissing, TimeoutError)
    assert issubclass(errors.ArenaExhausted, MemoryError)


@given(
    st.builds(
        Plan,
        st.text(),
        st.integers(0),
        st.integers(1),
        st.lists(members, max_size=5).map(tuple),
        st.lists(st.integers(0, 9), max_size=5).map(tuple),
        st.builds(LinkModel, *[st.floats(0, 1)] * 4),
        st.builds(
            GroupOptions,
            st.floats(0, 1e6),
            st.dictionaries(st.sampled_from([kind.label for kind in Kind]), st.text()),
            st.sampled_from(["raise", "shrink"]),
            st.integers(1),
            st.none() | st.integers(1),
            st.sampled_from(["any", "commit"]),
            st.floats(0, 1e6),
        ),
        st.lists(st.text(), max_size=5).map(tuple),
        st.integers(0),
    )
)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(("shared", "cores"), [(True, 2), (False, 0)])
def test_a_plan_from_before_schemas_keeps_what_its_nodes_share(shared: bool, cores: int) -> None:
    plan = Plan("g", 1, 0, (), (), LinkModel(shared_cores=cores), GroupOptions(30.0))
    old = {name: value for name, value in plan.to_dict().items() if name != "schema"}
    old["links"] = {**asdict(LinkModel()), "shared": shared}
    del old["links"]["shared_cores"]
    assert Plan.from_dict(old) == plan


def test_a_plan_from_before_losses_were_survived_raises_on_a_loss() -> None:
    plan = Plan("g", 1, 0, (), (), LinkModel(), GroupOptions(30.0))
    old = {**plan.to_dict(), "schema": 1}
    for name in ("on_loss", "min_world", "sessions", "generation"):
        del old[name]
    assert Plan.from_dict(old) == plan
    assert (plan.options.on_loss, plan.options.min_world) == ("raise", 1)


def test_a_plan_from_before_ranks_could_join_takes_in_nobody() -> None:
    plan = Plan("g", 1, 0, (), (), LinkModel(), GroupOptions(30.0, {}, "shrink", 2))
    old = {**plan.to_dict(), "schema": 2}
    for name in ("max_world", "joins", "join_timeout"):
        del old[name]
    assert Plan.from_dict(old) == plan
    assert not plan.options.is_elastic


def test_a_plan_knows_where_ranks_and_nodes_are() -> None:
    one, two = Member("a", "", "", (0, 3)), Member("b", "", "", (1, 2))
    plan = Plan("g", 1, 4, (one, two), (0, 1), LinkModel(), GroupOptions(30.0))
    assert [plan.index_of_rank(rank) for rank in range(4)] == [0, 1, 1, 0]
    assert plan.index_of_node("b") == 1
    assert plan.ranks_on("b") == (1, 2)
    assert plan.ranks_on("c") == ()
    with pytest.raises(KeyError):
        plan.index_of_node("c")
    with pytest.raises(KeyError):
        plan.index_of_rank(4)


def test_codes_and_labels_are_unique_and_read_back() -> None:
    for dtype in DType:
        assert DType.from_code(dtype.code) is DType.from_label(dtype.label) is dtype
    for kind in Kind:
        assert kind_from_code(kind.code) is kind
    for op in ReduceOp:
        assert reduce_op_from_code(op.code) is op
    assert reduce_op_from_code(0) is None


@pytest.mark.parametrize("read", [DType.from_code, kind_from_code, reduce_op_from_code])
def test_unknown_codes_are_refused(read: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown .* code 77"):
        read(77)


def test_an_unknown_dtype_lists_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"complex64 is not supported; supported: float32, "):
        DType.from_label("complex64")


def test_a_missing_peer_has_decided_an_op_unless_the_error_says_that_it_is_open() -> None:
    assert errors.PeerMissing("rank 1 did not come").decided
    assert not errors.PeerMissing("the group waits for node b", decided=False).decided
