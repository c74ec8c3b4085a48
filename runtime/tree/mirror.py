"""The tree as readers know it: rows by id, as columns, and what changed since.

Owns: the rows, the list of namespaces, and the sequence numbers of one audience.  Does not know:
the tree itself, who reads, or how events are sent.
Idea: one mirror for each audience.  That of everybody keeps the tree's ids; a tenant's has rows of
its own only, under numbers of its own, so that no gap between them tells what others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec

from radixcache.namespace import Namespace
from radixcache.watch import NodeRow, State
from runtime.tree.records import TIER


class SeenRow(msgspec.Struct, frozen=True, gc=False):
    """A row as readers get it; `namespace` is a place in the list of namespaces.

    Not seen by the garbage collector, as `NodeRow`.
    """

    id: int
    parent: int
    tokens: int
    blocks: int
    hits: int
    used: float
    pins: int
    state: State
    namespace: int


COLUMNS = SeenRow.__struct_fields__


class Label(msgspec.Struct, frozen=True):
    """What a namespace is called, and whose it is; None for nobody's."""

    label: str
    tenant: str | None


NO_LABEL = Label("", None)
"""Stands where no namespace does, until another takes the place."""


class Numbers:
    """A tenant's own numbers for nodes, never given twice."""

    def __init__(self) -> None:
        self._last = 0
        self._by_id: dict[int, int] = {0: 0}  # the parent of a root is 0 everywhere
        self._ids: dict[int, int] = {}

    def of(self, node_id: int) -> int:
        """Return the number of a node, a new one if it has none."""
        number = self._by_id.get(node_id)
        if number is None:
            self._last += 1
            number = self._by_id[node_id] = self._last
            self._ids[number] = node_id
        return number

    def node_id(self, number: int) -> int | None:
        """Return the node of a number; None for one that stands for none."""
        return self._ids.get(number)

    def forget(self, node_id: int) -> int | None:
        """Forget a node that is gone; return its number, if it had one."""
        number = self._by_id.pop(node_id, None)
        if number is not None:
            del self._ids[number]
        return number

    def clear(self) -> None:
        """Forget all nodes; their numbers are not given again."""
        self._by_id = {0: 0}
        self._ids = {}


class Mirror:
    """The rows of one audience.

    label    what a namespace is called
    numbers  the audience's own; None where it sees all, by the tree's ids
    sees     whether an audience with numbers of its own sees a namespace
    """

    def __init__(
        self,
        *,
        label: Callable[[Namespace], Label],
        numbers: Numbers | None = None,
        sees: Callable[[Namespace], bool] = lambda namespace: True,
    ) -> None:
        self.seq = 0
        self.rows: dict[int, SeenRow] = {}
        self.namespaces: list[Label] = []
        self._label = label
        self._sees = sees
        self._numbers = numbers
        self._places: dict[Namespace, int] = {}
        self._free: list[int] = []
        self._owners: list[Namespace | None] = []
        self._num_rows: Counter[int] = Counter()  # by place
        self._changed: dict[int, SeenRow] = {}
        self._removed: set[int] = set()
        self._fresh: set[int] = set()  # of those changed, what nobody was told of yet

    @property
    def num_nodes(self) -> int:
        """Nodes seen, roots not counted."""
        return len(self.rows) - len(self._places)

    def apply(self, rows: Iterable[tuple[NodeRow, float]], removed: Iterable[int]) -> None:
        """Take over changes; with each row comes when it was used, in seconds since 1970."""
        for row, used in rows:
            self.put(row, used)
        for node_id in removed:
            number = node_id if self._numbers is None else self._numbers.forget(node_id)
            if number is not None:
                self._take_out(number)

    def put(self, row: NodeRow, used: float) -> None:
        """Take over one row of the tree, if it is seen here."""
        number, above, namespace = row.node_id, row.parent, row.namespace
        if self._numbers is not None:
            if not self._sees(namespace):
                return
            number, above = self._numbers.of(number), self._numbers.of(above)
        place = self._places.get(namespace)
        if place is None:
            place = self._take_place(namespace)
        if number not in self.rows:
            self._num_rows[place] += 1
            self._fresh.add(number)
        self.rows[number] = self._changed[number] = SeenRow(
            number,
            above,
            row.num_tokens,
            row.num_blocks,
            row.num_hits,
            used,
            row.lock_ref,
            row.state,
            place,
        )

    def as_told(self, row: SeenRow) -> NodeRow:
        """Return a row as it was taken over, but for its time, by the numbers that it has here."""
        return NodeRow(
            row.id,
            row.parent,
            row.tokens,
            row.blocks,
            row.hits,
            0,
            row.pins,
            row.state,
            self._owner(row),
        )

    def changes(self) -> tuple[list[SeenRow], list[int]] | None:
        """Return what changed since the last time, and count it; None where nothing did."""
        if not self._changed and not self._removed:
            return None
        self.seq += 1
        changed, removed = list(self._changed.values()), sorted(self._removed)
        self._changed, self._removed, self._fresh = {}, set(), set()
        return changed, removed

    def node_id(self, number: int) -> int | None:
        """Return the tree's id of a node seen; None where no such node is."""
        if number not in self.rows:
            return None
        return number if self._numbers is None else self._numbers.node_id(number)

    def number(self, node_id: int) -> int:
        """Return the number of a node that the audience sees."""
        return node_id if self._numbers is None else self._numbers.of(node_id)

    def _take_out(self, number: int) -> None:
        row = self.rows.pop(number, None)
        if row is None:
            return
        self._changed.pop(number, None)
        if number in self._fresh:
            self._fresh.discard(number)
        else:
            self._removed.add(number)
        self._num_rows[row.namespace] -= 1
        if not self._num_rows[row.namespace]:
            del self._places[self._owner(row)], self._num_rows[row.namespace]
            self._owners[row.namespace] = None
            self.namespaces[row.namespace] = NO_LABEL
            self._free.append(row.namespace)

    def _owner(self, row: SeenRow) -> Namespace:
        namespace = self._owners[row.namespace]
        assert namespace is not None
        return namespace

    def _take_place(self, namespace: Namespace) -> int:
        if self._free:
            place = self._free.pop()
        else:
            place = len(self.namespaces)
            self.namespaces.append(NO_LABEL)
            self._owners.append(None)
        self.namespaces[place] = self._label(namespace)
        self._owners[place] = namespace
        self._places[namespace] = place
        return place


def encode_nodes(rows: list[SeenRow], namespaces: list[Label]) -> bytes:
    """Write rows as columns, in JSON; column by column, so that no call takes long."""
    return b"".join(_pieces(rows, namespaces))


def _pieces(rows: list[SeenRow], namespaces: list[Label]) -> Iterator[bytes]:
    for place, name in enumerate(COLUMNS):
        column: list[Any] = list(map(attrgetter(name), rows))
        yield (b',"%b":' if place else b'{"%b":') % name.encode()
        yield msgspec.json.encode(column)
    yield b',"tier":' + msgspec.json.encode([TIER] * len(rows))
    yield b',"namespaces":' + msgspec.json.encode(namespaces) + b"}"
