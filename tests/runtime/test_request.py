"""What a request may ask for, and how a wrong value is refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from runtime.errors import InvalidRequest
from runtime.request import MAX_SEED, MAX_STOP_STRINGS, SamplingParams

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
HUGE = 10**5000  # neither a float nor printable in decimals
WRONG = {
    **{f"{name}-{value!r}": (name, value) for name in NUMBERS for value in ("1", [1], 1j, b"")},
    **{f"{name}-bool": (name, True) for name in NUMBERS},
    **{f"{name}-{x}": (name, x) for name in NUMBERS for x in (math.nan, math.inf, -math.inf)},
    **{f"{name}-huge": (name, HUGE) for name in NUMBERS},
    **{f"{name}-minus-huge": (name, -HUGE) for name in NUMBERS},
    **{f"{name}-fraction": (name, 1.5) for name in ("top_k", "seed", "max_tokens")},
    **{f"{name}-None": (name, None) for name in ("temperature", "top_k", "top_p", "min_p")},
    "temperature-negative": ("temperature", -0.1),
    "temperature-101": ("temperature", 101),
    "top_k-negative": ("top_k", -1),
    "top_k-int32": ("top_k", 2**31),
    "top_p-0": ("top_p", 0),
    "top_p-0.0": ("top_p", 0.0),
    "top_p-above": ("top_p", 1.0000001),
    "top_p-negative": ("top_p", -0.5),
    "min_p-above": ("min_p", 1.1),
    "min_p-negative": ("min_p", -0.1),
    "seed-above": ("seed", MAX_SEED),
    "seed-below": ("seed", -MAX_SEED - 1),
    "max_tokens-negative": ("max_tokens", -1),
    "logit_bias-no-pairs": ("logit_bias", (1, 2)),
    "logit_bias-a-number": ("logit_bias", 1),
    "logit_bias-text": ("logit_bias", ("ab",)),
    "logit_bias-triple": ("logit_bias", ((1, 2.0, 3),)),
    "stop-a-lone-text": ("stop", "END"),
    "stop-number": ("stop", (1,)),
    "stop-None": ("stop", None),
    "stop-empty-text": ("stop", ("a", "")),
    "stop-too-many": ("stop", tuple("abcdefghijklmnopq")),
    "stop_token_ids-a-number": ("stop_token_ids", 5),
    "stop_token_ids-text": ("stop_token_ids", ("5",)),
    "stop_token_ids-bool": ("stop_token_ids", (True,)),
    "stop_token_ids-float": ("stop_token_ids", (5.0,)),
}
RIGHT = (
    {"temperature": 0},
    {"temperature": 100},
    {"temperature": 5e-324},
    {"top_k": 2**31 - 1},
    {"top_p": 1},
    {"top_p": 1e-300},
    {"min_p": 0},
    {"min_p": 1.0},
    {"seed": -MAX_SEED},
    {"seed": MAX_SEED - 1},
    {"seed": 0},
    {"max_tokens": 0},
    {"n": 128},
    {"logit_bias": ((0, -100), (7, 100.0))},
    {"logprobs": 0, "prompt_logprobs": 20},
    {"stop": tuple("abcdefghijklmnop")},
    {"stop": ["\n\n"]},
    {"stop_token_ids": (0, 10**9)},
)


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_value_is_refused_and_its_field_named(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("fields", RIGHT, ids=str)
def test_a_value_at_the_limit_is_taken(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == value
    assert len(params.stop) <= MAX_STOP_STRINGS


def test_the_default_is_greedy_and_open_ended():
    params = SamplingParams()
    assert params.greedy
    assert params.max_tokens is None
    assert not SamplingParams(temperature=0.1).greedy


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)
    with pytest.raises(msgspec.ValidationError, match="top_q"):
        msgspec.json.decode(b'{"top_q": 1}', type=SamplingParams)


def test_params_do_not_change():
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.top_k = 3
