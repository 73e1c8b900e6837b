"""``allfold run``: the ranks of a job, and an Allfold for them where there is none."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack

import click

from allfold._process.settings import GroupSettings, group_name
from allfold._session.agent_socket import await_agent
from allfold.cli._parameters import Seconds
from allfold.cli._run.launch import Launch, Policy
from allfold.cli._run.launch_spec import LaunchSpec, common_environment, make_group_name, place
from allfold_cluster import Cluster
from allfold_cluster.environment import socket_path
from allfold_cluster.processes import wait_for
from allfold_cluster.signals import Interrupted, Interrupts
from allfold_core.errors import InvalidArgument
from allfold_core.group_options import checked_seconds
from allfold_core.verdict import counted

_PATIENCE_SECONDS = 5.0
"""The time in which an agent must listen, unless ``ALLFOLD_INIT_TIMEOUT`` is set."""

_OR_ELSE = (
    "name another socket with --agent or ALLFOLD_SOCKET, or set neither: 'allfold run' then starts "
    "an agent itself"
)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script as the ranks of a job.",
)
@click.option("--nodes", type=click.IntRange(1), help="Nodes to start on this machine.  [1]")
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, show_default=True)
@click.option("--agent", "agents", multiple=True, metavar="SOCKET", help="Use a running agent.")
@click.option("--nnodes", type=click.IntRange(1), help="Machines that share the job.")
@click.option("--node-rank", type=click.IntRange(0), help="Which of them this is.")
@click.option("--master-addr", metavar="HOST", help="For torch: the machine of rank 0.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    default=29500,
    show_default=True,
    help="For torch: a free port of it.",
)
@click.option("--group", envvar="ALLFOLD_GROUP", help="The ranks' group.  [one for this run]")
@click.option("--timeout", type=Seconds(positive=True), metavar="S", help="End the run after S.")
@click.option("--grace", type=Seconds(), default=5.0, show_default=True, metavar="S")
@click.option("--keep-going", is_flag=True, help="A failed rank does not end the others.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start a failed rank again; N times in all.",
)
@click.option("--quiet-others", is_flag=True, help="Show the output of rank 0 only.")
@click.option("--no-prefix", is_flag=True, help="Do not put [rank] in front of lines.")
@click.option(
    "--all-tracebacks", is_flag=True, help="Fold none, also where another rank is the cause."
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nodes: int | None,
    nproc_per_node: int,
    agents: tuple[str, ...],
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int,
    group: str | None,
    timeout: float | None,
    grace: float,
    keep_going: bool,
    max_restarts: int,
    quiet_others: bool,
    no_prefix: bool,
    all_tracebacks: bool,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT as the ranks of a job, NPROC_PER_NODE on each node.

    Without --agent (or ALLFOLD_SOCKET) an orchestrator and --nodes agents are started for the run;
    with --nodes they are started in any case. With --agent the ranks use that agent; it may be
    given several times, once per node of this machine. Where several machines share a job, each
    runs this command with its own agent and --node-rank, and all with the same --nnodes and
    --group; for torch.distributed also with --master-addr, the machine of rank 0 as the others
    reach it, where MASTER_ADDR and MASTER_PORT are not set. An agent that does not listen within 5
    s, or ALLFOLD_INIT_TIMEOUT, ends the run with status 3.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK as under
    torchrun, and ALLFOLD_SOCKET, ALLFOLD_GROUP and ALLFOLD_TOKEN.

    The status is that of the first rank that fails, 128 + n after signal n, 124 after --timeout.
    After a first failure the others have --grace seconds to end by themselves; then comes SIGTERM
    and, as long again, SIGKILL. With --keep-going it is 0 if any rank ends well.

    At the end, a summary names the rank that failed first, its error, and what became of the
    others. A traceback whose cause is another rank, or that another rank has written already, is
    folded to one line.

    With --max-restarts a rank that fails, or is killed, is started again alone, while the others go
    on: for scripts whose group is elastic (init(min_world=, max_world=)), which it then rejoins. As
    under torchrun, N counts the restarts of all ranks of this launcher together. One that fails
    within 5 s of its start waits before the next: 0.5 s, then twice as long each time, up to 30 s.
    When N restarts are used up, the next failure ends the run as above. ALLFOLD_RESTARTS and
    TORCHELASTIC_RESTART_COUNT tell a rank how often it was started again. One whose group has ended
    meanwhile, as the others have ended well, is ended, and the run with the status of its failure.
    """
    sockets = _sockets(nodes, agents)
    count = len(sockets) or nodes or 1
    first_node = _first_node(count, nnodes, node_rank, group)
    if nnodes is not None and nnodes > 1 and not sockets:
        raise click.UsageError(
            "with --nnodes, give --agent: the machines' agents must be connected"
        )
    group = group_name(group or make_group_name())
    world_size = (nnodes or count) * nproc_per_node
    GroupSettings.resolve(world_size)  # refuses what the ranks' init would refuse
    policy = Policy(
        grace, timeout, quiet_others, not no_prefix, keep_going, max_restarts, all_tracebacks
    )
    with ExitStack() as ending:
        interrupts = ending.enter_context(Interrupts())
        cluster = None
        try:
            _await_agents(sockets, interrupts)
            if not sockets:
                cluster = ending.enter_context(Cluster(interrupts=interrupts))
                cluster.start(count)
        except Interrupted as interrupted:
            sys.exit(interrupted.status)
        spec = LaunchSpec(
            command=_command(module, script, arguments),
            nodes=_node_environments(sockets, cluster),
            per_node=nproc_per_node,
            group=group,
            first_node=first_node,
            total_nodes=nnodes or count,
            master=(master_addr, master_port) if master_addr else None,
        )
        env, notes = common_environment(os.environ, spec)
        for note in notes:
            click.echo(f"allfold: {note}", err=True)
        status = Launch(spec, policy, interrupts, cluster).run(env)
    sys.exit(status)


