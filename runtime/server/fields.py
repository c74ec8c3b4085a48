"""Types of fields whose limits the OpenAPI document tells.

Owns: what the document says of them.  Does not know: the checks, which raise errors that name the
field; a limit told here decides nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runtime.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_STOP_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT_S,
)

MAX_SALT_LEN = 1024


class CacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a request wants of the cache itself.

    explain  the answer tells why the prompt missed
    """

    explain: bool = False


def told(**keywords: Any) -> Meta:
    """Return what adds keywords to a field's schema, and checks nothing."""
    return Meta(extra_json_schema=keywords)


def only(*values: Any) -> Meta:
    """Return what tells that a field takes these values alone, such as those that ask for nothing.

    Null is always one of them.
    """
    return Meta(extra_json_schema={"enum": [*values, None]})


Temperature = Annotated[float, told(minimum=0, maximum=100)]
Fraction = Annotated[float, told(minimum=0, maximum=1)]
Mass = Annotated[float, told(exclusiveMinimum=0, maximum=1)]
Penalty = Annotated[float, told(minimum=-2, maximum=2)]
Seconds = Annotated[float, told(minimum=0, maximum=MAX_TIMEOUT_S)]
TopK = Annotated[int, told(minimum=-1, maximum=2**31 - 1)]
Seed = Annotated[int, told(minimum=-MAX_SEED, maximum=MAX_SEED - 1)]
Priority = Annotated[int, told(minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY)]
NumTokens = Annotated[int, told(minimum=0, maximum=2**31 - 1)]
NumBranches = Annotated[int, told(minimum=1, maximum=MAX_N)]
NumTop = Annotated[int, told(minimum=0, maximum=MAX_LOGPROBS)]
TokenId = Annotated[int, told(minimum=0, maximum=2**31 - 1)]
StopText = Annotated[str, told(minLength=1, maxLength=MAX_STOP_LEN)]
StopTexts = Annotated[list[StopText], told(maxItems=MAX_STOP_STRINGS)]
StopIds = Annotated[list[TokenId], told(maxItems=MAX_STOP_TOKEN_IDS)]
Salt = Annotated[str, told(minLength=1, maxLength=MAX_SALT_LEN)]
Bias = Annotated[
    dict[str, Annotated[float, told(minimum=-100, maximum=100)]],
    told(propertyNames={"pattern": "^[0-9]{1,9}$"}, maxProperties=MAX_LOGIT_BIAS),
]
Empty = Annotated[Any, only("", [])]
