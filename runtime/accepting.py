"""What an engine accepts: requests that this model and this pool can serve.

Owns: the checks that need to know model and limits.  Does not know: the queue; `request.py` checks
what is wrong with any engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixcache.tokens import num_tokens
from runtime.config import EngineConfig
from runtime.errors import InvalidRequest, PromptTooLong
from runtime.request import Request


def check_request(
    request: Request, config: EngineConfig, *, vocab_size: int, has_tokenizer: bool
) -> None:
    """Raise what is wrong with a request; O(prompt).

    InvalidRequest (empty prompt, unknown token ids, more branches than run together, branches of
    nothing, stop strings without a tokenizer) or PromptTooLong.
    """
    length, sampling = num_tokens(request.prompt), request.sampling
    if not length:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    check_tokens(request.prompt, vocab_size)
    if length >= config.max_len:
        raise PromptTooLong(
            f"the prompt has {length} tokens, and this server takes at most "
            f"{config.max_len - 1} (max_len {config.max_len}, one token of output included): "
            "shorten it, or start the server with more K/V memory or max_len",
            num_tokens=length,
            max_tokens=config.max_len - 1,
        )
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
