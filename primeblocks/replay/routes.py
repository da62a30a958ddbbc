"""Expert choices as a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
import torch

from ..errors import ShapeError, UsageError
from . import codec
from .codec import Bytes

__all__ = ["Routes", "read_only"]


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts that routers chose for each token in each mixture-of-experts layer.

    The arrays are read-only numpy arrays on the host. A slice is a view. Without `onto`, `unpack`
    does not copy the experts.

    Args:
        experts: expert ids `[tokens, layers, top_k]`, uint8 for up to 256 experts, else uint16. The
            dtype depends only on `num_experts`, so that parts of one sequence can always be joined.
        num_experts: the number of experts in each layer.
        layer_ids: for each layer in `experts`, its index among all hidden layers.
        missing: bool `[tokens]`, True if the choice is unknown. Missing rows have zeros.
        padding: bool `[tokens]`, True for tokens that `pad` added. The default is False for all
            tokens. `compare` does not count padding, and `impose(min_score_ratio=)` does not change
            the experts of padding.

    Raises:
        ShapeError: shapes or dtypes do not fit together. The values are not read: use
            `from_array` for unchecked data.
    """

    experts: np.ndarray
    num_experts: int
    layer_ids: tuple[int, ...]
    missing: np.ndarray
    padding: np.ndarray = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        dtype = codec.expert_dtype(self.num_experts)
        if self.experts.ndim != 3 or self.experts.dtype != dtype:
            raise ShapeError(
                f"experts must be {dtype} [tokens, layers, top_k] for {self.num_experts} experts;"
                f" got {self.experts.dtype} {list(self.experts.shape)}. Use Routes.from_array."
            )
        tokens, layers, top_k = self.experts.shape
        if not 1 <= top_k <= self.num_experts:
            raise ShapeError(f"top_k must be in 1..{self.num_experts}; got {top_k}")
        if len(self.layer_ids) != layers or len(set(self.layer_ids)) != layers:
            raise ShapeError(f"{layers} layers need as many distinct ids; got {self.layer_ids}")
        if self.padding is None:
            object.__setattr__(self, "padding", np.broadcast_to(np.False_, tokens))
        for name, mask in (("missing", self.missing), ("padding", self.padding)):
            codec.check_mask(name, mask, tokens)
            object.__setattr__(self, name, read_only(mask))
        object.__setattr__(self, "experts", read_only(self.experts))

    @classmethod
    def from_array(
        cls,
        array: np.ndarray,
        *,
        num_experts: int,
        layer_ids: Sequence[int],
        missing: np.ndarray | None = None,
    ) -> Routes:
        """Check expert ids, and return them as routes. Local. Reads every id.

        The array is not copied if its dtype fits and no row is missing. Do not write to the array
        after this call.

        Raises:
            ShapeError: the array is not integers `[tokens, layers, top_k]`, or `layer_ids` or
                `missing` do not fit the array.
            UsageError: an id is out of range, or one row contains an expert twice.
        """
        experts, missing = codec.checked_experts(array, num_experts, missing)
        return cls(experts, num_experts, codec.checked_ids(layer_ids), missing)

    @property
    def tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def known(self) -> int:
        """The number of tokens that are neither missing nor padding."""
        return self.tokens - int((self.missing | self.padding).sum())

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    @property
    def nbytes(self) -> int:
        return self.experts.nbytes + self.missing.nbytes

    def __len__(self) -> int:
        return self.tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routes):
            return NotImplemented
        return (
            self.num_experts == other.num_experts
            and self.layer_ids == other.layer_ids
            and np.array_equal(self.experts, other.experts)
            and np.array_equal(self.missing, other.missing)
            and np.array_equal(self.padding, other.padding)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Routes(tokens={self.tokens}, layer_ids={self.layer_ids}, top_k={self.top_k},"
            f" num_experts={self.num_experts}, missing={int(self.missing.sum())},"
            f" padding={int(self.padding.sum())})"
        )

    def __getitem__(self, tokens: slice) -> Routes:
        """`routes[a:b]`: a view of these tokens."""
        if isinstance(tokens, Integral):
            end = int(tokens) + 1 or ""
            raise UsageError(f"{tokens} is not a slice. For one token: routes[{tokens}:{end}]")
        return self._with(self.experts[tokens], self.missing[tokens], self.padding[tokens])

    @staticmethod
    def join(parts: Iterable[Routes], *, pad_to: int | None = None) -> Routes:
        """Join parts along the tokens, in one copy.

        Padding rows choose the experts in turn across all parts, so that experts get equal work.

        Args:
            pad_to: the number of tokens to which each part is padded, for rows of one length.

        Raises:
            ShapeError: the parts come from different models, `parts` is empty, or `pad` refuses
                `pad_to`.
        """
        parts = list(parts)
        if pad_to is not None:
            parts = [piece for part in parts for piece in part._filled_up(pad_to)]
        if not parts:
            raise ShapeError(
                "cannot join an empty list, because it has no layers. Pass routes[0:0]."
            )
        first = parts[0]
        for part in parts[1:]:
            if part._model != first._model:
                raise ShapeError(f"{part} does not continue {first}")
        if len(parts) == 1:
            return first
        experts = np.concatenate([part.experts for part in parts])
        padding = np.concatenate([part.padding for part in parts])
        rows = np.flatnonzero(padding)
        if rows.size and experts.size:
            experts[rows] = first._turns(len(rows), start=int(experts[rows[0], 0, 0]))[:, None]
        return first._with(experts, np.concatenate([part.missing for part in parts]), padding)

    def split(self, lengths: Sequence[int]) -> list[Routes]:
        """Split the routes into views of consecutive tokens. Inverse of `join`.

        Raises:
            ShapeError: the lengths do not add up to the number of tokens.
        """
        if sum(lengths) != self.tokens or any(length < 0 for length in lengths):
            raise ShapeError(
                f"lengths add up to {sum(lengths)}, but the routes have {self.tokens} tokens. Pad "
                "the routes first, or correct the lengths."
            )
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return [self[end - n : end] for n, end in zip(lengths, ends, strict=True)]

    def extend(self, newer: Routes, *, start: int) -> Routes:
        """Join the tokens before `start` with all tokens of `newer`, the next turn.

        The last sampled token of a turn gets its row in the next turn. So in the next turn, an
        engine sends rows from `start = self.tokens - 1` on. One copy.

        Raises:
            ShapeError: `start` leaves a gap before `newer`, or the routes come from different
                models.
        """
        if not 0 <= start <= self.tokens:
            raise ShapeError(
                f"rows from token {start} on do not continue {self.tokens} tokens. Add the tokens"
                " between with with_missing(after=)."
            )
        return Routes.join([self[:start], newer])

    def fill(self, other: Routes) -> Routes:
        """Keep known rows, and copy missing rows from `other`, which has the same tokens.

        If `self` and `other` both know a row, the row of `self` is kept. With prefill and decode on
        different engines, call `fill` on the routes of the decode engine, because decoding used
        that engine's KV cache. One copy.

        Raises:
            ShapeError: `self` and `other` belong to different tokens or models.
        """
        if other._model != self._model or other.tokens != self.tokens:
            raise ShapeError(f"{other} is not of the same tokens and model as {self}")
        experts = np.where(self.missing[:, None, None], other.experts, self.experts)
        padding = np.where(self.missing, other.padding, self.padding)
        return self._with(experts, self.missing & other.missing, padding)

    def with_missing(self, *, before: int = 0, after: int = 0) -> Routes:
        """Add tokens whose choices are unknown.

        Pass `after=1` for the last sampled token, and `before=` for a prompt without recorded rows.

        Raises:
            ShapeError: `before` or `after` is negative.
        """
        if before < 0 or after < 0:
            raise ShapeError(f"cannot add {before} and {after} missing tokens")
        experts = np.pad(self.experts, ((before, after), (0, 0), (0, 0)))
        missing = np.pad(self.missing, (before, after), constant_values=True)
        return self._with(experts, missing, np.pad(self.padding, (before, after)))

    def pad(self, tokens: int) -> Routes:
        """Pad to `tokens` with rows that choose all experts in turn, for padding tokens only.

        The model would compute a real token in these rows with arbitrary experts. For real tokens
        without a route, call `with_missing` on each sequence.

        The ids in neighbouring slots are far apart, so even a few rows give work to many ranks of
        an expert-parallel group. If these routes contain several sequences, all padding rows follow
        the last sequence. For a batch with rows of one length, use `join(pad_to=)`.

        Raises:
            ShapeError: `tokens` is not a whole number, or these routes have more tokens.
        """
        return Routes.join(self._filled_up(tokens))

    def take(self, order: np.ndarray | Sequence[int]) -> Routes:
        """Return the routes of the tokens at `order`, such as a context-parallel rank's tokens.

        Args:
            order: indices, or a bool mask `[tokens]` that is True for tokens to keep.

        Raises:
            ShapeError: an index is out of range or not an integer, or the mask has a wrong length.
        """
        index = np.asarray(order)
        if index.dtype == np.bool_ and index.shape == (self.tokens,):
            index = np.flatnonzero(index)
        whole = index.size == 0 or index.dtype.kind in "iu"
        if (
            index.ndim != 1
            or not whole
            or (index.size and not 0 <= index.min() <= index.max() < self.tokens)
        ):
            raise ShapeError(
                f"an order must be a list of indices in 0..{self.tokens - 1} or a bool mask"
                f" [{self.tokens}]; got {index.dtype} {list(index.shape)}"
            )
        index = index.astype(np.int64)
        return self._with(self.experts[index], self.missing[index], self.padding[index])

    def select_layers(self, layer_ids: Sequence[int]) -> Routes:
        """Return the routes of `layer_ids`, in this order, for example for a pipeline stage.

        Raises:
            ShapeError: a layer is not recorded.
        """
        unknown = [i for i in layer_ids if i not in self.layer_ids]
        if unknown:
            raise ShapeError(f"layers {unknown} are not among the recorded {self.layer_ids}")
        columns = [self.layer_ids.index(i) for i in layer_ids]
        experts = self.experts[:, columns]
        return Routes(experts, self.num_experts, tuple(layer_ids), self.missing, self.padding)

    def tensor(self, *, batch: int = 1) -> torch.Tensor:
        """Return int16 `[batch, sequence, layers, top_k]`, for `routed_experts` of `follow`.

        With 2**15 experts or more, the dtype is int32. A missing row has -1 in every element.
        Local. Copies the ids once, on the host.

        Raises:
            ShapeError: the tokens are not `batch` rows of one length.
        """
        whole = isinstance(batch, Integral) and not isinstance(batch, bool)
        if not whole or batch < 1 or self.tokens % batch:
            raise ShapeError(
                f"{self.tokens} tokens cannot be split into {batch!r} rows of one length. "
                "Routes.join(rows, pad_to=width) pads all rows to one length."
            )
        ids = self.experts.astype(np.int16 if self.num_experts < 1 << 15 else np.int32)
        ids[self.missing] = -1
        return torch.from_numpy(ids).view(batch, self.tokens // batch, *ids.shape[1:])

    def pack(self, *, start: int = 0) -> memoryview:
        """Return one self-describing, checksummed buffer. See `codec`. Local. One copy.

        The result is a memoryview. To pickle the result, convert it with `bytes(...)`.

        Args:
            start: the first token to pack. `unpack(onto=)` joins these rows to the earlier rows.

        Raises:
            ShapeError: `start` is negative or above the number of tokens.
        """
        if not 0 <= start <= self.tokens:
            raise ShapeError(f"start must be in 0..{self.tokens}; got {start}")
        return codec.encode(
            self.experts[start:],
            self.missing[start:],
            self.padding[start:],
            self.num_experts,
            self.layer_ids,
            start=start,
        )

    @classmethod
    def unpack(cls, payload: Bytes, *, onto: Routes | None = None) -> Routes:
        """Return the routes that `pack` packed. Without `onto`, experts are a view of `payload`.

        Args:
            onto: the routes of the earlier tokens, if the payload does not start at token 0. With
                `onto`, the call copies the experts.

        Raises:
            CorruptionError: a byte was changed, added or lost, or an id is out of range.
            UnsupportedError: the payload has an unknown format version.
            UsageError: the payload does not start at token 0, and `onto` is missing.
            ShapeError: the payload does not continue `onto`.
        """
        values, start = codec.decode(payload)
        routes = cls(*values)
        if onto is not None:
            return onto.extend(routes, start=start)
        if start:
            raise UsageError(
                f"these rows start at token {start}. Pass the routes of the earlier tokens as "
                "onto=."
            )
        return routes

    @property
    def _model(self) -> tuple[object, ...]:
        return self.num_experts, self.layer_ids, self.top_k

    def _with(self, experts: np.ndarray, missing: np.ndarray, padding: np.ndarray) -> Routes:
        return Routes(experts, self.num_experts, self.layer_ids, missing, padding)

    def _filled_up(self, tokens: int) -> list[Routes]:
        """Return this value and padding up to `tokens`. `join` sets the experts of the padding."""
        if not isinstance(tokens, Integral) or tokens < self.tokens:
            raise ShapeError(
                f"cannot pad {self.tokens} tokens to {tokens!r}. Pass a whole number from"
                f" {self.tokens} up, or slice instead."
            )
        extra = int(tokens) - self.tokens
        if extra == 0:
            return [self]
        rows = np.broadcast_to(self.experts.dtype.type(0), (extra, *self.experts.shape[1:]))
        known, added = np.zeros(extra, dtype=np.bool_), np.ones(extra, dtype=np.bool_)
        return [self, self._with(rows, known, added)]

    def _turns(self, rows: int, *, start: int) -> np.ndarray:
        """`[rows, top_k]`: every expert once before any expert repeats, from `start` on."""
        order = _far_apart(self.num_experts)
        first = np.flatnonzero(order == start)[0]
        turns = (first + np.arange(rows * self.top_k)) % self.num_experts
        return order[turns].reshape(rows, self.top_k).astype(self.experts.dtype)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written. Local."""
    view = array.view()
    view.flags.writeable = False
    return view


@lru_cache
def _far_apart(num_experts: int) -> np.ndarray:
    """All experts, ordered by their reversed bits as in van der Corput's sequence."""
    bits = (num_experts - 1).bit_length()
    index = np.arange(1 << bits)
    turned = sum(((index >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)) + 0 * index
    return turned[turned < num_experts]
