"""Running the ranks of a job: their output, their ends, and everybody's end in every case."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from allfold.cli._run.ending import Ending, Restarts
from allfold.cli._run.failures import Failures
from allfold.cli._run.launch_spec import LaunchSpec
from allfold.cli._run.questions import IncidentWatch, Latecomers
from allfold.cli._run.rank_process import Output, RankProcess, RankStream
from allfold.cli._run.tracebacks import Folding
from allfold_cluster import Cluster
from allfold_cluster.processes import Child, Waitable, stop_all, wait_for
from allfold_cluster.signals import Interrupts
from allfold_core.errors import ServiceError
from allfold_core.verdict import name_ranks

_STDOUT, _STDERR = 1, 2
_FLUSH_SECONDS = 2.0
"""Seconds by which a slow reader of our output may delay the end of a run that was told to end."""
_LATECOMERS_SECONDS = 2.0
"""The interval of the checks whether restarted ranks wait for ranks that have ended."""
_LOOK_AT_AGENTS = "'allfold trace' writes the last ops of the agents, 'allfold status' what is left"
"""Only where they outlive the run."""


@dataclass(frozen=True)
class Policy:
    """The user's choices for a run.

    Attributes:
        grace: seconds that the others have to end by themselves after a first failure.
        timeout: seconds for the whole run; None for no limit.
        quiet_others: show rank 0 only.
        prefix: put ``[rank]`` in front of each line.
        keep_going: let the others go on after a failure.
        max_restarts: how many restarts of failed ranks there may be, over all ranks.
        all_tracebacks: fold none, also where another rank is the cause.
    """

    grace: float = 5.0
    timeout: float | None = None
    quiet_others: bool = False
    prefix: bool = True
    keep_going: bool = False
    max_restarts: int = 0
    all_tracebacks: bool = False


class Launch:
    """One run of a job; whatever happens inside :meth:`run`, no rank is left after it."""

    def __init__(
        self,
        spec: LaunchSpec,
        policy: Policy,
        interrupts: Interrupts,
        cluster: Cluster | None = None,
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._interrupts = interrupts
        self._cluster = cluster
        self._services = list(cluster.services) if cluster else []
        self._out = Output(_STDOUT, prefix=policy.prefix)
        self._err = Output(_STDERR, prefix=policy.prefix)
        self._ending = Ending(policy.grace, policy.keep_going)
        self._restarts = Restarts(policy.max_restarts)
        self._deadline = None if policy.timeout is None else time.monotonic() + policy.timeout
        self._env: Mapping[str, str] = {}
        self._incidents: IncidentWatch
        self._running: list[RankProcess] = []
        self._ended_well: set[int] = set()
        self._failures = Failures()
        self._failed: dict[int, RankProcess] = {}
        self._folding = Folding(shows_all=policy.all_tracebacks)
        self._has_told_to_end = False
        self._ask_at: float | None = None

    def run(self, env: Mapping[str, str]) -> int:
        """Start every rank with ``env`` and its own variables, see all out; the exit status."""
        self._env = env
        try:
            with self._watch_incidents() as self._incidents:
                for number in self._spec.ranks:
                    self._start(number)
                while self._running or self._restarts.waiting:
                    self._step()
                self._sum_up()
                self._flush_output()
        except BrokenPipeError:
            # Nobody reads any more: end as what writes to a closed pipe does.
            return 128 + signal.SIGPIPE
        finally:
            self._kill_all()
        return self._ending.exit_status

    def _watch_incidents(self) -> IncidentWatch:
        """Watch those of this run: of a cluster of its own all, else those of its group."""
        group = "" if self._cluster is not None else self._spec.group
        return IncidentWatch({**self._env, **self._spec.nodes[0]}, group)

    def _start(self, number: int) -> None:
        own = self._spec.environment(number) | self._restarts.environment(number)
        try:
            rank = RankProcess(
                number,
                self._spec.command,
                {**self._env, **own},
                (self._out, self._err),
                folding=self._folding,
                shown=number == 0 or not self._policy.quiet_others,
                # One reader, or the ranks would share the lines out among themselves.
                stdin=None if number == 0 else subprocess.DEVNULL,
            )
        except OSError as error:
            raise ServiceError(f"cannot start rank {number}: {error.strerror}") from error
        self._restarts.started(number, time.monotonic())
        self._running.append(rank)

    def _sum_up(self) -> None:
        """After a failure: say which was the first, and what came of it."""
        cause = self._failures.cause
        if cause is None:
            return
        self._ending.caused_by(cause.status)
        self._failed[cause.rank].show_unshown()
        if cause.is_consequence:
            self._failed[cause.rank].show_folded()  # of all alike, one is shown
        notes = self._incidents.finish(cause.rank)
        advice = [*self._folding.advice, *([] if self._cluster else [_LOOK_AT_AGENTS])]
        for note in self._failures.summary(self._ended_well, advice):
            self._note(note)
        for note in notes:
            self._note(note)

    # --- what happens while ranks run

    def _step(self) -> None:
        streams = [stream for rank in self._running for stream in rank.readable_streams]
        ranks = {rank.child: rank for rank in self._running}
        watched: list[Waitable] = [self._interrupts, self._incidents, *streams, *ranks]
        watched += self._services
        ready = wait_for(watched, self._patience(), writable=self._clogged())
        for item in ready:
            if isinstance(item, RankStream):
                item.forward()
            elif item is self._incidents:
                for note in self._incidents.take():
                    self._note(note)
            elif isinstance(item, Child) and item not in ranks:
                self._service_ended(item)
        self._ranks_ended([rank for child, rank in ranks.items() if child in ready])
        for output in self._clogged():
            output.flush()
        self._obey()

    def _obey(self) -> None:
        """Handle signals and deadlines, and send the signals that are due."""
        now = time.monotonic()
        while (number := self._interrupts.take()) is not None:
            self._ending.told_to_end(number, now)
            name = signal.Signals(number).name
            self._note(f"got {name}: the ranks are told to end (once more kills them)")
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._ending.timed_out(now):
                self._note(f"not over after {self._policy.timeout:g} s; ending the ranks")
        self._end_latecomers(now)
        for due in self._ending.due(now):
            self._has_told_to_end = True
            for rank in self._running:
                rank.child.signal(due)
        if self._ending.begun:
            self._restarts.cancel()
        for number, status in self._restarts.take_due(now):
            self._start_again(number, status)

    def _patience(self) -> float | None:
        known = (self._deadline, self._ending.next_at(), self._restarts.next_at(), self._ask_at)
        times = [at for at in known if at is not None]
        return min(times) - time.monotonic() if times else None

    def _clogged(self) -> list[Output]:
        return [output for output in (self._out, self._err) if output.clogged]

    def _ranks_ended(self, ranks: list[RankProcess]) -> None:
        statuses = {rank: rank.reap() for rank in ranks}
        self._running = [rank for rank in self._running if rank not in statuses]
        # Of several at once, one that was killed is the cause: nobody else's failure does that.
        for rank in sorted(ranks, key=lambda rank: not rank.child.killed_by):
            self._rank_ended(rank, statuses[rank])

    def _rank_ended(self, rank: RankProcess, status: int) -> None:
        if status == 0:
            self._ended_well.add(rank.number)
        spent = ""
        if status and self._may_restart:
            if self._plan_restart(rank, status):
                return
            most = self._policy.max_restarts
            spent = f"; no restart is left of {most}" if most else ""
        ends_the_run = self._ending.rank_ended(status, time.monotonic())
        if status and not self._ending.urgent:
            self._note_failure(rank)
        if ends_the_run or (status and not self._ending.begun):
            rank.show_unshown()
            then = self._consequence(ends_the_run)
            self._note(f"{rank.child.name} {rank.child.ending}{spent}{then}")

    def _note_failure(self, rank: RankProcess) -> None:
        self._failed[rank.number] = rank
        self._failures.all.append(
            rank.failure(
                self._spec.place(rank.number),
                was_told=self._has_told_to_end,
                restarts=self._restarts.count(rank.number),
            )
        )

    @property
    def _may_restart(self) -> bool:
        """False once the run ends, or the others have all ended well: nobody is left to join."""
        is_over = self._ending.someone_ended_well and not self._running
        return not (self._ending.begun or is_over)

    def _plan_restart(self, rank: RankProcess, status: int) -> bool:
        """Plan the restart of a rank that has failed; False if there were too many of them."""
        pause = self._restarts.plan(rank.number, status, time.monotonic())
        if pause is None:
            return False
        rank.show_unshown()
        soon = f"in {pause:g} s" if pause else "now"
        count = f"restart {self._restarts.used} of at most {self._policy.max_restarts}"
        self._note(f"{rank.child.name} {rank.child.ending}; it is started again {soon} ({count})")
        return True

    def _start_again(self, number: int, status: int) -> None:
        """Start a rank whose pause is over, unless the others have all ended well meanwhile."""
        if self._may_restart:
            self._start(number)
            return
        self._note(f"rank {number} is not started again: the others have ended well")
        self._ending.rank_ended(status, time.monotonic())

    def _end_latecomers(self, now: float) -> None:
        """End ranks that were started again and wait for a group that cannot open any more.

        That is so where the others have ended well before they could join, as at the end of a
        training. A rank that is in the group, and goes on alone, is none of these.
        """
        failure = self._failure_of_those_left()
        if failure is None or self._ending.begun:
            self._ask_at = None
            return
        if self._ask_at is not None and now < self._ask_at:
            return
        self._ask_at = now + _LATECOMERS_SECONDS
        running = {rank.number for rank in self._running}
        latecomers = Latecomers(self._spec.group, {**self._env, **self._spec.nodes[0]})
        awaited = latecomers.awaited(running, self._ended_well)
        if awaited:
            self._note(
                f"{name_ranks(sorted(running))}, started again, came too late: the group has ended "
                f"and cannot open anew, as {name_ranks(awaited)} ended well"
            )
            self._ending.in_vain(failure, now)

    def _failure_of_those_left(self) -> int | None:
        """Return the failure status of a restarted rank, if all remaining ranks are restarted ones.

        Also ``None`` as long as no rank has ended with status 0.
        """
        failures = [self._restarts.last_failure(rank.number) for rank in self._running]
        known = [status for status in failures if status is not None]
        return known[0] if self._ended_well and failures and known == failures else None

    def _consequence(self, ends_the_run: bool) -> str:
        if not self._running:
            return ""
        if not ends_the_run:
            return "; the others go on"
        return f"; the others have {self._policy.grace:g} s to end by themselves"

    def _service_ended(self, service: Child) -> None:
        """Report it. The ranks go on: they notice what they need, and may need nothing of it."""
        self._services.remove(service)
        if self._cluster is not None:
            self._note(self._cluster.end_report(service))

    # --- the end

    def _flush_output(self) -> None:
        """Wait for a slow reader of ours; not for long where somebody wants us to end."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self._clogged() and not (self._ending.urgent and time.monotonic() > deadline):
            wait_for([self._interrupts], 0.1, writable=self._clogged())
            for output in self._clogged():
                output.flush()
            self._obey()

    def _kill_all(self) -> None:
        """Kill the ranks that still run: only after an error of the launcher itself."""
        stop_all([rank.child for rank in self._running], grace=0)
        for rank in self._running:
            rank.child.close_streams()

    def _note(self, text: str) -> None:
        self._err.write_note(text)