def _sockets(nodes: int | None, agents: tuple[str, ...]) -> list[str]:
    """The running agents to use; none when a cluster is to be started."""
    inherited = os.environ.get("ALLFOLD_SOCKET")
    if agents and nodes not in (None, len(agents)):
        raise click.UsageError(
            f"--nodes {nodes} does not fit {counted(len(agents), 'agent')} (--agent)"
        )
    if agents:
        return [socket_path(agent) for agent in agents]
    # --nodes is explicit, the variable may be left over.
    return [socket_path(inherited)] if inherited and nodes is None else []


def _first_node(count: int, nnodes: int | None, node_rank: int | None, group: str | None) -> int:
    """Return the number of this machine's first node in the job."""
    try:
        return place(count, nnodes, node_rank, group)
    except InvalidArgument as error:
        raise click.UsageError(error.message) from None


def _command(module: bool, script: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, *(["-m"] if module else []), script, *arguments]


def _node_environments(sockets: list[str], cluster: Cluster | None) -> list[dict[str, str]]:
    if cluster is not None:
        return [cluster.environment(name) for name in cluster.agents]
    return [{"ALLFOLD_SOCKET": path} for path in sockets]


def _await_agents(sockets: Iterable[str], interrupts: Interrupts) -> None:
    """Return when an agent listens on every socket.

    Raises:
        AgentUnreachable: none listens in time on one of them, or it cannot be used.
        InvalidArgument: ``ALLFOLD_INIT_TIMEOUT`` is not a time limit.
        Interrupted: a signal came.
    """
    variable = "ALLFOLD_INIT_TIMEOUT"
    seconds = checked_seconds(variable, os.environ.get(variable) or _PATIENCE_SECONDS)
    began = time.monotonic()

    def warn(text: str) -> None:
        click.echo(f"allfold: {text} ({variable})", err=True)

    def pause(seconds: float) -> None:
        wait_for([interrupts], seconds)
        interrupts.raise_if_pending()

    for path in sockets:
        found = await_agent(path, seconds, began=began, warn=warn, pause=pause, or_else=_OR_ELSE)
        found.close()
