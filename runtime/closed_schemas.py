"""JSON schemas whose objects have no properties but those that they name.

Owns: which objects may be closed without asking for what nothing can meet.  Does not know: tokens,
how a schema is enforced.
Idea: a schema that names properties and is silent about others allows any, and a small model goes
on inventing them until its limit.  Whatever meets the closed schema meets the open one, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSING = frozenset(
    (
        *("allOf", "oneOf", "not", "if", "then", "else", "unevaluatedProperties"),
        *("dependentSchemas", "dependentRequired", "dependencies", "extends"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords by which several schemas speak of one object, so that closing one shuts out another."""

_SAYS_MORE = frozenset(
    ("additionalProperties", "patternProperties", "minProperties", "propertyNames", "anyOf", "$ref")
)
"""Keywords with which an object is left as it is."""

_MAPS_OF_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_SCHEMAS = frozenset(
    ("items", "prefixItems", "additionalItems", "contains", "additionalProperties", "anyOf")
)


def closed(schema: Any) -> Any:
    """Return a schema whose objects allow no properties beside those that they name.

    Left open: an object that names none, says anything of others, or requires one that it does not
    name; and all of them where schemas are put together, as `allOf` does.  O(size); the schema
    itself stays as it is.

    >>> closed({"properties": {"a": {"type": "string"}}})["additionalProperties"]
    False
    """
    return schema if any(map(_composes, _mappings(schema))) else _closed(schema)


def _composes(part: Mapping[str, Any]) -> bool:
    if not _COMPOSING.isdisjoint(part):
        return True
    # What stands beside a choice or a reference holds together with it.
    is_beside = "anyOf" in part or "$ref" in part
    return is_beside and ("properties" in part or "required" in part)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    inner = dict(schema)
    for keyword in _MAPS_OF_SCHEMAS & schema.keys():
        if isinstance(schema[keyword], dict):
            inner[keyword] = {name: _closed(item) for name, item in schema[keyword].items()}
    for keyword in _SCHEMAS & schema.keys():
        item = schema[keyword]
        inner[keyword] = list(map(_closed, item)) if isinstance(item, list) else _closed(item)
    if _SAYS_MORE.isdisjoint(schema) and _names_all(schema):
        inner["additionalProperties"] = False
    return inner


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Return True where a schema names properties, and all that it requires."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return bool(properties) and all(isinstance(n, str) and n in properties for n in required)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object within a JSON value, be it a schema or not, but for maps of schemas.

    Their keys are names that somebody chose, `dependencies` among them.
    """
    if isinstance(value, dict):
        yield value
        maps = [value[name] for name in _MAPS_OF_SCHEMAS & value.keys()]
        value = [value[name] for name in value.keys() - _MAPS_OF_SCHEMAS]
        for item in maps:
            value += item.values() if isinstance(item, dict) else [item]
    if isinstance(value, list):
        for item in value:
            yield from _mappings(item)
