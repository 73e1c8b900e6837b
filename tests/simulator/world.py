"""The world of a simulation: its services and ranks, and the story that happens to them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from allfold_core.operations import Kind, Quorum
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.survival.decision import ProtocolViolation
from allfold_core.survival.reports import Call
from tests.core.survival.calls import call_of
from tests.core.survival.scenario import KINDS
from tests.simulator import ends
from tests.simulator.agent import Agent
from tests.simulator.channel import Channel
from tests.simulator.failures import Failures
from tests.simulator.happenings import Happenings
from tests.simulator.ledger import Ledger
from tests.simulator.network import Network
from tests.simulator.ranks import Rank
from tests.simulator.replica import Replica
from tests.simulator.store import Server
from tests.simulator.story import Event, Story
from tests.support.state_search import Violation
from tests.support.virtual_loop import Process, VirtualLoop

OPENING_SECONDS = 15.0
CALM_SECONDS, END_SECONDS, OUTAGE_SECONDS = 4.0, 60.0, 15.0
LAST_SECONDS = 2.0
LOOK_SECONDS = 0.25
FOR_EVER = 10**9
MOST_STEPS = 200_000


class World:
    """All processes of a story, and the network between them.

    Attributes:
        agents: by host, the newest life of each agent.
        replicas: by URL, the newest life of each replica of the orchestrator.
        channels: the control links.
        ranks: all that there ever were.
        last_op: ranks call no op behind this one.
        kills: the processes that were killed.
        troubled: by host, when it had a fault of its own, or a way from or to it, last.
        calm_since: the end of the last fault.
    """

    def __init__(self, loop: VirtualLoop, story: Story) -> None:
        self.loop = loop
        self.seed = story.seed
        self.setup = story.setup
        self.story = story
        self.network = Network(loop, story.seed, story.setup.latency)
        self.ledger = Ledger(self)
        self.server = Server(loop, self.network)
        self.server.tables.on_hset = self.ledger.written
        self.agents: dict[str, Agent] = {}
        self.replicas: dict[str, Replica] = {}
        self.channels: list[Channel] = []
        self.ranks: list[Rank] = []
        self.last_op = FOR_EVER
        self.failures = Failures()
        self.kills = 0
        self.troubled: dict[str, float] = {}
        self.calm_since = float("inf")
        self.log: list[str] = []
        self._random = random.Random(story.seed)

    # What others ask

    def urls_for(self, node: str) -> list[str]:
        """Return the replicas that an agent knows: each asks another one first."""
        urls = list(self.replicas)
        first = int(node[1:]) % len(urls)
        return urls[first:] + urls[:first]

    def ranks_on(self, agent: Agent) -> list[Rank]:
        """Return the ranks that live and were let in by an agent."""
        return [each for each in self.ranks if each.agent is agent and each.process.lives]

    def members(self) -> list[Rank]:
        """Return the ranks that are in the group."""
        return [each for each in self.ranks if each.is_member]

    def kind_of(self, seq: int) -> Kind:
        """Return the kind of an op."""
        kinds = self.setup.kinds
        return KINDS[kinds[seq % len(kinds)]]

    def call_of(self, kind: Kind, view: int, _: str) -> Call:
        """Return the call of a rank with a view."""
        call, setup = call_of(kind, view), self.setup
        if not setup.quorum or kind is not Kind.ALL_REDUCE:
            return call
        agreed = replace(call.fingerprint, quorum=Quorum(setup.quorum, setup.within))
        return replace(call, fingerprint=agreed)

    def count(self, kind: LinkMessageType) -> None:
        """Note that a message is sent between agents."""
        self.ledger.messages[kind] += 1

    def note(self, text: str) -> None:
        """Note something for the story."""
        self.log.append(f"{self.loop.time() - self._begun:7.3f} s  {text}")

    _begun = 0.0

    # Processes

    def start_replica(self, name: str) -> Replica:
        """Start a replica of the orchestrator."""
        replica = Replica(self, name)
        self.replicas[replica.url] = replica
        return replica

    def start_agent(self, node: str) -> Agent:
        """Start an agent."""
        agent = self.agents[node] = Agent(self, node)
        return agent

    def start_rank(self, node: str, place: int | None = None) -> Rank:
        """Start a rank; ``place`` is its number, of one that opens the group."""
        rank = Rank(self, len(self.ranks), node, place)
        self.ranks.append(rank)
        return rank

    def kill_rank(self, rank: Rank) -> None:
        """Kill a rank: its agent notices."""
        self.kills += 1
        rank.process.kill()
        if rank.agent is not None and not rank.has_left:
            agent = rank.agent
            self.network.post(rank.process, agent.process, agent.lose, rank, rank.group)

    def end_agent(self, agent: Agent) -> None:
        """End an agent's process; its ranks end as they lose it."""
        if not agent.process.lives:
            return
        self._end(agent.process)
        if agent.links is not None:
            agent.links.died()
        for rank in self.ranks_on(agent):
            rank.process.kill()

    def kill_replica(self, replica: Replica) -> None:
        """Kill a replica of the orchestrator."""
        self.kills += 1
        self._end(replica.process)

    def _end(self, process: Process) -> None:
        process.kill()
        self.channels = [each for each in self.channels if each.end_of(process)]

    # The course of a story

    def run(self) -> None:
        """Let the story happen; raises a :class:`Violation` if something is wrong."""
        with self.failures:
            self._run()

    def _run(self) -> None:
        try:
            self._open()
            happenings = Happenings(self)
            self._run_for(self.story.events[0].at if self.story.events else 1.0)
            self.ledger.check_quiet()
            self._tell(self.story.events, happenings)
            self._run_for(self.setup.pace)
            happenings.calm()
            self.calm_since = self.loop.time()
            self._run_for(CALM_SECONDS)
            self.note("all is well again")
            self._tell(self.story.coda, happenings)
            self._run_for(LAST_SECONDS)
            self._end_all()
        except ProtocolViolation as error:
            raise Violation(str(error)) from error

    def _open(self) -> None:
        for number in range(self.setup.replicas):
            self.start_replica(f"o{number}")
        for number in range(self.setup.nodes):
            self.start_agent(f"n{number}")
        for place, node in enumerate(self.setup.founders):
            self.start_rank(f"n{node}", place)
        until = self.loop.time() + OPENING_SECONDS
        while not all(rank.is_member for rank in self.ranks):
            self._run_for(0.1)
            if self.loop.time() > until:
                raise Violation(f"the group does not open: {[r.failure for r in self.ranks]}")
        self._begun = self.loop.time()

    def _tell(self, events: tuple[Event, ...], happenings: Happenings) -> None:
        begun = self.loop.time()
        for event in events:
            self._run_until(begun + event.at)
            happenings.happen(event)

    def _end_all(self) -> None:
        """Let all ranks come to the same op, and look whether everything has ended."""
        self.last_op = max((seq for rank in self.members() for seq in rank.called), default=0) + 1
        self._await_end(END_SECONDS)
        self._outage()

    def _await_end(self, seconds: float) -> None:
        until = self.loop.time() + seconds
        while problem := ends.unfinished(self):
            if self.loop.time() > until:
                raise Violation(problem)
            self._run_for(0.5)

    def _outage(self) -> None:
        """Check P4: a rank's death needs no orchestrator, while all agents of the group live."""
        ranks = ends.survivors(self)
        if len(ranks) <= self.setup.min_world:
            return
        for replica in list(self.replicas.values()):
            self.kill_replica(replica)
        victim = ranks[self.seed % len(ranks)]
        self.note(f"rank {victim.session} is killed while there is no orchestrator")
        self.last_op += 2
        for rank in self.members():  # those, too, that a term without them was decided for and lost
            rank.process.call(rank.go_on)
        self._run_for(self.setup.pace)
        self.kill_rank(victim)
        self._run_for(1.0)
        self._await_end(OUTAGE_SECONDS)

    def _run_until(self, when: float) -> None:
        while self.loop.time() < when:
            self._run_for(min(LOOK_SECONDS, when - self.loop.time()))

    def _run_for(self, seconds: float) -> None:
        self.loop.run_for(seconds)
        if self.loop.steps > MOST_STEPS:
            raise Violation(f"the story has no end: {self.loop.steps} steps")
        if self.failures.found:
            raise self.failures.found[0]
        if self.loop.failures:
            raise Violation(f"a task has failed: {self.loop.failures[0]!r}")
        ends.check_floors(self)


def describe(messages: Mapping[LinkMessageType, int]) -> str:
    """Return how many messages of each kind there were."""
    return ", ".join(f"{n} {kind.name}" for kind, n in sorted(messages.items()))
