"""Tenants: whose key opens what, and that nothing of one is seen by another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixcache import Namespace, Quota
from runtime.errors import InvalidRequest, InvalidSetting
from runtime.loading import Runtime
from runtime.request import SamplingParams
from runtime.server.config import ServerConfig
from runtime.server.context import Caller
from runtime.server.errors import Unauthorized
from runtime.server.generation import Ask
from runtime.server.tenants import Share, Tenant, Tenants, key_of, load_tenants
from tests.support.served import NAME, quick_runtime, serving

SECRET = b"0123456789abcdef"
FILE = """
secret = "a secret of the operator"

[tenants.acme]
keys = ["sk-acme-1234"]
max_waiting = 2
min_priority = 1
quota = { soft = 0.25, hard = 0.5 }

[tenants.globex]
key_sha256 = ["%s"]

[tenants.ops]
keys = ["sk-ops-12345"]
admin = true
""" % hashlib.sha256(b"sk-globex-12").hexdigest()  # noqa: UP031 - braces stand in the file


def three_tenants() -> Tenants:
    return Tenants(
        {
            "acme": Tenant(keys=("sk-acme-1234",)),
            "globex": Tenant(keys=("sk-globex-12",)),
            "ops": Tenant(keys=("sk-ops-12345",), admin=True),
        },
        secret=SECRET,
    )


ACME, GLOBEX, OPS = (
    {"Authorization": f"Bearer {key}"} for key in ("sk-acme-1234", "sk-globex-12", "sk-ops-12345")
)
PROMPT = {"prompt": list(range(100, 180)), "max_tokens": 4, "seed": 1}


@pytest.fixture
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with (
        serving(runtime, tenants=three_tenants()) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def cached(http: httpx.Client, headers: dict[str, str], **fields: Any) -> int:
    answer = http.post("/v1/completions", json=PROMPT | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_file_of_keys_is_read_with_all_it_says(tmp_path: Path) -> None:
    tenants = load_tenants(write(tmp_path, FILE), random_secret=SECRET)
    acme = tenants.caller("sk-acme-1234")
    assert (acme.tenant, acme.max_waiting, acme.is_admin) == ("acme", 2, False)
    assert acme.min_priority == 1
    assert tenants.caller("sk-globex-12").tenant == "globex"
    assert tenants.caller("sk-ops-12345").is_admin
    assert tenants.quotas(64) == {acme.namespace: Quota(soft_limit=16, hard_limit=32)}
    assert list(tenants.salts.values()) == ["acme", "globex", "ops"]


def test_the_secret_of_the_file_gives_the_same_salts_at_every_start(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    one, two = (load_tenants(path, random_secret=bytes([i]) * 16) for i in (1, 2))
    assert one.salts == two.salts
    without = write(tmp_path, FILE.replace('secret = "a secret of the operator"', ""))
    one, two = (load_tenants(without, random_secret=bytes([i]) * 16) for i in (1, 2))
    assert not one.salts.keys() & two.salts.keys()


KEYS = 'keys = ["sk-very-secret"]'
WRONG = [
    ("[tenants.a]\nkeys = [sk-very-secret]", "line 2"),
    ("[tenants.a]\nkeys = 'sk-very-secret'", r"tenants\.a: .*keys"),
    ("[tenants.a]\nkeys = ['sk very secret']", r"tenants\.a\.keys\[0\]"),
    ("[tenants.a]\nkeys = ['short']", r"tenants\.a\.keys\[0\]"),
    ("[tenants.a]\nkey_sha256 = ['sk-very-secret']", r"tenants\.a\.key_sha256\[0\]"),
    ("[tenants.a]\nadmin = true", r"tenants\.a has no key"),
    (f"[tenants.a]\n{KEYS}\nmax_wating = 1", r"tenants\.a: .*max_wating"),
    (f"[tenants.a]\n{KEYS}\nmax_waiting = 0", r"tenants\.a\.max_waiting"),
    (f"[tenants.a]\n{KEYS}\nmin_priority = 3000000000", r"tenants\.a\.min_priority"),
    (f"[tenants.a]\n{KEYS}\nquota = {{ soft = 1.5 }}", r"quota\.soft"),
    (f"[tenants.a]\n{KEYS}\nquota = {{ soft = 0.5, hard = 0.4 }}", r"quota\.hard"),
    (f"[tenants.a]\n{KEYS}\n[tenants.b]\n{KEYS}", "a and b have the same key"),
    (f"[tenants.'a b']\n{KEYS}", "a name has"),
    (f"[tenants.other]\n{KEYS}", "choose another"),
    (f"secret = 'short'\n[tenants.a]\n{KEYS}", "secret must"),
    (f"[tenant.a]\n{KEYS}", "unknown field 'tenant'"),
    ("tenants = 'sk-very-secret'", "must be tables"),
    ("", "no tenant"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_wrong_file_is_refused_by_line_or_field_and_shows_no_key(
    text: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting, match=says) as caught:
        load_tenants(write(tmp_path, text), random_secret=SECRET)
    assert "very" not in str(caught.value)
    assert "keys.toml" in str(caught.value)


def test_a_missing_file_is_the_operators_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"keys\.toml"):
        load_tenants(tmp_path / "keys.toml", random_secret=SECRET)


def test_shares_beyond_the_pool_are_refused() -> None:
    half = Share(soft=0.6)
    with pytest.raises(InvalidSetting, match="whole pool"):
        Tenants(
            {n: Tenant(keys=(f"sk-{n}-123456",), quota=half) for n in "ab"},
            secret=SECRET,
        )


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer sk-1"}, "sk-1"),
        ({"authorization": "bearer  sk-1 "}, "sk-1"),
        ({"x-api-key": "sk-2"}, "sk-2"),
        ({"authorization": "Basic abc", "x-api-key": "sk-2"}, "sk-2"),
        ({"authorization": "Bearer sk-1", "x-api-key": "sk-2"}, "sk-1"),
        ({"authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_keys_are_taken_from_either_header(headers: dict[str, str], key: str | None) -> None:
    assert key_of(headers) == key


@pytest.mark.parametrize(
    "key", [None, "", "sk-acme-123", "sk-acme-12345", "SK-ACME-1234", "é\ud800"]
)
def test_nobody_else_gets_in(key: str | None) -> None:
    with pytest.raises(Unauthorized, match="API key"):
        three_tenants().caller(key)


salts = st.text(max_size=8)


@given(st.tuples(st.text("ab.", max_size=6), salts), st.tuples(st.text("ab.", max_size=6), salts))
def test_no_two_pairs_of_tenant_and_salt_meet(one: tuple[str, str], two: tuple[str, str]) -> None:
    spaces = [Caller(namespace=Namespace(salt=a)).narrowed(b).namespace for a, b in (one, two)]
    assert (spaces[0] == spaces[1]) == (one == two)


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_a_tenant_owns_what_was_narrowed_from_its_own_and_nothing_else(
    mine: list[str], yours: list[str]
) -> None:
    tenants = three_tenants()
    callers = [tenants.caller(key) for key in ("sk-acme-1234", "sk-globex-12")]
    spaces = []
    for caller, salts in zip(callers, (mine, yours), strict=True):
        for salt in salts:
            caller = caller.narrowed(salt)
        spaces.append(caller.namespace)
    for caller, own, other in zip(callers, spaces, reversed(spaces), strict=True):
        assert caller.owns(own)
        assert not caller.owns(other)
        assert not caller.may_see(other)
        assert tenants.caller("sk-ops-12345").may_see(own)


def test_a_salt_of_nothing_changes_nothing_and_an_empty_one_does() -> None:
    caller = Caller(tenant="a", namespace=Namespace(salt="s"))
    assert caller.narrowed(None) == caller
    assert caller.narrowed("").namespace != caller.namespace
    assert caller.narrowed("x") == caller.narrowed("x")
    assert caller.narrowed("x").tenant == "a"


@pytest.mark.parametrize(("lowest", "asked", "got"), [(None, -9, -9), (0, -9, 0), (0, 9, 9)])
def test_no_request_of_a_tenant_goes_earlier_than_it_may(
    lowest: int | None, asked: int, got: int
) -> None:
    tenants = Tenants({"a": Tenant(keys=("sk-a-123456",), min_priority=lowest)}, secret=SECRET)
    caller = tenants.caller("sk-a-123456").narrowed("x")
    ask = Ask(name="a", prompts=[[1]], sampling=SamplingParams(), caller=caller, priority=asked)
    assert [request.priority for request in ask.requests()] == [got]


def test_a_tenant_with_a_hard_limit_cannot_step_out_of_it() -> None:
    tenants = Tenants({"a": Tenant(keys=("sk-a-123456",), quota=Share(hard=0.5))}, secret=SECRET)
    with pytest.raises(InvalidRequest, match="limited") as caught:
        tenants.caller("sk-a-123456").narrowed("elsewhere")
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer sk-wrong-key"}, {"x-api-key": "x"}]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere", "/v1/completions"])
def test_without_a_key_nothing_is_shown(
    http: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    answer = http.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert "sk-wrong-key" not in answer.text


def test_anthropics_clients_are_told_in_their_words(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json={})
    assert (answer.status_code, answer.json()["type"]) == (401, "error")
    assert answer.json()["error"]["type"] == "authentication_error"


def test_the_official_clients_bring_keys_each_in_its_way(http: httpx.Client) -> None:
    url, hello = str(http.base_url), [{"role": "user", "content": "Hello"}]

    def both(key: str) -> tuple[openai.OpenAI, anthropic.Anthropic]:
        return (
            openai.OpenAI(base_url=f"{url}/v1/", api_key=key, max_retries=0),
            anthropic.Anthropic(base_url=url, api_key=key, max_retries=0),
        )

    one, two = both("sk-acme-1234")
    with one, two:
        one.chat.completions.create(model=NAME, messages=hello, max_tokens=2)
        read = two.messages.create(model=NAME, messages=hello, max_tokens=2).usage
        assert read.cache_read_input_tokens  # one tenant, whatever it speaks
    one, two = both("sk-nobody-has")
    with one, two:
        with pytest.raises(openai.AuthenticationError, match="unknown API key"):
            one.models.list()
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            two.messages.create(model=NAME, messages=hello, max_tokens=2)


def test_probes_need_no_key(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/metrics%0A", "/metrics/"])
def test_metrics_are_for_administrators(http: httpx.Client, path: str) -> None:
    answers = [
        http.get(path, headers=headers, follow_redirects=True).status_code
        for headers in (ACME, GLOBEX)
    ]
    assert answers == [403, 403]
    assert http.get("/metrics", headers=OPS).status_code == 200


def test_open_metrics_are_for_everybody(runtime: Runtime) -> None:
    settings = ServerConfig(open_metrics=True)
    with serving(runtime, settings=settings, tenants=three_tenants()) as url:
        assert httpx.get(url + "/metrics").status_code == 200
        assert httpx.get(url + "/v1/models").status_code == 401


def test_no_tenant_finds_what_another_left_behind(http: httpx.Client) -> None:
    assert cached(http, ACME) == 0
    assert cached(http, ACME) > 0
    assert cached(http, GLOBEX) == 0
    assert cached(http, OPS) == 0
    assert cached(http, GLOBEX) > 0


def test_a_salt_of_the_caller_only_narrows(http: httpx.Client) -> None:
    assert cached(http, ACME, cache_salt="alice") == 0
    assert cached(http, ACME, cache_salt="alice") > 0
    assert cached(http, ACME, cache_salt="bob") == 0
    assert cached(http, ACME) == 0
    assert cached(http, GLOBEX, cache_salt="alice") == 0
    salt = next(iter(three_tenants().salts))
    assert cached(http, GLOBEX, cache_salt=salt) == 0  # even if it were known


def test_a_conversation_of_one_tenant_is_not_recalled_for_another(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    reply = http.post("/v1/chat/completions", json=body | {"seed": 1}, headers=ACME).json()
    said = reply["choices"][0]["message"]["content"]
    body["messages"] += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "More"},
    ]
    usages = [
        http.post("/v1/chat/completions", json=body, headers=headers).json()["usage"]
        for headers in (GLOBEX, ACME)
    ]
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert found[0] == 0
    assert found[1] >= reply["usage"]["total_tokens"] // 16 * 16


def test_a_tenant_resets_its_own_cache_only(http: httpx.Client) -> None:
    cached(http, ACME)
    cached(http, ACME, cache_salt="alice")
    cached(http, GLOBEX)
    assert http.post("/reset_prefix_cache", headers=GLOBEX).json()["freed_blocks"] > 0
    assert cached(http, GLOBEX) == 0
    assert cached(http, ACME) > 0
    assert cached(http, ACME, cache_salt="alice") > 0
    http.post("/reset_prefix_cache", headers=ACME)
    assert cached(http, ACME) == 0
    assert cached(http, ACME, cache_salt="alice") == 0
    assert cached(http, GLOBEX) > 0
    http.post("/reset_prefix_cache", headers=OPS)
    assert cached(http, GLOBEX) == 0


def test_quotas_of_the_file_hold_in_the_pool(runtime: Runtime) -> None:
    tenants = Tenants(
        {
            "small": Tenant(keys=("sk-small-123",), quota=Share(hard=0.125)),
            "large": Tenant(keys=("sk-large-123",)),
        },
        secret=SECRET,
    )
    small = tenants.caller("sk-small-123").namespace
    with serving(runtime, tenants=tenants) as url, httpx.Client(base_url=url, timeout=30) as http:
        for key, limit in (("sk-small-123", 8), ("sk-large-123", None)):
            for start in range(0, 1200, 100):
                prompt = list(range(start, start + 80))
                answer = http.post(
                    "/v1/completions",
                    json={"prompt": prompt, "max_tokens": 1},
                    headers={"x-api-key": key},
                )
                assert answer.status_code == 200
            namespaces = runtime.engine.cache.namespaces()
            if limit:
                assert namespaces[small].num_evictable <= limit
    owned = sum(stats.num_evictable for stats in namespaces.values())
    assert owned > 40


def test_a_prompt_beyond_a_tenants_quota_is_the_callers_mistake_and_told_beforehand() -> None:
    tenants = Tenants(
        {
            "small": Tenant(keys=("sk-small-123",), quota=Share(hard=0.25)),
            "large": Tenant(keys=("sk-large-123",)),
        },
        secret=SECRET,
    )
    with (
        serving(quick_runtime(), tenants=tenants) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        for key, most in (("sk-small-123", 256), ("sk-large-123", 1024)):
            headers = {"x-api-key": key}
            (card,) = http.get("/v1/models", headers=headers).json()["data"]
            assert card["max_model_len"] == most
            body = {"prompt": [7] * most, "max_tokens": 8, "ignore_eos": True}
            for path in ("/v1/completions", "/cache/explain"):
                answer = http.post(path, json=body, headers=headers)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            body["prompt"] = [7] * (most - 5)
            usage = http.post("/v1/completions", json=body, headers=headers).json()["usage"]
            assert usage["total_tokens"] == most
