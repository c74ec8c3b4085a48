"""What an engine accepts: requests that this model and this pool can serve.

Owns: the checks that need to know model and limits.  Does not know: the queue; `request.py` checks
what is wrong with any engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixcache.cache import RadixCache
from radixcache.namespace import Namespace
from radixcache.tokens import num_tokens
from runtime.config import EngineConfig
from runtime.errors import InvalidRequest, PromptTooLong
from runtime.request import Request


def longest_of(namespace: Namespace, cache: RadixCache, *, max_len: int, num_held: int) -> int:
    """Return how many tokens a sequence of a namespace may have where all others give way; O(1).

    max_len   of any sequence
    num_held  tokens of blocks that never give way, such as the public prefix's

    It depends on settings alone, so it tells nothing of what others do.
    """
    size = cache.config.block_size
    num_blocks = cache.config.num_blocks - num_held // size
    account = cache.accounts.by_namespace.get(cache.epochs.current(namespace))
    quota = account.quota if account else None
    if quota is not None and quota.hard_limit is not None:
        num_blocks = min(num_blocks, quota.hard_limit)
    return min(max_len, num_blocks * size)


def check_request(
    request: Request, config: EngineConfig, *, max_len: int, vocab_size: int, has_tokenizer: bool
) -> None:
    """Raise what is wrong with a request; O(prompt).

    max_len  tokens that a sequence of its namespace may have

    InvalidRequest (empty prompt, unknown token ids, more branches than run together, branches of
    nothing, stop strings without a tokenizer) or PromptTooLong.
    """
    length, sampling = num_tokens(request.prompt), request.sampling
    if not length:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    check_tokens(request.prompt, vocab_size)
    if length >= max_len:
        raise _too_long(length, max_len, is_own=max_len < config.max_len)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    if sampling.n > config.max_running:
        raise InvalidRequest(
            f"n is {sampling.n}, and this server computes at most {config.max_running} sequences "
            "together",
            param="n",
        )
    if sampling.n > 1 and sampling.max_tokens == 0:
        raise InvalidRequest("n is above 1, but max_tokens is 0: nothing branches", param="n")
    if sampling.stop and not has_tokenizer:
        raise InvalidRequest("stop strings need a tokenizer", param="stop")


def check_tokens(tokens: bytes, vocab_size: int, *, param: str = "prompt") -> None:
    """Raise InvalidRequest for packed ids of which the model does not have one; O(tokens)."""
    ids = np.frombuffer(tokens, np.int32)
    if len(ids):
        _check_ids(param, (int(ids.min()), int(ids.max())), vocab_size)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequest(f"token ids of this model lie from 0 to {vocab_size - 1}", param=param)


def _too_long(length: int, max_len: int, *, is_own: bool) -> PromptTooLong:
    limit, more = f"max_len {max_len}", "start the server with more K/V memory or max_len"
    if is_own:
        limit = f"the {max_len} that a public prefix and quotas leave you"
        more = "ask the operator for more K/V memory or a larger quota"
    most = max(0, max_len - 1)
    return PromptTooLong(
        f"the prompt has {length} tokens, and this server takes at most {most} "
        f"({limit}, one token of output included): shorten it, or {more}",
        num_tokens=length,
        max_tokens=most,
    )
