"""A target and the model that drafts tokens for it, updated as one: MTP heads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["WithDrafts"]


class WithDrafts(nn.Module):
    """A target and its drafter, which load one checkpoint.

    The drafter gets the tensors that only its loader reads. The layers that both share are loaded
    with the target.

    Args:
        own: the names of the drafter's tensors in the checkpoint.
    """

    def __init__(self, target: Any, draft: Any, own: Collection[str]) -> None:
        super().__init__()
        self.target, self.draft, self._own = target, draft, own

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load both. Returns the names of the parameters that were loaded."""
        kept: list[tuple[str, Tensor]] = []

        def rest() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name in self._own:
                    kept.append((name, tensor))
                else:
                    yield name, tensor

        return _load("target", self.target, rest()) | _load("draft", self.draft, kept)


def _load(prefix: str, model: Any, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    loaded = model.load_weights(tensors)
    if loaded is None:  # This loader does not say.
        loaded = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {f"{prefix}.{name}" for name in loaded}
