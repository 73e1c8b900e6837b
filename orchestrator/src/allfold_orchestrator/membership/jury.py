"""The jury: which lives of nodes are over, from what agents accuse each other of and who answers.

Pure: the time comes as an argument, and what is to be done goes back as instructions. One jury
belongs to one replica; what it decides is written by compare-and-set, so two of them never decide
twice.

A life is over on *proof*: it says so itself, or it refuses connections at a replica that had
reached it before and on a second path, or a new life of the node has its address. Or for *silence*:
accused, probed, and not heard by anybody until ``confirm`` is over. Where both ends of a link are
alive and nothing passes between them for as long, the *link* is dead, and the fewest nodes go that
have an end of every such link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from allfold_core.survival.suspicion import LONGEST_PATIENCE_SECONDS, PATIENCE_SECONDS
from allfold_orchestrator.membership.cases import Case, Charge, ExtendedPatience, Open, SilentLink
from allfold_orchestrator.membership.cover import Link, cover_of_some
from allfold_orchestrator.membership.evidence import Evidence
from allfold_orchestrator.membership.group_state import Life

CONFIRM_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """Look for a sign of life: ask the node, dial it, let ``members`` ping it."""

    accused: Life
    members: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Have an accuser say at once if it has heard the accused meanwhile."""

    accuser: Life
    accused: Life


@dataclass(frozen=True, slots=True)
class Cleared:
    """Tell an accuser that the node lives, and how long it may be silent from now on."""

    accuser: Life
    accused: Life
    patience: float


@dataclass(frozen=True, slots=True)
class Evict:
    """These lives are over, all at once; each with how that is known.

    Attributes:
        is_refused: they refuse connections here and at an accuser. This replica has not reached
            them before, so it is no proof, but it is more than silence.
    """

    lives: Mapping[Life, str]
    is_proven: bool
    is_refused: bool = False


Instruction = Probe | Ask | Cleared | Evict


