"""Rollouts concatenated into packs, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ...attachments import Aligned, parts
from ...errors import ShapeError, UsageError
from ...rollout import Rollout

__all__ = ["Pack", "pack", "unpack"]

_PACKED = {"tokens", "prompt_length", "logprobs", "versions", "loss_mask", "attachments"}


@dataclass(frozen=True, eq=False)
class Pack:
    """A micro-batch of concatenated rollouts.

    Arrays of *tokens* have a row per token, including prompts and padding. Arrays of *completions*
    (`logprobs`, `versions`, `loss_mask`) have a row per completion token, rollout after rollout.
    Pass the arrays of tokens to the model. The head and the loss need only the arrays of
    completions, because `hidden[pack.predictors]` predicts `pack.targets`.

    Attributes:
        indices: positions of the rollouts in the batch.
        tokens: ids. Padding is 0.
        positions: the position of each token in its rollout.
        cu_seqlens: the start of each sequence, then the end of the last sequence. If there is
            padding, padding is the last sequence.
        padding: the number of padding tokens after the last rollout.
        per_token: attachments with a row per token. The rows of padding are zeros.
        per_completion: attachments with a row per completion token.
        others: for each rollout, the remaining values: reward, prompt_id and other attachments,
            such as images.
    """

    indices: tuple[int, ...]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    prompt_lengths: NDArray[np.int64]
    padding: int
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    per_token: Mapping[str, Any]
    per_completion: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...]

    @property
    def document_lengths(self) -> list[int]:
        """The lengths of all sequences in tokens, including padding, for `plan_sequence`."""
        return np.diff(self.cu_seqlens).tolist()

    @property
    def completion_lengths(self) -> NDArray[np.int64]:
        """Number of completion tokens in each rollout."""
        return np.diff(self.cu_seqlens)[: len(self.indices)] - self.prompt_lengths

    @property
    def predictors(self) -> NDArray[np.int64]:
        """For each completion token, the index in the pack of the token before it."""
        starts = self.cu_seqlens[: len(self.indices)].astype(np.int64) + self.prompt_lengths - 1
        lengths = self.completion_lengths
        before = np.cumsum(lengths) - lengths
        return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)

    @property
    def targets(self) -> NDArray[np.int64]:
        """Ids of the completion tokens."""
        return self.tokens[self.predictors + 1]

    def split(self, values: Any) -> list[Any]:
        """Split an array of completions, such as new log-probabilities, into one view per rollout.

        Raises:
            ShapeError: `values` does not have a row per completion token.
        """
        self._check_rows(values)
        counts = self.completion_lengths.tolist()
        ends = np.cumsum(counts, dtype=np.int64).tolist()
        return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _check_rows(self, values: Any) -> None:
        rows = len(self.logprobs)
        if len(values) != rows:
            raise ShapeError(
                f"values must have {rows} rows, one per completion token; got "
                f"{list(np.shape(values))}. For a batch [1, tokens], pass values[0]."
            )

    def aligned(self, name: str) -> list[Aligned]:
        """Return the `Aligned` attachments `name`, such as images, with positions in this pack.

        The values are in the order of their tokens, as models expect. Rollouts without `name` are
        allowed.

        Raises:
            UsageError: `name` is in `per_token` or `per_completion`, or a value called `name` is
                not `Aligned`.
        """
        found = []
        # Padding, the last sequence, has no values.
        for start, other in zip(self.cu_seqlens.tolist(), self.others, strict=False):
            for each in parts(other["attachments"].get(name, ())):
                if name in {*self.per_token, *self.per_completion} or not isinstance(each, Aligned):
                    raise UsageError(
                        f"{name!r} does not belong to tokens of the pack. Read it from per_token, "
                        "per_completion or others, or attach it as Aligned(value, start, stop)."
                    )
                found.append(replace(each, start=each.start + start, stop=each.stop + start))
        return sorted(found, key=lambda each: each.start)

    def at_predictors(self, values: ArrayLike, *, fill: Any) -> NDArray:
        """Move the row of each completion token to the token before. Other tokens get `fill`.

        The result is an array with a row per token of the pack. For a sequence that ranks share,
        `pack.at_predictors(pack.targets, fill=-100)` returns labels.

        Raises:
            ShapeError: `values` does not have a row per completion token.
        """
        self._check_rows(values := np.asarray(values))
        out = np.full((len(self.tokens), *values.shape[1:]), fill, dtype=values.dtype)
        out[self.predictors] = values
        return out


def pack(
    rollouts: Sequence[Rollout],
    indices: Sequence[int],
    *,
    per_token: Sequence[str] = (),
    per_completion: Sequence[str] = (),
    multiple_of: int = 1,
) -> Pack:
    """Concatenate the rollouts of a micro-batch. Pure, copies.

    Args:
        rollouts: the batch.
        indices: the indices of the rollouts to pack, such as a micro-batch of a plan. If
            `indices` is empty, the pack contains only padding, so a rank without rollouts can still
            take part in collectives. An attachment then has the dtype and the row shape of the
            first rollout of the batch with this attachment.
        per_token: names of attachments with a row per token. The attachments are arrays, tensors or
            `Aligned.rows`. If `Aligned.rows` lack the row of the last token, the last token gets
            zeros. For routes, where 0 is an expert, join `Routes` with `Routes.with_missing`.
        per_completion: names of attachments with a row per completion token. Attachments that are
            in neither `per_token` nor `per_completion` become part of `others`.
        multiple_of: the pack is padded to a multiple of `multiple_of` tokens, and to at least
            `multiple_of` tokens.

    Raises:
        ShapeError: an attachment has a wrong number of rows, or its dtype or trailing dims differ
            between rollouts.
        UsageError: an attachment is missing or named twice, an index is outside the batch, or
            `multiple_of` is below 1.
    """
    if multiple_of < 1:
        raise UsageError(f"multiple_of must be at least 1; got {multiple_of}.")
    if len({*per_token, *per_completion}) < len(per_token) + len(per_completion):
        raise UsageError(
            "per_token and per_completion name an attachment twice: "
            f"{[*per_token, *per_completion]}"
        )
    indices = [*indices]
    if outside := [i for i in indices if not 0 <= i < len(rollouts)]:
        raise UsageError(f"a batch of {len(rollouts)} rollouts does not have indices {outside}.")
    chosen = [rollouts[i] for i in indices]
    lengths = [len(rollout.tokens) for rollout in chosen]
    total = max(-(-sum(lengths) // multiple_of), 1) * multiple_of
    padding = total - sum(lengths)
    segments = [*lengths, padding] if padding else lengths
    named = {*per_token, *per_completion}
    return Pack(
        indices=tuple(int(i) for i in indices),
        tokens=_joined([rollout.tokens for rollout in chosen], np.int64, padding),
        positions=_joined([np.arange(n) for n in segments], np.int64),
        cu_seqlens=np.cumsum([0, *segments], dtype=np.int32),
        prompt_lengths=np.array([rollout.prompt_length for rollout in chosen], dtype=np.int64),
        padding=padding,
        logprobs=_joined([rollout.logprobs for rollout in chosen], np.float64),
        versions=_joined([rollout.versions for rollout in chosen], np.int64),
        loss_mask=_joined([rollout.loss_mask for rollout in chosen], np.bool_),
        per_token=_attached(rollouts, chosen, per_token, lambda each: len(each.tokens), padding),
        per_completion=_attached(rollouts, chosen, per_completion, lambda x: len(x.logprobs), 0),
        others=tuple(_others(rollout, named) for rollout in chosen),
    )


def unpack(packed: Pack) -> list[Rollout]:
    """Return the rollouts, in the order of `packed.indices`. Inverse of `pack`. Pure."""
    starts = packed.cu_seqlens.tolist()
    logprobs, versions = packed.split(packed.logprobs), packed.split(packed.versions)
    masks = packed.split(packed.loss_mask)
    sampled = {name: packed.split(rows) for name, rows in packed.per_completion.items()}
    found = []
    for i, prompt_length in enumerate(packed.prompt_lengths.tolist()):
        own = slice(starts[i], starts[i + 1])
        whole = dict(packed.others[i])
        rows = {name: values[own] for name, values in packed.per_token.items()}
        rows |= {name: parts[i] for name, parts in sampled.items()}
        kept = whole.pop("attachments")
        # In their original order.
        attachments = {
            name: _unrows(rows[name], value) if name in rows else value
            for name, value in kept.items()
        }
        found.append(
            Rollout(
                tokens=packed.tokens[own],
                prompt_length=prompt_length,
                logprobs=logprobs[i],
                versions=versions[i],
                loss_mask=masks[i],
                attachments=attachments,
                **whole,
            )
        )
    return found


def _others(rollout: Rollout, named: set[str]) -> Mapping[str, Any]:
    whole = {x.name: getattr(rollout, x.name) for x in fields(rollout) if x.name not in _PACKED}
    kept = {name: _place(x) if name in named else x for name, x in rollout.attachments.items()}
    return MappingProxyType({**whole, "attachments": kept})


def _place(value: Any) -> tuple[int, int] | None:
    return (value.start, value.stop) if isinstance(value, Aligned) else None


def _rows(value: Any, count: int, name: str) -> Any:
    """Return rows for all tokens. The last token may lack its row: no engine computed it."""
    if not isinstance(value, Aligned) or not value.by_token:
        return value
    if value.start or value.stop < count - 1:
        raise ShapeError(
            f"{name!r} must have rows for {count} tokens, or all but the last; got rows of tokens "
            f"[{value.start}, {value.stop})."
        )
    rows, missing = value.value, count - value.stop
    if not missing:
        return rows
    if isinstance(rows, torch.Tensor):
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])


def _unrows(rows: Any, place: tuple[int, int] | None) -> Any:
    return rows if place is None else Aligned.rows(rows[slice(*place)], start=place[0])


def _joined(parts: Sequence[NDArray], dtype: Any, padding: int = 0) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *parts, np.zeros(padding, dtype)], dtype=dtype)


def _attached(
    batch: Sequence[Rollout],
    chosen: Sequence[Rollout],
    names: Sequence[str],
    rows: Callable[[Rollout], int],
    padding: int,
) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        # Padding has the dtype and the row shape of the batch.
        shapes = chosen or [each for each in batch if name in each.attachments][:1]
        if not shapes:
            continue
        parts: list[Any] = []
        for rollout in shapes:
            count = rows(rollout)
            if name not in rollout.attachments:
                raise UsageError(
                    f"a rollout of prompt {rollout.prompt_id!r} has no attachment {name!r}; it has "
                    f"{list(rollout.attachments)}."
                )
            part = rollout.attachments[name]
            if count == len(rollout.tokens):  # Not for `per_completion`, which has its own rows.
                part = _rows(part, count, name)
            if not isinstance(part, np.ndarray | torch.Tensor) or not part.ndim:
                raise ShapeError(f"{name!r} must be an array or a tensor; got {type(part)}.")
            if len(part) != count:
                raise ShapeError(
                    f"{name!r} must have {count} rows; got {list(part.shape)}. per_token needs "
                    "one row per token, and per_completion one row per completion token. Do not "
                    "name other attachments."
                )
            parts.append(part)
        kinds = {(type(part), part.dtype, tuple(part.shape[1:])) for part in parts}
        if len(kinds) > 1:
            raise ShapeError(
                f"{name!r} must have one type, dtype and row shape; got {sorted(map(str, kinds))}."
            )
        shape = (padding, *parts[0].shape[1:])
        if isinstance(parts[0], torch.Tensor):
            found[name] = torch.cat([*parts[: len(chosen)], parts[0].new_zeros(shape)])
        else:
            ends = np.zeros(shape, parts[0].dtype)
            found[name] = np.concatenate([*parts[: len(chosen)], ends])
    return MappingProxyType(found)
