"""Record the selection of an indexer, and make another indexer select the same tokens.

An indexer is free, or belongs to one open `impose`. Forwards inside the context replace its output,
and rows are never used up, so recomputation sees the same rows. After the context closes, a
recomputation is refused until the next forward, because it would differ from its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import PlanError, ShapeError, UsageError
from .values import Indices

__all__ = ["IndexTape", "Indexer", "impose", "record"]


@runtime_checkable
class Indexer(Protocol):
    """One indexer of a model: a module that selects the tokens that its layer attends to.

    `contrib.adapters.transformers.indexers(model)` returns the indexers of a model. A layer that
    uses the selection of another layer has no indexer.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose output is integers `[batch, tokens, width]`, the indices of keys."""

    @property
    def layer_id(self) -> int:
        """The index of the indexer's layer among all hidden layers of the model."""

    def filled(self, ids: Tensor) -> Tensor:
        """Convert ids with -1 at the end of rows to the form that the model's attention needs."""


class _Where:
    """The rows of a forward: their places in their documents, and the starts of the documents."""

    def __init__(self, positions: Any, starts: Any) -> None:
        self.positions, self.starts = (
            None if x is None else torch.as_tensor(x, dtype=torch.int64).cpu()
            for x in (positions, starts)
        )
        if (self.positions is None) != (self.starts is None):
            raise UsageError(
                "positions and starts belong together: pass sequence.positions(rank) and "
                "sequence.document_starts(rank), or neither for one document per row."
            )

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions and starts of the rows of `[batch, tokens, width]`, flattened."""
        batch, tokens = ids.shape[:2]
        if self.positions is None or self.starts is None:
            positions = torch.arange(tokens).repeat(batch)
            return positions, torch.zeros_like(positions)
        if not self.positions.shape == self.starts.shape == (batch * tokens,):
            raise ShapeError(
                f"an indexer ran on {batch} x {tokens} tokens; positions "
                f"{tuple(self.positions.shape)} and starts {tuple(self.starts.shape)} do not fit."
            )
        return self.positions, self.starts


@contextmanager
def record(
    indexers: Sequence[Indexer], *, positions: Any = None, starts: Any = None
) -> Iterator[IndexTape]:
    """Record the selection of one forward in a `with` block.

    If a layer runs again in the `with` block, the layer must select the same ids again. A
    recomputation by activation checkpointing usually selects the same ids, but a second forward of
    other tokens does not. Local. The ids stay on the device until you read `tape.indices`.

    Args:
        indexers: the indexers of the model.
        positions: integers `[rows]`, the position of each token in its document. By default, each
            row of the batch is one document.
        starts: integers `[rows]`, the index of the first key of each token's document. If documents
            are packed, or split over ranks, pass `positions` and `starts`.

    Raises:
        UsageError: `indexers` is empty, or only one of `positions` and `starts` is given.
        UsageError: raised by `tape.indices`, if a layer selected other ids when it ran again.
        ShapeError: raised by the forward, if an output is not integers `[batch, tokens, width]`, or
            `positions` and `starts` do not have one entry per token.
    """
    where = _Where(positions, starts)
    layers = [_Recorded(indexer, where) for indexer in _ordered(indexers)]
    handles = [layer.indexer.module.register_forward_hook(layer) for layer in layers]
    try:
        yield IndexTape(layers)
    finally:
        for handle in handles:
            handle.remove()


class IndexTape:
    """The recorded selection of one forward, by layer."""

    def __init__(self, layers: Sequence[_Recorded]) -> None:
        self._layers = layers

    @property
    def indices(self) -> Indices:
        """The recorded selection as positions inside documents, copied to the host.

        The result contains ids up to a token's own position. For the first tokens of a document,
        transformers also selects later ids, and masks them afterwards.

        Raises:
            UsageError: a layer has not run, or selected other ids when it ran again.
            ShapeError: the selections of the layers differ in the number of tokens or in width.
        """
        silent = [one.indexer.layer_id for one in self._layers if one.ids is None]
        changed = [one.indexer.layer_id for one in self._layers if one.changed]
        if silent or changed:
            raise UsageError(
                f"layers {silent} have not run, and layers {changed} selected other ids when they "
                "ran again. Record one forward, and read the tape after it."
            )
        found = [one.inside_documents() for one in self._layers]
        if len({ids.shape for ids in found}) != 1:
            raise ShapeError(f"layers differ in tokens or width: {[i.shape for i in found]}.")
        return Indices.from_array(
            np.stack(found, axis=1),
            layer_ids=[one.indexer.layer_id for one in self._layers],
            positions=self._layers[0].positions.numpy(),
        )


class _Recorded:
    """The forward hook of one indexer that records."""

    def __init__(self, indexer: Indexer, where: _Where) -> None:
        self.indexer, self._where = indexer, where
        self.ids: Any = None
        self.changed: Any = False
        self.positions = self.starts = torch.zeros(0, dtype=torch.int64)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        ids = _checked(self.indexer, output).detach()
        if self.ids is None:
            self.positions, self.starts = self._where.of(ids)
            self.ids = ids.to(torch.int32, copy=True)
            return
        same = ids.shape == self.ids.shape and bool((ids == self.ids).all())
        self.changed = self.changed or not same

    def inside_documents(self) -> np.ndarray:
        ids = self.ids.flatten(0, 1).cpu().long()
        inside = ids - self.starts[:, None]
        known = (ids >= 0) & (inside <= self.positions[:, None])
        found: np.ndarray = torch.where(known, inside, -1).to(torch.int32).numpy()
        return found


@contextmanager
def impose(
    indexers: Sequence[Indexer], indices: Indices, *, positions: Any = None, starts: Any = None
) -> Iterator[None]:
    """Make the indexers select the ids of `indices` while the `with` block is open.

    If a row is missing or has no ids, the model keeps its own selection for this row. A layer that
    runs again in the `with` block gets the same rows. Open one `with` block per micro-batch. With
    activation checkpointing, call backward inside of the block, because a recomputation after the
    block raises UsageError. Local. The ids are copied once to the device of each indexer.

    Args:
        indexers: the indexers of the model.
        indices: one row for each token of the micro-batch, in the order of the flattened batch.
        positions, starts: as in `record`.

    Raises:
        PlanError: `indices` and `indexers` are for different layers.
        ShapeError: raised by the forward, if `indices` and the batch differ in positions or in the
            number of tokens.
        UsageError: `indexers` is empty, an indexer already belongs to an open `impose` block, or
            only one of `positions` and `starts` is given.
        UsageError: raised at the end of the `with` block, if an indexer never ran. UsageError is
            also raised by backward, if a layer is recomputed after the `with` block.
    """
    ordered, where = _ordered(indexers), _Where(positions, starts)
    layer_ids = tuple(indexer.layer_id for indexer in ordered)
    if set(layer_ids) != set(indices.layer_ids):
        raise PlanError(
            f"the model selects in layers {layer_ids}, but the indices are for layers "
            f"{indices.layer_ids}. Pass the indexers of the recorded layers."
        )
    layers = [_Imposed(indexer, indices, where) for indexer in ordered]
    for layer in layers:
        hooks = layer.indexer.module._forward_hooks
        if any(isinstance(hook, _Imposed) for hook in hooks.values()):
            raise UsageError(
                f"layer {layer.indexer.layer_id} is already under impose. In a second context, a "
                "recomputation could not know its micro-batch. Close the first context before you "
                "open the second."
            )
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Closed)]:
            del hooks[key]
    handles = [layer.indexer.module.register_forward_hook(layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    silent = [layer.indexer.layer_id for layer in layers if not layer.ran]
    if silent:
        raise UsageError(f"layers {silent} never ran, so nothing was imposed on them.")
    for layer in layers:
        if layer.ran_with_grad:
            _Closed.on(layer.indexer)


class _Imposed:
    """The forward hook of one indexer that imposes read-only rows, also when it runs twice."""

    def __init__(self, indexer: Indexer, indices: Indices, where: _Where) -> None:
        self.indexer, self._where = indexer, where
        column = indices.layer_ids.index(indexer.layer_id)
        self._positions = torch.from_numpy(indices.positions.astype(np.int64))
        self._inside = torch.from_numpy(indices.ids[:, column].copy())
        self._rows: Tensor | None = None
        self.ran = self.ran_with_grad = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        own = _checked(self.indexer, output)
        rows = self._places(own)
        self.ran = True
        self.ran_with_grad = self.ran_with_grad or torch.is_grad_enabled()
        width = max(own.shape[2], rows.shape[1])
        theirs = _widened(rows, width).view(*own.shape[:2], width)
        kept = self.indexer.filled(_widened(own.flatten(0, 1), width)).view_as(theirs)
        known = theirs[..., :1] >= 0
        imposed = self.indexer.filled(theirs.flatten(0, 1)).view_as(theirs)
        return torch.where(known, imposed, kept).to(own.dtype)

    def _places(self, own: Tensor) -> Tensor:
        """Return places of keys, `[rows, top_k]`, on the device, equal at every run."""
        if self._rows is not None and self._rows.shape[0] == own.shape[0] * own.shape[1]:
            return self._rows
        positions, starts = self._where.of(own)
        if positions.shape != self._positions.shape:
            raise ShapeError(
                f"layer {self.indexer.layer_id} runs on {len(positions)} tokens, but the indices "
                f"hold {len(self._positions)}. Fill up with indices.with_missing(after=...)."
            )
        known = self._inside[:, 0] >= 0
        if not torch.equal(positions[known], self._positions[known]):
            raise ShapeError(
                f"layer {self.indexer.layer_id}: the positions of the indices differ from those "
                "of the batch. Order the indices like the rows of the batch: "
                "indices.take(sequence.indices(rank))."
            )
        ids = self._inside.long()
        rows = torch.where(ids >= 0, ids + starts[:, None], -1)
        self._rows = rows.to(own.device, own.dtype)
        return self._rows


class _Closed:
    """The forward hook after a context. It refuses a recomputation until the next forward."""

    def __init__(self, layer_id: int) -> None:
        self._layer_id = layer_id
        self._handle: Any = None

    @classmethod
    def on(cls, indexer: Indexer) -> None:
        hook = cls(indexer.layer_id)
        hook._handle = indexer.module.register_forward_hook(hook)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # torch's checkpoints detect recomputation in this way: only autograd has graph tasks.
        if torch._C._current_graph_task_id() != -1:
            raise UsageError(
                f"layer {self._layer_id} is recomputed after its impose context was closed, and "
                "may select other tokens than in forward. Call backward inside the context."
            )
        self._handle.remove()


def _ordered(indexers: Sequence[Indexer]) -> list[Indexer]:
    if isinstance(indexers, nn.Module):
        raise UsageError(
            f"pass the indexers of the model, not the {type(indexers).__name__} itself: "
            "contrib.adapters.transformers.indexers(model)."
        )
    ordered = sorted(indexers, key=lambda indexer: indexer.layer_id)
    if not ordered:
        raise UsageError("the list of indexers is empty, so there are no selections to replay.")
    return ordered


def _checked(indexer: Indexer, output: Any) -> Tensor:
    sound = isinstance(output, Tensor) and output.ndim == 3
    if not sound or output.dtype not in (torch.int32, torch.int64):
        shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ShapeError(
            f"layer {indexer.layer_id}: an indexer must return integers [batch, tokens, width]; "
            f"got {shown}."
        )
    found: Tensor = output
    return found


def _widened(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1)
