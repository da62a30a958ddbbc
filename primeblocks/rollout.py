"""Rollouts: tokens that an engine sampled, and the policy version of each token."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .attachments import check_inside, nbytes_of
from .errors import ShapeError, UsageError, check_version

__all__ = [
    "UNSAMPLED",
    "Group",
    "Rollout",
    "cache_salt",
    "freeze_trajectory",
    "pickled",
    "version_of",
    "versions_from_spans",
]

# The version of a completion token that no policy sampled.
UNSAMPLED = -1
_VERSION_DIGITS = 19  # Of 2**63. int() refuses thousands of digits.


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One prompt and one completion, in read-only arrays. Writable array arguments are copied.

    A completion of several turns also contains the tokens between the answers, such as tool
    results. Set the reward with `dataclasses.replace(rollout, reward=...)`.

    Args:
        tokens: token ids `[length]` of the prompt and then of the completion, as int64.
        prompt_length: the number of prompt tokens.
        logprobs: the engine's log-probability of each completion token, as float64, or 0 if no
            policy sampled the token.
        versions: the policy version that sampled each completion token, as int64, or `UNSAMPLED`
            (-1) if no policy sampled the token.
        finish_reason: the engine's reason to stop generation, such as "stop" or "length".
        prompt_id: an id of the prompt, equal in all rollouts of a group.
        reward: the number from which advantages are computed.
        rewards: the parts of the reward, by name.
        attachments: values that are stored unchanged with the rollout, such as expert routes. For a
            value that belongs to some of the tokens, use an `Aligned` or a tuple of `Aligned`.
        loss_mask: a bool mask of the completion tokens that count in the loss. The default is a
            mask of all sampled tokens.

    Raises:
        ShapeError: lengths do not match, the completion does not contain a sampled token, or an
            attachment belongs to a position after the last token.
        UsageError: a token id is below 0, a version is below -1, a log-probability is above 2**-10,
            or a log-probability or reward is not finite. Also raised if an unsampled token counts
            in the loss or has a log-probability.
    """

    tokens: NDArray[np.int64]
    prompt_length: int
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    finish_reason: str
    prompt_id: Hashable = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    attachments: Mapping[str, Any] = field(default_factory=dict)
    loss_mask: NDArray[np.bool_] = None  # type: ignore[assignment]  # All sampled.

    if TYPE_CHECKING:  # Arguments may be lists; fields are arrays.

        def __init__(
            self,
            *,
            tokens: ArrayLike,
            prompt_length: int,
            logprobs: ArrayLike,
            versions: ArrayLike,
            finish_reason: str,
            prompt_id: Hashable = None,
            reward: float | None = None,
            rewards: Mapping[str, float] = ...,
            attachments: Mapping[str, Any] = ...,
            loss_mask: ArrayLike | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        freeze_trajectory(self, least=1)
        object.__setattr__(self, "rewards", MappingProxyType(dict(self.rewards)))
        for name, reward in {"reward": self.reward, **self.rewards}.items():
            if reward is not None and not math.isfinite(reward):
                raise UsageError(f"{name} is {reward}, which is not finite")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pickled(self)

    @property
    def prompt(self) -> NDArray[np.int64]:
        """Token ids of the prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def completion(self) -> NDArray[np.int64]:
        """Token ids of the completion."""
        return self.tokens[self.prompt_length :]

    @property
    def nbytes(self) -> int:
        """Memory of arrays and attachments in bytes, computed with `attachments.nbytes_of`."""
        arrays = (self.tokens, self.logprobs, self.versions, self.loss_mask)
        return sum(array.nbytes for array in arrays) + nbytes_of([*self.attachments.values()])

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """A mask of the completion tokens that a policy sampled."""
        return self.versions != UNSAMPLED

    @cached_property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of the rollout."""
        return int(self.versions[self.sampled].min())

    @cached_property
    def newest_version(self) -> int:
        """The newest policy version that sampled a token of the rollout."""
        return int(self.versions.max())


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of one prompt, which are trained together or dropped together.

    Args:
        prompt: the caller's object for the prompt, returned to the caller if the group is dropped.
        version: the engine's policy version when the generation of the group started. `version`
            contributes to the age of the group, because the KV cache of the prompt may be older
            than all sampled tokens.
        generate_s: the duration of generation in seconds.
        ordinal: the position of the prompt among all drawn prompts, counted from 0.
    """

    prompt: Any
    rollouts: tuple[Rollout, ...]
    version: int
    generate_s: float = 0.0
    ordinal: int = 0

    if TYPE_CHECKING:

        def __init__(
            self,
            prompt: Any,
            rollouts: Iterable[Rollout],
            version: int,
            generate_s: float = 0.0,
            ordinal: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(self.rollouts))
        if not self.rollouts:
            raise UsageError(f"the group of prompt {self.prompt!r} has no rollouts")

    @cached_property
    def nbytes(self) -> int:
        """Memory of the rollouts in bytes."""
        return sum(rollout.nbytes for rollout in self.rollouts)

    @cached_property
    def oldest_version(self) -> int:
        """The oldest policy version among `version` and the versions of the rollouts."""
        return min(self.version, *(r.oldest_version for r in self.rollouts))

    @cached_property
    def newest_version(self) -> int:
        """The newest policy version among `version` and the versions of the rollouts."""
        return max(self.version, *(r.newest_version for r in self.rollouts))


def cache_salt(version: int) -> str:
    """Return a cache salt, so that policy versions do not share pages of a KV cache. Pure.

    Raises:
        UsageError: `version` is not a policy version.
    """
    return f"policy-{check_version(version)}"


def version_of(label: Any) -> int | None:
    """Return the policy version in a weight label, or None if the label is not a version. Pure."""
    if not isinstance(label, str) or not label.isdecimal() or len(label) > _VERSION_DIGITS:
        return None
    return version if (version := int(label)) < 1 << 63 else None


def versions_from_spans(spans: Iterable[tuple[int, int, int]], *, length: int) -> NDArray[np.int64]:
    """Convert spans `(version, start, end)` to an array with one version per token. Pure.

    Raises:
        ShapeError: the spans do not cover `[0, length)` in order, each token once.
        UsageError: the first number of a span is not a policy version.
    """
    versions = np.empty(length, np.int64)
    position = 0
    for version, start, end in spans:
        if start != position or not start < end <= length:
            raise ShapeError(
                f"version spans must cover [0, {length}) without gap or overlap; got [{start}, "
                f"{end}), but the next span must begin at {position}"
            )
        versions[start:end] = check_version(version)
        position = end
    if position != length:
        raise ShapeError(f"version spans end at token {position}, but there are {length} tokens")
    return versions


def pickled(item: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the result of `__reduce__` for a trajectory. Unpickling repeats all checks."""
    kind: Callable[..., Any] = type(item)
    made_of = {one.name: getattr(item, one.name) for one in fields(item)}
    # pickle refuses read-only views of dictionaries.
    views = {name: dict(x) for name, x in made_of.items() if isinstance(x, MappingProxyType)}
    return _made, (kind, made_of | views)


def _made(kind: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    return kind(**values)


def freeze_trajectory(item: Any, *, least: int) -> None:
    """Check the arrays of a new trajectory and replace them by read-only arrays.

    Args:
        least: the smallest allowed number of sampled tokens.

    Raises:
        ShapeError, UsageError: as for `Rollout`.
    """

    def put(name: str, value: Any) -> None:
        object.__setattr__(item, name, value)

    put("tokens", _frozen(item.tokens, np.int64, name="tokens"))
    put("logprobs", _frozen(item.logprobs, np.float64, name="logprobs"))
    put("versions", _frozen(item.versions, np.int64, name="versions"))
    put("attachments", MappingProxyType(dict(item.attachments)))
    length = len(item.tokens) - item.prompt_length
    sampled = item.versions != UNSAMPLED
    mask = sampled if item.loss_mask is None else item.loss_mask
    put("loss_mask", _frozen(mask, np.bool_, name="loss_mask"))
    if item.prompt_length < 1 or length < 0 or sampled.sum() < least:
        needs = "a prompt and a sampled token" if least else "a prompt"
        raise ShapeError(
            f"a {type(item).__name__.lower()} needs {needs}; got {len(item.tokens)} tokens with "
            f"prompt_length={item.prompt_length}. Leave out rollouts that were aborted before the "
            "first token."
        )
    for name in ("logprobs", "versions", "loss_mask"):
        values = getattr(item, name)
        if len(values) != length:
            raise ShapeError(
                f"{name} needs {length} entries, one per completion token; got {len(values)}"
            )
    if item.tokens.min() < 0 or item.versions.min(initial=0) < UNSAMPLED:
        raise UsageError(
            f"token ids and versions cannot be negative, except {UNSAMPLED=} as a version"
        )
    if (item.loss_mask | (item.logprobs != 0))[~sampled].any():
        raise UsageError(
            "a token that no policy sampled counts in the loss, or has a log-probability. Give "
            "tokens that no policy sampled loss_mask=False and logprobs=0."
        )
    right = np.isfinite(item.logprobs) & (item.logprobs <= 2**-10)  # Engines may round 0 up.
    if not right.all():
        where = int(np.flatnonzero(~right)[0])
        raise UsageError(
            f"logprobs[{where}] is {item.logprobs[where]}. A log-probability is finite and not "
            "above 0. Pass the result of log-softmax, not logits or probabilities."
        )
    check_inside(item.attachments, len(item.tokens))


def _frozen(values: ArrayLike, dtype: type, *, name: str) -> NDArray:
    if _is_constant(values) and (values.dtype, values.ndim) == (dtype, 1):
        return values
    array = np.array(np.asarray(values))  # torch's __array__ has no `copy`.
    if array.ndim != 1:
        raise ShapeError(f"{name} must be one-dimensional; got shape {array.shape}")
    if array.size and dtype is np.int64 and not np.issubdtype(array.dtype, np.integer):
        raise ShapeError(f"{name} must be integers; got {array.dtype}")
    if array.size and dtype is np.bool_ and array.dtype != np.bool_:
        raise ShapeError(f"{name} must be booleans; got {array.dtype}")
    array = array.astype(dtype, copy=False)
    array.flags.writeable = False
    return array


def _is_constant(values: ArrayLike) -> TypeGuard[NDArray]:
    """Return whether an array cannot be written to, directly or through the array that it views."""
    owner: Any = values
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return isinstance(values, np.ndarray) and (owner is None or isinstance(owner, bytes))
