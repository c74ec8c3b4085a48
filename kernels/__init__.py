"""Tensor operations of the radixcache runtime: paged K/V, attention and their exact arithmetic.

Owns: what runs on the device.  Does not know: trees, requests, models or schedules; it sees blocks,
slots and lengths.
Idea: the bits of a row depend on that row's own inputs and never on its company, so a cache can be
invisible.  docs/kernels.md states the rules.
"""

from typing import Final

from kernels._attention_work import SharedPrefixes
from kernels._extend_plan import ExtendPlan
from kernels.backend import Backend, choose_backend
from kernels.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.decode_attention import decode_attention, plan_decode
from kernels.decoder_layers import DecoderLayers, LayerWeights, fuse_layers
from kernels.extend_attention import extend_attention, plan_extend
from kernels.formats import QuantisedWeight
from kernels.linear import PackedWeight, RowLayout, linear, pack_weight
from kernels.merge_state import merge_state
from kernels.mla_attention import mla_attention, plan_mla
from kernels.noise import uniform_noise
from kernels.norm_rope import rms_norm, rotary, rotary_table, silu_and_mul
from kernels.penalties import mask_logits, penalise
from kernels.rotary_store import rotary_store_kv
from kernels.sampling import sample
from kernels.scratch import Scratch
from kernels.shared_prefix_attention import (
    plan_shared_prefix,
    shared_prefix_attention,
    shared_unit,
)
from kernels.store_kv import store_kv

# Another distribution also installs a top-level package of this name; this tells ours from it.
DISTRIBUTION: Final = "radixcache"

__all__ = [
    "DISTRIBUTION",
    "Backend",
    "DecoderLayers",
    "ExtendPlan",
    "LayerWeights",
    "PackedWeight",
    "QuantisedWeight",
    "RowLayout",
    "Scratch",
    "SharedPrefixes",
    "choose_backend",
    "copy_blocks",
    "decode_attention",
    "extend_attention",
    "fuse_layers",
    "gather_blocks",
    "linear",
    "mask_logits",
    "merge_state",
    "mla_attention",
    "pack_weight",
    "penalise",
    "plan_decode",
    "plan_extend",
    "plan_mla",
    "plan_shared_prefix",
    "rms_norm",
    "rotary",
    "rotary_store_kv",
    "rotary_table",
    "sample",
    "scatter_blocks",
    "shared_prefix_attention",
    "shared_unit",
    "silu_and_mul",
    "store_kv",
    "uniform_noise",
]
