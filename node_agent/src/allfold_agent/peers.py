"""What agents tell each other about ops that cannot go on: evidence, verdicts, losses, departures.

All of this is off the data path. For each group the first node that answers leads: it gathers the
evidence of all nodes, judges (``allfold_core.verdict``) and tells everyone the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import httpx

from allfold_agent.group import Group
from allfold_core.errors import (
    AllfoldError,
    PeerLost,
    PeerSentIncoherentTensor,
    ServiceError,
    from_dict,
)
from allfold_core.operations import Fingerprint
from allfold_core.plan import Member
from allfold_core.verdict import Evidence, judge_deadline, judge_mismatch

log = logging.getLogger(__name__)

# A mismatch must be known everywhere within a second: the latecomers get this long to be heard.
_ARRIVAL_SECONDS = 0.3
_ASK_SECONDS = 0.5
_LEAD_SECONDS = 3.0


class Peers:
    """This node's part in the judgement of ops. Lives in the control plane's event loop."""

    def __init__(self, node: str, token: str) -> None:
        self._node = node
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Agents reach each other directly: a proxy of the environment is not meant for this.
        self._http = httpx.AsyncClient(headers=headers, timeout=_ASK_SECONDS, trust_env=False)
        self._cases: dict[tuple[str, int, int, str], asyncio.Task[AllfoldError | None]] = {}

    async def close(self) -> None:
        await self._http.aclose()

    # As any node

    async def suspect(self, group: Group, seq: int, reason: str, waited: float) -> None:
        """Have the leader look into an op, and apply its verdict here."""
        for leader in group.plan.members:
            if leader.node == self._node:
                verdict = await self.lead(group, seq, reason, waited)
            else:
                body = {"reason": reason, "waited": waited}
                answer = await self._tell(
                    group, leader, f"ops/{seq}/suspicion", body, timeout=_LEAD_SECONDS
                )
                if answer is None:
                    continue
                verdict = from_dict(answer["error"]) if answer["error"] else None
            if verdict is not None:
                group.fail(seq, verdict)
            return

    async def announce_loss(self, group: Group, error: PeerLost) -> None:
        """Tell every other node that a member is lost."""
        await self._tell_all(group, "losses", error.to_dict())

    async def announce_departure(self, group: Group, rank: int, last_seq: int) -> None:
        """Tell every other node that a rank has left after an op."""
        await self._tell_all(group, "departures", {"rank": rank, "last_seq": last_seq})

    @staticmethod
    async def testify(group: Group, seq: int, wait: float) -> dict[str, Any]:
        """What this node knows of an op, waiting a little for ranks that are about to call it."""
        if wait:
            await asyncio.to_thread(group.await_arrivals, seq, wait)
        op = group.ops.get(seq)
        arrivals = dict(op.arrivals) if op is not None else {}
        return {
            "arrivals": {
                str(rank): each.message.fingerprint.hex() for rank, each in arrivals.items()
            },
            "last_seq": {str(rank): last for rank, last in group.last_seq.items()},
            "held": [rank for rank, held in list(group.held) if held == seq],
        }

    # As the leader

    async def lead(self, group: Group, seq: int, reason: str, waited: float) -> AllfoldError | None:
        """Judge an op once, however many nodes suspect it, and tell everyone."""
        key = (group.name, group.epoch, seq, reason)
        case = self._cases.get(key)
        if case is None:
            case = self._cases[key] = asyncio.create_task(self._judge(group, seq, reason, waited))
            case.add_done_callback(lambda _: self._cases.pop(key, None))
        return await asyncio.shield(case)

    async def _judge(
        self, group: Group, seq: int, reason: str, waited: float
    ) -> AllfoldError | None:
        known = group.failure(seq)
        verdict = known or await self._verdict(group, seq, reason, waited)
        if verdict is None or not await self._carry_out(group, seq, verdict):
            return None
        return verdict

    async def _carry_out(self, group: Group, seq: int, verdict: AllfoldError) -> bool:
        """Fail the op on every node; false if it goes on because the missing ranks came after all.

        Their nodes are asked first. Once one of them has agreed, the op can be done nowhere; else
        a rank that calls at that moment would have a result where the others have an error.
        """
        missing = set(verdict.details.get("missing_ranks", ()))
        asked = [each for each in group.plan.members if missing.intersection(each.ranks)]
        failed = await self._fail_on(group, seq, verdict, asked, final=False)
        if False in failed and True not in failed:
            log.info("too late for a verdict: op %d of group '%s' goes on", seq, group.name)
            return False
        log.warning("%s", verdict)
        await self._fail_on(group, seq, verdict, group.plan.members, final=True)
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
        """Whether the op has failed on each of the nodes; ``None`` where one does not answer."""
        path = f"ops/{seq}/verdict?final={str(final).lower()}"

        async def fail(member: Member) -> bool | None:
            if member.node == self._node:
                return group.fail(seq, verdict, final=final)
            answer = await self._tell(group, member, path, verdict.to_dict())
            return answer["failed"] if answer is not None else None

        return await asyncio.gather(*map(fail, members))

    async def _verdict(
        self, group: Group, seq: int, reason: str, waited: float
    ) -> AllfoldError | None:
        evidence = await self._gather(group, seq, _ARRIVAL_SECONDS if reason == "mismatch" else 0.0)
        mismatch = judge_mismatch(group.plan, evidence)
        if mismatch is not None:
            return mismatch
        if reason == "deadline":
            return judge_deadline(group.plan, evidence, waited)
        if reason.startswith("incoherent"):
            return PeerSentIncoherentTensor(reason.removeprefix("incoherent: "), seq=seq)
        if reason.startswith("failed"):
            return ServiceError(
                f"op {seq} of group '{group.name}' {reason}; the log of that node has the "
                "traceback. The group is usable.",
                seq=seq,
                group=group.name,
            )
        return None

    async def _gather(self, group: Group, seq: int, wait: float) -> Evidence:
        members = group.plan.members
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
            "GET", group, member, f"ops/{seq}", params={"wait": wait}, timeout=wait + _ASK_SECONDS
        )

    # Talking

    async def _tell_all(self, group: Group, path: str, body: dict[str, Any]) -> None:
        await _all(
            self._tell(group, member, path, body)
            for member in group.plan.members
            if member.node != self._node
        )

    async def _tell(
        self,
        group: Group,
        member: Member,
        path: str,
        body: dict[str, Any],
        timeout: float = _ASK_SECONDS,
    ) -> dict[str, Any] | None:
        return await self._request("POST", group, member, path, json=body, timeout=timeout)

    async def _request(
        self, method: str, group: Group, member: Member, path: str, **request: Any
    ) -> dict[str, Any] | None:
        """One request to a peer's control port; ``None`` where it does not answer or know."""
        url = f"{member.control_url}/v1/groups/{group.name}/epochs/{group.epoch}/{path}"
        try:
            response = await self._http.request(method, url, **request)
            response.raise_for_status()
            body = response.json()
        except (httpx.HTTPError, ValueError) as error:
            log.info("node %s does not answer %s: %r", member.node, path, error)
            return None
        assert isinstance(body, dict)
        return body


async def _all(requests: Iterable[Awaitable[object]]) -> None:
    await asyncio.gather(*requests)
