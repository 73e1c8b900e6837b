"""The worlds that are searched."""

from __future__ import annotations

from dataclasses import replace

from tests.core.survival.scenario import Scenario

ONE_TWO = (0, 1, 1)
TWO = (0, 1, 2, 1)  # four ranks on three nodes; the last one shares node 1
SCENARIOS = [
    Scenario("crash", crashes=1),
    Scenario("crash, raise", crashes=1, raises=True),
    Scenario("two crashes", crashes=2),
    Scenario("broadcast and all-reduce, two crashes", kinds=("bc", "ar"), crashes=2),
    Scenario("reduce-scatter, crash", kinds=("rs", "ar"), crashes=1),
    Scenario("reduce-scatter, two crashes", kinds=("rs", "rs"), crashes=2),
    Scenario("rank dies", rank_node=TWO, mortal=(3,), late=((3, 0), (3, 1)), rank_deaths=1),
    Scenario(
        "rank dies, no orchestrator",
        rank_node=TWO,
        mortal=(3,),
        late=((3, 0), (3, 1)),
        rank_deaths=1,
        orchestrator=False,
    ),
    Scenario(
        "rank dies, raise", rank_node=TWO, mortal=(3,), late=((3, 1),), rank_deaths=1, raises=True
    ),
    Scenario(
        "rank dies, crash", rank_node=TWO, mortal=(3,), late=((3, 1),), rank_deaths=1, crashes=1
    ),
    Scenario(
        "broadcast, rank dies, crash",
        rank_node=TWO,
        kinds=("bc", "rs"),
        mortal=(3,),
        late=((3, 1),),
        rank_deaths=1,
        crashes=1,
    ),
    Scenario(
        "the last rank of a node dies", mortal=(1,), late=((1, 0), (1, 1)), rank_deaths=1, crashes=1
    ),
    Scenario("false suspicion", false=1),
    Scenario("false suspicion and crash", false=1, crashes=1),
    Scenario("orchestrator crashes, crash", orch_crashes=1, crashes=1),
    Scenario("record lost, false suspicion, crash", false=1, crashes=1, losses=1),
    Scenario(
        "two nodes, record lost, false suspicion", nodes=2, rank_node=(0, 1), false=2, losses=1
    ),
    Scenario("verdict", rank_node=TWO, late=((3, 1),), verdicts=1),
    Scenario("verdict, crash", rank_node=TWO, late=((3, 1),), verdicts=1, crashes=1),
    Scenario("watermarks that come late, crash", slow=True, crashes=1),
    Scenario("reduce and gather, crash", kinds=("re", "ga"), late=((2, 1),), crashes=1),
    Scenario(
        "world-shaped ops, rank dies",
        rank_node=TWO,
        kinds=("ag", "rs"),
        mortal=(3,),
        late=((3, 0), (0, 1), (2, 1), (3, 1)),
        rank_deaths=1,
    ),
    Scenario(
        "old views, raise",
        nodes=2,
        rank_node=(0, 1, 1),
        kinds=("ar", "ar", "ar"),
        raises=True,
        mortal=(2,),
        late=((2, 0), (0, 2), (2, 1), (2, 2)),
        rank_deaths=1,
    ),
    Scenario(
        "a view newer than the op",
        nodes=2,
        rank_node=(0, 1, 1),
        kinds=("ar", "ag"),
        mortal=(2,),
        late=((1, 0), (0, 1), (1, 1)),
        rank_deaths=1,
        verdicts=1,
    ),
    Scenario("the root is lost before the call", kinds=("bc",), late=((1, 0), (2, 0)), crashes=1),
    Scenario(
        "the root is lost, and a call in advance",
        nodes=2,
        rank_node=(0, 1, 1),
        kinds=("bc",),
        mortal=(2,),
        late=((1, 0),),
        rank_deaths=1,
        crashes=1,
    ),
    Scenario("a reduce that is redone, two crashes", kinds=("re",), crashes=2),
    Scenario(
        "fewer than min_world", kinds=("ar",), min_world=3, late=((0, 0), (1, 0), (2, 0)), crashes=1
    ),
    Scenario(
        "messages arrive twice",
        rank_node=TWO,
        kinds=("ar", "rs"),
        mortal=(3,),
        late=((3, 1),),
        rank_deaths=1,
        verdicts=1,
        again=2,
    ),
    Scenario("another order of nodes", arrangements=2, late=((2, 1),)),
    Scenario("another order, raise", kinds=("ar", "rs"), raises=True, arrangements=1),
    Scenario("another order, crash", kinds=("ar", "rs"), arrangements=1, crashes=1),
    Scenario(
        "another order, rank dies, raise",
        rank_node=TWO,
        kinds=("bc", "ar"),
        mortal=(3,),
        late=((3, 1),),
        rank_deaths=1,
        raises=True,
        arrangements=1,
    ),
    # Small ones, each with what some mutant needs to be caught.
    Scenario("one all-reduce, crash", kinds=("ar",), crashes=1),
    Scenario("one reduce-scatter, crash", kinds=("rs",), crashes=1),
    Scenario(
        "one late all-reduce, verdict, crash", kinds=("ar",), late=((2, 0),), verdicts=1, crashes=1
    ),
    Scenario("one all-reduce, verdict, false suspicion", kinds=("ar",), verdicts=1, false=1),
    Scenario(
        "one late broadcast, rank dies, false suspicion",
        rank_node=(0, 1, 1, 2),
        kinds=("bc",),
        mortal=(2,),
        late=((1, 0), (2, 0)),
        rank_deaths=1,
        false=1,
    ),
    Scenario(
        "one late all-reduce, record lost, false suspicion",
        nodes=2,
        rank_node=(0, 1),
        kinds=("ar",),
        late=((1, 0),),
        false=1,
        losses=1,
    ),
    Scenario(
        "one all-reduce, record lost, false suspicions",
        nodes=2,
        rank_node=(0, 1),
        kinds=("ar",),
        false=2,
        losses=1,
    ),
    Scenario(
        "one late all-reduce, record lost, false suspicion, crash",
        kinds=("ar",),
        late=((1, 0),),
        crashes=1,
        false=1,
        losses=1,
    ),
    Scenario(
        "two rounds",
        nodes=2,
        rank_node=ONE_TWO,
        kinds=("ar",),
        mortal=(2,),
        late=((2, 0),),
        rank_deaths=1,
        verdicts=1,
    ),
    Scenario(
        "two ranks die",
        nodes=2,
        rank_node=(0, 1, 1, 0),
        kinds=("ar",),
        mortal=(2, 3),
        late=((2, 0), (3, 0)),
        rank_deaths=2,
    ),
    Scenario(
        "a late all-gather, another order",
        nodes=2,
        rank_node=(0, 1),
        kinds=("ag",),
        raises=True,
        late=((0, 0), (1, 0)),
        arrangements=1,
    ),
    Scenario(
        "floors that differ",
        nodes=2,
        rank_node=(0, 1),
        kinds=("rs", "ar"),
        late=((0, 1),),
        slow=True,
        verdicts=1,
    ),
]
JOINS = [
    Scenario(
        "only the newcomer knows that it has joined",
        kinds=("ar", "ar"),
        joiners=(2,),
        max_world=3,
        late=((1, 0), (1, 1), (0, 1)),
        crashes=1,
    ),
    Scenario(
        "too few, then a node joins",
        kinds=("ar", "ar"),
        rank_node=(0, 1, 2, 2),
        joiners=(3,),
        min_world=3,
        max_world=4,
        mortal=(2,),
        late=((2, 0), (0, 1), (1, 1), (2, 1)),
        rank_deaths=1,
        verdicts=1,
    ),
    Scenario("a node joins", nodes=2, rank_node=(0, 1), joiners=(1,), max_world=2),
    Scenario(
        "a rank joins", nodes=2, rank_node=(0, 1, 1), joiners=(2,), max_world=3, late=((0, 1),)
    ),
    Scenario("a third node joins, crash", joiners=(2,), max_world=3, late=((0, 1),), crashes=1),
    Scenario(
        "two nodes join, crash",
        joiners=(1, 2),
        max_world=3,
        late=((0, 1),),
        crashes=1,
    ),
    Scenario(
        "a rank joins a node whose last one has died",
        rank_node=(0, 1, 1),
        nodes=2,
        joiners=(2,),
        max_world=3,
        mortal=(1, 2),
        late=((0, 1), (1, 1)),
        rank_deaths=2,
    ),
    Scenario(
        "a node without ranks has one again, before an op that others have called",
        kinds=("ar",),
        rank_node=(0, 0, 1, 1),
        nodes=2,
        joiners=(3,),
        max_world=3,
        mortal=(2,),
        late=((1, 0), (2, 0)),
        rank_deaths=1,
    ),
    Scenario(
        "a node is evicted, and joins again",
        rank_node=(0, 1, 2, 2),
        joiners=(3,),
        max_world=3,
        late=((0, 1),),
        false=1,
    ),
    Scenario(
        "a node joins, record lost, false suspicion, crash",
        kinds=("ar",),
        joiners=(2,),
        max_world=3,
        late=((0, 0), (1, 0)),
        crashes=1,
        false=1,
        losses=1,
    ),
    Scenario(
        "a node joins at a commit",
        nodes=2,
        rank_node=(0, 1),
        joiners=(1,),
        max_world=2,
        commits=(1, 2),
        kinds=("ar", "ar", "ar"),
    ),
    Scenario(
        "two nodes join at commits, crash",
        rank_node=(0, 0, 1, 2),
        joiners=(2, 3),
        max_world=4,
        commits=(1, 2),
        kinds=("ar", "ar", "ar"),
        crashes=1,
    ),
    Scenario(
        "a rank leaves at a commit",
        nodes=2,
        rank_node=(0, 1),
        max_world=2,
        commits=(1,),
        leavers=(1,),
        kinds=("ar", "ar"),
    ),
]
SCENARIOS += JOINS
QUORUMS = [
    Scenario(
        "quorum, a late rank",
        nodes=2,
        rank_node=(0, 1, 1),
        kinds=("ar",),
        quorum=2,
        late=((2, 0),),
    ),
    Scenario("quorum, a silent rank", nodes=2, rank_node=(0, 1, 1), quorum=2, silent=(2,)),
    Scenario("quorum, a late node, crash", quorum=2, late=((2, 0), (2, 1)), crashes=1),
    Scenario("quorum, a late node, crash, raise", quorum=2, late=((2, 1),), crashes=1, raises=True),
    Scenario("quorum, a silent leader, crash", quorum=2, silent=(0,), crashes=1),
    Scenario(
        "quorum, a late rank, rank dies",
        rank_node=TWO,
        kinds=("ar",),
        quorum=2,
        mortal=(1, 3),
        late=((0, 0), (2, 0), (3, 0)),
        rank_deaths=1,
    ),
    Scenario(
        "quorum, rank dies before anybody starts",
        nodes=2,
        rank_node=(0, 0, 1, 1),
        kinds=("ar",),
        quorum=2,
        silent=(1,),
        mortal=(2,),
        late=((3, 0),),
        rank_deaths=1,
    ),
    Scenario("quorum, false suspicion", kinds=("ar",), quorum=2, silent=(2,), false=1),
    Scenario(
        "quorum, messages arrive twice",
        kinds=("ar",),
        quorum=2,
        late=((1, 0), (2, 0)),
        verdicts=1,
        again=1,
        crashes=1,
    ),
]
SCENARIOS += QUORUMS
# The faults of the deep searches.
_DEEP_FAULTS = Scenario(
    "deep",
    nodes=4,
    crashes=2,
    rank_deaths=2,
    false=1,
    losses=1,
    verdicts=1,
    again=2,
    arrangements=1,
    orch_crashes=1,
)
JOIN_DEEP = [
    replace(
        _DEEP_FAULTS,
        name=f"deep: {name}",
        rank_node=(0, 1, 2, 3, 1, 3, 2),
        joiners=(3, 4, 5, 6),
        max_world=most,
        kinds=kinds,
        raises=raises,
        min_world=least,
        mortal=(2, 4, 5, 6),
        late=((0, 1), (1, 1), (2, 1), (2, 2)),
        slow=slow,
        commits=commits,
        leavers=leavers,
    )
    for name, kinds, raises, slow, least, most, commits, leavers in [
        ("joins", ("ar", "ar", "ar"), False, False, 1, 6, (), ()),
        ("joins, all kinds", ("bc", "rs", "ag", "ar"), False, True, 1, 6, (), ()),
        ("joins, raise", ("ar", "ga", "ar"), True, True, 1, 6, (), ()),
        ("joins, min_world", ("ar", "rs", "ar"), False, False, 3, 5, (), ()),
        ("commits", ("ar", "ar", "ar", "ar"), False, False, 1, 6, (1, 2, 3), ()),
        ("commits, min_world", ("ar", "rs", "ar", "ar"), False, False, 3, 5, (1, 2, 3), (1,)),
        ("commits, leaving", ("ar", "rs", "bc", "ar"), False, True, 1, 6, (1, 2, 3), (1, 3)),
        ("commits, raise", ("ar", "ag", "ar", "ar"), True, False, 2, 6, (1, 3), (1,)),
    ]
]
DEEP = [
    replace(
        _DEEP_FAULTS,
        name=f"deep: {name}",
        rank_node=ranks,
        kinds=kinds,
        raises=raises,
        mortal=(4, 5),
        late=((4, 0), (4, 1), (5, 1)),
        slow=slow,
        arrangements=2,
    )
    for name, ranks, kinds, raises, slow in [
        ("4 nodes", (0, 1, 2, 3, 1, 2), ("ar", "ar"), False, False),
        ("broadcast, reduce-scatter", (0, 1, 2, 3, 1, 0), ("bc", "rs"), False, True),
        ("raise", (0, 1, 2, 3, 1, 2), ("ar", "bc", "ar"), True, False),
        ("all kinds", (0, 1, 2, 3, 1, 0), ("re", "ag", "ga", "bc"), False, True),
        ("all kinds, raise", (0, 1, 2, 3, 1, 2), ("ga", "rs", "re", "ag"), True, True),
    ]
]
DEEP += JOIN_DEEP
DEEP += [
    replace(
        DEEP[0],
        name=f"deep: quorum{name}",
        kinds=("ar", "ar", "ar"),
        raises=raises,
        quorum=3,
        silent=silent,
        late=((4, 0), (3, 1), (4, 1), (5, 1), (3, 2), (4, 2), (5, 2)),
    )
    for name, silent, raises in [
        ("", (1,), False),
        (", raise", (), True),
        (", leader", (0,), False),
    ]
]
