"""Nodes that die, stop, lose links and are suspected, before the real detector; a clock ticks.

Whoever can say something does so before the next tick, in any order with the others; a node that is
silent is suspected by all who can hear others and not it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Self

from allfold_core.survival.suspicion import SuspicionKind
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.failure_detector import FailureDetector
from allfold_orchestrator.membership.suspects import Ask, Evict, Instruction, Probe
from tests.orchestrator.search.detector_value import copy_of, key_of
from tests.support.state_search import Violation

TICK = 0.125  # less than the time by which reporters are asked ahead
SILENT_TICKS, BEAT_TICKS, ASKED_TICKS = 4, 4, 2
STALL_TICKS = 8
LAST_FAULT, LAST_TICK = 6, 36
FAR = 99

Link = frozenset[str]


@dataclass(frozen=True)
class Trial:
    """The nodes of a world, and the number of faults of each kind.

    Attributes:
        deaths: of agents' processes.
        stops: of processes, which go on later if they ``wake``.
        cuts: links between two nodes on which nothing passes, from the beginning on.
        heals: links that pass something again.
        false: suspicions of nodes that do nothing wrong.
        lonely: nodes that lose their way to the orchestrator.
        stalls: times that the replica stands still for a second.
        sticks: nodes that live and answer, and do their part of the ops no more; if one
            ``recovers``, it does.
        rejects: nodes at whose ports no connection of the orchestrator was ever accepted.
    """

    name: str
    nodes: str = "abc"
    deaths: int = 0
    stops: int = 0
    wake: bool = False
    cuts: tuple[str, ...] = ()
    heals: int = 0
    false: int = 0
    lonely: int = 0
    stalls: int = 0
    rejects: str = ""
    sticks: int = 0
    recovers: bool = False


def life(node: str) -> Life:
    return (node, "1")


Change = Callable[["DetectorWorld"], None]


@dataclass
class DetectorWorld:
    """One replica's detector and the nodes.

    Attributes:
        heard: by observer and node, the last tick in which the one heard the other.
        beaten: the tick of each node's last BEAT.
        asked: nodes that are to say whom they hear, each with the tick: they ping once more first.
        back: suspicions that are to be taken back.
        probed: nodes that are asked for a sign of life, since a tick.
        suspected: (reporter, node) of the suspicions that were brought.
        noticed: dead nodes of which the end of the control link is known.
        evicted: each with the tick.
        woken: the tick in which a stopped node has gone on.
        healed: the tick in which a link has come back.
        decided: the tick in which the failure detector has decided last.
        stuck: nodes that do not do their part, each with the tick since when.
        called_stuck: (reporter, node) of the suspicions of that.
        was_stuck: nodes that did not do their part when they were evicted, or had begun to in
            this very tick, so that nobody could say so.
        recovered: the tick in which a node has begun to do its part again.
        blamed: by node, the tick of the last mistake about it: it is heard before anything else.
    """

    trial: Trial
    detector: FailureDetector = field(default_factory=FailureDetector)
    tick: int = 0
    status: dict[str, str] = field(default_factory=dict)
    cut: frozenset[Link] = frozenset()
    lonely: frozenset[str] = frozenset()
    heard: dict[tuple[str, str], int] = field(default_factory=dict)
    beaten: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    back: frozenset[tuple[str, str]] = frozenset()
    probed: frozenset[str] = frozenset()
    dialled: frozenset[str] = frozenset()
    suspected: frozenset[tuple[str, str]] = frozenset()
    noticed: frozenset[str] = frozenset()
    evicted: dict[str, int] = field(default_factory=dict)
    woken: dict[str, int] = field(default_factory=dict)
    healed: dict[Link, int] = field(default_factory=dict)
    decided: int = -1
    stuck: dict[str, int] = field(default_factory=dict)
    called_stuck: frozenset[tuple[str, str]] = frozenset()
    was_stuck: frozenset[str] = frozenset()
    recovered: dict[str, int] = field(default_factory=dict)
    blamed: dict[str, int] = field(default_factory=dict)
    budget: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trial = self.trial
        self.status = dict.fromkeys(trial.nodes, "runs")
        self.cut = frozenset(map(frozenset, trial.cuts))
        self.beaten = dict.fromkeys(trial.nodes, 0)
        self.heard = {(a, b): 0 for a in trial.nodes for b in trial.nodes if a != b}
        names = ("deaths", "stops", "heals", "false", "lonely", "stalls", "sticks")
        self.budget = {each: getattr(trial, each) for each in names}
        for node in trial.nodes:
            if node not in trial.rejects:
                self.detector.reached(life(node))

    # States

    def copy(self) -> Self:
        other = replace(self, detector=copy_of(self.detector))
        for name in (
            "status",
            "heard",
            "beaten",
            "evicted",
            "woken",
            "healed",
            "asked",
            "stuck",
            "recovered",
            "blamed",
            "budget",
        ):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def key(self) -> object:
        return (
            (self.tick, key_of(self.detector, self.now), self.cut, self.lonely, self.back),
            (self.probed, self.dialled, self.suspected, self.noticed),
            tuple(self.status.items()),
            (tuple(self.evicted.items()), tuple(self.woken.items())),
            (tuple(self.healed.items()), self.decided, frozenset(self.asked.items())),
            tuple(self.blamed.items()),
            (tuple(self.stuck.items()), self.called_stuck, self.was_stuck),
            tuple(node for node, at in self.recovered.items() if at == self.tick),
            tuple(min(FAR, self.tick - at) for at in self.heard.values()),
            tuple(min(FAR, self.tick - at) for at in self.beaten.values()),
            tuple(self.budget.values()),
        )

    def after(self, change: Change) -> Self:
        other = self.copy()
        change(other)
        return other

    @property
    def now(self) -> float:
        return self.tick * TICK

    # Questions

    def members(self) -> list[str]:
        return [node for node in self.trial.nodes if node not in self.evicted]

    def running(self) -> list[str]:
        return [node for node in self.members() if self.status[node] == "runs"]

    def hears(self, a: str, b: str) -> bool:
        return self.status[b] == "runs" and frozenset((a, b)) not in self.cut

    # Faults

    def end(self, node: str, how: str) -> None:
        self.status[node] = how

    def wake(self, node: str) -> None:
        self.status[node], self.woken[node] = "runs", self.tick

    def heal(self, link: Link) -> None:
        self.cut -= {link}
        self.healed[link] = self.tick
        self._hear()

    def cut_off(self, node: str) -> None:
        self.lonely |= {node}

    def stick(self, node: str) -> None:
        self.stuck[node] = self.tick

    def recover(self, node: str) -> None:
        del self.stuck[node]
        self.recovered[node] = self.tick

    def stall(self) -> None:
        for _ in range(STALL_TICKS):
            self.pass_time()
        self.detector.lagged(STALL_TICKS * TICK)

    # Messages

    def pass_time(self) -> None:
        self._hear()
        self.tick += 1
        self._hear()

    def _hear(self) -> None:
        for a, b in self.heard:
            if self.status[a] == "runs" and self.hears(a, b):
                self.heard[a, b] = self.tick
                self.back |= {(a, b)} & self.suspected
                self.suspected -= {(a, b)}

    def beat(self, node: str) -> None:
        self.beaten[node] = self.tick
        if self.asked.get(node, FAR) <= self.tick:
            del self.asked[node]
        others = [each for each in self.members() if each != node]
        ages = {life(each): self.now - TICK * self.heard[node, each] for each in others}
        self.follow(self.detector.answered(self.now, life(node), 0.0))
        self.follow(self.detector.told(self.now, life(node), ages))

    def answer(self, node: str) -> None:
        self.probed, self.dialled = self.probed - {node}, self.dialled - {node}
        self.follow(self.detector.answered(self.now, life(node), 0.0))

    def refuse(self, node: str) -> None:
        self.dialled -= {node}
        self.follow(self.detector.dial_refused(life(node)))

    def notice(self, node: str) -> None:
        self.noticed |= {node}
        members = [life(each) for each in self.members() if each != node]
        self.follow(self.detector.link_ended(self.now, life(node), members))

    def suspect(self, by: str, node: str, kind: SuspicionKind) -> None:
        self.suspected |= {(by, node)}
        members = [life(each) for each in self.members()]
        self.follow(self.detector.suspected(self.now, life(by), life(node), kind, members))

    def call_stuck(self, by: str, node: str) -> None:
        self.called_stuck |= {(by, node)}
        members = [life(each) for each in self.members()]
        self.follow(self.detector.suspected(self.now, life(by), life(node), "stuck", members))

    def go_on(self, by: str, node: str) -> None:
        self.called_stuck -= {(by, node)}
        self.detector.withdrawn(life(by), life(node), "stuck")

    def take_back(self, by: str, node: str) -> None:
        self.back -= {(by, node)}
        self.detector.withdrawn(life(by), life(node), "silent")

    def blame(self, by: str, node: str) -> None:
        self.blamed[node] = self.tick
        self.suspect(by, node, "silent")

    def decide(self) -> None:
        self.decided = self.tick
        ranks = dict.fromkeys(self.trial.nodes, 1)
        self.follow(self.detector.questions(self.now))
        self.follow(self.detector.decide(self.now, ranks, "a"))

    def follow(self, instructions: Iterable[Instruction]) -> None:
        for each in instructions:
            match each:
                case Probe(suspected, members):
                    self.detector.asked(self.now, suspected)
                    self.probed |= {suspected[0]}
                    self.dialled |= {suspected[0]}
                    self.asked |= {name: self.tick + ASKED_TICKS for name, _ in members}
                case Ask(reporter, _):
                    self.asked |= {reporter[0]: self.tick + ASKED_TICKS}
                case Evict(lives):
                    for node, _ in lives:
                        self._evict(node)
                    self._check()

    def _evict(self, node: str) -> None:
        self.evicted[node] = self.tick
        self.suspected = frozenset(pair for pair in self.suspected if node not in pair)
        self.back = frozenset(pair for pair in self.back if node not in pair)
        self.called_stuck = frozenset(pair for pair in self.called_stuck if node not in pair)
        if node in self.stuck or self.recovered.get(node) == self.tick:
            self.was_stuck |= {node}
        self.stuck.pop(node, None)
        self.detector.over(life(node))

    # What must hold

    def _check(self) -> None:
        """Of nodes that run only those are evicted that have a dead link, and no more than need be.

        One that has just gone on had no time to say so, nor those whose link has just come back.
        One that does not do its part goes as well.
        """
        evicted = self.evicted.keys() - self.was_stuck
        runs = [node for node in evicted if self.status[node] == "runs"]
        wrong = [
            each for each in runs if self.evicted[each] > self.woken.get(each, -FAR) + BEAT_TICKS
        ]
        lately = {link for link, at in self.healed.items() if self.tick - at <= BEAT_TICKS}
        dead = self.cut | lately
        for node in wrong:
            if self.evicted[node] == self.tick and not any(node in link for link in dead):
                raise Violation(f"{node} runs and is evicted: {self.evicted}")
        links = frozenset(map(frozenset, self.trial.cuts))
        if len(wrong) > _fewest(self.trial.nodes, links):
            raise Violation(f"of the ends of {self.trial.cuts} too many are evicted: {wrong}")

    def check_end(self) -> None:
        """Check that all nodes that are gone, or behind a dead link, have been evicted."""
        if self.tick < LAST_TICK:
            return
        members = self.members()
        if not set(self.running()) - self.lonely:
            return  # nobody is left who could say anything
        for node in members:
            if self.status[node] != "runs":
                raise Violation(f"{node} is {self.status[node]}, and still a member at the end")
            if node in self.stuck:
                raise Violation(f"{node} does not do its part, and is still a member at the end")
        for link in self.cut:
            if link <= set(members) - self.lonely:
                raise Violation(f"the link {sorted(link)} is dead, and both ends are members")


def _fewest(nodes: str, links: frozenset[Link]) -> int:
    """The size of a smallest set of nodes that has an end of each link."""
    for size in range(len(nodes)):
        for chosen in combinations(nodes, size):
            if all(link & set(chosen) for link in links):
                return size
    return len(nodes)
