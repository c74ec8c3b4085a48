"""The matrix can fail: each planted fault is seen by a few of its rows.

Without a fault the same rows pass, in float32 and in bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from runtime.models.llama import LlamaModel
from tests.runtime.test_invisibility import HOW, play, prompt
from tests.support.invisibility import CPU, Alone, Visible
from tests.support.planted_arithmetic import FAULTS, PlantedFault
from tests.support.tiny_models import random_weights, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [
    dict(zip(HOW, row, strict=True))
    for row in ((True, 16, 0, 7, False, True, 1), (True, 16, 7, 1, True, False, 1))
]


def hunt(dtype: torch.dtype) -> None:
    """Play the rows on a tiny model."""
    config = tiny_config(head_dim=64, hidden_size=96, intermediate_size=192)
    alone = Alone(
        LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU), dtype
    )
    for how in ROWS:
        play(alone, how, prompt(70), pool_tokens=2048)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen(fault: PlantedFault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    with pytest.raises(Visible):
        hunt(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_fault_nothing_is_seen(dtype: torch.dtype) -> None:
    hunt(dtype)
