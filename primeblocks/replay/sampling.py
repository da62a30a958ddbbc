"""The tokens from which sampling could choose, and log-probabilities among these tokens.

Temperature, top-k and top-p change the policy. The trainer renormalises over the ids that the
engine kept, because otherwise the measured mismatch would include this change of the policy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch

from ..errors import CorruptionError, ShapeError, UsageError
from .codec import Bytes, seal, unseal
from .routes import read_only

__all__ = ["KeptTokens", "kept_logprobs", "kept_tokens"]

_KIND, _FORMAT = b"PBKT", 2
_SIZES = struct.Struct("<QQQ")


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The vocabulary ids that top-k, top-p and similar filters kept for each token.

    The object is read-only, and its arrays are in CPU memory. The ids of all tokens are in one
    array, as in a CSR matrix: token `t` has `ids[offsets[t]:offsets[t + 1]]`, in ascending order.
    A token without ids has no mask: the token was sampled from the whole vocabulary, belongs to a
    prompt, or has unknown ids.

    Args:
        ids: int32 `[kept]`.
        offsets: int64 `[tokens + 1]`, from 0 to `kept`.
        vocab_size: the number of ids in the vocabulary.

    Raises:
        ShapeError: shapes or dtypes do not fit together. The constructor does not check values. For
            unchecked data, use `from_lists` or `from_arrays`.
    """

    ids: np.ndarray
    offsets: np.ndarray
    vocab_size: int

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int32:
            raise ShapeError(f"ids must be int32 [kept]; got {_kind(self.ids)}")
        if self.offsets.ndim != 1 or self.offsets.dtype != np.int64 or not len(self.offsets):
            raise ShapeError(f"offsets must be int64 [tokens + 1]; got {_kind(self.offsets)}")
        object.__setattr__(self, "ids", read_only(self.ids))
        object.__setattr__(self, "offsets", read_only(self.offsets))

    @classmethod
    def from_lists(cls, sets: Iterable[Sequence[int]], *, vocab_size: int) -> KeptTokens:
        """Return kept tokens from one list of kept ids per token.

        The ids of a list may have any order. vLLM returns the lists as
        `output.sampling_mask.token_ids`.

        Raises:
            ShapeError, UsageError: as for `from_arrays`.
        """
        rows = [np.asarray(row) for row in sets]
        if strange := [row for row in rows if row.ndim != 1]:
            raise ShapeError(f"each token needs a list of ids; got {_kind(strange[0])}")
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        full = [row for row in rows if len(row)]  # An empty list would become an array of floats.
        ids = np.concatenate(full) if full else np.zeros(0, dtype=np.int64)
        return cls.from_arrays(ids, offsets, vocab_size=vocab_size)

    @classmethod
    def from_arrays(cls, ids: np.ndarray, offsets: np.ndarray, *, vocab_size: int) -> KeptTokens:
        """Check and sort compressed rows, and return them as kept tokens.

        Raises:
            ShapeError: `ids` or `offsets` are not one-dimensional integers.
            UsageError: offsets do not rise from 0 to the number of ids, an id is out of range, or
                a row repeats an id.
        """
        ids, offsets = np.asarray(ids), np.asarray(offsets)
        for name, array in (("ids", ids), ("offsets", offsets)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ShapeError(f"{name} must be one-dimensional integers; got {_kind(array)}")
        lengths = np.diff(offsets.astype(np.int64))
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (lengths < 0).any():
            raise UsageError(f"offsets must rise from 0 to {len(ids)}, the number of ids")
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise UsageError(
                f"ids reach from {ids.min()} to {ids.max()}, outside 0..{vocab_size - 1}"
            )
        rows = np.repeat(np.arange(len(lengths)), lengths)
        order = np.lexsort((ids, rows))
        ids = ids[order].astype(np.int32)
        twice = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
        if twice.any():
            at = int(twice.argmax())
            raise UsageError(f"token {rows[at]} keeps the id {ids[at]} twice")
        return cls(ids, offsets.astype(np.int64), vocab_size)

    @property
    def tokens(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """int64 `[tokens]`: the number of ids that each token keeps, or 0 without a mask."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return self.tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptTokens):
            return NotImplemented
        return (
            self.vocab_size == other.vocab_size
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        masked = int((self.counts > 0).sum())
        return (
            f"KeptTokens(tokens={self.tokens}, masked={masked}, kept={len(self.ids)},"
            f" vocab_size={self.vocab_size})"
        )

    def __getitem__(self, tokens: slice) -> KeptTokens:
        """`kept[a:b]`: a range of tokens. Ids are a view."""
        if isinstance(tokens, Integral):
            end = int(tokens) + 1 or ""
            raise UsageError(f"{tokens} is not a slice. For one token: kept[{tokens}:{end}]")
        first, last, step = tokens.indices(self.tokens)
        if step != 1:
            raise ShapeError(f"kept tokens can only be sliced with step 1; got {step}")
        offsets = self.offsets[first : max(first, last) + 1]
        return KeptTokens(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0], self.vocab_size)

    @staticmethod
    def join(parts: Iterable[KeptTokens]) -> KeptTokens:
        """Join parts along the tokens.

        Raises:
            ShapeError: vocabularies differ, or `parts` is empty.
        """
        parts = list(parts)
        if len({part.vocab_size for part in parts}) != 1:
            raise ShapeError(
                f"{len(parts)} parts do not share one vocabulary. Pass at least one part, all of "
                "one vocabulary."
            )
        counts = np.concatenate([part.counts for part in parts])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return KeptTokens(
            np.concatenate([part.ids for part in parts]), offsets, parts[0].vocab_size
        )

    def pack(self) -> memoryview:
        """Return one checksummed buffer. Local. Each count and each id has four bytes."""
        sizes = _SIZES.pack(self.vocab_size, self.tokens, len(self.ids))
        return seal(_KIND, _FORMAT, (sizes, self.counts.astype("<u4"), self.ids.astype("<u4")))

    @classmethod
    def unpack(cls, payload: Bytes) -> KeptTokens:
        """Return the kept tokens that `pack` packed.

        Raises:
            CorruptionError: a byte was changed, added or lost.
            UnsupportedError: the payload has an unknown format version.
        """
        body = unseal(payload, kind=_KIND, format_version=_FORMAT)
        if len(body) < _SIZES.size:
            raise CorruptionError(f"a body of {len(body)} bytes cannot hold the sizes")
        vocab_size, tokens, kept = _SIZES.unpack_from(body)
        if len(body) != _SIZES.size + 4 * (tokens + kept):
            raise CorruptionError(f"{len(body)} bytes do not hold {tokens} tokens, {kept} ids")
        values = np.frombuffer(body[_SIZES.size :], "<u4").astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(values[:tokens])])
        return cls.from_arrays(values[tokens:], offsets, vocab_size=vocab_size)


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


def kept_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, kept: KeptTokens, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probability of each target among the ids that its token kept.

    Computes in float32, or in float64 for float64 logits, without a `[tokens, vocab]` mask.
    Gradients reach only kept ids. For a token without ids in `kept`, the log-probability is over
    the whole vocabulary. Local. Differentiable. On a GPU, the host waits for the device several
    times.

    Args:
        logits: the logits `[tokens, vocab]`, before division by the temperature.
        targets: the sampled ids, `[tokens]`.
        kept: one row per token.
        temperature: the number by which the engine divided its logits.

    Returns:
        `[tokens]`.

    Raises:
        ShapeError: `logits`, `targets` and `kept` differ in tokens or vocabulary.
        UsageError: the temperature is not positive, or a target is not among the kept ids or not in
            the vocabulary.

    Source: DeepSeek-V3.2, "Keep Sampling Mask".
    """
    tokens, vocab = _check(logits, temperature)
    if targets.shape != (tokens,) or kept.tokens != tokens or kept.vocab_size != vocab:
        raise ShapeError(
            f"logits {list(logits.shape)} need one target and one kept row per token, of the same "
            f"vocabulary; got targets {list(targets.shape)} and {kept}"
        )
    outside = ((targets < 0) | (targets >= vocab)).nonzero()
    if len(outside):
        first = int(outside[0])
        raise UsageError(
            f"the target of token {first} is {int(targets[first])}, outside 0..{vocab - 1}. Select "
            "the sampled tokens of logits, targets and kept first."
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = logits.gather(1, targets[:, None])[:, 0].to(dtype) / temperature
    masked = np.flatnonzero(kept.counts)
    free = np.flatnonzero(kept.counts == 0)
    normaliser = torch.zeros_like(chosen)
    if len(free):
        at = torch.from_numpy(free).to(logits.device)
        whole = (logits[at].to(dtype) / temperature).logsumexp(-1)
        normaliser = normaliser.index_copy(0, at, whole)
    if len(masked):
        at = torch.from_numpy(masked).to(logits.device)
        lengths = torch.from_numpy(kept.counts[masked]).to(logits.device)
        rows = torch.repeat_interleave(at, lengths)
        ids = torch.from_numpy(kept.ids.astype(np.int64)).to(logits.device)
        _check_targets(ids == targets[rows], lengths, at)
        scores = logits[rows, ids].to(dtype) / temperature
        normaliser = normaliser.index_copy(0, at, _logsumexp(scores, lengths))
    return chosen - normaliser


def kept_tokens(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> KeptTokens:
    """Return the ids that temperature, then top-k, then top-p keep. Local. Sorts the vocabulary.

    Use this function only for an engine that does not return its kept ids. Near the limit of top-k
    or top-p, the trainer's logits may keep other ids than the engine's logits. As in vLLM 0.32, the
    most likely id is always kept. An id as likely as the last id of top-k is kept, too.

    Args:
        logits: `[tokens, vocab]`.
        top_k: 0 keeps all.
        top_p: 1 keeps all.

    Raises:
        ShapeError: `logits` are not floating-point numbers `[tokens, vocab]`.
        UsageError: a setting is out of range.
    """
    tokens, vocab = _check(logits, temperature)
    if top_k < 0 or not 0 < top_p <= 1:
        raise UsageError(
            f"kept_tokens needs top_k >= 0 and 0 < top_p <= 1; got {top_k} and {top_p}"
        )
    scores, order = (logits.detach().float() / temperature).sort(dim=-1)
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < vocab:
        keep = scores >= scores[:, -top_k, None]
        scores = scores.masked_fill(~keep, -torch.inf)
    if top_p < 1:
        # In float32 like engines, because 1 - 0.8 in float64 drops an id exactly at the limit.
        dropped = 1 - torch.tensor(top_p, dtype=torch.float32)
        keep = keep & (scores.softmax(-1).cumsum(-1) > dropped)
        keep[:, -1] = True
    if keep.all():
        return KeptTokens(np.zeros(0, np.int32), np.zeros(tokens + 1, np.int64), vocab)
    counts = keep.sum(-1).cpu().numpy()
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return KeptTokens.from_arrays(order[keep].cpu().numpy(), offsets, vocab_size=vocab)


def _check(logits: torch.Tensor, temperature: float) -> tuple[int, int]:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ShapeError(
            f"logits must be floating [tokens, vocab]; got {logits.dtype} {list(logits.shape)}"
        )
    if not temperature > 0:
        raise UsageError(f"temperature must be positive; got {temperature}")
    return logits.shape[0], logits.shape[1]


def _check_targets(hits: torch.Tensor, lengths: torch.Tensor, at: torch.Tensor) -> None:
    found = torch.segment_reduce(hits.float(), "max", lengths=lengths, unsafe=True) > 0
    if not found.all():
        lost = at[~found]
        raise UsageError(
            f"{len(lost)} targets are not among the ids kept for them, the first at token "
            f"{int(lost[0])}. Check that targets and kept rows belong to the same tokens."
        )


def _logsumexp(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Compute logsumexp of each segment. Segments are not empty."""
    largest = torch.segment_reduce(scores.detach(), "max", lengths=lengths, unsafe=True)
    powers = (scores - torch.repeat_interleave(largest, lengths)).exp()
    return largest + torch.segment_reduce(powers, "sum", lengths=lengths, unsafe=True).log()