class Jury:
    """All cases of one replica."""

    def __init__(self) -> None:
        self._cases: dict[Life, Case] = {}
        self._links: dict[tuple[Life, Life], SilentLink] = {}  # by accuser and accused
        self._evidence = Evidence()
        self._extended: dict[Life, ExtendedPatience] = {}

    def patience(self, life: Life, now: float) -> float:
        """Return how long a node may be silent; twice as long after each false accusation."""
        extended = self._extended.get(life)
        return extended.patience if extended and extended.holds(now) else PATIENCE_SECONDS

    # What happens

    def reached(self, life: Life) -> None:
        """This replica has dialled the node, and it answered."""
        self._evidence.reached(life)

    def accused(
        self,
        now: float,
        accuser: Life,
        life: Life,
        charge: Charge,
        members: Collection[Life],
        lag: float = 0.0,
    ) -> list[Instruction]:
        """An agent accuses another one.

        Args:
            members: who could hear the accused as well.
            lag: how late the accuser is itself to read what others say; so much longer is the
                accused waited for.
        """
        case = self._open(now, life, lag)
        until = now + self._confirm(life, now) + lag
        if charge is Charge.STUCK:
            case.stuck_until = max(case.stuck_until, until)
        elif not case.is_missed:
            case.wait_for_life(until)
        case.charge(accuser, charge)
        if charge is not Charge.STUCK:
            self._links.setdefault((accuser, life), SilentLink(now, until, lag))
        return self._proof(life, case) or [Probe(life, self._others(life, accuser, members))]

    def withdrawn(self, accuser: Life, life: Life, charge: Charge) -> None:
        """An accuser takes back what it has said: the node was heard, or does its part again."""
        if charge is not Charge.STUCK:
            self._links.pop((accuser, life), None)
        case = self._cases.get(life)
        if case is None:
            return
        case.withdraw(accuser, charge)
        if not case.is_charged:
            del self._cases[life]

    def unlinked(self, accuser: Life) -> None:
        """Drop the accusations of an accuser that could no longer withdraw them here.

        On its next link, which may lead to another replica, it says again what still holds.
        """
        self._links = {pair: link for pair, link in self._links.items() if pair[0] != accuser}
        for case in self._cases.values():
            case.charges.pop(accuser, None)
        self._cases = {each: case for each, case in self._cases.items() if case.is_charged}

    def asked(self, now: float, life: Life) -> None:
        """All replicas were asked for a sign of life; from the first time on it is waited for."""
        case = self._cases.get(life)
        if case is not None and not case.is_asked:
            case.is_asked = True
            case.until = max(case.until, now + CONFIRM_SECONDS)

    def doubted(self, now: float, life: Life) -> None:
        """A node has no link; :meth:`link_ended` follows once it is known which nodes hear it."""
        case = self._open(now, life)
        if not case.link_ended and not case.is_missed:
            case.wait_for_life(now + self._confirm(life, now))
        case.link_ended = True

    def link_ended(self, now: float, life: Life, members: Collection[Life]) -> list[Instruction]:
        """This replica's own control link to the node has ended."""
        self._evidence.unlinked(life)
        self.doubted(now, life)
        case = self._cases[life]
        return self._proof(life, case) or [Probe(life, self._others(life, life, members))]

    def dial_refused(self, life: Life) -> list[Instruction]:
        """The node refuses connections of this replica."""
        case = self._cases.get(life)
        if case is None:
            return []
        case.dial_refused = True
        return self._proof(life, case)

    def answered(self, now: float, life: Life, lag: float) -> list[Instruction]:
        """The node has answered; ``lag`` is how late its thread for the links is."""
        self._evidence.answered(now, life, lag)
        return self._sign_of_life(now, life)

    def linked(self, now: float, life: Life) -> list[Instruction]:
        """The node has opened its control link, perhaps anew."""
        case = self._cases.get(life)
        if case is not None:
            case.link_ended = False
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
            case = self._cases.get(life)
            if case is not None and at - lag > case.begun:
                instructions += self._sign_of_life(now, life)
        return instructions

    def lagged(self, seconds: float) -> None:
        """This replica was itself late: nobody may suffer for answers that it has not read."""
        for each in self._open_questions():
            each.until += seconds
        for case in self._cases.values():
            case.stuck_until += seconds

    def wait_until(self, until: float) -> None:
        """Decide nothing before then: what was said meanwhile may come once more."""
        for each in self._open_questions():
            each.until = max(each.until, until)
        for case in self._cases.values():
            case.stuck_until = max(case.stuck_until, until)

    def gone(self, life: Life, how: str) -> list[Instruction]:
        """The node itself says that it is over, or a new life of it has come in its place."""
        self.over(life)
        return [Evict({life: how}, is_proven=True)]

    def over(self, life: Life) -> None:
        """Forget a life that is over, or that this replica has nothing to do with any more."""
        self.forget(life)
        self._evidence.over(life)

    def forget(self, life: Life) -> None:
        """Drop all accusations by and of a life that is in no group any more."""
        self._cases.pop(life, None)
        self.unlinked(life)
        self._links = {pair: link for pair, link in self._links.items() if pair[1] != life}
        self._extended.pop(life, None)
        self._evidence.forget(life)

    # What follows when the time is over

    @property
    def is_idle(self) -> bool:
        """True while nobody is accused: nothing is to be decided."""
        return not any(self._open_questions())

    @property
    def accused_lives(self) -> set[Life]:
        """The lives of which a sign is looked for."""
        return set(self._cases)

    @property
    def lives_in_question(self) -> set[Life]:
        """The lives that may be judged: the accused, and both ends of silent links."""
        return self.accused_lives.union(*self._links)

    @property
    def refused_lives(self) -> set[Life]:
        """The accused that refuse connections here and at an accuser."""
        return {life for life, case in self._cases.items() if case.is_refused_to_all}

    def is_due(self, now: float, protected: Collection[Life] = ()) -> bool:
        """Return True if :meth:`decide` may have something to decide."""
        cases = (
            case.due
            for life, case in self._cases.items()
            if life not in protected or not case.charges  # it is not judged, and need not stay open
        )
        aside = self._looked_for.union(protected)
        links = (link.due for pair, link in self._links.items() if not aside.intersection(pair))
        return now >= min((*cases, *links), default=float("inf"))

    def decide(
        self,
        now: float,
        ranks: Mapping[str, int],
        leaders: Collection[str] = (),
        protected: Collection[Life] = (),
    ) -> list[Evict]:
        """Return the evictions that are due.

        A case stays open until its life is :meth:`over`: what cannot be carried out now is decided
        anew, by what is known then.

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
        cover = cover_of_some(_by_name(dead), _by_name(undecided), ranks, leaders)
        if cover is not None:
            over |= {names[name]: _cut_off(name, dead) for name in sorted(cover)}
            for pair in dead:  # these accusations were not false
                for life in pair:
                    self._extended.pop(life, None)
        verdicts = Evict(over, is_proven=False), Evict(gone, is_proven=False, is_refused=True)
        return [each for each in verdicts if each.lives]

    def questions(self, now: float) -> list[Instruction]:
        """Ask the accusers whose next word decides: it would come with their next BEAT only."""
        due = [pair for pair, link in self._links.items() if now >= link.due and not link.is_asked]
        for pair in due:
            self._links[pair].is_asked = True
        return [Ask(*pair) for pair in due]

    def _silent(self, now: float, protected: Collection[Life]) -> Iterator[tuple[Life, str]]:
        for life, case in list(self._cases.items()):
            is_protected = life in protected
            if now < case.due or (is_protected and case.charges):
                continue
            if case.charges:
                yield life, case.how
            elif not is_protected and self._evidence.is_missed(now, life):
                yield life, "ended its control link, and is heard by no member of its groups"
            else:
                del self._cases[life]

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
        """Return True if the accuser says after the time that it has heard nothing since."""
        return self._evidence.has_heard_nothing(*pair, link.begun, link.until)

    # Cases

    def _open_questions(self) -> Iterator[Open]:
        yield from self._cases.values()
        yield from self._links.values()

    @property
    def _looked_for(self) -> set[Life]:
        """The lives of which a sign is waited for: their links are not judged before."""
        return {life for life, case in self._cases.items() if case.is_missed or case.link_ended}

    def _open(self, now: float, life: Life, lag: float = 0.0) -> Case:
        case = self._cases.get(life)
        if case is None:
            case = self._cases[life] = Case(now, now + self._confirm(life, now) + lag)
        return case

    def _confirm(self, life: Life, now: float) -> float:
        """Return how long a sign of life is waited for.

        Those who accuse a node at the same time are not told of its patience one after the other.
        """
        extended = self._extended.get(life)
        if extended is not None and extended.is_new(now):
            return max(CONFIRM_SECONDS, extended.before)
        return max(CONFIRM_SECONDS, self.patience(life, now))

    def _proof(self, life: Life, case: Case) -> list[Instruction]:
        if not case.is_refused_twice or not self._evidence.was_reached(life):
            return []
        return self.gone(life, "refuses connections of the orchestrator and of others")

    def _sign_of_life(self, now: float, life: Life) -> list[Instruction]:
        """Drop what it disproves, and let those accusers be more patient with the node.

        A link that was silent because its end did not run has to show from now on that it works.
        """
        case = self._cases.get(life)
        if case is None:
            return []
        accusers = case.acquit()
        if not case.charges:
            del self._cases[life]
        if not accusers:
            return []  # we have only looked for it, or it lives and is stuck
        for accuser in accusers:
            if (link := self._links.get((accuser, life))) is not None:
                link.listen_again(now)
        extended = self._extended.get(life)
        if extended is None or not extended.is_new(now):
            before = self.patience(life, now)
            extended = ExtendedPatience(min(2 * before, LONGEST_PATIENCE_SECONDS), before, now)
            self._extended[life] = extended
        return [Cleared(accuser, life, extended.patience) for accuser in accusers]

    @staticmethod
    def _others(life: Life, accuser: Life, members: Collection[Life]) -> tuple[Life, ...]:
        return tuple(each for each in members if each not in (life, accuser))[:2]


def _cut_off(name: str, dead: Collection[tuple[Life, Life]]) -> str:
    others = sorted({end[0] for pair in dead for end in pair if name in (pair[0][0], pair[1][0])})
    others.remove(name)
    return f"has no connection with {', '.join(others)}, although both ends live"


def _by_name(pairs: Iterable[tuple[Life, Life]]) -> list[Link]:
    return [frozenset((a[0], b[0])) for a, b in pairs]
