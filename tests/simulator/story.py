"""Stories: what happens to the processes of a simulation, and when, all drawn from one number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from allfold_core.group_options import OnLoss

OP_KINDS = ("ar", "ar", "ar", "ag", "rs", "ar")


@dataclass(frozen=True)
class Setup:
    """The services and the group of a story.

    Attributes:
        nodes: how many hosts have an agent.
        founders: the node of each rank that opens the group.
        replicas: of the orchestrator.
        window: so many ops of a rank are in flight at most.
        pace: the longest time from an outcome to the next call, in seconds.
        latency: how many times longer than usual messages take, so that more meets in rounds.
        kinds: of the ops, one after the other and again from the beginning.
        quorum: all-reduces wait for so many ranks, and no longer than ``within`` seconds for the
            others; 0 for all ranks.
    """

    nodes: int
    founders: tuple[int, ...]
    replicas: int
    on_loss: OnLoss = "shrink"
    min_world: int = 1
    max_world: int | None = None
    window: int = 1
    pace: float = 0.1
    timeout: float = 8.0
    latency: float = 1.0
    kinds: tuple[str, ...] = ("ar",)
    quorum: int = 0
    within: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something that happens.

    Attributes:
        at: seconds after the group has opened.
        what: see :data:`WEIGHTS`.
        whom: the hosts or ranks that it concerns, as numbers that those that are there are counted
            by: a story stays one when something is left out of it.
        seconds: how long it lasts, or until what was killed comes back.
    """

    at: float
    what: str
    whom: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        whom = " ".join(map(str, self.whom))
        return f"{self.at:7.3f} s  {self.what} {whom} ({self.seconds:.2f} s)"


@dataclass(frozen=True)
class Story:
    """A setup and what happens in it.

    Attributes:
        events: faults, and ranks that come and go.
        coda: when all of that is over, ranks that come and go once more: nothing follows that could
            make up for what was missed.
    """

    seed: int
    setup: Setup
    events: tuple[Event, ...] = field(default=())
    coda: tuple[Event, ...] = field(default=())

    def only(self, places: tuple[int, ...]) -> Story:
        """Return the story with some of its events."""
        return replace(self, events=tuple(self.events[each] for each in places))


WEIGHTS = {
    "kill agent": 10,
    "kill rank": 14,
    "stop agent": 4,
    "stop rank": 2,
    "cut link": 3,
    "cut link one way": 3,
    "cut from orchestrator": 2,
    "cut from store": 2,
    "kill orchestrator": 3,
    "stop orchestrator": 3,
    "lose store": 1,
    "restart store": 1,
    "slow store": 2,
    "join": 6,
    "leave": 3,
    "sign off": 1,
    "drain": 1,
}
LONGEST_FAULT = 3.0
ROUND_TRIP_SECONDS = 0.001
EVICTED_SECONDS = 1.15
"""A node that is stopped for so long may be evicted; somewhat later it is."""


def draw(seed: int) -> Story:
    """Return the story of a number."""
    rng = random.Random(seed)
    setup = _setup(rng)
    most = rng.randint(6, 28)
    events, at = [], rng.random()
    # Often at the same moment, or while the recovery from what was before goes on.
    round_trip = ROUND_TRIP_SECONDS * setup.latency
    # Some stories have one kind of fault more than others.
    favoured = rng.choice(list(WEIGHTS))
    weights = {what: 3 * n if what == favoured else n for what, n in WEIGHTS.items()}
    for _ in range(most):
        what = rng.choices(list(weights), list(weights.values()))[0]
        seconds = LONGEST_FAULT * rng.random() ** 2
        whom = (rng.randrange(1000), rng.randrange(1000))
        events.append(Event(at, what, whom, seconds))
        at += rng.choice((0.0, round_trip, 4 * round_trip, 0.1, 0.4, 0.8, 1.5)) * rng.random()
    return Story(seed, setup, tuple(events), _coda(rng, setup))


def quorums(seed: int) -> Story:
    """Return the story of a number, whose all-reduces do not wait for all ranks."""
    story, rng = draw(seed), random.Random(f"quorum {seed}")
    quorum = rng.randint(1, len(story.setup.founders))
    setup = replace(story.setup, quorum=quorum, within=rng.choice((0.001, 0.02, 0.2)))
    return replace(story, setup=setup)


def stopped_leaders(number: int) -> Story:
    """Return a story of leaders that are stopped in a round, and go on as others take over.

    In those of even numbers others are stopped or cut off at the same time, and a leader may go on
    before it is evicted.
    """
    rng = random.Random(number)
    is_mixed = number % 2 == 0
    shortest = EVICTED_SECONDS - 0.3 * is_mixed
    nodes = rng.randint(4, 6)
    setup = Setup(
        nodes,
        tuple(sorted([*range(nodes), *(rng.randrange(nodes) for _ in range(3))])),
        replicas=1,
        max_world=2 * nodes + 6,
        window=rng.choice((1, 2, 3)),
        pace=rng.choice((0.02, 0.1)),
        latency=40.0,
        kinds=tuple(rng.choice(OP_KINDS) for _ in range(5)),
    )
    events, at = [], rng.random()
    round_trip = ROUND_TRIP_SECONDS * setup.latency
    for _ in range(rng.randint(1, 3)):
        what = rng.choice(("kill rank", "kill rank", "join"))
        events.append(Event(at, what, (rng.randrange(1000),), 0.5 * rng.random()))
        seconds = at + round_trip * rng.random()
        events.append(Event(seconds, "stop leader", (), shortest + 0.4 * rng.random()))
        if is_mixed:
            what = rng.choice(("stop agent", "cut link", "cut link one way"))
            whom = (rng.randrange(1000), rng.randrange(1000))
            events.append(Event(at + 0.4 * rng.random(), what, whom, 0.3 + 1.5 * rng.random()))
        at += 2.5 + rng.random()
    events.append(Event(at, "join", (1,)))  # until then the last one is stopped
    return Story(number, setup, tuple(sorted(events, key=lambda each: each.at)))


def _coda(rng: random.Random, setup: Setup) -> tuple[Event, ...]:
    """Some that come and one that goes, close to each other."""
    seconds = 4 * ROUND_TRIP_SECONDS * setup.latency
    what = ("join", "join", "join", "join", "leave")
    events = [Event(seconds * rng.random(), each, (rng.randrange(1000),)) for each in what]
    return tuple(sorted(events, key=lambda each: each.at))


def _setup(rng: random.Random) -> Setup:
    nodes = rng.randint(2, 6)
    founders = [*range(nodes), *(rng.randrange(nodes) for _ in range(rng.randint(0, 3)))]
    is_elastic = rng.random() < 0.75
    return Setup(
        nodes,
        tuple(sorted(founders)),
        replicas=rng.choice((1, 1, 2)),
        on_loss=rng.choice(("shrink", "shrink", "raise")),
        min_world=rng.choice((1, 1, 2)),
        max_world=len(founders) + 6 if is_elastic else None,
        window=rng.choice((1, 1, 2, 3)),
        pace=rng.choice((0.02, 0.1, 0.3)),
        latency=rng.choice((1.0, 10.0, 40.0)),
        kinds=tuple(rng.choice(OP_KINDS) for _ in range(5)),
    )
