"""Blocks of the engine's memory: reported to the workers as assigned, and stored before reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..patch import Patch

__all__ = [
    "ROUTES",
    "STORES_FIRST",
    "Assigned",
    "build_with_blocks",
    "carries_routes",
    "lift_cap",
    "watch_loads",
]

ROUTES = "primeblocks_routes_bytes_per_token"  # Our tier's setting: rows travel with its pages.
_UPDATE = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests"


@dataclass
class Assigned:
    """Blocks that a step gives to requests, by group of layers.

    Args:
        started: requests that begin or resume, with all their blocks and the tokens in them.
        grown: blocks that running requests get.
        copied: (from, to) in the engine's memory, before the step computes.
        loading: blocks that a tier overwrites from this step on, by group of layers.
    """

    started: dict[str, tuple[Sequence[list[int]], int]] = field(default_factory=dict)
    grown: dict[str, Sequence[list[int]]] = field(default_factory=dict)
    copied: list[tuple[int, int]] = field(default_factory=list)
    loading: list[Sequence[list[int]]] = field(default_factory=list)

    @classmethod
    def read(cls, step: Any) -> Assigned:
        """Read vLLM's SchedulerOutput. Shares its lists, so that they are sent only once."""
        assigned = cls(copied=[tuple(pair) for pair in step.kv_cache_block_copies or ()])
        for new in step.scheduled_new_reqs:
            assigned.started[new.req_id] = new.block_ids, new.num_computed_tokens
        known = step.scheduled_cached_reqs
        for request_id, blocks, tokens in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if request_id in known.resumed_req_ids:
                assigned.started[request_id] = blocks, tokens
            elif blocks is not None:
                assigned.grown[request_id] = blocks
        return assigned


def build_with_blocks(stock_build: Any) -> Any:
    """Return a `build_connector_meta` that adds each step's changes of blocks to the metadata."""

    def build_connector_meta(control: Any, scheduler_output: Any, requests: Any) -> Any:
        metadata = stock_build(control, scheduler_output, requests)
        metadata.primeblocks_blocks = assigned = Assigned.read(scheduler_output)
        assigned.loading += getattr(control, "primeblocks_loading", ())
        control.primeblocks_loading = []
        return metadata

    return build_connector_meta


def watch_loads(scheduler: Any) -> None:
    """Make a scheduler tell its workers the blocks into which tiers load. Local.

    A block may have contained the same page of another computation before. Its hash then does not
    show that it was loaded again.
    """
    control, connector = scheduler.aux_output_connector, scheduler.connector
    if control is None or connector is None:
        return
    groups = scheduler.kv_cache_config.kv_cache_groups
    tokens = [group.kv_cache_spec.block_size for group in groups]
    find, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    asked = ("", 0)  # The request that asks tiers, and the tokens that the engine itself has.

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        nonlocal asked
        asked = request.request_id, num_computed_tokens
        return find(request, num_computed_tokens)

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            begin = asked[1] if asked[0] == request.request_id else 0
            end = begin + num_external_tokens
            each = zip(blocks.get_block_ids(), tokens, strict=True)
            loading = [ids[begin // size : -(-end // size)] for ids, size in each]
            control.primeblocks_loading = [*getattr(control, "primeblocks_loading", ()), loading]
        allocated(request, blocks, num_external_tokens)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc


def carries_routes(config: Any) -> bool:
    """Whether an engine captures routes, and all pages of its tiers carry routes. Pure."""
    return bool(config.aux_output_config.enabled and _extra(config).get(ROUTES))


def _extra(config: Any) -> Any:
    transfer = config.kv_transfer_config
    return {} if transfer is None else transfer.kv_connector_extra_config


def lift_cap(scheduler: Any, config: Any) -> None:
    """Let all pages of tiers that carry routes count as hits. Local.

    vLLM 0.33 keeps routes by hash, for at most twice the pages of the engine's memory. If it has
    forgotten the routes of one page of a prompt, it takes no page of this prompt from a tier. Here
    routes come with the pages.
    """
    control = scheduler.aux_output_connector
    if not hasattr(control, "cap_external_hit") or not carries_routes(config):
        return
    control.max_cache_hit = lambda request: request.num_tokens - 1
    control.cap_external_hit = lambda request, num_local, num_external: num_external


def _update_after_stores(stock_update: Any) -> Any:
    def update_requests(runner: Any, scheduler_output: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        metadata = scheduler_output.kv_connector_metadata
        if metadata is not None and has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(metadata)  # vLLM's later call does nothing.
        stock_update(runner, scheduler_output)

    return update_requests


STORES_FIRST = Patch(
    name="stores_before_reuse",
    reason="Model Runner V2 zeroes reused blocks, and copies into them, before it submits the "
    "stores that read them, so a tier stores the new contents under the key of the old page.",
    tested="vllm==0.32.*",
    replacements={_UPDATE: _update_after_stores},
    asked=lambda config: "primeblocks." in str(_extra(config)) and config.use_v2_model_runner,
    cpu_only=False,
    compared="vllm==0.33.*",
)
