"""From settings to a running engine: files, weights, memory, parts put together.

Owns: the order of building, and how much K/V fits.  Does not know: requests, HTTP, text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from random import SystemRandom
from typing import Any

import msgspec
import torch

from kernels.backend import BACKEND_VARIABLE, Backend, choose_backend
from kernels.calibration import Calibration, calibrate, use
from radixcache.cache import RadixCache
from radixcache.config import CacheConfig
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.observer import TreeObserver
from radixcache.policy import POLICIES
from radixcache.seal import Seals
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.errors import InvalidRequest, InvalidSetting, PromptTooLong
from runtime.exactness.promise import UNCHECKED, Exactness
from runtime.exactness.start import exact_model
from runtime.executor.executor import ModelExecutor
from runtime.grammar import Constrainer, Grammar
from runtime.kv.store import KVStore
from runtime.models.config import ModelConfig
from runtime.models.llama import LlamaModel
from runtime.plan import Executor
from runtime.request import MAX_SEED, Constraint
from runtime.sealed import SealedExecutor
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.replies import ReplyMemory
from runtime.tokenizer.tool_calls import key_of_reply
from runtime.tokenizer.tool_format import HERMES, ToolFormat
from runtime.weights.checkpoint import Checkpoint, open_checkpoint
from runtime.weights.mapping import expected_shapes
from runtime.weights.pull import Progress


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """How much K/V fits, worked out: bytes_per_token = 2 · layers · kv heads · head dim · bytes."""

    dtype: str
    bytes_per_token: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    num_tokens: int


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was built: the engine, and what its front ends need beside it.

    replies      which token ids the latest replies were made of
    constrainer  compiles what an output must look like
    exactness    whether cached and uncached answers have the same bits here
    calibration  what was measured of products here; None where torch computes all
    """

    name: str
    model_config: ModelConfig
    memory: Memory
    executor: Executor
    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    replies: ReplyMemory
    constrainer: Constrainer
    exactness: Exactness = UNCHECKED
    calibration: Calibration | None = None

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return a conversation's token ids; replies given lately keep theirs.

        tools                  functions that the model may call, as chat templates expect them
        add_generation_prompt  whether they end where the reply begins

        Raises InvalidRequest where the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template: send a prompt of your own as a completion",
                param="messages",
            )
        said = (
            str(m[field]) for m in messages for field in ("content", "tool_calls") if m.get(field)
        )
        self._check_length(*said, *map(str, tools or ()))
        return self.chat_template.encode(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            recall=partial(self.replies.recall, namespace),
        )

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of tools."""
        return HERMES if self.chat_template is None else self.chat_template.format

    def constrain(self, grammar: Grammar) -> Constraint:
        """Compile what an output must look like; milliseconds, from any thread.

        Raises InvalidRequest for a grammar that is wrong, too complex, or can't be had here.
        """
        return self.constrainer.compile(grammar)

    def system_tokens(self, text: str) -> list[int]:
        """Return the ids that every conversation with this system prompt begins with.

        Raises InvalidRequest where the model has no chat template, or it takes no system prompt.
        """
        system = {"role": "system", "content": text}
        asked = [[system, {"role": "user", "content": content}] for content in ("a", "1")]
        first, second = (self.chat_tokens(messages) for messages in asked)
        pairs = zip(first, second, strict=False)
        shared = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
        return [token for token, _ in shared]

    def remember_reply(
        self,
        prompt: bytes,
        text: str,
        token_ids: Sequence[int],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        """Note which ids a reply was made of, so that the next turn can begin with them.

        prompt  the packed ids that it answers
        """
        ids = list(token_ids)
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        # Not where a stop string cut the text, nor with control tokens that would act later on.
        if self.tokenizer.decode(ids, skip_special=False) == text:
            self.replies.remember(namespace, prompt, text, ids)
            key = key_of_reply(text, self.tool_format)  # clients send calls back taken apart
            if key is not None:
                self.replies.remember(namespace, prompt, key, ids)

    def prompt_tokens(
        self, text: str, *, parse_special: bool = False, begun: bool = False
    ) -> list[int]:
        """Return a text's token ids.  Raises PromptTooLong at once for one that can't fit.

        begun  whether it follows other tokens, with which nothing of it is merged
        """
        self._check_length(text)
        if begun:
            return self.tokenizer.encode_later(text, parse_special=parse_special)
        return self.tokenizer.encode_prompt(text, parse_special=parse_special)

    def _check_length(self, *texts: str) -> None:
        """Refuse texts with more characters than the longest tokens could hold."""
        max_len, longest = self.engine.config.max_len, self.tokenizer.longest_token_bytes
        num_chars = sum(map(len, texts))
        if num_chars > max_len * longest:
            least = num_chars // longest
            raise PromptTooLong(
                f"the prompt has {num_chars} characters, so at least {least} tokens, and this "
                f"server takes at most {max_len - 1}: shorten it",
                num_tokens=least,
                max_tokens=max_len - 1,
            )


def load_runtime(
    config: RuntimeConfig,
    *,
    progress: Progress | None = None,
    observers: Sequence[TreeObserver] = (),
) -> Runtime:
    """Open a model, read its weights, reserve K/V memory and build the engine.

    observers  told of every block that is published or given up

    Raises ModelFileError for the model's files, InvalidSetting for settings that don't fit them,
    NotExact where `exact` is "require" and this machine is not.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config, progress)
    checkpoint = open_checkpoint(config.model, progress=progress)
    shape = checkpoint.config
    calibration = measured(shape, device)
    dtype = choose_dtype(config, device, calibration)
    memory = plan_memory(config, shape, dtype)
    max_len = _max_len(config, shape, memory)
    tokenizer = checkpoint.tokenizer()  # what may fail comes before the weights, which take long
    chat_template = checkpoint.chat_template()
    store = KVStore(
        shape,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        dtype=dtype,
        device=device,
    )
    model = _read_model(checkpoint, config, dtype, device, calibration, progress)
    exactness = exact_model(model, config.exact)
    seals = Seals(memory.block_size)
    watching = (*observers, seals) if config.debug_seals else observers
    cache = _new_cache(config, memory, observers=watching)
    executor = ModelExecutor(model, store)
    random = SystemRandom()
    engine = Engine(
        cache,
        config.engine(max_len=max_len),
        SealedExecutor(executor, cache, seals) if config.debug_seals else executor,
        tokenizer=tokenizer,
        eos_ids=tokenizer.eos_ids,
        vocab_size=shape.vocab_size,
        draw_seed=lambda: random.randrange(MAX_SEED),
    )
    return Runtime(
        name=checkpoint.name,
        model_config=shape,
        memory=memory,
        executor=executor,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=chat_template,
        replies=ReplyMemory(),
        constrainer=Constrainer(tokenizer),
        exactness=exactness,
        calibration=calibration,
    )


