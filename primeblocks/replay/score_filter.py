"""A filter that keeps the replayed experts that the trainer still finds plausible."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from .router import Router

__all__ = ["keep_scored"]


def keep_scored(
    router: Router,
    output: Any,
    own: Int64[Tensor, "tokens top_k"],
    replayed: Int64[Tensor, "tokens top_k"],
    *,
    ratio: float,
    exempt: Bool[Tensor, " tokens"] | None = None,
) -> tuple[Int64[Tensor, "tokens top_k"], Int64[Tensor, ""]]:
    """Replace replayed experts that the trainer scores far below its own choices.

    An expert stays where its score is at least `ratio` times the weakest score among the row's own
    choices. The others' slots, from left to right, get the row's own choices that are not kept
    already, from the best down; no row names an expert twice. Local; waits for nothing.

    Args:
        ratio: in (0, 1]; an expert that the trainer chose itself is always kept.
        exempt: True for rows to keep as they are: padding.

    Returns:
        The rows, and how many slots were replaced (on the device).

    Source: prime-rl pull request 2703.
    """
    with torch.no_grad():
        # In one call: whatever it divides by is the same for both.
        scores = router.gates(output, torch.cat([own, replayed], dim=1))
        of_own, of_replayed = scores.split([own.shape[1], replayed.shape[1]], dim=1)
        kept = of_replayed >= ratio * of_own.amin(dim=1, keepdim=True)
        if exempt is not None:
            kept = kept | exempt[:, None]
        best_first = own.gather(1, of_own.argsort(dim=1, descending=True, stable=True))
        twice = (best_first[:, :, None] == replayed[:, None, :]).any(-1)
        # The free ones first, in their order. A replayed own choice is kept, so there are as many
        # free ones as slots to fill, or more.
        free_first = best_first.gather(1, twice.to(torch.uint8).argsort(dim=1, stable=True))
        turn = (~kept).cumsum(dim=1) - 1
        rows = torch.where(kept, replayed, free_first.gather(1, turn.clamp(min=0)))
        return rows, (~kept).sum()
