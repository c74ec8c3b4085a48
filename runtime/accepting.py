"""What an engine accepts: requests that this model and this pool can serve.

Owns: the checks that need to know model and limits.  Does not know: the queue; `request.py` checks
what is wrong with any engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

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
    prompt, sampling = np.frombuffer(request.prompt, np.int32), request.sampling
    if not len(prompt):
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    _check_ids("prompt", (int(prompt.min()), int(prompt.max())), vocab_size)
    if len(prompt) >= config.max_len:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens, and this server takes at most "
            f"{config.max_len - 1} (max_len {config.max_len}, one token of output included): "
            "shorten it, or start the server with more K/V memory or max_len",
            num_tokens=len(prompt),
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


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequest(f"token ids of this model lie from 0 to {vocab_size - 1}", param=param)
