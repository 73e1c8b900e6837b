"""The failure detector: which lives of nodes are over, by what agents suspect and who answers.

Pure: the time comes as an argument, and what is to be done goes back as instructions. One failure
detector belongs to one replica; what it decides is written by compare-and-set, so two of them never
decide twice.

A life is over on *proof*: it says so itself, or it refuses connections at a replica that had
reached it before and on a second path, or a new life of the node has its address. Or for *silence*:
suspected, probed, and not heard by anybody until ``confirm`` is over. Where both ends of a link are
alive and nothing passes between them for as long, the *link* is dead, and the fewest nodes go that
have an end of every such link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from allfold_core.survival.suspicion import (
    LONGEST_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    SuspicionKind,
)
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.eviction_set import Link, eviction_set_of_some
from allfold_orchestrator.membership.evidence import Evidence
from allfold_orchestrator.membership.suspects import (
    Ask,
    Cleared,
    Evict,
    ExtendedPatience,
    Instruction,
    Open,
    Probe,
    SilentLink,
    SuspectedLife,
)

CONFIRM_SECONDS = 0.5


class FailureDetector:
    """All suspects of one replica."""

    def __init__(self) -> None:
        self._suspects: dict[Life, SuspectedLife] = {}
        self._links: dict[tuple[Life, Life], SilentLink] = {}  # by reporter and suspected
        self._evidence = Evidence()
        self._extended: dict[Life, ExtendedPatience] = {}

    def patience(self, life: Life, now: float) -> float:
        """Return how long a node may be silent; twice as long after each false suspicion."""
        extended = self._extended.get(life)
        return extended.patience if extended and extended.holds(now) else PATIENCE_SECONDS

    # What happens

    def reached(self, life: Life) -> None:
        """This replica has dialled the node, and it answered."""
        self._evidence.reached(life)

    def suspected(
        self,
        now: float,
        reporter: Life,
        life: Life,
        kind: SuspicionKind,
        members: Collection[Life],
        lag: float = 0.0,
    ) -> list[Instruction]:
        """An agent suspects another one.

        Args:
            members: who could hear the suspect as well.
            lag: how late the reporter is itself to read what others say; so much longer is the
                suspected waited for.
        """
        suspect = self._open(now, life, lag)
        until = now + self._confirm(life, now) + lag
        if kind == "stuck":
            suspect.stuck_until = max(suspect.stuck_until, until)
        elif not suspect.is_missed:
            suspect.wait_for_life(until)
        suspect.add(reporter, kind)
        if kind != "stuck":
            self._links.setdefault((reporter, life), SilentLink(now, until, lag))
        return self._proof(life, suspect) or [Probe(life, self._others(life, reporter, members))]

    def withdrawn(self, reporter: Life, life: Life, kind: SuspicionKind) -> None:
        """A reporter takes back what it has said: the node was heard, or does its part again."""
        if kind != "stuck":
            self._links.pop((reporter, life), None)
        suspect = self._suspects.get(life)
        if suspect is None:
            return
        suspect.withdraw(reporter, kind)
        if not suspect.is_suspected:
            del self._suspects[life]

    def unlinked(self, reporter: Life) -> None:
        """Drop the suspicions of a reporter that could no longer withdraw them here.

        On its next link, which may lead to another replica, it says again what still holds.
        """
        self._links = {pair: link for pair, link in self._links.items() if pair[0] != reporter}
        for suspect in self._suspects.values():
            suspect.suspicions.pop(reporter, None)
        self._suspects = {
            each: suspect for each, suspect in self._suspects.items() if suspect.is_suspected
        }

    def asked(self, now: float, life: Life) -> None:
        """All replicas were asked for a sign of life; from the first time on it is waited for."""
        suspect = self._suspects.get(life)
        if suspect is not None and not suspect.is_asked:
            suspect.is_asked = True
            suspect.until = max(suspect.until, now + CONFIRM_SECONDS)

    def doubted(self, now: float, life: Life) -> None:
        """A node has no link; :meth:`link_ended` follows once it is known which nodes hear it."""
        suspect = self._open(now, life)
        if not suspect.link_ended and not suspect.is_missed:
            suspect.wait_for_life(now + self._confirm(life, now))
        suspect.link_ended = True

    def link_ended(self, now: float, life: Life, members: Collection[Life]) -> list[Instruction]:
        """This replica's own control link to the node has ended."""
        self._evidence.unlinked(life)
        self.doubted(now, life)
        suspect = self._suspects[life]
        return self._proof(life, suspect) or [Probe(life, self._others(life, life, members))]

    def dial_refused(self, life: Life) -> list[Instruction]:
        """The node refuses connections of this replica."""
        suspect = self._suspects.get(life)
        if suspect is None:
            return []
        suspect.dial_refused = True
        return self._proof(life, suspect)

    def answered(self, now: float, life: Life, lag: float) -> list[Instruction]:
        """The node has answered; ``lag`` is how late its thread for the links is."""
        self._evidence.answered(now, life, lag)
        return self._sign_of_life(now, life)

    def linked(self, now: float, life: Life) -> list[Instruction]:
        """The node has opened its control link, perhaps anew."""
        suspect = self._suspects.get(life)
        if suspect is not None:
            suspect.link_ended = False
        return self._sign_of_life(now, life)

    def told(
        self, now: float, member: Life, ages: Mapping[Life, float], lag: float = 0.0
    ) -> list[Instruction]:
        """A member says how long ago it heard each of the others; ``lag``: how late it reads."""
        instructions: list[Instruction] = []
        for life, at in self._evidence.told(now, member, ages, lag).items():
            link = self._links.get((member, life))
            if link is not None and at > link.begun:
                del self._links[member, life]
            suspect = self._suspects.get(life)
            if suspect is not None and at - lag > suspect.begun:
                instructions += self._sign_of_life(now, life)
        return instructions

    def lagged(self, seconds: float) -> None:
        """This replica was itself late: nobody may suffer for answers that it has not read."""
        for each in self._open_questions():
            each.until += seconds
        for suspect in self._suspects.values():
            suspect.stuck_until += seconds

    def wait_until(self, until: float) -> None:
        """Decide nothing before then: what was said meanwhile may come once more."""
        for each in self._open_questions():
            each.until = max(each.until, until)
        for suspect in self._suspects.values():
            suspect.stuck_until = max(suspect.stuck_until, until)

    def gone(self, life: Life, how: str) -> list[Instruction]:
        """The node itself says that it is over, or a new life of it has come in its place."""
        self.over(life)
        return [Evict({life: how}, is_proven=True)]

    def over(self, life: Life) -> None:
        """Forget a life that is over, or that this replica has nothing to do with any more."""
        self.forget(life)
        self._evidence.over(life)

    def forget(self, life: Life) -> None:
        """Drop all suspicions by and of a life that is in no group any more."""
        self._suspects.pop(life, None)
        self.unlinked(life)
        self._links = {pair: link for pair, link in self._links.items() if pair[1] != life}
        self._extended.pop(life, None)
        self._evidence.forget(life)

    # What follows when the time is over

    @property
    def is_idle(self) -> bool:
        """True while nobody is suspected: nothing is to be decided."""
        return not any(self._open_questions())

    @property
    def suspected_lives(self) -> set[Life]:
        """The lives of which a sign is looked for."""
        return set(self._suspects)

    @property
    def lives_in_question(self) -> set[Life]:
        """The lives that a decision may evict: the suspects, and both ends of silent links."""
        return self.suspected_lives.union(*self._links)

    @property
    def refused_lives(self) -> set[Life]:
        """The suspects that refuse connections here and at a reporter."""
        return {life for life, suspect in self._suspects.items() if suspect.is_refused_to_all}

    def is_due(self, now: float, protected: Collection[Life] = ()) -> bool:
        """Return True if :meth:`decide` may have something to decide."""
        dues = (
            suspect.due
            for life, suspect in self._suspects.items()
            if life not in protected
            or not suspect.suspicions  # there is nothing to decide, and it need not stay open
        )
        aside = self._looked_for.union(protected)
        links = (link.due for pair, link in self._links.items() if not aside.intersection(pair))
        return now >= min((*dues, *links), default=float("inf"))

    def decide(
        self,
        now: float,
        ranks: Mapping[str, int],
        leaders: Collection[str] = (),
        protected: Collection[Life] = (),
    ) -> list[Evict]:
        """Return the evictions that are due.

        A suspect stays one until its life is :meth:`over`: what cannot be carried out now is
        decided anew, by what is known then.

        Args:
            ranks: how many each node has.
            leaders: the nodes that lead a group.
            protected: lives that may not be evicted now.
        """
        refused = self.refused_lives
        silent = dict(self._silent(now, protected))
        over = {life: how for life, how in silent.items() if life not in refused}
        gone = {life: how for life, how in silent.items() if life in refused}
        dead, undecided = (
            [pair for pair in pairs if not {*pair} & {*protected}]
            for pairs in self._dead_links(now, silent)
        )
        names = {life[0]: life for pair in dead for life in pair}
        eviction_set = eviction_set_of_some(_by_name(dead), _by_name(undecided), ranks, leaders)
        if eviction_set is not None:
            over |= {names[name]: _cut_off(name, dead) for name in sorted(eviction_set)}
            for pair in dead:  # these suspicions were not false
                for life in pair:
                    self._extended.pop(life, None)
        evictions = Evict(over, is_proven=False), Evict(gone, is_proven=False, is_refused=True)
        return [each for each in evictions if each.lives]

    def questions(self, now: float) -> list[Instruction]:
        """Ask the reporters whose next word decides: it would come with their next BEAT only."""
        due = [pair for pair, link in self._links.items() if now >= link.due and not link.is_asked]
        for pair in due:
            self._links[pair].is_asked = True
        return [Ask(*pair) for pair in due]

    def _silent(self, now: float, protected: Collection[Life]) -> Iterator[tuple[Life, str]]:
        for life, suspect in list(self._suspects.items()):
            is_protected = life in protected
            if now < suspect.due or (is_protected and suspect.suspicions):
                continue
            if suspect.suspicions:
                yield life, suspect.how
            elif not is_protected and self._evidence.is_missed(now, life):
                yield life, "ended its control link, and is heard by no member of its groups"
            else:
                del self._suspects[life]

    def _dead_links(
        self, now: float, silent: Collection[Life]
    ) -> tuple[list[tuple[Life, Life]], list[tuple[Life, Life]]]:
        """Return the links that are dead, and those that may have died with the first of them.

        Args:
            silent: the lives that are over whatever their links are.
        """
        looked_for = self._looked_for
        for pair, link in list(self._links.items()):
            is_over = now >= link.until and not looked_for.intersection(pair)
            if is_over and not self._evidence.both_live(now, *pair, link.begun):
                del self._links[pair]
        links = {pair: link for pair, link in self._links.items() if not {*pair} & {*silent}}
        dead = {
            pair: link
            for pair, link in links.items()
            if self._is_dead(pair, link) and not looked_for.intersection(pair)
        }
        window = min((link.until for link in dead.values()), default=now)
        undecided = [
            pair for pair, link in links.items() if pair not in dead and link.begun <= window
        ]
        return list(dead), undecided

    def _is_dead(self, pair: tuple[Life, Life], link: Open) -> bool:
        """Return True if the reporter says after the time that it has heard nothing since."""
        return self._evidence.has_heard_nothing(*pair, link.begun, link.until)

    # Suspects

    def _open_questions(self) -> Iterator[Open]:
        yield from self._suspects.values()
        yield from self._links.values()

    @property
    def _looked_for(self) -> set[Life]:
        """The lives of which a sign is awaited: their links are not decided on before."""
        return {
            life
            for life, suspect in self._suspects.items()
            if suspect.is_missed or suspect.link_ended
        }

    def _open(self, now: float, life: Life, lag: float = 0.0) -> SuspectedLife:
        suspect = self._suspects.get(life)
        if suspect is None:
            suspect = self._suspects[life] = SuspectedLife(
                now, now + self._confirm(life, now) + lag
            )
        return suspect

    def _confirm(self, life: Life, now: float) -> float:
        """Return how long a sign of life is waited for.

        Those who suspect a node at the same time are not told of its patience one after the other.
        """
        extended = self._extended.get(life)
        if extended is not None and extended.is_new(now):
            return max(CONFIRM_SECONDS, extended.before)
        return max(CONFIRM_SECONDS, self.patience(life, now))

    def _proof(self, life: Life, suspect: SuspectedLife) -> list[Instruction]:
        if not suspect.is_refused_twice or not self._evidence.was_reached(life):
            return []
        return self.gone(life, "refuses connections of the orchestrator and of others")

    def _sign_of_life(self, now: float, life: Life) -> list[Instruction]:
        """Drop what it disproves, and let those reporters be more patient with the node.

        A link that was silent because its end did not run has to show from now on that it works.
        """
        suspect = self._suspects.get(life)
        if suspect is None:
            return []
        reporters = suspect.clear()
        if not suspect.suspicions:
            del self._suspects[life]
        if not reporters:
            return []  # we have only looked for it, or it lives and is stuck
        for reporter in reporters:
            if (link := self._links.get((reporter, life))) is not None:
                link.listen_again(now)
        extended = self._extended.get(life)
        if extended is None or not extended.is_new(now):
            before = self.patience(life, now)
            extended = ExtendedPatience(min(2 * before, LONGEST_PATIENCE_SECONDS), before, now)
            self._extended[life] = extended
        return [Cleared(reporter, life, extended.patience) for reporter in reporters]

    @staticmethod
    def _others(life: Life, reporter: Life, members: Collection[Life]) -> tuple[Life, ...]:
        return tuple(each for each in members if each not in (life, reporter))[:2]


def _cut_off(name: str, dead: Collection[tuple[Life, Life]]) -> str:
    others = sorted({end[0] for pair in dead for end in pair if name in (pair[0][0], pair[1][0])})
    others.remove(name)
    return f"has no connection with {', '.join(others)}, although both ends live"


def _by_name(pairs: Iterable[tuple[Life, Life]]) -> list[Link]:
    return [frozenset((a[0], b[0])) for a, b in pairs]
