"""A world of nodes that run the real machines, for a search through everything that can happen.

Every message may take any time, messages overtake each other, and what a dead node has sent may
arrive or be lost. A frame is "a node has contributed to an op in an epoch": that its content needs
all contributions, however the schedule routes them, is what all strategies have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from allfold_core.codecs import Wire
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, PeerMissing
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.survival import instructions as agent
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.decision import GroupPolicy, ProtocolViolation
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Call, Doubt, Install, OpState, Reason, Report

KINDS = {"ar": Kind.ALL_REDUCE, "bc": Kind.BROADCAST, "rs": Kind.REDUCE_SCATTER}
HOLDS = (OpState.HELD, OpState.HANDED)


@dataclass(frozen=True)
class Scenario:
    """What there is, and how much may go wrong.

    Attributes:
        rank_node: the node of each rank.
        kinds: of the ops; a broadcast comes from rank 0.
        mortal: ranks that may die while their agent lives.
        late: (rank, op): calls that are still to come.
    """

    name: str
    nodes: int = 3
    rank_node: tuple[int, ...] = (0, 1, 2)
    kinds: tuple[str, ...] = ("ar", "ar")
    raises: bool = False
    mortal: tuple[int, ...] = ()
    late: tuple[tuple[int, int], ...] = ()
    crashes: int = 0
    rank_deaths: int = 0
    false: int = 0
    losses: int = 0
    verdicts: int = 0
    orchestrator: bool = True
    orch_crashes: int = 0


class Violation(Exception):
    """What must hold does not."""


@dataclass(frozen=True)
class Mutant:
    """One rule of the protocol switched off, by a change of the machines or of the orchestrator."""

    agent: type[AgentMachine] = AgentMachine
    leader: type[LeaderMachine] = LeaderMachine
    compare_and_set: bool = True
    recalled_evicts_no_silent: bool = True
    grace: bool = True
    out_is_proof: bool = True
    siblings_meet: bool = True
    reporter_out: bool = True


FAITHFUL = Mutant()
Action = tuple[str, bool, Callable[["World"], None]]
"""What can happen: its name, whether it may never happen, and what it does to a copy."""


def judge_deadline(
    seq: int, _epoch: Epoch, _reports: object, doubt: Doubt | None
) -> AllfoldError | None:
    """A verdict on whatever is doubted."""
    return PeerMissing(f"op {seq} was late") if doubt else None


def name(node: int) -> str:
    return f"n{node}"


class World:
    """All nodes, the orchestrator's record, and what is under way between them."""

    def __init__(self, scenario: Scenario, mutant: Mutant = FAITHFUL) -> None:
        self.s, self.mutant = scenario, mutant
        everyone = tuple(range(scenario.nodes))
        seats = tuple(Seat(f"r{rank}", name(at)) for rank, at in enumerate(scenario.rank_node))
        term = Term(0, 0, tuple(map(name, everyone)), (0,) * scenario.nodes)
        epoch = Epoch(Stamp(0, 0, 0), 0, seats)
        policy = GroupPolicy("g", shrink=not scenario.raises)
        self.policy = policy
        self.terms: list[Term] = [term]
        self.parents: list[tuple[int, ...]] = [()]
        self.announced: list[set[int]] = [{0}]
        self.record: int | None = 0
        self.recalled = False
        self.reported: set[int] = set(everyone)
        self.generation = 0
        self.orch = scenario.orchestrator
        self.alive = [True] * scenario.nodes
        self.agents = [mutant.agent(name(n), policy, term, epoch) for n in everyone]
        self.leaders: dict[int, LeaderMachine] = {
            0: mutant.leader(policy, term, judge_deadline, gathering=False)
        }
        self.dead: set[int] = set()
        self.called = {(r, k) for k in range(len(scenario.kinds)) for r in range(len(seats))}
        self.called -= set(scenario.late)
        self.told: dict[tuple[int, int], tuple[str, Any]] = {}
        self.started: dict[tuple[int, Stamp], set[int]] = {}
        self.closings: dict[tuple[int, Stamp], set[int]] = {}
        self.reports: dict[tuple[int, int, int], Report] = {}
        self.installs: dict[tuple[int, int], Install] = {}
        self.completed_in: set[int] = set()
        s = scenario
        self.budget = {
            "crash": s.crashes,
            "rank": s.rank_deaths,
            "false": s.false,
            "loss": s.losses,
            "verdict": s.verdicts,
            "orch": s.orch_crashes,
        }
        for rank, seq in sorted(self.called, key=lambda each: each[::-1]):
            self.call(rank, seq)
        self.settle()

    def copy(self) -> World:
        """Return an independent world in the same state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.terms, other.parents = list(self.terms), list(self.parents)
        other.announced = [set(each) for each in self.announced]
        other.reported, other.alive = set(self.reported), list(self.alive)
        other.agents = [each.copy() for each in self.agents]
        other.leaders = {t: each.copy() for t, each in self.leaders.items()}
        other.dead, other.called = set(self.dead), set(self.called)
        other.told = dict(self.told)
        other.started = {key: set(nodes) for key, nodes in self.started.items()}
        other.closings = {key: set(nodes) for key, nodes in self.closings.items()}
        other.reports, other.installs = dict(self.reports), dict(self.installs)
        other.completed_in = set(self.completed_in)
        other.budget = dict(self.budget)
        return other

    def key(self) -> object:
        """Equal for states with equal futures."""
        return (
            tuple(map(self._agent_key, range(self.s.nodes))),
            tuple(
                (t, each.round, each.gathering, tuple(each._dead), tuple(each._later))
                for t, each in sorted(self.leaders.items())
            ),
            tuple(self.terms),
            tuple(map(frozenset, self.announced)),
            (self.record, self.recalled, frozenset(self.reported), self.generation, self.orch),
            frozenset(self.dead),
            frozenset(self.called),
            frozenset(self.told.items()),
            frozenset((key, frozenset(nodes)) for key, nodes in self.started.items()),
            frozenset((key, frozenset(nodes)) for key, nodes in self.closings.items()),
            frozenset(self.reports),
            frozenset(self.installs),
            tuple(self.budget.values()),
        )

    def _agent_key(self, n: int) -> object:
        a = self.agents[n]
        if not self.alive[n]:
            return tuple((k, e.state, e.stamp) for k, e in a.ops.items() if e.state in HOLDS)
        ops = tuple(
            (k, e.state, e.stamp, e.started, e.complete, e.closed, e.forward, e.fetch, e.fetching)
            for k, e in sorted(a.ops.items())
        )
        return (
            a.term.number,
            a.term.generation,
            a.generation,
            a.round,
            a.frozen,
            a.out,
            (
                a.epoch.stamp,
                a.floor,
                a.watermark,
                ops,
            ),
        )

    # Small questions

    def live(self) -> list[int]:
        """The nodes that run and are not out."""
        return [n for n in range(self.s.nodes) if self.alive[n] and not self.agents[n].out]

    def term_of(self, n: int) -> int:
        return self.terms.index(self.agents[n].term)

    def voters(self, t: int) -> set[int]:
        return {int(each[1:]) for each in self.terms[t].voters}

    def ancestors(self, t: int) -> set[int]:
        seen: set[int] = set()
        todo = [t]
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    def excluded(self, n: int) -> bool:
        """Return True if some term that was ever decided leaves the node out."""
        return any(n not in self.voters(t) for t in range(len(self.terms)))

    # What agents are told to do

    def carry_out(self, n: int, instructions: list[agent.Instruction]) -> None:
        for each in instructions:
            if isinstance(each, agent.Start):
                self.started.setdefault((each.seq, each.epoch.stamp), set()).add(n)
            elif isinstance(each, agent.SendClosing):
                stamp = self.agents[n].ops[each.seq].stamp
                assert stamp is not None
                self.closings.setdefault((each.seq, stamp), set()).add(n)
            elif isinstance(each, agent.HandOut):
                self._tell(n, each.seq, ("result", each.stamp))
            elif isinstance(each, agent.Refuse):
                self._tell(n, each.seq, ("error", each.error, each.ordinal))
            elif isinstance(each, agent.SendReport):
                report = each.report
                self.reports[self.terms.index(report.term), report.round, n] = report
            elif isinstance(each, agent.SendDoubt):
                raise Violation(f"an unexpected doubt of node {n}: {each}")

    def _tell(self, n: int, seq: int, outcome: tuple[Any, ...]) -> None:
        before = self.told.setdefault((n, seq), outcome)
        if before != outcome:
            raise Violation(f"I5: node {n} was told {before} of op {seq}, and now {outcome}")

    def settle(self) -> None:
        """Watermarks arrive as early as they can: a copy goes once every voter has the result."""
        news = True
        while news:
            news = False
            marks = {n: self.agents[n].watermark for n in self.live()}
            for n in self.live():
                for m, mark in marks.items():
                    if m != n:
                        got = self.agents[n].learn_watermark(name(m), mark)
                        news = news or bool(got)
                        self.carry_out(n, got)

    def call(self, rank: int, seq: int) -> None:
        self.called.add((rank, seq))
        kind = KINDS[self.s.kinds[seq]]
        fingerprint = Fingerprint(
            kind,
            ReduceOp.SUM if kind.reduces else None,
            DType.FLOAT32,
            (4,),
            0 if kind.has_root else -1,
            AUTO,
            Wire.NATIVE,
        )
        n = self.s.rank_node[rank]
        root = "r0" if kind.has_root else ""
        view = self.agents[n].epoch.ordinal
        self.carry_out(n, self.agents[n].call(seq, f"r{rank}", Call(view, fingerprint, root)))

    # What can happen

    def actions(self) -> Iterator[Action]:
        """Everything that can happen now."""
        yield from self._faults()
        yield from self._orchestrator()
        for rank, seq in self.s.late:
            earlier = all((rank, each) in self.called for each in range(seq))
            node = self.s.rank_node[rank]
            may_call = earlier and rank not in self.dead and (rank, seq) not in self.called
            if may_call and self.alive[node] and not self.agents[node].out:
                yield f"rank {rank} calls op {seq}", False, _do(World.call, rank, seq)
        for n in self.live():
            yield from self._data(n)
            yield from self._control(n)

    def _spend(self, what: str) -> None:
        self.budget[what] -= 1

    def _faults(self) -> Iterator[Action]:
        if self.budget["crash"] and sum(self.alive) > 1:
            for n in range(self.s.nodes):
                if self.alive[n]:
                    yield f"node {n} crashes", True, _do(World._crash, n)
        if self.budget["rank"]:
            for rank in self.s.mortal:
                if rank not in self.dead and self.alive[self.s.rank_node[rank]]:
                    yield f"rank {rank} dies", True, _do(World._rank_dies, rank)
        if self.budget["loss"] and self.record is not None:
            yield "the record is lost", True, _do(World._lose_record)
        if self.budget["orch"] and self.orch:
            yield "the orchestrator crashes", True, _do(World._orch_crashes)
        if self.budget["false"] and self.orch and self.record is not None:
            yield from self._mistakes(self.record)
        if self.budget["verdict"]:
            yield from self._deadlines()

    def _mistakes(self, record: int) -> Iterator[Action]:
        may = not (self.recalled and self.mutant.recalled_evicts_no_silent)
        terms = [record] if may else []
        if not self.mutant.compare_and_set:
            terms += self.ancestors(record)
        for t in terms:
            for n in self.voters(t):
                if self.alive[n] and len(self.voters(t)) > 1:
                    label = f"node {n} is evicted by mistake from term {t}"
                    yield label, True, _do(World._mistake, t, n)

    def _deadlines(self) -> Iterator[Action]:
        for t, leader in self.leaders.items():
            n = int(self.terms[t].leader[1:])
            if self.alive[n] and self.term_of(n) == t and not self.agents[n].frozen:
                for k in range(len(self.s.kinds)):
                    entry = self.agents[n].ops.get(k)
                    unknown = entry is None and k > self.agents[n].floor
                    if unknown or (entry is not None and entry.state is OpState.OPEN):
                        label = f"the deadline of op {k} passes in term {t}"
                        yield label, True, _do(World._deadline, t, k)
            del leader

    def _crash(self, n: int) -> None:
        self._spend("crash")
        self.alive[n] = False
        self.leaders = {
            t: each for t, each in self.leaders.items() if self.terms[t].leader != name(n)
        }

    def _rank_dies(self, rank: int) -> None:
        self._spend("rank")
        self.dead.add(rank)
        n = self.s.rank_node[rank]
        if self.alive[n] and not self.agents[n].out:
            self.carry_out(n, self.agents[n].rank_ended(f"r{rank}", "died"))

    def _lose_record(self) -> None:
        self._spend("loss")
        self.record, self.recalled, self.reported = None, True, set()
        self.generation += 1

    def _orch_crashes(self) -> None:
        self._spend("orch")
        self.orch = False

    def _mistake(self, t: int, n: int) -> None:
        self._spend("false")
        self._evict(t, n)

    def _deadline(self, t: int, k: int) -> None:
        self._spend("verdict")
        self.leaders[t].doubt(Doubt(k, Reason.DEADLINE, 1.0))

    # The orchestrator: its record is the head of the chain of terms

    def _add_term(self, parents: tuple[int, ...], voters: tuple[str, ...]) -> None:
        number = max(self.terms[p].number for p in parents) + 1
        before = dict(
            zip(self.terms[parents[0]].voters, self.terms[parents[0]].joined, strict=True)
        )
        joined = tuple(before[each] for each in voters)
        self.record = len(self.terms)
        self.terms.append(Term(number, self.generation, voters, joined))
        self.parents.append(parents)
        self.announced.append({self.generation})

    def _evict(self, t: int, n: int) -> None:
        self._add_term((t,), tuple(each for each in self.terms[t].voters if each != name(n)))

    def _orchestrator(self) -> Iterator[Action]:
        if not self.orch:
            if self.s.orchestrator:
                yield "the orchestrator is back", False, _do(World._orch_is_back)
            return
        for n in range(self.s.nodes):
            if self.alive[n] and self.agents[n].generation < self.generation:
                yield f"node {n} registers again", False, _do(World._register, n)
        if self.record is None:
            return
        for n in sorted(self.voters(self.record)):
            if self.recalled and self.mutant.grace and self._late() and n not in self.reported:
                continue
            gone = not self.alive[n] or (self.agents[n].out and self.mutant.out_is_proof)
            if gone and len(self.voters(self.record)) > 1:
                label = f"the orchestrator evicts the dead node {n}"
                yield label, False, _do(World._evict, self.record, n)

    def _orch_is_back(self) -> None:
        self.orch = True

    def _late(self) -> bool:
        lives = zip(self.alive, self.agents, strict=True)
        return any(alive and each.generation < self.generation for alive, each in lives)

    def _register(self, n: int) -> None:
        """A node registers with a store that may have lost something, and reports its term."""
        self.agents[n].registered(self.generation)
        self.reported.add(n)
        t = self.term_of(n)
        if not (self.agents[n].out or t == self.record):
            self._meet(n, t)
        gone = {each for each in range(self.s.nodes) if not self.alive[each]}
        if self._late() and self.mutant.grace:
            gone = set()
        if self.record is not None and self.voters(self.record) <= self.reported | gone:
            self.recalled = False

    def _meet(self, n: int, t: int) -> None:
        if self.record is None or self.record in self.ancestors(t):
            self.record = t
            self.announced[t].add(self.generation)
        elif t not in self.ancestors(self.record) and self.mutant.siblings_meet:
            both = tuple(v for v in self.terms[self.record].voters if v in self.terms[t].voters)
            if both:
                self._add_term((self.record, t), both)
            elif self.mutant.reporter_out:
                self.agents[n].out = True
            else:
                raise Violation("two terms without a common node")

    # An agent's control plane

    def _control(self, n: int) -> Iterator[Action]:
        me = self.agents[n]
        by_peers = {self.term_of(m) for m in self.live()}
        for t, term in enumerate(self.terms):
            known = self.orch or t in by_peers
            if known and me.generation in self.announced[t] and term.may_follow(me.term):
                yield f"node {n} learns term {t}", False, _do(World._learn, n, t)
        t = self.term_of(n)
        leads = self.alive[int(self.terms[t].leader[1:])]
        leader = self.leaders.get(t)
        if leader is not None and leader.round > me.round:
            label = f"node {n} gets FREEZE {t}.{leader.round}"
            yield label, not leads, _do(World._freeze, n, t, leader.round)
        if leader is not None and leader.term.leader == name(n):
            yield from self._lead(n, t, leader)
        install = self.installs.get((t, me.round))
        late = [i for (at, r), i in self.installs.items() if at == t and r < me.round]
        for each in ([install] if install else []) + late:
            if me.frozen:
                label = f"node {n} gets INSTALL {t}.{each.round}"
                yield label, not leads, _do(World._install, n, t, each.round)

    def _learn(self, n: int, t: int) -> None:
        term = self.terms[t]
        if term.leader == name(n):
            self.leaders[t] = self.mutant.leader(self.policy, term, judge_deadline, gathering=True)
        self.carry_out(n, self.agents[n].take_term(term, self.agents[n].generation))

    def _freeze(self, n: int, t: int, number: int) -> None:
        self.carry_out(n, self.agents[n].freeze(self.terms[t].number, number))

    def _install(self, n: int, t: int, number: int) -> None:
        self.carry_out(n, self.agents[n].install(self.installs[t, number]))

    def _lead(self, n: int, t: int, leader: LeaderMachine) -> Iterator[Action]:
        for m in self.live():
            news = {
                s: how
                for s, how in self.agents[m].dead.items()
                if s not in leader._dead and s in self.agents[n].epoch.sessions
            }
            if news and self.term_of(m) == t and not leader.gathering:
                yield f"leader {n} hears of {sorted(news)}", False, _do(World._down, t, m)
        if leader.gathering and all((t, leader.round, m) in self.reports for m in self.voters(t)):
            gone = not all(self.alive[m] for m in self.voters(t))
            yield f"leader {n} decides {t}.{leader.round}", gone, _do(World._decide, n, t)

    def _down(self, t: int, m: int) -> None:
        self.leaders[t].down(self.agents[m].dead)

    def _decide(self, n: int, t: int) -> None:
        leader = self.leaders[t]
        number = leader.round
        for m in sorted(self.voters(t)):
            report = self.reports.get((t, number, m))
            for made in leader.report(report) if report else []:
                if isinstance(made, Install):
                    self.installs[t, number] = made
        self._install(n, t, number)

    # An agent's data plane

    def _data(self, n: int) -> Iterator[Action]:
        for k, op in self.agents[n].ops.items():
            if op.stamp is None:
                continue
            if op.fetching and not op.complete:
                yield from self._holders(n, k, op.stamp)
            elif op.started and not op.complete and op.state is OpState.OPEN:
                need = self._need(n, k, op.stamp)
                if need and need <= self.started.get((k, op.stamp), set()):
                    label = f"node {n} has received op {k} of epoch {op.stamp}"
                    yield label, self._lossy(need), _do(World._complete, n, k, op.stamp)
            if op.state is OpState.HELD and not op.closed:
                nodes = {int(each[1:]) for each in self.agents[n].epochs[op.stamp].nodes}
                if nodes <= self.closings.get((k, op.stamp), set()):
                    label = f"node {n} has all closing signals of op {k}"
                    yield label, self._lossy(nodes), _do(World._close, n, k, op.stamp)

    def _holders(self, n: int, k: int, stamp: Stamp) -> Iterator[Action]:
        for m in range(self.s.nodes):
            entry = self.agents[m].ops.get(k)
            holds = entry is not None and entry.state in HOLDS and entry.stamp == stamp
            if m != n and self.alive[m] and holds:
                yield f"node {n} gets op {k} from node {m}", False, _do(World._fetched, n, k, stamp)

    def _fetched(self, n: int, k: int, stamp: Stamp) -> None:
        self.carry_out(n, self.agents[n].fetched(k, stamp))

    def _need(self, n: int, k: int, stamp: Stamp) -> set[int]:
        epoch = self.agents[n].epochs[stamp]
        if self.s.kinds[k] == "bc":
            return {self.s.rank_node[0]} if "r0" in epoch.sessions else set()
        return {int(each[1:]) for each in epoch.nodes}

    def _lossy(self, senders: set[int]) -> bool:
        return any(not self.alive[m] for m in senders)

    def _complete(self, n: int, k: int, stamp: Stamp) -> None:
        made_in = (stamp.term, stamp.generation)
        terms = enumerate(self.terms)
        self.completed_in.add(next(t for t, x in terms if (x.number, x.generation) == made_in))
        self.carry_out(n, self.agents[n].completed(k, stamp))

    def _close(self, n: int, k: int, stamp: Stamp) -> None:
        self.carry_out(n, self.agents[n].closed(k, stamp))

    # What must hold

    def check(self) -> None:
        """Raise a :class:`Violation` where survivors have different outcomes."""
        survivors = [n for n in self.live() if not self.excluded(n)]
        for k in range(len(self.s.kinds)):
            ends = {self.told[n, k] for n in survivors if (n, k) in self.told}
            if len(ends) > 1:
                raise Violation(f"I1: op {k} has several outcomes among {survivors}: {ends}")
        active = sorted(self.completed_in)
        for i, a in enumerate(active):
            for b in active[i + 1 :]:
                if a not in self.ancestors(b) and b not in self.ancestors(a):
                    raise Violation(f"I2: terms {a} and {b} are both active")

    def check_end(self) -> None:
        """Nothing more must happen: every op that a survivor's rank has called has ended."""
        if self.record is not None and not self.orch:
            voters = self.voters(self.record)
            if not all(self.alive[n] for n in voters):
                return  # the death of a node needs the orchestrator
        for n in self.live():
            me = self.agents[n]
            if me.frozen:
                raise Violation(f"I4: node {n} stays frozen")
            for rank, k in self.called:
                mine = self.s.rank_node[rank] == n and rank not in self.dead
                if mine and (n, k) not in self.told:
                    raise Violation(f"I4: op {k} never ends on node {n}: {me.ops.get(k)}")


def _do(method: Callable[..., None], *args: Any) -> Callable[[World], None]:
    return lambda world: method(world, *args)


def follow(world: World, change: Callable[[World], None]) -> World:
    """Return the world after an action; a broken rule of the machines is a violation."""
    after = world.copy()
    try:
        change(after)
        after.settle()
    except ProtocolViolation as error:
        raise Violation(str(error)) from error
    after.check()
    return after
