"""Tenants: whose key it is, and what follows from it.

Owns: the file of keys, the salts of tenants, their shares of the pool.  Does not know: HTTP paths,
the cache.
Idea: a salt is a keyed hash of the tenant's name, so no tenant can find or choose another's; keys
are kept as their sha256 only, and never shown.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from radixcache.accounts import Quota
from radixcache.namespace import Namespace
from runtime.errors import InvalidSetting
from runtime.metrics import NO_TENANT, OTHER_TENANTS
from runtime.request import MAX_PRIORITY
from runtime.server.context import Caller
from runtime.server.errors import Unauthorized

MIN_KEY_LEN = 8
MIN_SECRET_LEN = 16
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_LEN},512}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Record = TypeVar("Record")


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's part of the pool, as fractions from 0 to 1.

    soft  nobody else's request evicts from it while it owns no more
    hard  it never owns more; None where the pool decides
    """

    soft: float = 0.0
    hard: float | None = None

    def quota(self, num_blocks: int) -> Quota:
        """Return the share of a pool, in whole blocks; at least one where there is a hard limit."""
        hard = None if self.hard is None else max(1, int(self.hard * num_blocks))
        return Quota(soft_limit=int(self.soft * num_blocks), hard_limit=hard)


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant as the file has it.

    keys, key_sha256  its API keys, as they are or as 64 hexadecimal digits of their sha256
    admin             may see and change what belongs to all tenants
    max_waiting       requests of its own that may wait; None: as many as the engine's queue takes
    min_priority      its requests go no earlier than this; None: as early as they ask
    quota             its part of the pool; None: none of its own
    """

    keys: tuple[str, ...] = ()
    key_sha256: tuple[str, ...] = ()
    admin: bool = False
    max_waiting: int | None = None
    min_priority: int | None = None
    quota: Share | None = None


class Tenants:
    """Whoever may call.

    secret  keys the hash that salts are made with; the same secret gives the same salts

    Raises InvalidSetting that names tenant and field, and shows no key.
    """

    def __init__(self, tenants: Mapping[str, Tenant], *, secret: bytes) -> None:
        self._callers: dict[bytes, Caller] = {}  # by sha256 of the key
        self._shares: dict[Namespace, Share] = {}
        self._salts: dict[str, str] = {}
        if not tenants:
            raise InvalidSetting("no tenant has a key: write [tenants.NAME] with keys = [...]")
        for name, tenant in tenants.items():
            _check_tenant(name, tenant)
            self._add(name, tenant, secret)
        if sum(share.soft for share in self._shares.values()) > 1:
            raise InvalidSetting("quota.soft of all tenants together is above 1, the whole pool")

    @property
    def salts(self) -> Mapping[str, str]:
        """The tenant of each salt, in the order of the file."""
        return self._salts

    @property
    def names(self) -> list[str]:
        """Those that may call now, in the order of the file."""
        return list(dict.fromkeys(caller.tenant for caller in self._callers.values()))

    def check_salts_of(self, newer: Tenants) -> None:
        """Raise InvalidSetting where the tenants that both have lie under other salts there."""
        salts = {name: salt for salt, name in self._salts.items()}
        if any(salts.get(name, salt) != salt for salt, name in newer.salts.items()):
            raise InvalidSetting("another secret needs a restart: all that is cached lies under it")

    def follow(self, newer: Tenants) -> None:
        """Let in whoever `newer` does, and nobody else; salts of those that went stay known."""
        self._callers, self._shares = newer._callers, newer._shares
        self._salts.update(newer.salts)

    def _add(self, name: str, tenant: Tenant, secret: bytes) -> None:
        salt = hashlib.blake2b(name.encode(), key=secret[:64], digest_size=16).hexdigest()
        self._salts[salt] = name
        share = tenant.quota
        caller = Caller(
            tenant=name,
            namespace=Namespace(salt=salt),
            is_admin=tenant.admin,
            max_waiting=tenant.max_waiting,
            min_priority=tenant.min_priority,
            may_narrow=share is None or share.hard is None,
        )
        if share is not None:
            self._shares[caller.namespace] = share
        digests = [bytes.fromhex(digest) for digest in tenant.key_sha256]
        for digest in digests + [_digest(key) for key in tenant.keys]:
            other = self._callers.setdefault(digest, caller)
            if other is not caller:
                raise InvalidSetting(f"tenants {other.tenant} and {name} have the same key")

    def caller(self, key: str | None) -> Caller:
        """Return whose key it is.  Raises Unauthorized."""
        if key is None:
            raise Unauthorized("no API key: send it as `Authorization: Bearer KEY` or `x-api-key`")
        # How long the look-up takes may tell something of a digest, which says nothing of any key.
        caller = self._callers.get(_digest(key))
        if caller is None:
            raise Unauthorized("unknown API key: ask the operator of this server for one")
        return caller

    def quotas(self, num_blocks: int) -> dict[Namespace, Quota]:
        """Return the quota of each tenant that has one, in a pool of so many blocks."""
        return {namespace: share.quota(num_blocks) for namespace, share in self._shares.items()}


def load_tenants(path: Path, *, random_secret: bytes) -> Tenants:
    """Read a file of keys.

    random_secret  at least 16 bytes, used where the file has no `secret`

    Raises InvalidSetting that names the line or the field, and shows no key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidSetting(f"can't read the API keys in {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the API keys in {path} are not TOML: {_where(error)}") from None
    try:
        return Tenants(_tenants_of(content), secret=_secret_of(content) or random_secret)
    except InvalidSetting as error:
        raise InvalidSetting(f"the API keys in {path}: {error}") from None


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key that a request brings, or None."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip() or None


