"""Pictures of strategies for docs/concepts.md, drawn from the schedules that they compile to.

Each picture is a row of panels: the nodes before the op, and after each step of it. A step has the
messages that wait for none of each other. A square is a slice of the tensor on a node; its fill is
the part of the nodes whose tensors are folded into it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import cos, hypot, pi, sin

from allfold_core.operations import Kind
from allfold_core.schedules.compiler import compile_schedule
from allfold_core.schedules.schedule import Fold, Receive, Schedule, Send, Slice
from tools.pages import DOCS

Point = tuple[float, float]

_WIDTH = 200.0  # of a panel
_PER_ROW = 4
_MARGIN = 12.0
_CELL = 9.0
_HALF = 18.0  # the height of a node
_COLOURS = 4
_TINY = 1e-9
_STYLE = """\
.card { fill: #ffffff; stroke: #d0d7de }
.node { fill: #f3f5f8; stroke: #57606a }
.empty { fill: #e4e8ee }
text { fill: #24292f; font: 12px system-ui, sans-serif }
.muted { fill: #57606a; font-size: 11px }
.c0 { color: #1f5fd0 } .c1 { color: #c2410c } .c2 { color: #15803d } .c3 { color: #9333b8 }
@media (prefers-color-scheme: dark) {
  .card { fill: #1e2129; stroke: #434a57 }
  .node { fill: #2b303b; stroke: #a5adba }
  .empty { fill: #3a4150 }
  text { fill: #e6e9ee }
  .muted { fill: #b3bac6 }
  .c0 { color: #7aa7ff } .c1 { color: #ff9d5c } .c2 { color: #5fd38f } .c3 { color: #d79bf0 }
}
"""


@dataclass(frozen=True, slots=True)
class Message:
    """A slice on its way, in a step; ``folded`` where its receiver adds it to what it has."""

    step: int
    source: int
    to: int
    slice: Slice
    folded: bool


@dataclass(slots=True)
class _Node:
    """The elements of one node: whose tensors are in each, and since which step."""

    contributions: list[frozenset[int]]
    since: list[int]
    position: int = 0


@dataclass(slots=True)
class Run:
    """A schedule, run on symbols: its messages, and the contributions after each step."""

    schedule: Schedule
    messages: list[Message] = field(default_factory=list)
    history: list[list[list[frozenset[int]]]] = field(default_factory=list)
    """By step, node and element; the first are those before the op."""

    @property
    def steps(self) -> int:
        return len(self.history) - 1


@dataclass(slots=True)
class _Sent:
    step: int
    slice: Slice
    contents: list[frozenset[int]]


def run(schedule: Schedule) -> Run:
    """Run the programs of all nodes, each in order, and note in which step what happens."""
    elements = range(schedule.numel)
    nodes = [
        _Node([frozenset({node})] * schedule.numel, [0] * schedule.numel)
        for node in range(schedule.nodes)
    ]
    wires: dict[tuple[int, int], deque[_Sent]] = {}
    changes: list[tuple[int, int, int, frozenset[int]]] = []
    messages: list[Message] = []

    def take(source: int, to: int, *, folded: bool) -> _Sent:
        sent = wires[source, to].popleft()
        messages.append(Message(sent.step, source, to, sent.slice, folded))
        return sent

    def advance(number: int) -> bool:
        """Do the next step of a node's program; False if it waits, or is done."""
        node, program = nodes[number], schedule.programs[number]
        if node.position == len(program):
            return False
        step = program[node.position]
        match step:
            case Send(part, to):
                span = range(part.start, part.stop)
                sent = _Sent(
                    1 + max(node.since[at] for at in span),
                    part,
                    [node.contributions[at] for at in span],
                )
                wires.setdefault((number, to), deque()).append(sent)
            case Receive(part, source):
                if not wires.get((source, number)):
                    return False
                _store(node, part, [take(source, number, folded=False)])
            case Fold(part, operands):
                others = [each for each in operands if each != number]
                if not all(wires.get((each, number)) for each in others):
                    return False
                came = [take(each, number, folded=True) for each in others]
                own = [node.contributions[at] for at in range(part.start, part.stop)]
                _store(node, part, [*came, _Sent(0, part, own)])
        if isinstance(step, Receive | Fold):
            span = range(step.slice.start, step.slice.stop)
            changes.extend((node.since[at], number, at, node.contributions[at]) for at in span)
        node.position += 1
        return True

    while True:
        moved = [advance(number) for number in range(schedule.nodes)]
        if not any(moved):
            break
    now = [[frozenset({number})] * schedule.numel for number in range(schedule.nodes)]
    history = [[list(each) for each in now]]
    for step in range(1, max((each.step for each in messages), default=0) + 1):
        for _, number, at, contributions in (each for each in changes if each[0] == step):
            now[number][at] = contributions
        history.append([list(each) for each in now])
    assert all(
        len(now[number][at]) == schedule.nodes
        for number in range(schedule.nodes)
        for at in elements
    )
    return Run(schedule, sorted(messages, key=lambda each: each.step), history)


def _store(node: _Node, part: Slice, operands: Sequence[_Sent]) -> None:
    for index, at in enumerate(range(part.start, part.stop)):
        node.contributions[at] = frozenset().union(*(each.contents[index] for each in operands))
        node.since[at] = max([*(each.step for each in operands), 0])


# --- Layouts: where the nodes stand in a panel, from its middle


def circle(found: Run) -> list[Point]:
    count = found.schedule.nodes
    angles = [2 * pi * (index + 0.5) / count - pi / 2 for index in range(count)]
    return [(70 * cos(each), 70 * sin(each)) for each in angles]


def line(found: Run) -> list[Point]:
    count = found.schedule.nodes
    gap = min(44.0, (_WIDTH - 56) / (count - 1))
    return [((index - (count - 1) / 2) * gap, 0.0) for index in range(count)]


def layers(found: Run) -> list[Point]:
    """The levels of a tree: each node below the one that folds what it sends."""
    parents = {each.source: each.to for each in found.messages if each.folded}
    (root,) = set(range(found.schedule.nodes)) - parents.keys()
    order, depths = _walk(root, parents)
    deepest = max(depths.values())
    leaves = [node for node in order if node not in parents.values()]
    across = {node: index - (len(leaves) - 1) / 2 for index, node in enumerate(leaves)}
    for node in reversed(order):
        if node not in across:
            below = [across[child] for child, parent in parents.items() if parent == node]
            across[node] = sum(below) / len(below)
    return [
        (42 * across[node], 66 * (depths[node] - deepest / 2))
        for node in range(found.schedule.nodes)
    ]


def _walk(root: int, parents: dict[int, int]) -> tuple[list[int], dict[int, int]]:
    """The nodes of a tree, parents first, and the depth of each."""
    order, depths, waiting = [], {root: 0}, [root]
    while waiting:
        node = waiting.pop()
        order.append(node)
        children = sorted((each for each in parents if parents[each] == node), reverse=True)
        depths |= dict.fromkeys(children, depths[node] + 1)
        waiting += children
    return order, depths


# --- Drawing


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of one all-reduce: its strategy, its nodes, and the slices of its tensor.

    Attributes:
        height: of a panel.
    """

    strategy: str
    nodes: int
    slices: int
    layout: Callable[[Run], list[Point]]
    height: float

    def run(self) -> Run:
        """Return the run of its schedule."""
        count, numel = self.nodes, self.slices
        return run(compile_schedule(Kind.ALL_REDUCE, self.strategy, nodes=count, numel=numel))

    def svg(self) -> str:
        """Return the file."""
        found = self.run()
        places = self.layout(found)
        rows = -(-(found.steps + 1) // _PER_ROW)
        columns = -(-(found.steps + 1) // rows)
        width = 2 * _MARGIN + columns * _WIDTH
        height = 2 * _MARGIN + rows * self.height
        panels = "".join(
            f'<g transform="translate({_MARGIN + step % columns * _WIDTH:g} '
            f'{_MARGIN + step // columns * self.height:g})">\n'
            f"{self._panel(found, places, step)}</g>\n"
            for step in range(found.steps + 1)
        )
        what = f"All-reduce with {self.strategy} on {self.nodes} nodes, in {found.steps} steps"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" role="img">\n<title>{what}</title>\n<style>\n{_STYLE}</style>\n'
            f"<defs>{''.join(map(_head, range(_COLOURS)))}</defs>\n"
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" '
            f'rx="6"/>\n{panels}</svg>\n'
        )

    def _panel(self, found: Run, places: list[Point], step: int) -> str:
        label = f"step {step}" if step else "before"
        arrows = [
            arrow
            for message in found.messages
            if message.step == step
            for arrow in self._arrows(message, places)
        ]
        nodes = [
            _node(number, place, found.history[step][number], self.nodes)
            for number, place in enumerate(places)
        ]
        middle = f"translate({_WIDTH / 2:g} {self.height / 2 + 6:g})"
        drawn = "".join([*arrows, *nodes])
        return (
            f'<text class="muted" x="4" y="12">{label}</text>\n'
            f'<g transform="{middle}">\n{drawn}</g>\n'
        )

    def _arrows(self, message: Message, places: list[Point]) -> Iterator[str]:
        begin, end = places[message.source], places[message.to]
        for index, cell in enumerate(range(message.slice.start, message.slice.stop)):
            if self.layout is line:
                yield _arc(begin, end, cell)
            else:
                yield _straight(begin, end, cell, _half_width(self.slices), 3.0 + 4.0 * index)


def _straight(begin: Point, end: Point, cell: int, half_width: float, aside: float) -> str:
    """An arrow to the right of the line between two nodes: the other way has another place."""
    across, down = end[0] - begin[0], end[1] - begin[1]
    length = hypot(across, down)
    ux, uy = across / length, down / length
    inside = min(
        half_width / abs(ux) if abs(ux) > _TINY else length,
        _HALF / abs(uy) if abs(uy) > _TINY else length,
    )
    x1, y1 = begin[0] + ux * (inside + 2) - uy * aside, begin[1] + uy * (inside + 2) + ux * aside
    x2, y2 = end[0] - ux * (inside + 4) - uy * aside, end[1] - uy * (inside + 4) + ux * aside
    return _stroke(f"M{x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}", cell)


def _arc(begin: Point, end: Point, cell: int) -> str:
    """An arrow above nodes in a line, of the second slice below them."""
    side = 1 if cell else -1
    inward = 4 if end[0] > begin[0] else -4
    bend = side * (_HALF + 10 + 0.42 * abs(end[0] - begin[0]))
    return _stroke(
        f"M{begin[0] + inward:.1f} {side * (_HALF + 2):.1f}"
        f"Q{(begin[0] + end[0]) / 2:.1f} {bend:.1f} {end[0] - inward:.1f} {side * (_HALF + 4):.1f}",
        cell,
    )


def _head(colour: int) -> str:
    return (
        f'<marker id="head{colour}" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="4.5" '
        f'markerHeight="4.5" orient="auto"><path class="c{colour}" d="M0 0 8 4 0 8z" '
        'fill="currentColor"/></marker>'
    )


def _stroke(path: str, cell: int) -> str:
    colour = cell % _COLOURS
    return (
        f'<path class="c{colour}" d="{path}" fill="none" stroke="currentColor" '
        f'stroke-width="1.8" marker-end="url(#head{colour})"/>\n'
    )


def _half_width(cells: int) -> float:
    return max(13.0, (cells * _CELL + 7) / 2)


def _node(number: int, place: Point, cells: Sequence[frozenset[int]], nodes: int) -> str:
    x, y = place
    half, left = _half_width(len(cells)), x - _CELL * len(cells) / 2
    parts = [
        f'<rect class="node" x="{x - half:.1f}" y="{y - _HALF:.1f}" width="{2 * half:g}" '
        f'height="{2 * _HALF:g}" rx="5"/>\n'
        f'<text x="{x:.1f}" y="{y - 3:.1f}" text-anchor="middle">{number}</text>\n'
    ]
    for index, contributions in enumerate(cells):
        full = _CELL * len(contributions) / nodes
        at, top = left + index * _CELL + 0.5, y + 4
        parts.append(
            f'<rect class="empty" x="{at:.1f}" y="{top:.1f}" width="{_CELL - 1:g}" '
            f'height="{_CELL:g}"/><rect class="c{index % _COLOURS}" fill="currentColor" '
            f'x="{at:.1f}" y="{top + _CELL - full:.1f}" width="{_CELL - 1:g}" '
            f'height="{full:.1f}"/>\n'
        )
    return "".join(parts)


PICTURES = (
    Picture("direct", 4, 1, circle, 180),
    Picture("direct2", 4, 4, circle, 180),
    Picture("halving_doubling", 4, 4, circle, 180),
    Picture("ring", 4, 4, circle, 180),
    Picture("double_tree", 6, 2, line, 150),
    Picture("tree", 7, 1, layers, 200),
    Picture("centralized", 5, 1, layers, 140),
    Picture("chain", 4, 1, line, 110),
)
FILES = {DOCS / "images" / "schedules" / f"{each.strategy}.svg": each.svg for each in PICTURES}
