"""Whether vLLM still has the faults that patches repair, and whether this process has them.

Used by plugin_job.py. A patch whose fault a new vLLM does not have can go.
"""

import inspect
from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from primeblocks.errors import UnsupportedError
from primeblocks.plugins.patch import ours
from primeblocks.plugins.vllm import PATCHES
from primeblocks.plugins.vllm.scheduled_blocks import Assigned

SYMBOLS = {patch.name: list(patch.replacements) for patch in PATCHES}
NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


def stock(symbol: str) -> Any:
    found = ours(symbol)
    while hasattr(found, "primeblocks_stock"):
        found = found.primeblocks_stock
    return found


class _Reached(Exception):
    """The host's own code runs."""


class _Probe:
    """A worker that stops the host's code at its first step."""

    def __init__(self) -> None:
        self.__dict__["model_config"] = SimpleNamespace(dtype=torch.bfloat16)

    def __setattr__(self, name: str, value: object) -> None:
        raise _Reached


def amx() -> tuple[bool, bool]:
    """A worker asks before it starts, and stops if the answer is no."""

    def outcome(init_device: Callable[[Any], None], *, granted: bool) -> str:
        with (
            mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True),
            mock.patch.object(torch.cpu, "_init_amx", return_value=granted) as ask,
        ):
            try:
                init_device(_Probe())
            except UnsupportedError:
                return "refused"
            except _Reached:
                return "asked" if ask.called else "went on"
        return "went on"

    (symbol,) = SYMBOLS["amx_on_cpu"]
    current = {granted: outcome(ours(symbol), granted=granted) for granted in (True, False)}
    needed = outcome(stock(symbol), granted=False) == "went on"
    return needed, current == {True: "asked", False: "refused"}


def refusal(
    verify: Callable[[Any], None], *, v2: bool = False, prefix_caching: bool = True,
    transfer: Any = None,
) -> str:  # fmt: skip
    """Return the refusal of vLLM's check for a configuration, without starting an engine."""
    config = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=True),
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(runner_type="generate", is_moe=True),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        kv_transfer_config=transfer,
    )
    try:
        verify(config)
    except ValueError as error:
        return str(error)
    return ""


def routed_experts() -> tuple[bool, bool]:
    verify, runner = SYMBOLS["routed_experts_on_cpu"]
    step = inspect.unwrap(stock(runner).execute_model).__code__.co_names
    refused = "Model Runner V2" in refusal(stock(verify))
    accepted = refusal(ours(verify)) == ""
    still_checked = "prefix caching" in refusal(ours(verify), prefix_caching=False)
    return (
        refused and "aux_output_connector_metadata" not in step,
        accepted and still_checked and hasattr(ours(runner), "aux_output_connector"),
    )


def over_nixl() -> tuple[bool, bool]:
    def refused(verify: Callable[[Any], None], connector: str) -> str:
        transfer = SimpleNamespace(kv_connector=connector, has_connector=connector.__eq__)
        return refusal(verify, v2=True, transfer=transfer)

    (verify,) = SYMBOLS["routes_over_nixl"]
    others = all(refused(ours(verify), name) for name in ("MooncakeConnector", "MoRIIOConnector"))
    return (
        all("PD auxiliary output" in refused(stock(verify), name) for name in NIXL),
        others and not any(refused(ours(verify), name) for name in NIXL),
    )


def missing_routes() -> tuple[bool, bool]:
    """A store is asked for a page that nobody stored."""

    def survives(store: Any) -> bool:
        try:
            found = store(max_bytes=8, object_nbytes=4).get_concatenated(["gone"])
        except RuntimeError:
            return False
        return bool(found == b"\xff" * 4)

    (symbol,) = SYMBOLS["missing_routes_survive"]
    return not survives(stock(symbol)), survives(ours(symbol))


def with_pages() -> tuple[bool, bool]:
    connector, build = SYMBOLS["routes_with_pages"]
    return (
        not _survives_another_computation(stock(connector)),
        _survives_another_computation(ours(connector))
        and hasattr(ours(build), "primeblocks_stock"),
    )


