"""An immutable mapping from ranks, of which a changed copy costs little.

A group of n ranks changes n times while it forms. With a plain dictionary each change would copy
up to n entries; this one copies about 2√n of them and shares the rest with its predecessor, so
that what two of them have in common is also found without looking at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")

_BLOCK_BITS = 8  # 256 ranks a block: √n for the largest world size


class RankMap(Mapping[int, V]):
    """Entries by rank, in blocks of neighbours; iterates in no particular order."""

    __slots__ = ("_blocks", "_size")

    def __init__(self, entries: Mapping[int, V] | None = None) -> None:
        self._blocks: dict[int, dict[int, V]] = {}
        for rank, entry in (entries or {}).items():
            self._blocks.setdefault(rank >> _BLOCK_BITS, {})[rank] = entry
        self._size = len(entries or ())

    def __getitem__(self, rank: int) -> V:
        return self._blocks.get(rank >> _BLOCK_BITS, {})[rank]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank in self._blocks.get(rank >> _BLOCK_BITS, ())

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks.values():
            yield from block

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"RankMap({dict(self)!r})"

    def updated(self, entries: Mapping[int, V]) -> RankMap[V]:
        """A copy with these entries put in."""
        return self._edited(entries, ()) if entries else self

    def without(self, ranks: Iterable[int]) -> RankMap[V]:
        """A copy without these ranks; they need not be there."""
        gone = {rank for rank in ranks if rank in self}
        return self._edited({}, gone) if gone else self

    def changed_since(self, earlier: RankMap[V]) -> Iterator[int]:
        """The ranks with another entry than in ``earlier``, new ones and removed ones too.

        Entries are compared by identity, and blocks that both share are passed over.
        """
        for number in self._blocks.keys() | earlier._blocks.keys():
            now, before = self._blocks.get(number, {}), earlier._blocks.get(number, {})
            if now is not before:
                for rank in now.keys() | before.keys():
                    if now.get(rank) is not before.get(rank):
                        yield rank

    def _edited(self, entries: Mapping[int, V], gone: Iterable[int]) -> RankMap[V]:
        result: RankMap[V] = RankMap()
        result._blocks = dict(self._blocks)
        own: dict[int, dict[int, V]] = {}
        for rank, entry in entries.items():
            result._own_block(rank, own)[rank] = entry
        for rank in gone:
            del result._own_block(rank, own)[rank]
        for number, block in own.items():
            result._size += len(block) - len(self._blocks.get(number, ()))
            if not block:
                del result._blocks[number]
        result._size += self._size
        return result

    def _own_block(self, rank: int, own: dict[int, dict[int, V]]) -> dict[int, V]:
        """The block of ``rank``, copied before its first change."""
        number = rank >> _BLOCK_BITS
        if number not in own:
            own[number] = self._blocks[number] = dict(self._blocks.get(number, {}))
        return own[number]
