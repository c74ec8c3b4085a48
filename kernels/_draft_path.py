"""Where the drafts of a tree stand, for a window that counts what a row sees.

Owns: the meaning of `window` together with `tree_mask`, for both backends.  Does not know: keys.
Idea: on its own path a draft stands behind its ancestors alone, so its window reaches further back
by the drafts that it does not see, and may leave out the oldest that it does.
"""

from __future__ import annotations

import torch

NUM_BITS = 64  # new tokens that a mask tells of; later ones are no drafts


def on_path(
    tree_mask: torch.Tensor, positions: torch.Tensor, first_news: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each row on its own path, and the mask of the drafts in its window.

    positions, first_news  [T] of each row, as in a WorkPlan
    returns                [T] in the dtype of positions, [T] int64

    Rows from the 64th new token on stand at their positions, and keep their masks.  A key is in a
    row's window where it lies after place - window.  Waits for nothing; a dozen small launches.
    """
    new = (positions - first_news)[:, None]
    bit = torch.arange(NUM_BITS, device=tree_mask.device)
    seen = ((tree_mask[:, None] >> bit & 1) != 0) & (bit <= new)
    behind = seen.flip(1).cumsum(1).flip(1)  # drafts seen from each on
    held = ((seen & (behind <= window)).long() << bit).sum(1)
    place = first_news + seen.sum(1).clamp(min=1) - 1
    is_draft = new[:, 0] < NUM_BITS
    return (
        torch.where(is_draft, place, positions).to(positions.dtype),
        torch.where(is_draft, held, tree_mask),
    )
