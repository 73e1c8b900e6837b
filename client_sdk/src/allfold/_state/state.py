"""The training state of a rank."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from allfold._arena import Bytes
from allfold._calls.call import EpochView
from allfold._group import Group
from allfold._registry import registry
from allfold._session.connection import GRACE_SECONDS
from allfold._state.agreement import NOBODYS, StateVersion, find_holders, share_outcome
from allfold._state.image import Image, Manifest, is_stateful, load, named_nodes, with_identities
from allfold._state.tensors import check_overwritable, form_of, is_overwritable, is_tensor
from allfold._state.transfer import Offering, StateLanding, pull
from allfold._state.tree import Flattened, pair_tensors, unflatten
from allfold_core.errors import InvalidArgument, PeerSentIncoherentTensor, WorldChanged
from allfold_core.group_options import checked_seconds
from allfold_core.protocol.state_blocks import MAX_SOURCES, spans

log = logging.getLogger("allfold")

_NO_OP_SINCE = (
    "the state was committed twice without a collective of group '{}' in between: newcomers get "
    "the state of the first commit, and that collective is what waits until they have it. Commit "
    "once per step, behind the step's collectives"
)
_NOTHING_KEPT = (
    "nothing was kept to go back to: make the state with State(keep=True), and commit it before"
)


class _NotAgreed(Exception):
    """The others have no state to give: they agree on one, with this rank."""


class State:
    """The training state of a rank: all that it needs to go on, and can give to a rank that joins.

        state = allfold.State(model=model, optimizer=optimizer, step=0)
        state.sync()
        while state.step < steps:
            train(...)
            state.step += 1
            state.commit()

    It holds models, optimizers, schedulers, samplers and whatever else has ``state_dict()`` and
    ``load_state_dict()``; arrays and torch tensors, which are overwritten in place; plain values:
    None, bool, int, float, str, bytes, and dicts, lists, tuples and sets of all these. Each is an
    attribute of its name.

    Every rank creates it with the same names, and with the values that it would start from on its
    own.

    Args:
        keep: whether each :meth:`commit` copies the state to memory of the host, for
            :meth:`restore`. By default it does not: an op that fails changes nothing, so that a
            step can be done again without a copy.
        values: by name.

    Raises:
        InvalidArgument: a name is taken by a method, or begins with an underscore; an array cannot
            be overwritten in place.
    """

    def __init__(self, *, keep: bool = False, **values: Any) -> None:
        self._values: dict[str, Any] = {}
        self._keep = keep
        self._kept: Bytes | None = None
        self._kept_head = 0
        self._commits = 0
        self._lineage = _new_lineage()
        self._offering: Offering | None = None
        self._offered_at = -1  # the next op of the group then
        self._is_agreed = True  # but for the time of a sync
        self._invitation: Offering | None = None  # for newcomers, to that sync
        for name, value in values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(
                f"the state has no '{name}', only: {', '.join(values) or 'nothing'}"
            )
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        elif hasattr(type(self), name):
            raise InvalidArgument(
                f"'{name}' is a method of a state, so no value can have that name"
            )
        else:
            if is_tensor(value):
                check_overwritable(value, name)
            self._values[name] = value

    def __repr__(self) -> str:
        return f"<allfold.State {', '.join(self._values)}: {self._commits} commits>"

    def commit(self, group: Group | None = None) -> None:
        """Say that the state is complete here: a step is done, and the next has not begun.

        Call it at the same point of the program on all ranks, with at least one collective between
        two calls. Ranks that wait to join or to leave do so here (:meth:`Group.boundary`), and
        newcomers get this state while the others compute their next step. If no rank waits, nothing
        is sent.

        Args:
            group: by default the first of the process, if it is in one.

        Raises:
            InvalidArgument: newcomers still pull the state of the last commit, because no
                collective, which would wait for them, was called since then.
        """
        if group is None and len(registry):
            group = registry.default()
        if self._offering is not None and group is not None and group.next_op == self._offered_at:
            raise InvalidArgument(_NO_OP_SINCE.format(group.name))
        self._end_offer()
        self._commits += 1
        if self._keep:
            image = self._image()
            kept, self._kept = self._kept, None  # an interrupted copy is none to go back to
            self._kept, self._kept_head = image.copy(kept), image.head
        if group is not None and group.boundary():
            self.meet_newcomers(group)

    def restore(self) -> None:
        """Go back to the last commit; needs ``keep=True``.

        Raises:
            InvalidArgument: nothing was kept.
        """
        kept = self._kept
        if kept is None:
            raise InvalidArgument(_NOTHING_KEPT)
        landing = StateLanding(self._kept_head, len(kept), self._places)
        for start, stop in (*spans(0, self._kept_head), *spans(self._kept_head, len(kept))):
            landing.put(start, kept[start:stop])
        self._take(landing)

    def sync(self, group: Group | None = None, *, timeout: float | None = None) -> None:
        """Give every rank the most advanced state in the group; a collective.

        The ranks with the most commits have that state. All others pull it from several of these at
        once, and go on with the rest if one dies. Among states with equally many commits, those
        that were synced with each other before are the same; among different ones, that of the
        lowest rank wins.

        Args:
            group: by default the first of the process.
            timeout: seconds for all of it; by default the group's.

        Raises:
            PeerMissing: it was not complete in time; says what is missing, and who was asked.
            PeerLost: all ranks that had it have failed.
            PeerError: another rank did not get it.
            InvalidArgument, PeerSentIncoherentTensor: the ranks have made states of different
                names, or of arrays of different types or sizes.
        """
        group = group or registry.default()
        seconds = group.timeout if timeout is None else checked_seconds("timeout", timeout)
        self._is_agreed = False
        try:
            while not self._is_synced(group, seconds):
                log.info("group '%s': others have joined, and the sync begins anew", group.name)
        finally:
            self._is_agreed = True
            self._end_invitation()

    def _is_synced(self, group: Group, seconds: float) -> bool:
        """Sync once; return False if that is to begin anew, with newcomers.

        Too few were left for it, and those who wait for the state are invited to it.
        """
        invitation = self._invitation
        try:
            self._sync(group, seconds)
        except WorldChanged:
            if self._invitation is invitation:
                raise
            return False
        return True

    def _sync(self, group: Group, seconds: float) -> None:
        view, newest, holders = find_holders(
            group, StateVersion(self._commits, self._lineage), seconds
        )
        if len(holders) == view.world_size:
            return
        tag = f"{newest.lineage:x}.{newest.commits}"
        offering = None
        if view.rank in holders[:MAX_SOURCES]:
            offering = self.offer(group, tag, view)
        error: Exception | None = None
        try:
            if view.rank not in holders:
                self.pull(group, holders, tag, seconds, view)
        except Exception as failure:  # noqa: BLE001 - the others wait to hear of it
            error = failure
        try:
            share_outcome(group, error, seconds + 2 * GRACE_SECONDS)
        except WorldChanged:
            error = None  # all begin anew
            raise
        finally:
            if offering is not None:
                offering.close()
            if error is not None:
                raise error

    # Newcomers of a group that goes on meanwhile

    def meet_newcomers(self, group: Group) -> None:
        """Offer this state, which was just committed, to ranks that have come into the group.

        It returns at once: others pull while this rank computes its next step. Nothing in the state
        changes before the next op is done, which waits for the newcomers; the next commit, which
        comes after it, ends the offer.

        While the group agrees on a state there is none yet, and newcomers are invited to that.
        """
        if not self._is_agreed:
            self._end_invitation()
            nothing = Image(Flattened({}), {"commits": NOBODYS, "lineage": 0})
            self._invitation = self.offer(group, _boundary_tag(group), image=nothing)
            return
        self._end_offer()
        self._offering = self.offer(group, _boundary_tag(group))
        self._offered_at = group.next_op

    def catch_up(self, group: Group, timeout: float | None = None) -> None:
        """Get the state of those who were in a group before this rank came into it.

        Args:
            timeout: seconds; by default the group's.

        Raises:
            The errors of :meth:`sync`.
        """
        seconds = group.timeout if timeout is None else checked_seconds("timeout", timeout)
        # Newcomers have the last numbers. There may be others of them before this one, which offer
        # nothing, so the first ranks are asked first.
        try:
            self.pull(group, range(group.rank), _boundary_tag(group), seconds, turned=False)
        except _NotAgreed:
            self.sync(group, timeout=seconds)

    def _end_offer(self) -> None:
        if self._offering is not None:
            self._offering.close()
            self._offering = None

    def _end_invitation(self) -> None:
        if self._invitation is not None:
            self._invitation.close()
            self._invitation = None

    # Parts of the above

    def offer(
        self, group: Group, tag: str, view: EpochView | None = None, image: Image | None = None
    ) -> Offering:
        """Offer this state to ranks of the group; leave it alone until the offer is closed.

        Args:
            tag: what all who offer this version call it.
            view: the epoch of the rank numbers; by default the current one.
            image: offered instead.
        """
        view = view or group.membership.view
        state_id = _id(group, tag, view, view.rank)
        return Offering(group.membership, state_id, image or self._image())

    def pull(
        self,
        group: Group,
        holders: Sequence[int],
        tag: str,
        timeout: float,
        view: EpochView | None = None,
        *,
        turned: bool = True,
    ) -> None:
        """Overwrite this state with that of ranks that offer it, or will do so soon.

        After an error, part of it may be overwritten: it counts as older than all others.

        Args:
            holders: their numbers.
            tag, view: as for :meth:`offer`.
            timeout: seconds for all of it.
            turned: do not begin with the same holder as other ranks that pull.
        """
        view = view or group.membership.view
        offering = list(holders[:MAX_SOURCES])
        first = view.rank % len(offering) if turned and offering else 0
        ranks = [*offering[first:], *offering[:first]]
        sources = [(rank, _id(group, tag, view, rank)) for rank in ranks]
        landing = pull(
            group.membership,
            sources,
            self._places,
            timeout,
            epoch=view.epoch,
            opened=self._invalidate,
        )
        self._take(landing)

    def _image(self) -> Image:
        about = {"commits": self._commits, "lineage": self._lineage}
        return Image(self._flattened(), about)

    def _flattened(self) -> Flattened:
        return Flattened(
            {
                name: value.state_dict() if is_stateful(value) else value
                for name, value in self._values.items()
            }
        )

    def _places(self, manifest: Manifest) -> list[Any | None]:
        """Return this rank's own tensors where those of the manifest belong, if they fit."""
        if manifest.about.get("commits") == NOBODYS:
            raise _NotAgreed
        own = self._flattened()
        self._check_names(manifest)
        places: list[Any | None] = [None] * len(manifest.forms)
        for index, ours in pair_tensors(manifest.node, own.node).items():
            if own.forms[ours] == manifest.forms[index] and is_overwritable(own.tensors[ours]):
                places[index] = own.tensors[ours]
        self._check_arrays(manifest, places)
        return places

    def _check_names(self, manifest: Manifest) -> None:
        theirs = set(named_nodes(manifest))
        if theirs != self._values.keys():
            raise InvalidArgument(
                f"this rank's state has {sorted(self._values)}, that of the others has "
                f"{sorted(theirs)}; make it of the same names on all ranks"
            )

    def _check_arrays(self, manifest: Manifest, places: Sequence[Any | None]) -> None:
        """Raise ``InvalidArgument`` if a received array does not fit the one to be overwritten."""
        for name, node in named_nodes(manifest).items():
            value = self._values[name]
            if not is_tensor(value):
                continue
            check_overwritable(value, name)
            index = node.get("tensor") if isinstance(node, dict) else None
            if index is None or places[index] is None:
                found = "no array" if index is None else str(manifest.forms[index])
                raise InvalidArgument(
                    f"'{name}' is {form_of(value, name)} here and {found} on the other ranks"
                )

    def _invalidate(self) -> None:
        """Mark this state as incomplete: part of it may be overwritten."""
        self._commits, self._lineage = NOBODYS, _new_lineage()

    def _take(self, landing: StateLanding) -> None:
        """Assign the values of a state that was received."""
        manifest, tensors = landing.finish()
        values = unflatten(manifest.node, tensors)
        for name, node in named_nodes(manifest).items():
            known = self._values[name]
            if is_stateful(known):
                load(known, values[name], with_identities(node, tensors))
            elif not is_tensor(known):
                self._values[name] = values[name]
        try:
            self._commits, self._lineage = manifest.about["commits"], manifest.about["lineage"]
        except KeyError as error:
            raise PeerSentIncoherentTensor(f"a state without its {error}") from error


def _new_lineage() -> int:
    return secrets.randbits(63)


def _boundary_tag(group: Group) -> str:
    """The version that the ranks of a group had when it came to its current epoch."""
    return f"epoch.{group.epoch}"


def _id(group: Group, tag: str, view: EpochView, rank: int) -> str:
    """Return the id of a rank's offer, which every rank can compute."""
    name = hashlib.blake2b(group.name.encode(), digest_size=8).hexdigest()
    return f"state.{name}.{group.membership.opening}.{tag}.{view.epoch}.{rank}"