def _read_model(
    checkpoint: Checkpoint,
    config: RuntimeConfig,
    dtype: torch.dtype,
    device: torch.device,
    calibration: Calibration | None,
    progress: Progress | None,
) -> LlamaModel:
    total = len(expected_shapes(checkpoint.config))
    backend = product_backend(dtype, device, calibration)
    tensors = checkpoint.tensors(as_stored=keeps_stored(config, backend))
    if config.weights in ("float32", "bfloat16"):
        kept = getattr(torch, config.weights)
        tensors = (
            (name, tensor.to(kept) if len(tensor.shape) == 2 else tensor)  # type: ignore[union-attr]
            for name, tensor in tensors
        )
    return LlamaModel(
        checkpoint.config,
        tensors,
        dtype=dtype,
        device=device,
        int8=config.activations == "int8",
        product_backend=backend,
        progress=(lambda done: progress("reading weights", done, total)) if progress else None,
    )


def product_backend(
    dtype: torch.dtype, device: torch.device, calibration: Calibration | None
) -> Backend:
    """Return the backend of products: the measured one, unless $RADIXCACHE_KERNELS names one."""
    chosen = choose_backend(device)
    if calibration is None or chosen != "native":
        return chosen
    fastest = use(calibration, dtype)
    return chosen if os.environ.get(BACKEND_VARIABLE) else fastest


