"""A few rows of a large table in which every two values of different columns still meet.

Owns: the selection.  Does not know: what the columns mean.
Idea: most faults need one or two settings to show.  Rows are added greedily, each with as many
pairs as it can have that no row before it has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Hashable]]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """Every two settings of a row."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def all_rows(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The whole table."""
    return [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]


def covering_rows(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which every pair of values of two columns stands at least once; always the same.

    Cost: rows · pairs · values; hundreds of pairs take milliseconds.
    """
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(columns, 2)
        for x, y in product(columns[a], columns[b])
    }
    rows: list[Row] = []
    while missing:
        (first, x), (second, y) = sorted(min(missing, key=repr_of), key=repr)
        row: Row = {first: x, second: y}
        for name in columns:
            if name not in row:
                row[name] = max(
                    columns[name],
                    key=lambda value, name=name: sum(  # type: ignore[misc]
                        frozenset(((name, value), setting)) in missing for setting in row.items()
                    ),
                )
        missing -= pairs_of(row)
        rows.append({name: row[name] for name in columns})
    return rows


def repr_of(pair: Pair) -> list[str]:
    """A pair as text, to choose by: sets have no order of their own."""
    return sorted(map(repr, pair))