def _tenants_of(content: dict[str, Any]) -> dict[str, Tenant]:
    unknown = sorted(content.keys() - {"secret", "tenants"})
    if unknown:
        raise InvalidSetting(f"unknown field {unknown[0]!r}: there are `secret` and `tenants`")
    tables = content.get("tenants", {})
    if not isinstance(tables, dict):
        raise InvalidSetting("tenants must be tables: write [tenants.NAME]")
    tenants = {}
    for name, table in tables.items():
        try:
            tenants[name] = msgspec.convert(table, Tenant)
        except msgspec.ValidationError as error:
            raise InvalidSetting(f"tenants.{name}: {error}") from None
    return tenants


def _secret_of(content: dict[str, Any]) -> bytes | None:
    secret = content.get("secret")
    if secret is None:
        return None
    if not isinstance(secret, str) or len(secret) < MIN_SECRET_LEN:
        raise InvalidSetting(f"secret must be a text of at least {MIN_SECRET_LEN} characters")
    return hashlib.sha256(secret.encode()).digest()


def _check_tenant(name: str, tenant: Tenant) -> None:
    where = f"tenants.{name}"
    if not _NAME.fullmatch(name):
        raise InvalidSetting(f"{where!r}: a name has at most 64 letters, digits, '-', '_' and '.'")
    if name in (NO_TENANT, OTHER_TENANTS):
        raise InvalidSetting(f"{where}: metrics call others by that name; choose another")
    if not tenant.keys and not tenant.key_sha256:
        raise InvalidSetting(f"{where} has no key: write keys = [...] or key_sha256 = [...]")
    for place, key in enumerate(tenant.keys):
        if not _KEY.fullmatch(key):
            raise InvalidSetting(
                f"{where}.keys[{place}] must have {MIN_KEY_LEN} to 512 printable ASCII "
                "characters without spaces"
            )
    for place, digest in enumerate(tenant.key_sha256):
        if not _SHA256.fullmatch(digest):
            raise InvalidSetting(f"{where}.key_sha256[{place}] must be 64 digits of 0-9a-f")
    if tenant.max_waiting is not None and tenant.max_waiting < 1:
        raise InvalidSetting(f"{where}.max_waiting is {tenant.max_waiting}: at least 1")
    if abs(tenant.min_priority or 0) > MAX_PRIORITY:
        raise InvalidSetting(f"{where}.min_priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    share = tenant.quota or Share()
    if not 0 <= share.soft <= 1:
        raise InvalidSetting(f"{where}.quota.soft is {share.soft}: from 0 to 1")
    if share.hard is not None and not (0 < share.hard <= 1 and share.soft <= share.hard):
        raise InvalidSetting(
            f"{where}.quota.hard is {share.hard}: above 0, at most 1, and not below quota.soft"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _where(error: Exception) -> str:
    """Where a file is wrong, without what stands there: it may be a key."""
    match = re.search(r"\(at (?:line \d+, column \d+|end of document)\)", str(error))
    return match[0].strip("()") if match else "not UTF-8"
