"""The fewest nodes to leave out so that no two of the others have a dead link between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

# More nodes than this in one tangle of dead links are left out greedily: no search may hold up the
# failure detector, and links that die between so many pairs at once have few causes that differ.
MAX_SEARCHED = 24

Link = frozenset[str]
_Cost = tuple[int, int, int, tuple[str, ...]]
_CostOf = Callable[[Iterable[str]], _Cost]


def smallest_eviction_set(
    links: Collection[Link], ranks: Mapping[str, int], leaders: Collection[str] = ()
) -> frozenset[str]:
    """Return a smallest set of nodes that has an end of every link.

    Of several it is the one with the fewest ranks, then the one with the fewest leaders, then the
    first by name, so that all replicas find the same.
    """
    cost = _cost_by(ranks, leaders)
    cover: frozenset[str] = frozenset()
    for tangle in _tangles(links):
        chosen = _greedy(tangle, cost)
        if len(frozenset().union(*tangle)) <= MAX_SEARCHED:
            chosen = _search(tangle, frozenset(), chosen, cost)
        cover |= chosen
    return cover


def eviction_set_of_some(
    dead: Collection[Link],
    undecided: Collection[Link],
    ranks: Mapping[str, int],
    leaders: Collection[str] = (),
) -> frozenset[str] | None:
    """Return the nodes to leave out for some dead links, while it is open which others are dead.

    All of these nodes are ends of dead links. They also cover every undecided link that has an end
    in common with a dead one, and cost no more than the cheapest cover of the dead links alone. So
    whichever undecided links turn out to be dead, no other choice would have been cheaper: the
    links that are not covered touch none of the dead ones. If there is no such set, return
    ``None``: wait.
    """
    cheapest = smallest_eviction_set(dead, ranks, leaders)
    ends = frozenset().union(*dead)
    touching = [link & ends for link in undecided if link & ends]
    if not touching:
        return cheapest
    forced = frozenset().union(*(link for link in touching if len(link) == 1))
    inside = (link for link in (*dead, *touching) if not link & forced)
    chosen = forced | smallest_eviction_set([*inside], ranks, leaders)
    cost = _cost_by(ranks, leaders)
    *price, _ = cost(chosen)
    *least, _ = cost(cheapest)
    return chosen if price == least else None


def _cost_by(ranks: Mapping[str, int], leaders: Collection[str]) -> _CostOf:
    def cost(nodes: Iterable[str]) -> _Cost:
        names = tuple(sorted(nodes))
        return (
            len(names),
            sum(ranks.get(name, 0) for name in names),
            sum(name in leaders for name in names),
            names,
        )

    return cost


def _tangles(links: Collection[Link]) -> list[frozenset[Link]]:
    """Return the links in sets that have no node in common."""
    tangles: list[frozenset[Link]] = []
    for link in links:
        touching = [each for each in tangles if any(link & other for other in each)]
        tangles = [each for each in tangles if each not in touching]
        tangles.append(frozenset({link}).union(*touching))
    return tangles


def _greedy(links: frozenset[Link], cost: _CostOf) -> frozenset[str]:
    chosen: frozenset[str] = frozenset()
    while links:
        node = min(
            frozenset().union(*links), key=lambda name: (-_degree(links, name), cost([name]))
        )
        chosen |= {node}
        links = frozenset(link for link in links if node not in link)
    return chosen


def _search(
    links: frozenset[Link], chosen: frozenset[str], best: frozenset[str], cost: _CostOf
) -> frozenset[str]:
    """Return the cheapest cover that has ``chosen`` in it, or ``best`` where none is cheaper."""
    if not links:
        return min(best, chosen, key=cost)
    if len(chosen) >= len(best):
        return best
    node = min(frozenset().union(*links), key=lambda name: (-_degree(links, name), name))
    neighbours = frozenset().union(*(link for link in links if node in link)) - {node}
    for taken in (frozenset({node}), neighbours):
        left = frozenset(link for link in links if not link & taken)
        best = _search(left, chosen | taken, best, cost)
    return best


def _degree(links: frozenset[Link], node: str) -> int:
    return sum(node in link for link in links)
