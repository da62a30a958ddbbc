"""A rollout: what an engine generated, and which policy version generated each token."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
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

# In the place of a version: a token of the completion that no policy sampled.
UNSAMPLED = -1
_VERSION_DIGITS = 19  # Of 2**63; Python refuses to read thousands of them.


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One completion of one prompt; arrays are read-only copies, or constants as they are.

    A completion of several turns has what was said to the model too, from its first sampled token
    on: tool results, later questions. `Conversation` makes such rollouts.

    Set the reward with `dataclasses.replace(rollout, reward=...)`.

    Args:
        tokens: ids of the prompt, then of the completion; int64.
        prompt_length: how many of them are the prompt.
        logprobs: the engine's log-probability of each completion token; float64. 0 for a token
            that no policy sampled.
        versions: the policy version that sampled each completion token; int64. `UNSAMPLED`, -1,
            for a token that none did.
        finish_reason: the engine's word, "stop" or "length" for instance.
        prompt_id: names the prompt; rollouts of one group share it.
        reward: what the advantage is made of.
        rewards: what it is made of itself, by name.
        attachments: values that travel along unseen, expert routes for instance. One that belongs
            to some of the tokens says so: `Aligned`, or a tuple of them.
        loss_mask: the completion tokens that count in the loss; default: all that were sampled.

    Raises:
        ShapeError: lengths do not fit, no token was sampled, or an attachment lies outside.
        UsageError: a negative id or version, a log-probability or reward that is not finite, or a
            token that no policy sampled counts in the loss or has a log-probability.
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
    loss_mask: NDArray[np.bool_] = None  # type: ignore[assignment]  # All of them.

    if TYPE_CHECKING:  # It takes what becomes an array; its fields are arrays.

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

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return pickled(self)

    @property
    def prompt(self) -> NDArray[np.int64]:
        """Ids of the prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def completion(self) -> NDArray[np.int64]:
        """Ids of the completion."""
        return self.tokens[self.prompt_length :]

    @property
    def nbytes(self) -> int:
        """Memory of its arrays and attachments, in bytes; of an attachment that tells none, 64."""
        arrays = (self.tokens, self.logprobs, self.versions, self.loss_mask)
        return sum(array.nbytes for array in arrays) + nbytes_of([*self.attachments.values()])

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """The completion tokens that a policy sampled."""
        return self.versions != UNSAMPLED

    @property
    def oldest_version(self) -> int:
        """The oldest policy that sampled a token of it."""
        return int(self.versions[self.sampled].min())

    @property
    def newest_version(self) -> int:
        """The newest policy that sampled a token of it."""
        return int(self.versions.max())


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of one prompt, which are trained together or not at all.

    Args:
        prompt: the caller's own object, handed back if the group is dropped.
        version: the policy version when the group was submitted. Its prompt may
            sit in a KV cache of that version even if every token is newer, so it
            counts towards the group's age.
        generate_s: how long it took.
        ordinal: the place of its prompt among those that were drawn, from 0.
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
        """Memory of its rollouts, in bytes."""
        return sum(rollout.nbytes for rollout in self.rollouts)

    @cached_property
    def oldest_version(self) -> int:
        """The oldest policy that has a part in it."""
        return min(self.version, *(r.oldest_version for r in self.rollouts))

    @cached_property
    def newest_version(self) -> int:
        """The newest policy that has a part in it."""
        return max(self.version, *(r.newest_version for r in self.rollouts))


def cache_salt(version: int) -> str:
    """The salt that keeps the KV pages of one policy version apart from all others. Pure.

    Raises:
        UsageError: `version` is not a policy version.
    """
    return f"policy-{check_version(version)}"


def version_of(label: Any) -> int | None:
    """Return the version that an engine's label of its weights names; None if none. Pure."""
    if not isinstance(label, str) or not label.isdecimal() or len(label) > _VERSION_DIGITS:
        return None
    return version if (version := int(label)) < 1 << 63 else None


def versions_from_spans(spans: Iterable[tuple[int, int, int]], *, length: int) -> NDArray[np.int64]:
    """Write out spans `(version, start, end)` as one version per token.

    Raises:
        ShapeError: the spans do not cover `[0, length)` in order, each token once.
        UsageError: a span's version is not a policy version.
    """
    versions = np.empty(length, np.int64)
    position = 0
    for version, start, end in spans:
        if start != position or not start < end <= length:
            raise ShapeError(
                f"version spans must cover [0, {length}) without gap or overlap; "
                f"got [{start}, {end}) where {position} should begin"
            )
        versions[start:end] = check_version(version)
        position = end
    if position != length:
        raise ShapeError(f"version spans end at {position} of {length} tokens")
    return versions


def pickled(item: Any) -> tuple[Callable[[], Any], tuple[()]]:
    """Return what `__reduce__` does for a trajectory: it is made anew, and checked, elsewhere."""
    kind: Callable[..., Any] = type(item)
    made_of = {one.name: getattr(item, one.name) for one in fields(item)}
    # Views of dictionaries that cannot be written to, which pickle refuses.
    views = {name: dict(x) for name, x in made_of.items() if isinstance(x, MappingProxyType)}
    return partial(kind, **made_of | views), ()


def freeze_trajectory(item: Any, *, least: int) -> None:
    """Copy the arrays of a trajectory that is being made, and check them.

    Args:
        least: completion tokens that it needs.

    Raises:
        ShapeError, UsageError: as `Rollout` says.
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
            f"prompt_length={item.prompt_length}. Leave out rollouts that were aborted empty."
        )
    for name in ("logprobs", "versions", "loss_mask"):
        values = getattr(item, name)
        if len(values) != length:
            raise ShapeError(
                f"{name} needs one entry per completion token, {length}; got {len(values)}"
            )
    if item.tokens.min() < 0 or item.versions.min(initial=0) < UNSAMPLED:
        raise UsageError(f"token ids and versions cannot be negative, but for {UNSAMPLED=}")
    if (item.loss_mask | (item.logprobs != 0))[~sampled].any():
        raise UsageError(
            "a token that no policy sampled counts in the loss, or has a log-probability. Give "
            "what was said to the model loss_mask=False and logprobs=0."
        )
    if not np.isfinite(item.logprobs).all():
        where = int(np.flatnonzero(~np.isfinite(item.logprobs))[0])
        raise UsageError(f"logprobs[{where}] is {item.logprobs[where]}, which is not finite")
    check_inside(item.attachments, len(item.tokens))


def _frozen(values: ArrayLike, dtype: type, *, name: str) -> NDArray:
    if _is_constant(values) and (values.dtype, values.ndim) == (dtype, 1):
        return values
    array = np.array(values)
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
    """Whether it is an array to which nobody can write, nor to what it is a view of."""
    owner: Any = values
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return False
        owner = owner.base
    return isinstance(values, np.ndarray) and (owner is None or isinstance(owner, bytes))