def measured(
    shape: ModelConfig, device: torch.device, *, again: bool = False
) -> Calibration | None:
    """Return what was measured of products of this model's sizes; None where torch computes.

    again  measure even where an earlier result is kept
    """
    if choose_backend(device) != "native":
        return None
    matrices = {n: s for n, s in expected_shapes(shape).items() if len(s) == 2}
    sizes = [(n, k) for name, (n, k) in matrices.items() if ".layers.0." in name]
    return calibrate(sizes, again=again)


def keeps_stored(config: RuntimeConfig, backend: Backend) -> bool:
    """Whether weights stay as the file stores them.  Raises InvalidSetting where they can't."""
    if config.activations == "int8" and (backend != "native" or config.weights not in _STORED):
        raise InvalidSetting(
            "activations are int8, which only the native backend computes, with weights as the "
            f"file stores them: this is the {backend} backend, with weights {config.weights!r}"
        )
    if config.weights == "file" and backend != "native":
        raise InvalidSetting(
            f"weights are 'file', which the {backend} backend does not compute with: use "
            "'auto', or install a C compiler"
        )
    return config.weights in _STORED and backend == "native"


_STORED = ("auto", "file")


def _new_cache(
    config: RuntimeConfig, memory: Memory, *, observers: Sequence[TreeObserver]
) -> RadixCache:
    return RadixCache(
        CacheConfig(
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            enable_prefix_cache=config.enable_prefix_cache,
            max_ghosts=config.max_ghosts,
        ),
        policy=POLICIES[config.eviction_policy](),
        observers=observers,
        clock=time.monotonic,
    )


def choose_device(config: RuntimeConfig, progress: Progress | None = None) -> torch.device:
    """Return the device that the settings mean; compiles its kernels, and shows it.

    Raises InvalidSetting.
    """
    wish = config.device
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise InvalidSetting(f"device is {wish!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidSetting(f"device is {wish!r}, which is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting(f"device is {wish!r}, but this torch finds no CUDA device: use cpu")
    try:
        choose_backend(device, progress=progress)
    except (ValueError, RuntimeError) as error:  # what $RADIXCACHE_KERNELS asks for
        raise InvalidSetting(str(error)) from None
    return device


def choose_dtype(
    config: RuntimeConfig, device: torch.device, calibration: Calibration | None
) -> torch.dtype:
    """Return the dtype that the settings mean: bfloat16 where it was measured faster, or CUDA."""
    name = config.dtype
    if name == "auto":
        is_fast = device.type == "cuda" or (calibration and calibration.prefers_bfloat16)
        name = "bfloat16" if is_fast else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def plan_memory(config: RuntimeConfig, shape: ModelConfig, dtype: torch.dtype) -> Memory:
    """Work out how many blocks and tokens the settings' memory holds.  Raises InvalidSetting."""
    per_token = shape.kv_bytes_per_token(dtype.itemsize)
    per_block = per_token * config.block_size
    num_blocks = config.num_blocks or config.kv_memory_bytes // per_block
    if num_blocks < 1:
        raise InvalidSetting(
            f"{config.kv_memory_bytes} bytes of K/V memory hold not even one block of "
            f"{per_block} bytes: give more memory or a smaller block_size"
        )
    return Memory(
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_token=per_token,
        bytes_per_block=per_block,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_tokens=num_blocks * config.block_size,
    )


def _max_len(config: RuntimeConfig, shape: ModelConfig, memory: Memory) -> int:
    allowed = min(shape.max_len, memory.num_tokens)
    if config.max_len is None:
        return allowed
    if config.max_len > allowed:
        raise InvalidSetting(
            f"max_len is {config.max_len}, but the model was trained for {shape.max_len} tokens "
            f"and the K/V memory holds {memory.num_tokens}: at most {allowed} can be served"
        )
    return config.max_len
