"""Everything that can happen in a world: faults, the orchestrator, the control and data planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.decision import ProtocolViolation
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.records import Term
from allfold_core.survival.reports import Doubt, Install, OpState, Reason, Wishes
from allfold_core.topology import Layout
from tests.core.survival import joining, quorums
from tests.core.survival.data_plane import Action, data_actions, do
from tests.core.survival.scenario import name, number
from tests.core.survival.world import WishesOf, World
from tests.support.state_search import Violation

W = TypeVar("W", bound=World)


def actions(w: World) -> Iterator[Action]:
    """Everything that can happen now."""
    yield from node_faults(w)
    yield from _orchestrator_faults(w)
    yield from _orchestrator(w)
    yield from joining.requests(w)
    yield from joining.arrivals(w)
    for n in w.live():
        yield from _terms(w, n)
    yield from node_actions(w)


def node_actions(w: World) -> Iterator[Action]:
    """Whatever nodes do, and what they say to each other in rounds."""
    live = w.live()
    for rank, seq in w.s.later_calls:
        if w.s.rank_node[rank] in live and w.may_call(rank, seq):
            yield f"rank {rank} calls op {seq}", False, do(World.call, rank, seq)
    yield from quorums.endings(w)
    yield from joining.commits(w)
    yield from joining.waits_for_others(w)
    for n in live:
        yield from data_actions(w, n)
        yield from _rounds(w, n)


def follow(world: W, change: Callable[[W], None]) -> W:
    """Return the world after an action; a broken rule of the machines is a violation."""
    after = world.copy()
    try:
        change(after)
        after.settle()
    except ProtocolViolation as error:
        raise Violation(str(error)) from error
    after.check()
    return after


# Faults


def node_faults(w: World) -> Iterator[Action]:
    """Deaths, deadlines of ops, and messages that come twice."""
    if w.budget["crash"] and sum(w.alive) > 1:
        for n in range(w.s.nodes):
            if w.alive[n]:
                yield f"node {n} crashes", True, do(_crash, n)
    if w.budget["rank"]:
        for rank in w.s.mortal:
            if rank not in w.dead and w.alive[w.s.rank_node[rank]]:
                yield f"rank {rank} dies", True, do(_rank_dies, rank)
    if w.budget["verdict"]:
        yield from _deadlines(w)
    if w.budget["again"]:
        yield from _repetitions(w)
    if w.budget["arrange"]:
        for t in w.leaders:
            if w.alive[number(w.terms[t].leader)]:
                yield f"the nodes of term {t} are to stand in another order", True, do(_arrange, t)


def _orchestrator_faults(w: World) -> Iterator[Action]:
    if w.budget["loss"] and w.record is not None:
        yield "the record is lost", True, _lose_record
    if w.budget["orch"] and w.orch:
        yield "the orchestrator crashes", True, _orch_crashes
    if w.budget["false"] and w.orch and w.record is not None:
        yield from _mistakes(w, w.record)


def _mistakes(w: World, record: int) -> Iterator[Action]:
    may = not (w.recalled and w.mutant.recalled_evicts_no_silent)
    terms = [record] if may else []
    if not w.mutant.compare_and_set:
        terms += w.ancestors(record)
    for t in terms:
        for n in w.voters(t):
            if w.alive[n] and len(w.voters(t)) > 1:
                yield f"node {n} is evicted by mistake from term {t}", True, do(_mistake, t, n)


def _deadlines(w: World) -> Iterator[Action]:
    """The deadlines of what some living rank has called."""
    live = w.live()
    waiting = {k for rank, k in w.called if rank not in w.dead and w.s.rank_node[rank] in live}
    for t in w.leaders:
        n = number(w.terms[t].leader)
        if w.alive[n] and w.term_of(n) == t and not w.agents[n].frozen:
            for k in sorted(waiting):
                entry = w.agents[n].ops.get(k)
                unknown = entry is None and k > w.agents[n].floor
                if unknown or (entry is not None and entry.state is OpState.OPEN):
                    yield f"the deadline of op {k} passes in term {t}", True, do(_deadline, t, k)


def _repetitions(w: World) -> Iterator[Action]:
    for t, what in sorted(w.arrived, key=str):
        if t in w.leaders:
            yield f"the leader of term {t} hears again of {what}", True, do(_again, t, what)
    for t, r, n in w.reports:
        if t in w.leaders and not (w.leaders[t].gathering and r == w.leaders[t].round):
            label = f"the leader of term {t} gets the report {r} of node {n} again"
            yield label, True, do(_report_again, t, r, n)


def _crash(w: World, n: int) -> None:
    w.budget["crash"] -= 1
    w.alive[n] = False
    w.leaders = {t: each for t, each in w.leaders.items() if w.terms[t].leader != name(n)}


def _rank_dies(w: World, rank: int) -> None:
    w.budget["rank"] -= 1
    w.dead.add(rank)
    n = w.s.rank_node[rank]
    if n in w.live():
        w.carry_out(n, w.agents[n].rank_ended(f"r{rank}", "died"))


def _lose_record(w: World) -> None:
    w.budget["loss"] -= 1
    w.record, w.recalled, w.reported = None, True, set()
    w.generation += 1


def _orch_crashes(w: World) -> None:
    w.budget["orch"] -= 1
    w.orch = False


def _mistake(w: World, t: int, n: int) -> None:
    w.budget["false"] -= 1
    _evict(w, t, n)


def _deadline(w: World, t: int, k: int) -> None:
    w.budget["verdict"] -= 1
    w.leaders[t].doubt(Doubt(k, Reason.DEADLINE, 1.0))


def _arrange(w: World, t: int) -> None:
    ring = w.terms[t].voters
    w.leaders[t].arrange(Layout(ring=ring, usual=float(w.budget["arrange"])))
    w.budget["arrange"] -= 1


def _again(w: World, t: int, what: str | Doubt | WishesOf) -> None:
    w.budget["again"] -= 1
    _hear(w, t, what)


def _report_again(w: World, t: int, r: int, n: int) -> None:
    w.budget["again"] -= 1
    if made := w.leaders[t].report(w.reports[t, r, n]):
        raise Violation(f"an old report is counted: {made}")


# The orchestrator: its record is the head of the chain of terms


def _orchestrator(w: World) -> Iterator[Action]:
    if not w.orch:
        if w.s.orchestrator:
            yield "the orchestrator is back", False, _orch_is_back
        return
    for n in range(w.s.nodes):
        if w.alive[n] and w.agents[n].generation < w.generation:
            yield f"node {n} registers again", False, do(_register, n)
    if w.record is None:
        return
    for n in sorted(w.voters(w.record)):
        is_awaited = w.recalled and _some_are_late(w) and n not in w.reported
        if is_awaited and w.mutant.grace:
            continue
        gone = not w.alive[n] or (w.agents[n].out and w.mutant.out_is_proof)
        if gone and len(w.voters(w.record)) > 1:
            label = f"the orchestrator evicts the dead node {n}"
            yield label, False, do(_evict, w.record, n)


def _add_term(w: World, parents: tuple[int, ...], voters: tuple[str, ...]) -> None:
    newest = max(w.terms[p].number for p in parents)
    parent = w.terms[parents[0]]
    before = dict(zip(parent.voters, parent.joined, strict=True))
    joined = tuple(before[each] for each in voters)
    w.record = len(w.terms)
    w.terms.append(Term(newest + 1, w.generation, voters, joined))
    w.parents.append(parents)
    w.announced.append({w.generation})


def _evict(w: World, t: int, n: int) -> None:
    _add_term(w, (t,), tuple(each for each in w.terms[t].voters if each != name(n)))


def _orch_is_back(w: World) -> None:
    w.orch = True


def _some_are_late(w: World) -> bool:
    lives = zip(w.alive, w.agents, strict=True)
    return any(alive and each.generation < w.generation for alive, each in lives)


def _register(w: World, n: int) -> None:
    """A node registers with a store that may have lost something, and reports its term."""
    w.agents[n].registered(w.generation)
    if n in w.inside:
        w.reported.add(n)
        t = w.term_of(n)
        if not (w.agents[n].out or t == w.record):
            _meet(w, n, t)
    gone = {each for each in range(w.s.nodes) if not w.alive[each]}
    if _some_are_late(w):
        gone = set()
    if w.record is not None and w.voters(w.record) <= w.reported | gone:
        w.recalled = False


def _meet(w: World, n: int, t: int) -> None:
    if w.record is None or w.record in w.ancestors(t):
        w.record = t
        w.announced[t].add(w.generation)
    elif t not in w.ancestors(w.record) and w.mutant.siblings_meet:
        both = tuple(v for v in w.terms[w.record].voters if v in w.terms[t].voters)
        if both:
            _add_term(w, (w.record, t), both)
        elif w.mutant.strangers_are_out:
            w.agents[n].out = True


# An agent's control plane


def _terms(w: World, n: int) -> Iterator[Action]:
    by_peers = {w.term_of(m) for m in w.live()}
    for t in range(len(w.terms)):
        known = w.orch or t in by_peers
        if known and _heeds(w, n, t):
            yield f"node {n} learns term {t}", False, do(_learn, n, t)


def _rounds(w: World, n: int) -> Iterator[Action]:
    me = w.agents[n]
    t = w.term_of(n)
    leads = w.alive[number(w.terms[t].leader)]
    leader = w.leaders.get(t)
    if leader is not None and leader.round > me.round:
        label = f"node {n} gets FREEZE {t}.{leader.round}"
        yield label, not leads, do(_freeze, n, t, leader.round)
    if leader is not None and leader.term.leader == name(n):
        yield from _lead(w, n, t, leader)
    for at, r in w.installs:
        mine = me.frozen and (at, r) == (t, me.round)
        if mine or type(me) is not AgentMachine:  # which heeds no other
            yield f"node {n} gets INSTALL {at}.{r}", not (mine and leads), do(_install, n, at, r)
    if w.s.slow:
        yield from _progress(w, n)


def _heeds(w: World, n: int, t: int) -> bool:
    """Return True if an agent would take a term now."""
    me, term = w.agents[n], w.terms[t]
    void = w.mutant.generation and me.generation not in w.announced[t]
    if void or term.number <= me.term.number:
        return False
    return bool(me.copy().take_term(term, me.generation))


def _learn(w: World, n: int, t: int) -> None:
    take_term(w, n, w.terms[t], w.agents[n].generation)


def take_term(w: World, n: int, term: Term, announced: int) -> None:
    """A node is told of a term that it heeds."""
    if term.leader == name(n):
        w.lead(term, gathering=True)
    w.carry_out(n, w.agents[n].take_term(term, announced))


def _freeze(w: World, n: int, t: int, r: int) -> None:
    w.carry_out(n, w.agents[n].freeze(w.terms[t].number, r))


def _install(w: World, n: int, t: int, r: int) -> None:
    w.carry_out(n, w.agents[n].install(w.installs[t, r]))


def _progress(w: World, n: int) -> Iterator[Action]:
    for m in w.live():
        if m != n and w.agents[m].watermark > w.agents[n]._watermarks.get(name(m), 2**63):
            yield f"node {n} hears how far node {m} is", False, do(_hear_watermark, n, m)


def _hear_watermark(w: World, n: int, m: int) -> None:
    w.carry_out(n, w.agents[n].learn_watermark(name(m), w.agents[m].watermark))


def _lead(w: World, n: int, t: int, leader: LeaderMachine) -> Iterator[Action]:
    for at, what in sorted(w.sent, key=str):
        if at == t:
            yield f"leader {n} hears of {what}", False, do(_hear, t, what)
    if _is_complete(w, t, leader):
        gone = not all(w.alive[m] for m in w.voters(t))
        yield f"leader {n} decides {t}.{leader.round}", gone, do(_decide, n, t)


def _is_complete(w: World, t: int, leader: LeaderMachine) -> bool:
    """Return True if a leader would decide its round with the reports that there are."""
    trial = leader.copy()
    for m in w.voters(t):
        if (t, leader.round, m) in w.reports:
            trial.reports[name(m)] = w.reports[t, leader.round, m]
    return trial.gathering and not trial.missing


def _hear(w: World, t: int, what: str | Doubt | WishesOf) -> None:
    """A leader gets DOWN, or DOUBT."""
    w.sent.discard((t, what))
    if w.s.again:
        w.arrived.add((t, what))
    if isinstance(what, Doubt):
        w.leaders[t].doubt(what)
    elif isinstance(what, WishesOf):
        wishes = Wishes(what.join, what.leave, dict(what.at_boundary))
        w.leaders[t].wish(name(what.node), wishes)
    else:
        w.leaders[t].down({what: "died"})


def _decide(w: World, n: int, t: int) -> None:
    leader = w.leaders[t]
    r = leader.round
    for m in sorted(w.voters(t)):
        report = w.reports.get((t, r, m))
        for made in leader.report(report) if report else []:
            if isinstance(made, Install):
                w.installs[t, r] = made
                for epoch in (*made.older, made.epoch):
                    w.decided(epoch)
    _install(w, n, t, r)
