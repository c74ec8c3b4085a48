"""What one HTTP request came to: the numbers of its line in the log and of its trace.

Owns: the numbers.  Does not know: where they are shown; no text of a prompt or key comes here.
"""

from __future__ import annotations

import re

from runtime.request import Usage

_SANE_ID = re.compile(r"[!-~]{1,128}")


class Journal:
    """The numbers of one request, filled in as it goes; for one event loop.

    request_id      the caller's `X-Request-Id` where it is sane, else one of ours
    endpoint        method and route, such as "POST /v1/completions"; not what the caller wrote
    tenant          name of the tenant, "" without keys
    status          of the answer, 0 before there is one
    answer_ids      of the answers generated
    prompt_tokens, cached_tokens, computed_tokens, output_tokens
                    summed over prompts and branches
    queue_s         the longest wait for first admission
    began, first_token_at, ended
                    seconds of one monotonic clock; None where it did not happen
    num_gaps, gap_sum_s, gap_max_s
                    times between tokens of one branch
    finish_reasons  one for each branch that ended; "abort" for those left behind
    misses          why each prompt missed, as log lines show it; empty where nobody wanted to know
    answer_headers  that the answer is to have beside its own
    """

    __slots__ = (
        "answer_headers",
        "answer_ids",
        "began",
        "cached_tokens",
        "computed_tokens",
        "ended",
        "endpoint",
        "finish_reasons",
        "first_token_at",
        "gap_max_s",
        "gap_sum_s",
        "misses",
        "num_gaps",
        "output_tokens",
        "prompt_tokens",
        "queue_s",
        "request_id",
        "status",
        "tenant",
    )

    def __init__(self, request_id: str, *, began: float) -> None:
        self.request_id = request_id
        self.began = began
        self.endpoint = "none"
        self.tenant = ""
        self.status = 0
        self.answer_ids: list[str] = []
        self.prompt_tokens = self.cached_tokens = self.computed_tokens = self.output_tokens = 0
        self.queue_s = 0.0
        self.first_token_at: float | None = None
        self.ended: float | None = None
        self.num_gaps = 0
        self.gap_sum_s = self.gap_max_s = 0.0
        self.finish_reasons: list[str] = []
        self.misses: list[dict[str, str | int | float]] = []
        self.answer_headers: list[tuple[bytes, bytes]] = []

    def note_prompt(self, usage: Usage) -> None:
        """Add a prompt's tokens."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.computed_tokens += usage.computed_tokens
        self.queue_s = max(self.queue_s, usage.queue_s)

    def note_first_token(self, now: float) -> None:
        """Note when the first token of all came."""
        if self.first_token_at is None:
            self.first_token_at = now

    def note_gap(self, seconds: float) -> None:
        """Note the time between two tokens."""
        self.num_gaps += 1
        self.gap_sum_s += seconds
        if seconds > self.gap_max_s:
            self.gap_max_s = seconds

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.began

    @property
    def duration_s(self) -> float | None:
        """Seconds from arrival to the end of the answer."""
        return None if self.ended is None else self.ended - self.began

    def fields(self) -> dict[str, str | int | float]:
        """Return what a log line shows: without tokens where nothing was generated."""
        shown: dict[str, str | int | float | None] = {
            "id": self.request_id,
            "tenant": self.tenant or None,
            "endpoint": self.endpoint,
            "status": self.status,
        }
        if self.answer_ids:
            shown |= {
                "answer": ",".join(self.answer_ids),
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "computed": self.computed_tokens,
                "output": self.output_tokens,
                "queue_s": self.queue_s,
                "ttft_s": self.time_to_first_token_s,
                "itl_mean_s": self.gap_sum_s / self.num_gaps if self.num_gaps else None,
                "itl_max_s": self.gap_max_s if self.num_gaps else None,
                "finish": ",".join(sorted(set(self.finish_reasons))) or None,
            }
        shown["duration_s"] = self.duration_s
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in shown.items()
            if value is not None
        }


def request_id_of(header: str | None, *, otherwise: str) -> str:
    """Return the id that a request brings where it is sane, else another.

    Sane is 1 to 128 printable ASCII characters without spaces, so that it stands in one line of a
    log and in a header.
    """
    return header if header and _SANE_ID.fullmatch(header) else otherwise
