"""The terms of this node's groups: what the orchestrator announces, and what it is told of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.outcomes import evicted
from allfold_agent.groups.registry import GroupRegistry, LastTerm
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.peer_monitor import PeerMonitor
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.reactor import Reactor
from allfold_control.messages import Held, Progress
from allfold_core.protocol.frames import FrameError
from allfold_core.protocol.traffic import Cap
from allfold_core.survival.term_record import TermRecord

MAX_KEPT = 1024
# For as long as a plan may take on a node that is overloaded.
_KEPT_SECONDS = 60.0

Notice = Callable[[NodeGroup], None]


class _Kept(NamedTuple):
    until: float
    group: str
    opening: int
    notice: Notice


class EarlyNotices:
    """Gives messages and terms to the groups that they are for, as soon as those are open.

    A peer may get its plan a moment before this node does, and its messages are not sent again
    while the link lasts. So they are kept for as long as a plan may take, at most :data:`MAX_KEPT`
    of them; the oldest go first. Those for groups that are over are dropped.
    """

    def __init__(self, registry: GroupRegistry) -> None:
        self._registry = registry
        self._lock = make_lock("early notices")
        self._kept: deque[_Kept] = deque(maxlen=MAX_KEPT)

    def apply(self, name: str, opening: int, notice: Notice) -> bool:
        """Apply a notice now, or keep it for the moment in which the group opens.

        Returns:
            False where the group is over, and nobody wants the notice.
        """
        with self._lock:
            group = self._registry.look_for(name, opening, 0.0)
            is_over = group is None and self._registry.is_over(name, opening)
            if group is None and not is_over:
                now = monotonic()
                while self._kept and self._kept[0].until <= now:
                    self._kept.popleft()
                self._kept.append(_Kept(now + _KEPT_SECONDS, name, opening, notice))
        if group is not None:
            notice(group)
        return not is_over

    def opened(self, group: NodeGroup) -> None:
        """Apply what was kept for a group that has just opened."""
        now, key = monotonic(), (group.name, group.opening)
        with self._lock:
            due = [each for each in self._kept if each[1:3] == key and each.until > now]
            others = (each for each in self._kept if each[1:3] != key)
            self._kept = deque(others, maxlen=MAX_KEPT)
        for each in due:
            each.notice(group)


log = logging.getLogger(__name__)

_UNKNOWN = "is not in the newest term that the orchestrator knows"


class GroupTerms:
    """Lets groups know of their terms. Called by the control plane; the reactor does the work.

    A term that was announced before this node registered anew is dropped: the orchestrator goes by
    what the node held at that moment.

    Args:
        incarnation: returns the present life of this node.
        notices: keeps what comes for groups whose plan is on its way.

    Attributes:
        let_in: called with the record of a term that lets this node into a group.
        register: called when the orchestrator is to hear at once what this node holds.
    """

    def __init__(
        self,
        node: str,
        incarnation: Callable[[], str],
        registry: GroupRegistry,
        notices: EarlyNotices,
        reactor: Reactor,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._registry = registry
        self._notices = notices
        self._reactor = reactor
        self._lock = make_lock("terms")
        self._registrations = 0
        self._is_registering = False
        self._generation = 0
        self._said: dict[str, int] = {}  # by group, the opening that a registration spoke of
        self._disowned: dict[str, TermRecord] = {}
        self.let_in: Callable[[TermRecord], None] = lambda _: None
        self.register: Callable[[], None] = lambda: None

    @property
    def generation(self) -> int:
        """The generation of the store with which this node registered last; 0 while it registers.

        While it does so, its report of its groups is on the way, and would lack a rank that came
        meanwhile.
        """
        return 0 if self._is_registering else self._generation

    def opened(self, group: NodeGroup) -> None:
        """Tell a new group with which store this node has registered."""
        group.registered(self._generation)

    def has_unsaid(self) -> bool:
        """Return True if the store may lack a group, and this node has not told of it yet.

        That is so for a group that a store of an earlier generation has opened, and whose plan came
        after :meth:`held` was asked.
        """
        return bool(self._disowned) or any(
            self._said.get(name) != group.opening and group.record.generation < self._generation
            for name, group in self._newest().items()
        )

    def _newest(self) -> dict[str, NodeGroup]:
        """The groups by name; of one name that which was opened last."""
        return {group.name: group for group in self._registry.all()}

    def held(self) -> list[Held]:
        """Return what a registration says of the groups; announcements under way are void."""
        with self._lock:
            self._registrations += 1
            self._is_registering = True
            newest = self._newest()
            self._said = {name: group.opening for name, group in newest.items()}
        records = {name: group.registers() for name, group in newest.items()}
        disowned = [
            Held(group=name, record=record, is_out=True)
            for name, record in self._disowned.items()
            if self._said.get(name, -1) < record.opening
        ]
        return disowned + [
            Held(group=name, record=record, is_out=newest[name].evicted is not None)
            for name, record in records.items()
        ]

    def registered(self, generation: int, out: Collection[str]) -> None:
        """The node has registered with a store of a generation.

        Args:
            out: the groups that go on without this node.
        """
        self._generation, self._is_registering = generation, False
        self._disowned.clear()
        answer = partial(self._registered, self._registrations, generation, self._said, out)
        self._reactor.call(answer)

    def _registered(
        self, number: int, generation: int, said: Mapping[str, int], out: Collection[str]
    ) -> None:
        """The registration of this number was answered; the next one may be under way already.

        Args:
            said: by group, the opening that it spoke of.
            out: the groups of which that opening goes on without this node.
        """
        for group in self._registry.all():
            with self._lock:
                if number == self._registrations:
                    group.registered(generation)
            newest = said.get(group.name, -1)
            is_out = group.opening == newest and group.name in out
            if is_out or _is_forgotten(group, newest):
                group.evict(evicted(group.name, self._node, _UNKNOWN))

    def term(self, generation: int, group: str, record: TermRecord) -> None:
        """A term was announced, by a store of a generation."""
        if generation == self._generation:
            self._look_at(group, record)
        number = self._registrations
        self._reactor.call(partial(self._take, number, generation, group, record))

    def _look_at(self, group: str, record: TermRecord) -> None:
        if self._is_let_in(record):
            self.let_in(record)
        is_over = self._registry.last_term(group, record.opening) is not None
        if is_over and self.is_unknown(group, record):
            self.disown(group, record)

    def is_unknown(self, group: str, record: TermRecord) -> bool:
        """Return True if a term takes this node for one that knows the group, and it does not.

        The plan of the opening has not come here, or a store has lost the term that has left this
        node out. The others wait for what it cannot know.
        """
        opening, joined = record.opening, self._joined(record)
        last = self._registry.last_term(group, opening)
        is_open = last is None and self._registry.look_for(group, opening, 0.0) is not None
        if joined is None or is_open or self._registry.had_no_ranks(group, opening):
            return False
        return not self._is_let_in(record) or not _follows(record, joined, last)

    def _joined(self, record: TermRecord) -> int | None:
        """Return the number of the term that has let this life of the node in, if it votes."""
        if not record.has((self._node, self._incarnation())):
            return None
        return record.term.joined[record.term.voters.index(self._node)]

    def disown(self, group: str, record: TermRecord) -> None:
        """Report to the orchestrator that this node is not in a group, whatever its term says."""
        self._disowned[group] = record
        self.register()

    def _is_let_in(self, record: TermRecord) -> bool:
        known = {each.node for each in record.term.newcomers}
        return self._node in known.intersection(record.term.voters)

    def _take(self, number: int, generation: int, name: str, record: TermRecord) -> None:
        def take(group: NodeGroup) -> None:
            with self._lock:
                if number != self._registrations:
                    return
                try:
                    group.take_term(record, generation)
                except FrameError as error:
                    log.error("group '%s': the orchestrator sends nonsense: %s", name, error)

        self._notices.apply(name, record.opening, take)

    def evicted(self, how: str) -> None:
        """This life of the node is over: so are all its groups here.

        Args:
            how: that is known; a phrase to follow the node's name.
        """
        self._reactor.call(partial(self._evict_all, how))

    def _evict_all(self, how: str) -> None:
        for group in self._registry.all():
            group.evict(evicted(group.name, self._node, how))


def _follows(record: TermRecord, joined: int, last: LastTerm | None) -> bool:
    """Return True if the term of this number, in which a node has joined, is later than its last.

    A store that has lost terms makes others of the same numbers.
    """
    if last is None:
        return True
    is_new = joined == record.term.number and record.term.generation > last.generation
    return is_new or joined > last.number


def _is_forgotten(group: NodeGroup, newest: int) -> bool:
    """Return True if a group has ranks here, although a later opening of its name is known.

    A name is opened anew once no rank is known in it: a store has lost those of this opening, and
    no registration will speak of them any more.
    """
    return group.opening < newest and not group.is_empty


class NodeListener:
    """The control link's listener: terms go to the groups, clearings to the peer monitor.

    Args:
        terms: of the groups.
        monitor: of the other nodes.
        groups: returns the groups that are open on this node.
        end_life: called when the orchestrator has evicted this node, with how that is known.
        draining: of this node.
        limit: has this node keep to some caps.
    """

    def __init__(
        self,
        terms: GroupTerms,
        monitor: PeerMonitor,
        groups: Callable[[], list[NodeGroup]],
        end_life: Callable[[str], None],
        draining: NodeDrain,
        limit: Callable[[Sequence[Cap]], None],
    ) -> None:
        self.limit = limit
        self.held = terms.held
        self.has_unsaid = terms.has_unsaid
        self.term = terms.term
        self.evicted = end_life
        self.cleared = monitor.cleared
        self.lag = monitor.lag
        self.heard = monitor.heard
        self.drain = draining.begin
        self._terms = terms
        self._monitor = monitor
        self._groups = groups
        self._draining = draining

    def is_draining(self) -> bool:
        return self._draining.reason is not None

    def registered(self, generation: int, out: Sequence[str]) -> None:
        self._terms.registered(generation, out)
        self._monitor.again()

    def progress(self) -> list[Progress]:
        return [_progress(group) for group in self._groups()]


def _progress(group: NodeGroup) -> Progress:
    records = group.lanes.records
    records.harvest()  # now and then, as nobody else may look
    return Progress(
        group=group.name,
        epoch=group.opening,
        last_seq=max(records.last_called().values(), default=-1),
        in_flight=len(group.table.in_flight) + len(records.in_flight()),
    )
