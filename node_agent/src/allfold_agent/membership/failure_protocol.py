"""Messages between agents about ops that cannot go on: evidence, verdicts, losses, departures.

All of this is off the data path. For each group the first node that answers is the leader: it
gathers the evidence of all nodes, judges (``allfold_core.verdict``) and sends all the same verdict.
A loss needs no judge, so any of the first nodes may announce it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import httpx

from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.group import Group
from allfold_core.errors import (
    AllfoldError,
    PeerLost,
    PeerSentIncoherentTensor,
    ServiceError,
    from_dict,
)
from allfold_core.operations import Fingerprint
from allfold_core.plan import Member
from allfold_core.schema import MESSAGE
from allfold_core.verdict import Evidence, judge_deadline, judge_mismatch

log = logging.getLogger(__name__)

# A mismatch must be known everywhere within a second: the latecomers get this long to be heard.
_ARRIVAL_SECONDS = 0.3
_ASK_SECONDS = 0.5
_LEAD_SECONDS = 3.0
# The leader answers when it has notified all, or has waited _ASK_SECONDS for one that is silent.
_ANNOUNCE_SECONDS = 2 * _ASK_SECONDS
_LEADERS_AT_ONCE = 3


class FailureProtocol:
    """This node's part in judging ops that cannot go on. Runs in the control plane's event loop."""

    def __init__(
        self, node: str, token: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._node = node
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Agents reach each other directly: a proxy of the environment is not meant for this.
        self._http = httpx.AsyncClient(
            headers=headers, timeout=_ASK_SECONDS, trust_env=False, transport=transport
        )
        self._announced: WeakSet[Epoch] = WeakSet()
        self._incidents: dict[tuple[str, int, int, str], asyncio.Task[AllfoldError | None]] = {}

    async def close(self) -> None:
        await self._http.aclose()

    # As any node

    async def suspect(self, group: Group, seq: int, reason: str, waited: float) -> None:
        """Have the leader look into an op, and apply its verdict here."""
        epoch = group.epoch_of(seq)
        for leader in epoch.plan.members:
            if leader.node == self._node:
                verdict = await self.lead(group, seq, reason, waited)
            else:
                body = {"reason": reason, "waited": waited}
                answer = await self._notify(
                    epoch, leader, f"ops/{seq}/suspicion", body, timeout=_LEAD_SECONDS
                )
                if answer is None:
                    continue
                verdict = from_dict(answer["error"]) if answer["error"] else None
            if verdict is not None:
                group.fail(seq, verdict)
            return

    async def announce_loss(self, epoch: Epoch, error: PeerLost) -> None:
        """Notify every other node that a member is lost.

        Also the lost one: it may be alive, where only a link is broken, and must not wait either.
        """
        self._announced.add(epoch)
        await self._notify_all(epoch, "losses", error.to_dict())

    async def announce_loss_once(self, epoch: Epoch, error: PeerLost) -> None:
        """Notify the others of the first loss; a later one finds the epoch broken everywhere."""
        if epoch not in self._announced:
            await self.announce_loss(epoch, error)

    async def report_loss(self, epoch: Epoch, error: PeerLost) -> None:
        """Have leaders announce a loss that all survivors see: O(N) messages instead of O(N * N).

        Several are asked at once, and each time twice as many, because members that have died
        together do not refuse but are silent.
        """
        leaders = [each for each in epoch.plan.members if each.node != error.details.get("node")]
        at_once = _LEADERS_AT_ONCE
        while leaders:
            asked, leaders = leaders[:at_once], leaders[at_once:]
            at_once *= 2
            if any(each.node == self._node for each in asked):
                await self.announce_loss_once(epoch, error)
                return
            answers = (self._have_announced(epoch, each, error) for each in asked)
            if any(await asyncio.gather(*answers)):
                return

    async def _have_announced(self, epoch: Epoch, leader: Member, error: PeerLost) -> bool:
        path, body = "losses?announce=true", error.to_dict()
        answer = await self._notify(epoch, leader, path, body, timeout=_ANNOUNCE_SECONDS)
        return answer is not None

    async def announce_departure(self, epoch: Epoch, rank: int, last_seq: int, how: str) -> None:
        """Notify every other node that a rank has left after an op, and how."""
        body = {"rank": rank, "last_seq": last_seq, "how": how}
        await self._notify_all(epoch, "departures", body)

    @staticmethod
    async def testify(group: Group, seq: int, wait: float) -> dict[str, Any]:
        """Return this node's evidence of an op, after a wait for ranks that are about to call."""
        if wait:
            await asyncio.to_thread(group.await_arrivals, seq, wait)
        op, epoch = group.table.in_flight.get(seq), group.epoch_of(seq)
        arrivals = dict(op.arrivals) if op is not None else {}
        return {
            "arrivals": {
                str(rank): each.message.fingerprint.hex() for rank, each in arrivals.items()
            },
            "last_seq": {str(rank): last for rank, last in group.last_called(epoch).items()},
            "held": [
                epoch.rank_of(session)
                for session, held in list(group.deferred)
                if held == seq and epoch.has(session)
            ],
        }

    # As the leader

    async def lead(self, group: Group, seq: int, reason: str, waited: float) -> AllfoldError | None:
        """Judge an op once, however many nodes suspect it, and send the verdict to all."""
        key = (group.name, group.epoch_of(seq).number, seq, reason)
        incident = self._incidents.get(key)
        if incident is None:
            incident = asyncio.create_task(self._judge(group, seq, reason, waited))
            self._incidents[key] = incident
            incident.add_done_callback(lambda _: self._incidents.pop(key, None))
        return await asyncio.shield(incident)

    async def _judge(
        self, group: Group, seq: int, reason: str, waited: float
    ) -> AllfoldError | None:
        known = group.failure(seq)
        verdict = known or await self._verdict(group, seq, reason, waited)
        if verdict is None or not await self._carry_out(group, seq, verdict):
            return None
        return verdict

    async def _carry_out(self, group: Group, seq: int, verdict: AllfoldError) -> bool:
        """Fail the op on every node; return False if the missing ranks came and it goes on.

        Their nodes are asked first. Once one of them has agreed, the op can be done nowhere; else
        a rank that calls at that moment would have a result where the others have an error.
        """
        members = group.epoch_of(seq).plan.members
        missing = set(verdict.details.get("missing_ranks", ()))
        asked = [each for each in members if missing.intersection(each.ranks)]
        failed = await self._fail_on(group, seq, verdict, asked, final=False)
        if False in failed and True not in failed:
            log.info("too late for a verdict: op %d of group '%s' goes on", seq, group.name)
            return False
        log.warning("%s", verdict)
        await self._fail_on(group, seq, verdict, members, final=True)
        return True

    async def _fail_on(
        self,
        group: Group,
        seq: int,
        verdict: AllfoldError,
        members: Sequence[Member],
        *,
        final: bool,
    ) -> list[bool | None]:
        """Return, for each node, True if the op has failed there; ``None`` without an answer."""
        path = f"ops/{seq}/verdict?final={str(final).lower()}"
        epoch = group.epoch_of(seq)

        async def fail(member: Member) -> bool | None:
            if member.node == self._node:
                return group.fail(seq, verdict, final=final)
            answer = await self._notify(epoch, member, path, verdict.to_dict())
            return answer["failed"] if answer is not None else None

        return await asyncio.gather(*map(fail, members))

    async def _verdict(
        self, group: Group, seq: int, reason: str, waited: float
    ) -> AllfoldError | None:
        evidence = await self._gather(group, seq, _ARRIVAL_SECONDS if reason == "mismatch" else 0.0)
        plan = group.epoch_of(seq).plan
        mismatch = judge_mismatch(plan.group, plan.nodes_by_rank, evidence)
        if mismatch is not None:
            return mismatch
        if reason == "deadline":
            return judge_deadline(plan.group, plan.nodes_by_rank, evidence, waited)
        if reason.startswith("incoherent"):
            return PeerSentIncoherentTensor(reason.removeprefix("incoherent: "), seq=seq)
        if reason.startswith("failed"):
            return ServiceError(
                f"op {seq} of group '{group.name}' {reason}; the log of that node says "
                "more. The group is usable.",
                seq=seq,
                group=group.name,
            )
        return None

    async def _gather(self, group: Group, seq: int, wait: float) -> Evidence:
        members = group.epoch_of(seq).plan.members
        statements = await asyncio.gather(*(self._ask(group, each, seq, wait) for each in members))
        arrivals: dict[int, Fingerprint] = {}
        last_seq: dict[int, int] = {}
        silent: list[str] = []
        held: set[int] = set()
        for member, statement in zip(members, statements, strict=True):
            if statement is None:
                silent.append(member.node)
                continue
            for rank, packed in statement["arrivals"].items():
                arrivals[int(rank)] = Fingerprint.unpack(bytes.fromhex(packed))
            last_seq |= {int(rank): last for rank, last in statement["last_seq"].items()}
            held.update(statement.get("held", ()))
        return Evidence(seq, arrivals, last_seq, tuple(silent), frozenset(held))

    async def _ask(
        self, group: Group, member: Member, seq: int, wait: float
    ) -> dict[str, Any] | None:
        if member.node == self._node:
            return await self.testify(group, seq, wait)
        return await self._request(
            "GET",
            group.epoch_of(seq),
            member,
            f"ops/{seq}",
            params={"wait": wait},
            timeout=wait + _ASK_SECONDS,
        )

    # Messages

    async def _notify_all(self, epoch: Epoch, path: str, body: dict[str, Any]) -> None:
        await _all(
            self._notify(epoch, member, path, body)
            for member in epoch.plan.members
            if member.node != self._node
        )

    async def _notify(
        self,
        epoch: Epoch,
        member: Member,
        path: str,
        body: dict[str, Any],
        timeout: float = _ASK_SECONDS,
    ) -> dict[str, Any] | None:
        json = MESSAGE.stamp(body)
        return await self._request("POST", epoch, member, path, json=json, timeout=timeout)

    async def _request(
        self, method: str, epoch: Epoch, member: Member, path: str, **request: Any
    ) -> dict[str, Any] | None:
        """Send a request to a peer's control port; ``None`` if it does not answer, or refuses."""
        url = f"{member.control_url}/v1/groups/{epoch.group}/epochs/{epoch.number}/{path}"
        try:
            response = await self._http.request(method, url, **request)
            if response.is_error:
                log.info("node %s refuses %s: %s", member.node, path, response.text)
                return None
            body = response.json()
            assert isinstance(body, dict)
            return MESSAGE.read(body)
        except (httpx.HTTPError, ValueError) as error:
            log.info("node %s does not answer %s: %r", member.node, path, error)
            return None


async def _all(requests: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*requests)
