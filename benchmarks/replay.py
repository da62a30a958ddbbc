"""Routes of 131,072 tokens x 75 layers x 8 of 256 experts: packed, unpacked, joined.

A fraction is the time of a plain copy of the same bytes, into memory that exists already, over the
time measured. One core.
"""

import base64
import io
import json

import numpy as np
import torch

from primeblocks.replay import Routes

from .harness import compare, main

TOKENS, LAYERS, TOP_K, EXPERTS = 131_072, 75, 8, 256
TURNS = 16


def make_routes() -> Routes:
    generator = np.random.default_rng(0)
    some = generator.random((4096, EXPERTS)).argsort(-1)[:, :TOP_K].astype(np.uint8)
    rows = some[generator.integers(0, len(some), TOKENS * LAYERS)]
    return Routes.from_array(
        rows.reshape(TOKENS, LAYERS, TOP_K), num_experts=EXPERTS, layer_ids=range(3, 3 + LAYERS)
    )


def base64_json_bytes(routes: Routes) -> int:
    """What vLLM's HTTP answer spends on them: a .npy file in base64 in JSON."""
    file = io.BytesIO()
    np.save(file, routes.experts)
    return len(json.dumps({"routed_experts": base64.b64encode(file.getvalue()).decode()}))


def measure() -> dict[str, tuple[float, str, str]]:
    torch.set_num_threads(1)
    routes = make_routes()
    turns = routes.split([TOKENS // TURNS] * TURNS)
    raw = routes.pack()
    target = np.zeros_like(routes.experts)

    def agree() -> None:
        np.copyto(target, routes.experts)
        assert np.array_equal(target, routes.experts)
        assert Routes.unpack(raw) == routes
        assert Routes.join(turns) == routes

    copy, pack, unpack, join = compare(
        lambda: np.copyto(target, routes.experts),
        routes.pack,
        lambda: Routes.unpack(raw),
        lambda: Routes.join(turns),
        agree=agree,
    )
    (check,) = compare(
        lambda: Routes.from_array(routes.experts, num_experts=EXPERTS, layer_ids=routes.layer_ids),
        agree=agree,
        runs=3,
    )
    gigabytes = routes.experts.nbytes / 1e9
    text = base64_json_bytes(routes)
    fraction, rate = ("ratio", "numpy copyto"), ("GB/s a core", "")
    return {
        "replay.pack.copy_bandwidth_fraction": (copy.median / pack.median, *fraction),
        "replay.unpack.copy_bandwidth_fraction": (copy.median / unpack.median, *fraction),
        "replay.join.copy_bandwidth_fraction": (copy.median / join.median, *fraction),
        "replay.pack.spread": (pack.spread, "ratio", ""),
        "replay.copy.gigabytes_per_s": (gigabytes / copy.median, *rate),
        "replay.wire.raw_bytes_ratio_vs_base64_json": (len(raw) / text, "ratio", "base64 JSON"),
        "replay.from_array": (gigabytes / check.median, *rate),
    }


if __name__ == "__main__":
    main(measure)
