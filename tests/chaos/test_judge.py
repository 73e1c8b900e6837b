"""The judge of chaos runs: what it must object to, and what not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos import records
from chaos.faults import Kind
from chaos.injector import Done
from chaos.judge import (
    CHANGED,
    CRASH,
    DIFFERENT,
    ERROR,
    HANG,
    MISSING,
    SHRINK,
    STUCK,
    WRONG,
    Finding,
    Life,
    Loss,
    judge,
)
from chaos.leaks import Held, leaks
from chaos.records import BROKEN, CRASHED, FINISHED, HUNG, KILLED, RankLog, Record
from chaos.report import Tally, recovery, table
from chaos.service_logs import exceptions
from tests.support.waiting import wait_until

SEATS = range(4)


def op(number: int, mask: int = 0b1111, **values: Any) -> Record:
    usual = {"digest": f"d{mask}", "participants": mask.bit_count(), "epoch": 0, "mask": mask}
    return _record(number, usual | values)


def failed(number: int, code: str = "PeerLost", **values: Any) -> Record:
    usual = {"text": "rank 3 was lost", "epoch": 1, "before": "a", "after": "a", "code": code}
    return _record(number, usual | values)


def _record(number: int, values: dict[str, Any]) -> Record:
    usual: dict[str, Any] = {
        "group": "world",
        "kind": "all_reduce",
        "called": number,
        "ended": number + 0.5,
    }
    return Record(number, **usual | values)


def logs_of(records: Sequence[Record], endings: dict[int, str] | None = None) -> list[RankLog]:
    """Every seat has these records, with a rank of its own."""
    found = endings or {}
    return [
        RankLog(
            seat,
            f"node{seat}",
            found.get(seat, FINISHED),
            [replace(record, rank=seat, world=4) for record in records],
        )
        for seat in SEATS
    ]


def kinds(life: Life) -> list[str]:
    return [finding.kind for finding in judge(life)]


def with_record(logs: list[RankLog], seat: int, position: int, record: Record) -> list[RankLog]:
    changed = [*logs[seat].records]
    changed[position] = replace(record, rank=seat, world=record.world or 4)
    return [replace(log, records=changed) if log.seat == seat else log for log in logs]


def test_a_life_without_a_fault_has_no_findings() -> None:
    assert kinds(Life("life", logs_of([op(0), op(1)]))) == []


def test_results_that_are_wrong_alike_are_found() -> None:
    assert kinds(Life("life", logs_of([op(0, exact=False)]))) == [WRONG] * 4


def test_a_result_without_the_ranks_own_input_is_found() -> None:
    assert kinds(Life("life", logs_of([op(0, 0b0111)]))) == [WRONG]


def test_a_wrong_number_of_participants_is_found() -> None:
    assert kinds(Life("life", logs_of([op(0, participants=3)]))) == [WRONG] * 4


def test_nothing_is_said_of_participants_that_the_library_does_not_tell() -> None:
    assert kinds(Life("life", logs_of([op(0, participants=None, epoch=None)]))) == []


@pytest.mark.parametrize(
    "other",
    [op(1, digest="x"), op(1, epoch=1), op(1, participants=None), op(1, world=3), failed(1)],
)
def test_one_survivor_with_another_outcome_is_found(other: Record) -> None:
    loss = Loss(0.1, frozenset([0]))
    logs = with_record(logs_of([op(0), op(1)], {0: KILLED}), 2, 1, other)
    assert DIFFERENT in kinds(Life("life", logs, [loss]))


def test_errors_with_different_texts_are_different_outcomes() -> None:
    logs = with_record(logs_of([failed(0)], {3: KILLED}), 1, 0, failed(0, text="node3 was lost"))
    assert kinds(Life("life", logs, [Loss(0.1, frozenset([3]))])) == [DIFFERENT]


def test_nothing_is_promised_to_the_dead() -> None:
    logs = with_record(logs_of([op(0, 0b0111)], {3: KILLED}), 3, 0, op(0, exact=False))
    assert kinds(Life("life", logs, [Loss(0.1, frozenset([3]))])) == []


def test_blocks_differ_between_ranks_but_not_who_is_in_them() -> None:
    scattered = replace(op(0), kind="reduce_scatter")
    logs = logs_of([scattered])
    assert kinds(Life("life", with_record(logs, 1, 0, replace(scattered, digest="x")))) == []
    fewer = replace(scattered, mask=0b0111, participants=3)
    assert kinds(Life("life", with_record(logs, 1, 0, fewer))) == [DIFFERENT]


def test_an_input_that_has_changed_is_found() -> None:
    loss = Loss(0.1, frozenset([3]))
    logs = logs_of([failed(0)], {3: KILLED})
    changed = with_record(logs, 0, 0, failed(0, after="b"))
    assert kinds(Life("life", changed, [loss])) == [CHANGED]


def test_an_op_that_took_too_long_is_a_hang_and_so_is_one_that_met_its_deadline() -> None:
    assert kinds(Life("life", logs_of([op(0)]), hang_seconds=0.2)) == [HANG] * 4
    missing = logs_of([failed(0, "PeerMissing")])
    assert kinds(Life("life", missing)) == [HANG] * 4


@pytest.mark.parametrize(("ending", "kind"), [(BROKEN, STUCK), (CRASHED, CRASH), (HUNG, HANG)])
def test_a_rank_that_did_not_finish_lacks_no_ops_besides(ending: str, kind: str) -> None:
    logs = logs_of([op(0), op(1)], {1: ending})
    logs[1].records.pop()
    assert kinds(Life("life", logs)) == [kind]


def test_an_op_that_a_survivor_did_not_call_is_found() -> None:
    logs = logs_of([op(0), op(1)])
    logs[1].records.pop()
    assert kinds(Life("life", logs)) == [MISSING]


def test_ops_of_a_half_are_missed_by_none_of_the_other_half() -> None:
    even = replace(op(0, 0b0101), group="even")
    logs = logs_of([even, op(1)])
    for seat in (1, 3):
        del logs[seat].records[0]
    assert kinds(Life("life", logs)) == []


def test_survivors_with_the_same_rank_or_in_another_order_are_found() -> None:
    for rank in (0, 3, 5):
        logs = logs_of([op(0)])
        logs[1].records[0] = replace(op(0), rank=rank, world=4)
        assert kinds(Life("life", logs)) == [DIFFERENT], rank


def test_an_error_without_a_loss_before_it_is_found() -> None:
    later = Loss(2.0, frozenset([3]))
    assert kinds(Life("life", logs_of([failed(0)], {3: KILLED}), [later])) == [ERROR] * 3


def test_an_error_that_no_loss_can_explain_is_found() -> None:
    logs = logs_of([failed(0, "MismatchError")], {3: KILLED})
    assert kinds(Life("life", logs, [Loss(0.1, frozenset([3]))])) == [ERROR] * 3


def test_a_loss_may_fail_an_op_but_not_one_that_can_be_done_again_with_fewer() -> None:
    loss = [Loss(0.1, frozenset([3]))]
    logs = logs_of([failed(0)], {3: KILLED})
    assert kinds(Life("life", logs, loss)) == []
    assert kinds(Life("life", logs, loss, SHRINK)) == [ERROR] * 3
    gathered = logs_of([replace(failed(0, "WorldChanged"), kind="all_gather")], {3: KILLED})
    assert kinds(Life("life", gathered, loss, SHRINK)) == []


def test_an_epoch_that_falls_is_found() -> None:
    assert kinds(Life("life", logs_of([op(0, epoch=2), op(1, epoch=1)]))) == [DIFFERENT] * 4


def test_of_ops_that_were_in_flight_together_a_later_one_may_have_an_older_epoch() -> None:
    again, done = op(0, epoch=1, ended=3.0), op(1, epoch=0, ended=3.0)
    assert kinds(Life("life", logs_of([again, done]))) == []
    after = op(4, epoch=0)
    assert kinds(Life("life", logs_of([again, done, after]))) == [DIFFERENT] * 4


def test_recovery_counts_until_the_slowest_survivor_has_a_result_without_the_dead() -> None:
    fault = Done(Kind.KILL_RANK, "seat 3", at=1.1, over=1.1, seats=frozenset([3]))
    records = [op(0), op(1), op(2, 0b0111), op(3, 0b0111)]
    logs = with_record(logs_of(records)[:3], 1, 2, op(2, 0b0111, ended=2.9))
    assert recovery(fault, logs) == pytest.approx(1.8)


def test_there_is_no_recovery_unless_all_survivors_have_finished_an_op() -> None:
    fault = Done(Kind.KILL_RANK, "seat 3", at=1.1, over=1.1, seats=frozenset([3]))
    logs = with_record(logs_of([op(0), op(2, 0b0111)])[:3], 1, 1, failed(2))
    assert recovery(fault, logs) is None


def test_of_a_fault_that_takes_nobody_the_next_op_after_it_counts() -> None:
    fault = Done(Kind.CUT, "node0", at=0.2, over=1.5)
    assert recovery(fault, logs_of([op(0), op(1), op(2)])) == pytest.approx(1.0)


def test_the_table_counts_faults_recoveries_and_findings() -> None:
    tally = Tally()
    fault = Done(Kind.CUT, "node0", at=0.2, over=1.5)
    life = Life("life", logs_of([op(0), op(1), op(2, exact=False)]))
    tally.add(life, [fault, fault], judge(life))
    text = table(tally)
    assert text.splitlines()[4].split()[:4] == ["cut", "2", "2", "1000.0"]
    assert "4 wrong value, 0 different outcomes" in text


def test_an_agent_that_holds_more_than_it_may_leaks() -> None:
    before = Held(1, 1, files=Counter(socket=20), threads=10, resident=100 << 20)
    assert leaks("node0", before, replace(before, files=Counter(socket=24))) == []
    files = Counter(socket=60)
    many = replace(before, processes=2, files=files, threads=60, resident=300 << 20)
    told = ["files 20 -> 60: {'socket': 40} more", "processes 1 -> 2", "threads 10 -> 60"]
    found = [finding.text.removeprefix("node0: ") for finding in leaks("node0", before, many)]
    assert found == [*told, f"resident {100 << 20} -> {300 << 20}"]
    assert leaks("node0", before, replace(many, pid=2)) == []


def test_the_work_buffers_that_an_agent_may_keep_are_no_leak() -> None:
    before = Held(1, 1, files=Counter(socket=20), threads=10, resident=100 << 20)
    idle = Counter({"socket": 20, "/memfd:allfold-work": 64})
    assert leaks("node0", before, replace(before, files=idle)) == []
    too_many = idle + Counter({"/memfd:allfold-work": 9})
    [found] = leaks("node0", before, replace(before, files=too_many))
    assert found.text == "node0: files 20 -> 29: {'/memfd:allfold-work': 9} more"


def test_an_exception_in_the_log_of_a_service_is_a_crash(tmp_path: Path) -> None:
    lines = ["1 INFO a: begun", "2 ERROR a: failed", "Traceback (most recent call last):"]
    (tmp_path / "node0.log").write_text("\n".join([*lines, "  File x", "KeyError: 1", "3 INFO b"]))
    (tmp_path / "node1.log").write_text("1 ERROR a: expected\n")
    assert exceptions(tmp_path) == [Finding(CRASH, "node0: 2 ERROR a: failed ... KeyError: 1")]


def test_what_a_process_holds_is_counted() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    command = [sys.executable, "-c", program]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    with child:
        wait_until(lambda: Held.of(child.pid).processes == 2, "it has started another one")
        held = Held.of(child.pid)
        assert (held.pid, held.threads) == (child.pid, 1)
        assert held.files["pipe"] >= 1
        assert held.resident > 1 << 20
        child.communicate(b"\n")


def test_logs_are_read_as_they_were_written_even_if_the_last_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = records.Writer(path)
    for each in (op(0), failed(1)):
        writer.write(each)
    writer.close()
    with path.open("a") as file:
        file.write('{"number": 2, "gro')
    log = records.read(path, 0, "node0", KILLED)
    assert (log.records, log.ending) == ([op(0), failed(1)], KILLED)


def test_the_ending_that_a_rank_has_written_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = records.Writer(path)
    writer.write(op(0))
    writer.end(FINISHED)
    assert records.read(path, 0, "node0", CRASHED) == RankLog(0, "node0", FINISHED, [op(0)])


def test_the_newest_whole_record_tells_the_size_of_the_group(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = records.Writer(path)
    assert records.last_world(path) == 0
    writer.write(replace(op(0), world=8))
    writer.write(replace(op(1), world=6))
    writer.write(replace(op(2, group="even"), world=3))
    assert records.last_world(path) == 6
    writer.close()
    with path.open("a") as file:
        file.write('{"group": "world", "wor')
    assert records.last_world(path) == 6
