"""The check at the start: are a row's bits its own, on this model's shapes and this machine?

Owns: which operations of a model are checked, the layout that its products take, what a fault leads
to.  Does not know: how an operation is checked; kernels/row_check.py does.
"""

from __future__ import annotations

import logging
import time

import torch

from kernels.linear import RowLayout
from kernels.row_check import (
    FEW_COUNTS,
    AttentionShape,
    Product,
    check_attention,
    check_rows,
    find_layout,
)
from runtime.errors import NotExact
from runtime.exactness.promise import UNCHECKED, Exact, Exactness
from runtime.models.llama import LlamaModel

_log = logging.getLogger("radixcache")


def exact_model(model: LlamaModel, wish: Exact) -> Exactness:
    """Check a model's operations, give its products a layout that holds, and say what is promised.

    wish  "require": raise NotExact where no layout holds; "warn": log it; "off": check nothing

    Cost: 700 to 900 rows through one layer's weights and 140 through the vocabulary's; 0.2 to 0.3 s
    for SmolLM2-135M on two threads.
    """
    if wish == "off":
        return UNCHECKED
    with torch.inference_mode():
        exactness, layout = check_model(model)
    model.row_layout = layout
    if not exactness.holds:
        found = "; ".join(exactness.faults)
        message = (
            "on this machine the bits of a token depend on its batch, so cached and uncached "
            f"answers may differ: {found}"
        )
        if wish == "require":
            raise NotExact(
                f"{message}; try another dtype or number of threads, or --exact warn to go on"
            )
        _log.warning("%s; the promise of docs/exactness.md is not made", message)
    elif exactness.layout:
        _log.warning(
            "products take %s, which is slower: with the default, %s",
            exactness.layout,
            "; ".join(exactness.faults),
        )
    return exactness


def check_model(model: LlamaModel) -> tuple[Exactness, RowLayout | None]:
    """Check the operations of a model without changing it.

    returns  what was found, and the layout for its products; None for the default
    """
    begun = time.perf_counter()
    config, head = model.config, model.head_weight
    products = [Product(weight, bias) for weight, bias in model.layer_weights]
    products.append(Product(head, row_counts=FEW_COUNTS))
    found = find_layout(products)
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
    widths = config.hidden_size, config.intermediate_size, config.head_dim
    others = check_rows(*widths, head) + check_attention(shape, head)
    holds = found.holds and not others
    exactness = Exactness(
        holds=holds,
        faults=tuple(map(str, found.faults + others)),
        layout=described(found.layout) if found.layout and holds else "",
        seconds=time.perf_counter() - begun,
    )
    return exactness, found.layout


def described(layout: RowLayout) -> str:
    """Say how rows are laid out, in words."""
    if layout.most == 1:
        return "one row at a time"
    if layout.most is not None:
        return f"{layout.most} rows at a time"
    return f"at least {layout.least} rows" if layout.step == 1 else f"rows in {layout.step}s"
