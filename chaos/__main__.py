"""Groups on real processes under faults, op by op compared afterwards.

python -m chaos --seconds 600 --seed 1 --nodes 4 --ranks 2 --faults reset,flip
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, BooleanOptionalAction
from datetime import UTC, datetime
from pathlib import Path

from chaos.contents import MOST_SEATS
from chaos.faults import Kind, parse
from chaos.judge import RAISE, SHRINK
from chaos.report import table
from chaos.run import Plan, run


def main() -> None:
    """Run what the options say; status 1 if a promise was broken."""
    plan = _plan()
    kinds = ",".join(kind.value for kind in plan.kinds)
    print(
        f"# seed {plan.seed}, {plan.nodes} nodes x {plan.ranks} ranks, {plan.seconds:g} s, "
        f"on_loss {plan.on_loss}; faults: {kinds}",
        flush=True,
    )
    tally = run(plan, lambda line: print(line, flush=True))
    print(table(tally))
    if tally.findings:
        sys.exit(f"{len(tally.findings)} promises were broken; seed {plan.seed}")


def _plan() -> Plan:
    parser = ArgumentParser(prog="python -m chaos", description=__doc__)
    names = ", ".join(kind.value for kind in Kind)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of play  [%(default)s]")
    add("--seed", type=int, default=None, help="of ops and faults  [of the date]")
    add("--nodes", type=int, default=4, help="[%(default)s]")
    add("--ranks", type=int, default=2, help="per node  [%(default)s]")
    add("--faults", type=parse, default="endured", help=f"endured, all, none, or of {names}")
    add("--on-loss", choices=(RAISE, SHRINK), default=RAISE, help="[%(default)s]")
    add("--timeout", type=float, default=20.0, help="of each op, in seconds  [%(default)s]")
    add(
        "--churn",
        action=BooleanOptionalAction,
        help="elastic groups alone, which ranks and nodes join and leave, or none of them",
    )
    add("--joins", choices=("any", "commit"), help="into elastic groups  [each in turn]")
    add("--logs", type=Path, metavar="FOLDER", help="keep the logs of all processes there")
    given = parser.parse_args()
    if given.nodes < 2 or not 2 <= given.nodes * given.ranks <= MOST_SEATS:
        parser.error(f"there are 2 nodes at least, and {MOST_SEATS} ranks at most")
    seed = given.seed if given.seed is not None else int(datetime.now(UTC).strftime("%y%m%d"))
    return Plan(
        given.seconds,
        seed,
        given.nodes,
        given.ranks,
        given.faults,
        given.on_loss,
        given.timeout,
        given.churn,
        given.joins,
        given.logs,
    )


if __name__ == "__main__":
    main()
