"""Rollouts made of traces of `verifiers` 0.4.

This module has never run on the answers of a real engine. Only `TrainClientConfig` records token
ids and log-probabilities in a trace. A client with `TrainClientConfig` calls
`/inference/v1/generate` under its `base_url`, but cannot read the answers of vLLM 0.32. The client
uses the package `renderers` 0.1.12, which expects `"token": "token_id:5"`, but vLLM sends
`"token_id": 5`.

`EvalClientConfig` sends an environment's chats to any OpenAI-compatible server, and records no
token ids. Set the `base_url` of `EvalClientConfig` to a session of a `CaptureServer`, which records
token ids and versions. A trace does not contain versions.

Read traces from memory or from verifiers' own wire format. The JSON records of verifiers round
log-probabilities to four digits and leave routes out.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...attachments import Aligned
from ...errors import PrimeblocksError, ShapeError, UnsupportedError, check_version, needs
from ...rollout import UNSAMPLED, Rollout

with needs("verifiers", extra="verifiers"):
    from verifiers.v1 import Branch, Episode, MessageNode, Trace

__all__ = ["episode_rollouts", "trace_rollouts"]


def trace_rollouts(
    trace: Trace,
    *,
    version: int | Callable[[MessageNode], ArrayLike],
    prompt_id: Hashable = None,
) -> tuple[Rollout, ...]:
    """Make a rollout of each branch of a trace, if the branch adds sampled tokens. Local.

    A sampled token is trained on in one rollout, and belongs to the prompt in the rollouts of other
    branches. Failed compactions are left out, because verifiers does not train on them. The reward
    of a rollout is the reward of the trace, or None if part of the scoring did not run. The
    components of the reward are in `rewards`.

    Expert routes of a branch become the attachment "routed_experts" with rows `[tokens - 1, layers,
    top_k]`. The kept tokens, from which the engine could sample, become two attachments. The
    attachment "sampling_mask" contains the ids of all kept tokens, and "sampling_mask_counts"
    contains the number of these ids per token.

    Args:
        version: the version of the policy that sampled all tokens. For several policies, pass a
            function that maps a sampled message to one version, or to one version per sampled
            token.

    Raises:
        UnsupportedError: a sampled message has no token ids, or no log-probabilities.
        ShapeError: ids, mask, log-probabilities or versions of a message do not fit together.
        UsageError: a version is not a whole number in 0..2**63 - 1, or a log-probability is not
            finite.
    """
    trained: set[int] = set()
    rollouts = []
    for branch in trace.branches:
        fresh = {id(node) for node in branch.nodes if any(node.mask)} - trained
        if branch.trainable:
            _check(trace, branch)
        if branch.trainable and fresh:
            # A message that was trained before has only such messages before it.
            trained |= fresh
            versions = _versions(branch, fresh, version)
            rollouts.append(_rollout(trace, branch, versions, prompt_id))
    return tuple(rollouts)


def episode_rollouts(
    episode: Episode,
    *,
    version: int | Callable[[MessageNode], ArrayLike] | None = None,
) -> tuple[Rollout, ...]:
    """Make rollouts of the traces of an episode's trainable agents, with `trace_rollouts`. Local.

    The `prompt_id` of the rollouts is the id of the episode's group. If the episode has no group,
    `prompt_id` is the key of the episode's task. Check `episode.ok` first, because failed traces
    become rollouts too.

    Args:
        version: as for `trace_rollouts`. The default is the version of the episode's recorded
            policy.

    Raises:
        UnsupportedError: the episode has no recorded policy, the policy changed during the episode,
            or a trace lacks token ids or log-probabilities.
        ShapeError, UsageError: as for `trace_rollouts`.
    """
    if version is None:
        version = _noted_version(episode)
    prompt_id = episode.task.key if episode.group is None else episode.group.id
    return tuple(
        rollout
        for trace in episode.traces
        if trace.agent.trainable
        for rollout in trace_rollouts(trace, version=version, prompt_id=prompt_id)
    )


def _noted_version(episode: Episode) -> int:
    work = getattr(episode.run, "work", None)
    policy = None if work is None else work.policy
    if policy is None:
        raise UnsupportedError(
            f"episode {episode.id} has no recorded policy. Pass version=, or call record_run() "
            "with a PolicySpan during the episode."
        )
    if policy.drift:
        raise UnsupportedError(
            f"the policy went from version {policy.start} to {policy.end} during episode "
            f"{episode.id}, and a trace does not say at which token. Pass as version= a "
            "function of a message, or record with a CaptureServer."
        )
    return check_version(policy.start)


def _check(trace: Trace, branch: Branch) -> None:
    for at, node in enumerate(branch.nodes):
        where = f"message {at} of branch {branch.index} of trace {trace.id}"
        if node.sampled and not node.token_ids:
            raise UnsupportedError(
                f"{where} was sampled, and has no token ids. Run the environment with "
                "TrainClientConfig, or record with a CaptureServer."
            )
        sampled = sum(node.mask)
        if sampled and not node.logprobs:
            raise UnsupportedError(
                f"{where} has no log-probabilities of its {sampled} sampled tokens"
            )
        if len(node.mask) != len(node.token_ids) or len(node.logprobs) != sampled:
            raise ShapeError(
                f"{where} has {len(node.token_ids)} tokens, {len(node.mask)} entries of mask, "
                f"{sampled} sampled tokens and {len(node.logprobs)} log-probabilities. Give each "
                "token an entry of mask, and each sampled token a log-probability."
            )


def _rollout(
    trace: Trace, branch: Branch, versions: NDArray[np.int64], prompt_id: Hashable
) -> Rollout:
    start = int(np.argmax(versions != UNSAMPLED))
    ended = [call.finish_reason for call in branch.calls if call.finish_reason is not None]
    if cut := {"abort", "error"}.intersection(ended):
        raise PrimeblocksError(f"the engine ended a call with {cut.pop()!r}. Run the task again.")
    return Rollout(
        tokens=np.array(branch.token_ids, np.int64),
        prompt_length=start,
        logprobs=np.array(branch.logprobs[start:]),
        versions=versions[start:],
        finish_reason=ended[-1] if ended else "unknown",
        prompt_id=prompt_id,
        reward=None if None in trace.rewards.values() else trace.reward,
        rewards={name: each.value for name, each in trace.rewards.items() if each is not None},
        attachments=_attachments(branch),
    )


def _versions(
    branch: Branch, fresh: set[int], version: int | Callable[[MessageNode], ArrayLike]
) -> NDArray[np.int64]:
    """Return a version for each token of the branch, or UNSAMPLED if it is not trained here."""
    parts = []
    for node in branch.nodes:
        part = np.full(len(node.token_ids), UNSAMPLED)
        if id(node) in fresh:
            mask = np.array(node.mask)
            found = np.asarray(version(node) if callable(version) else version)
            if found.shape not in ((), (mask.sum(),)):
                raise ShapeError(
                    f"version has shape {found.shape} for a message of {mask.sum()} sampled "
                    "tokens; give one version, or one per sampled token."
                )
            part[mask] = [check_version(each) for each in np.atleast_1d(found)]
        parts.append(part)
    return np.concatenate(parts)


def _attachments(branch: Branch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    routes, kept = branch.routed_experts, branch.sampling_mask
    if routes is not None:
        # A forward never followed the last token: verifiers repeats the row before it.
        found["routed_experts"] = Aligned.rows(routes[:-1])
    if kept is not None:
        found["sampling_mask"] = kept.ids
        found["sampling_mask_counts"] = Aligned.rows(kept.counts)
    return found
