"""Asking a running server, for the commands that do: its URL, the key, what it answers.

Owns: requests over HTTP and what their failures mean.  Does not know: what is asked.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Any

from runtime.errors import InvalidRequest, NoAnswer

KEY_VARIABLE = "RADIXCACHE_API_KEY"
"""The environment variable that a key is taken from where no flag gives one."""

_TOO_MANY_REQUESTS = 429


class Server:
    """A server to ask.

    url  such as http://127.0.0.1:8000; a `/v1` at its end is of no account
    key  None: that of `$RADIXCACHE_API_KEY`, if any

    Raises InvalidRequest for what is no URL.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{url} is no URL such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key or os.environ.get(KEY_VARIABLE)

    def open(
        self, path: str, body: bytes | None = None, *, timeout_s: float = 60.0
    ) -> HTTPResponse:
        """Ask for a path, and return the answer; close it.

        Raises InvalidRequest for what the server refuses, NoAnswer where it can't be reached, is
        busy or broke down.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url + path, body, headers)
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                said = _error_text(error.read()) or error.reason
            refused = error.code < 500 and error.code != _TOO_MANY_REQUESTS
            kind = InvalidRequest if refused else NoAnswer
            raise kind(f"{self.url} answers {error.code}: {said}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswer(
                f"no answer from {self.url}{path}: {error}; does a server run there?"
            ) from None
        return answer

    def read(self, path: str, body: bytes | None = None, *, timeout_s: float = 60.0) -> bytes:
        """Ask for a path and return the whole answer; raises what `open` raises."""
        with self.open(path, body, timeout_s=timeout_s) as answer:
            try:
                return answer.read()
            except (OSError, HTTPException) as error:
                raise NoAnswer(f"{self.url}{path} broke off: {error}; try again") from None


def _error_text(body: bytes) -> str:
    try:
        found: Any = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(found)
