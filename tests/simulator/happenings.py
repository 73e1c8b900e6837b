"""The events of a story, and how each is done to the processes that it concerns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tests.simulator.agent import Agent
from tests.simulator.ranks import Rank
from tests.simulator.replica import Replica
from tests.simulator.story import Event
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.world import World

T = TypeVar("T")

EMPTY: tuple[dict[str, object], dict[str, float]] = ({}, {})
SLOWER = 50.0


class Happenings:
    """Does what a story says, as far as it is possible when it comes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._doings: dict[str, Callable[[Event], None]] = {
            "kill agent": self._kill_agent,
            "kill rank": self._kill_rank,
            "stop agent": self._stop_agent,
            "stop leader": self._stop_leader,
            "stop rank": self._stop_rank,
            "cut link": self._cut_link,
            "cut link one way": self._cut_one_way,
            "cut from orchestrator": self._cut_from_orchestrator,
            "cut from store": self._cut_from_store,
            "kill orchestrator": self._kill_orchestrator,
            "stop orchestrator": self._stop_orchestrator,
            "lose store": self._lose_store,
            "restart store": self._restart_store,
            "slow store": self._slow_store,
            "join": self._join,
            "leave": self._leave,
            "sign off": self._sign_off,
            "drain": self._drain,
        }
        self._to_come: list[Callable[[], None]] = []

    def happen(self, event: Event) -> None:
        """Do what an event says."""
        self._doings[event.what](event)

    def calm(self) -> None:
        """End everything that lasts."""
        to_come, self._to_come = self._to_come, []
        for each in to_come:
            each()

    def _after(self, event: Event, action: Callable[[], None]) -> None:
        """Do something when an event is over, or all is."""

        def do() -> None:
            if action in self._to_come:
                self._to_come.remove(action)
                action()

        self._to_come.append(action)
        self._world.loop.call_later(event.seconds, do)

    def _trouble(self, *hosts: str) -> None:
        """Note that these hosts have a fault now."""
        self._world.troubled |= dict.fromkeys(hosts, self._world.loop.time())

    def _say(self, text: str) -> None:
        self._world.note(text)

    # Whom

    def _agents(self) -> list[Agent]:
        """The agents that live, and would leave others behind."""
        agents = self._world.agents.values()
        return [each for each in agents if each.process.lives and not each.says_goodbye]

    def _has_others(self, agents: Sequence[Agent]) -> bool:
        """Return True if a rank would be left on another agent, in the group and alive."""
        left = self._world.members()
        return any(r.agent not in agents and r.agent and r.agent.process.runs for r in left)

    # Agents and ranks

    def _kill_agent(self, event: Event) -> None:
        agent = _pick(self._agents(), event.whom[0])
        if agent is None or not self._has_others([agent]):
            return
        self._say(f"agent {agent.node} is killed, for {event.seconds:.3f} s")
        self._world.kills += 1
        self._world.end_agent(agent)
        self._come_back(event, agent)

    def _come_back(self, event: Event, agent: Agent) -> None:
        ranks = [each for each in self._world.ranks if each.agent is agent]
        is_elastic = self._world.setup.max_world is not None

        def come_back() -> None:
            self._world.end_agent(agent)  # which may still take its leave
            self._world.start_agent(agent.node)
            self._say(f"agent {agent.node} is started")
            if is_elastic and ranks:
                self._start_rank(agent.node)

        self._after(event, come_back)

    def _start_rank(self, node: str) -> None:
        rank = self._world.start_rank(node)
        self._say(f"rank {rank.session} is started on {node}")

    def _kill_rank(self, event: Event) -> None:
        members = self._world.members()
        rank = _pick(members, event.whom[0])
        if rank is None or len(members) < 2:
            return
        self._say(f"rank {rank.session} on {rank.node} is killed")
        self._world.kill_rank(rank)
        if self._world.setup.max_world is not None:
            self._after(event, lambda: self._start_rank(rank.node))

    def _stop_agent(self, event: Event) -> None:
        agent = _pick([each for each in self._agents() if each.process.runs], event.whom[0])
        if agent is not None and self._has_others([agent]):
            self._stop(event, agent.process)

    def _stop_leader(self, event: Event) -> None:
        groups = [r.group for r in self._world.members() if r.agent and r.agent.process.runs]
        leaders = [each.agreement.term.leader for each in groups if each is not None]
        agent = self._world.agents[leaders[0]] if leaders else None
        if agent is not None and agent.process.runs and self._has_others([agent]):
            self._stop(event, agent.process)

    def _stop_rank(self, event: Event) -> None:
        rank: Rank | None = _pick(self._world.members(), event.whom[0])
        if rank is not None and rank.process.runs:
            self._stop(event, rank.process)

    def _stop(self, event: Event, process: Process) -> None:
        self._say(f"{process.name} is stopped for {event.seconds:.3f} s")
        self._trouble(process.host)
        process.stop()

        def go_on() -> None:
            self._trouble(process.host)
            self._say(f"{process.name} goes on")
            process.go_on()

        self._after(event, go_on)

    def _join(self, event: Event) -> None:
        agent = _pick(self._agents(), event.whom[0])
        if agent is not None and self._world.setup.max_world is not None:
            self._start_rank(agent.node)

    def _leave(self, event: Event) -> None:
        members = self._world.members()
        rank = _pick(members, event.whom[0])
        if rank is not None and len(members) > 1:
            self._say(f"rank {rank.session} on {rank.node} is asked to leave")
            rank.process.call(rank.asked_to_leave)

    def _sign_off(self, event: Event) -> None:
        agent = _pick([each for each in self._agents() if each.process.runs], event.whom[0])
        if agent is None or agent.links is None or not self._has_others([agent]):
            return
        self._say(f"agent {agent.node} is told to end, and comes back {event.seconds:.3f} s later")
        agent.says_goodbye = True
        agent.process.spawn(agent.sign_off())
        self._come_back(Event(event.at, event.what, event.whom, event.seconds + 2.0), agent)

    def _drain(self, event: Event) -> None:
        agent = _pick([each for each in self._agents() if each.links], event.whom[0])
        if agent is not None and self._has_others([agent]):
            self._say(f"agent {agent.node} drains")
            agent.process.call(agent.draining.begin, "an operator drains it")

    # The network

    def _cut_link(self, event: Event) -> None:
        one, other = self._two_nodes(event)
        self._cut(event, [(one, other), (other, one)])

    def _cut_one_way(self, event: Event) -> None:
        self._cut(event, [self._two_nodes(event)])

    def _two_nodes(self, event: Event) -> tuple[str, str]:
        nodes = [*self._world.agents]
        first = event.whom[0] % len(nodes)
        second = (first + 1 + event.whom[1] % (len(nodes) - 1)) % len(nodes)
        return nodes[first], nodes[second]

    def _cut_from_orchestrator(self, event: Event) -> None:
        node = _pick([*self._world.agents], event.whom[0])
        names = [each.name for each in self._world.replicas.values()]
        assert node is not None
        self._cut(event, [*((node, o) for o in names), *((o, node) for o in names)])

    def _cut_from_store(self, event: Event) -> None:
        replica = _pick([*self._world.replicas.values()], event.whom[0])
        assert replica is not None
        ways = [(replica.name, "store"), ("store", replica.name)]
        self._cut(event, ways[event.whom[1] % 3 :][:2])

    def _cut(self, event: Event, ways: list[tuple[str, str]]) -> None:
        network = self._world.network
        ways = [each for each in ways if not network.is_cut(*each)]
        if not ways:
            return
        names = ", ".join(f"{source} to {target}" for source, target in ways)
        self._say(f"nothing passes from {names} for {event.seconds:.3f} s")
        for way in ways:
            network.cut(*way)
            self._trouble(*way)

        def heal() -> None:
            self._say(f"all passes again from {names}")
            for way in ways:
                network.heal(*way)
                self._trouble(*way)

        self._after(event, heal)

    # The orchestrator and its store

    def _kill_orchestrator(self, event: Event) -> None:
        replica = self._replica(event)
        if replica is None:
            return
        self._say(f"orchestrator {replica.name} is killed for {event.seconds:.3f} s")
        self._world.kill_replica(replica)

        def come_back() -> None:
            self._say(f"orchestrator {replica.name} is started")
            self._world.start_replica(replica.name)

        self._after(event, come_back)

    def _replica(self, event: Event) -> Replica | None:
        replicas = self._world.replicas.values()
        return _pick([each for each in replicas if each.process.runs], event.whom[0])

    def _stop_orchestrator(self, event: Event) -> None:
        replica = self._replica(event)
        if replica is not None:
            self._stop(event, replica.process)

    def _lose_store(self, _: Event) -> None:
        self._say("the store loses everything")
        self._world.server.restart(EMPTY)

    def _restart_store(self, event: Event) -> None:
        server = self._world.server
        if event.whom[0] % 2:
            self._say("the store is restarted, and has lost what was written of late")
            server.restart(server.saved)
        else:
            self._say("the store is restarted")
            server.restart()
        server.save()

    def _slow_store(self, event: Event) -> None:
        self._say(f"the store is slow for {event.seconds:.3f} s")
        slow = self._world.network.slow
        slow["store"] = SLOWER

        def be_quick() -> None:
            slow.pop("store", None)

        self._after(event, be_quick)


def _pick(items: Sequence[T], number: int) -> T | None:
    return items[number % len(items)] if items else None