def _survives_another_computation(connector_type: Any) -> bool:
    """Check that a page that is computed twice, with other choices, brings the rows of its block.

    Runs on a connector without a model.
    """
    from vllm.distributed.aux_output_connector import connector as control
    from vllm.distributed.aux_output_connector import routed_experts, store

    connector = object.__new__(connector_type)
    connector._store = store.BackgroundBlockObjectStore(
        store.BlockObjectStore(max_bytes=8, object_nbytes=2), max_pending_batches=2
    )
    connector._buffer = routed_experts.RoutedExpertsBuffer(
        np.dtype(np.uint8), (1, 1), block_size=2, max_num_seqs=3, max_num_batched_tokens=4,
        max_concurrent_batches=1,
    )  # fmt: skip
    connector._requests, connector._pending_outputs = {}, []
    connector._generation, connector._lock, connector._max_concurrent_batches = 0, Lock(), 1
    connector._capturer = SimpleNamespace(snapshot_routing_data=lambda count: None)
    if hasattr(connector, "_lay_table"):
        connector._lay_table(0, 4, 2, alone=True)

    def step(name: str, blocks: list[int], start: int, experts: list[int]) -> list[int]:
        hashes = {name: control.PackedBlockHashes(b"page", 4)}
        metadata = control.AuxOutputConnectorMetadata(0, {name: 0}, hashes, ())
        vars(metadata)["primeblocks_blocks"] = Assigned({name: ([blocks], start)})
        connector.begin_step(metadata)
        batch = SimpleNamespace(
            req_ids=[name],
            query_start_loc_np=np.array([0, len(experts)]),
            num_computed_tokens_np=np.array([start]),
        )
        pending = connector.prepare_output(batch)
        pending.routed_experts = np.array(experts, np.uint8).reshape(-1, 1, 1)
        pending.num_sampled, pending.num_rejected = np.array([1]), np.array([0])
        rows: list[int] = connector.process_output(pending)[name].rows.ravel().tolist()
        return rows

    try:
        step("first", [1, 2], 0, [1, 2, 3])
        step("again", [3, 0], 0, [4, 5, 6])
        return step("hits", [3, 0], 2, [7]) == [4, 5, 7]
    except (store.BlockObjectStoreError, AssertionError):
        return False
    finally:
        connector.close()


def stores_first() -> tuple[bool, bool]:
    """A step reuses a block that a store of the last step has yet to read."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    def calls(update: Any) -> list[str]:
        made: list[str] = []
        connector = SimpleNamespace(handle_preemptions=lambda metadata: made.append("store"))
        counts = np.zeros(0)
        runner = SimpleNamespace(
            req_states=SimpleNamespace(
                num_computed_tokens_np=counts,
                prefill_len=SimpleNamespace(np=counts),
                num_computed_prefill_tokens=counts,
            ),
            kv_block_zeroer=SimpleNamespace(zero_block_ids=lambda ids: made.append("zero")),
        )
        step = SimpleNamespace(
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], new_block_ids=[]
            ),
            new_block_ids_to_zero=[1],
            kv_cache_block_copies=None,
            kv_connector_metadata=object(),
        )
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector):
            update(runner, step)
        return made

    (symbol,) = SYMBOLS["stores_before_reuse"]
    execute = ours("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model")
    step = inspect.unwrap(execute).__code__.co_names
    stores_late = step.index("update_requests") < step.index("pre_forward")
    return (
        stores_late and "handle_preemptions" not in step and calls(stock(symbol)) == ["zero"],
        calls(ours(symbol)) == ["store", "zero"],
    )


# Needed in stock vLLM, and repaired in this process. plugin_job.py tries moe_reload_on_cpu itself.
FAULTS = {
    "amx_on_cpu": amx,
    "routed_experts_on_cpu": routed_experts,
    "missing_routes_survive": missing_routes,
    "routes_with_pages": with_pages,
    "routes_over_nixl": over_nixl,
    "stores_before_reuse": stores_first,
}
