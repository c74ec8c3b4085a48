"""What the output must look like, as bodies say it.

Owns: the fields that constrain output, and that no two of them contradict each other.  Does not
know: how a grammar is carried out.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar, GrammarKind

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    """Some JSON object."""


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema with a name, which the output follows.

    strict  whether a keyword that can't be enforced is refused; else it is passed over
    """

    name: str
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    """JSON that follows a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The `guided_` fields by the names that vLLM has for them since 0.12; at most one is given."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The fields of a body that constrain its output; at most one of them may.

    response_format     as OpenAI has it
    guided_json         a JSON schema, as an object or a text
    guided_json_object  whether it is to be some JSON object
    guided_regex        a regular expression that the whole output matches
    guided_choice       the texts that the output may be
    guided_grammar      a grammar in Lark's syntax
    structured_outputs  one of the same
    """

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammar(self) -> Grammar | None:
        """Return what the output must look like; None for any text.

        Raises InvalidRequest where two fields say so, or a value can't be served.
        """
        grammars = [grammar for grammar in self._grammars() if grammar is not None]
        if len(grammars) > 1:
            first, second, *_ = (grammar.param for grammar in grammars)
            raise InvalidRequest(
                f"`{first}` and `{second}` both say what the output must be: send one of them",
                param=second,
            )
        return grammars[0] if grammars else None

    def _grammars(self) -> list[Grammar | None]:
        guided = StructuredOutputs(
            json=self.guided_json,
            json_object=self.guided_json_object,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        structured = self.structured_outputs or StructuredOutputs()
        return [
            self._response_grammar(),
            *_constraints("guided_", guided),
            *_constraints("structured_outputs.", structured),
        ]

    def _response_grammar(self) -> Grammar | None:
        match self.response_format:
            case JsonObjectFormat():
                return Grammar(kind="json_object")
            case JsonSchemaFormat(json_schema=named):
                if not _NAME.fullmatch(named.name):
                    raise InvalidRequest(
                        "the schema's name takes 1 to 64 letters, digits, _ and -",
                        param="response_format.json_schema.name",
                    )
                source = _json(named.schema) or ""
                return Grammar(kind="json_schema", source=source, strict=bool(named.strict))
        return None


def _constraints(prefix: str, given: StructuredOutputs) -> list[Grammar | None]:
    """Return a grammar for each field; None for one that asks for nothing."""
    return [
        _grammar(f"{prefix}json", "json_schema", _json(given.json)),
        _grammar(f"{prefix}json_object", "json_object", "" if given.json_object else None),
        _grammar(f"{prefix}regex", "regex", given.regex),
        _grammar(f"{prefix}choice", "choice", _json(given.choice)),
        _grammar(f"{prefix}grammar", "lark", given.grammar),
    ]


def _grammar(param: str, kind: GrammarKind, source: str | None) -> Grammar | None:
    return None if source is None else Grammar(kind=kind, source=source, param=param)


def _json(value: Any) -> str | None:
    """A text as it is, anything else as JSON; None for None."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
