"""Policy version and rollout of a request, carried from the front end to the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....errors import UsageError, check_version

__all__ = ["Request", "read_request", "request_args"]

_VERSION = "primeblocks_policy_version"
_ROLLOUT = "primeblocks_rollout"
_ENDS = "primeblocks_rollouts_that_end"

logger = logging.getLogger(__name__)


def request_args(version: Any = None, *, rollout: Any = None, ends: Any = ()) -> dict[str, Any]:
    """Name a request for our tier: `SamplingParams(extra_args=request_args(7, rollout="a/3"))`.

    The same dictionary goes into the JSON of a request to vLLM's server. It complements the
    request's `cache_salt` and does not replace it. Pure.

    Args:
        version: the policy's, a count of updates; the tier advances with the largest that it has
            seen, and keys of different versions differ. A version 2**20 ahead of all before does
            not advance it: a mistake in one request would make everybody's pages stale.
        rollout: name of the rollout that will need the pages again, in its next turn. Several
            samples of one prompt in a request (`n`) share it.
        ends: names of rollouts that need their pages no longer once this request is over: its own
            in its last turn, or others that ended without one.

    Raises:
        UsageError: names that are not text, or a version that is no integer below 2**63.
    """
    if version is not None:
        version = check_version(version)
    is_list = isinstance(ends, list | tuple)
    if not is_list or not all(isinstance(name, str) for name in ends):
        raise UsageError(f"ends is a list of names of rollouts; got {ends!r}")
    if rollout is not None and not isinstance(rollout, str):
        raise UsageError(f"a rollout is named by text; got {rollout!r}")
    said = {_VERSION: version, _ROLLOUT: rollout, _ENDS: list(ends) or None}
    return {"kv_transfer_params": {name: each for name, each in said.items() if each is not None}}


@dataclass(frozen=True)
class Request:
    """The version and rollouts that a request named; empty where it named none."""

    version: int | None = None
    rollout: str | None = None
    ends: tuple[str, ...] = ()


def read_request(parameters: Mapping[str, Any] | None) -> Request:
    """Read `kv_transfer_params`.

    Malformed values are left out with a warning, not raised: they came over the network, and an
    error here would end the engine.
    """
    if not parameters:
        return Request()
    version, rollout = parameters.get(_VERSION), parameters.get(_ROLLOUT)
    ends = parameters.get(_ENDS) or []
    try:
        request_args(version, rollout=rollout, ends=ends)
    except UsageError as error:
        logger.warning("a request's rollout and version are ignored: %s", error)
        return Request()
    return Request(version, rollout, tuple(ends))
