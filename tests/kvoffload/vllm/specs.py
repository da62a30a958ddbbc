"""The specs that vLLM makes from our arguments, without an engine."""

import os
from itertools import count

PAGE = 4096
_NAMES = count()


def config_of(*, page=PAGE, model="model", group_tokens=(32,), blocks_per_chunk=1, extra=()):
    """What vLLM tells an offloading spec of an engine with one rank."""
    from vllm.v1.kv_offload import config

    one = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size")
    zero = ("rank", "data_parallel_index", "data_parallel_rank_local")
    return config.OffloadingConfig(
        groups=tuple(
            config.OffloadingGroupConfig(tokens, (f"layer{index}",), index)
            for index, tokens in enumerate(group_tokens)
        ),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=False,
        extra_config=dict(extra),
        engine_id=f"test-{os.getpid()}-{next(_NAMES)}",
        model=config.OffloadingModelConfig(model, "float32"),
        cache=config.OffloadingCacheConfig(32, blocks_per_chunk),
        parallel=config.OffloadingParallelConfig(
            **dict.fromkeys(one, 1), **dict.fromkeys(zero, 0), is_parallelism_agnostic=True
        ),
    )


def make_spec(adapter, *, pool_pages, routes=0, extra=(), group_tokens=(32,), blocks_per_chunk=1):
    """The spec that vLLM makes from our arguments, for pages of 4096 bytes."""
    arguments = adapter.engine_args(
        primary_bytes=pool_pages * PAGE,
        host_bytes=256 * PAGE,
        routes_bytes_per_token=routes,
    )
    extra = arguments["kv_transfer_config"].kv_connector_extra_config | dict(extra)
    pages = {"group_tokens": group_tokens, "blocks_per_chunk": blocks_per_chunk}
    return adapter.StoreOffloadingSpec(config_of(extra=extra, **pages))
