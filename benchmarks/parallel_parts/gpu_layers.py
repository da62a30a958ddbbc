"""Decoder layers under FSDP2 on a CUDA device: `python -m benchmarks.parallel_parts.gpu_layers`.

It has run on one H100 with all experts, and without a peer (docs/gpu.md). With `--dry-run` its code
runs on a CPU, at sizes that say nothing about speed.

One layer of Qwen3-30B-A3B and of GLM-4.5 by their published shapes, with the experts of one of
eight ranks, which get as many rows as under expert parallelism over eight; 8,192 tokens of one
document, bfloat16 with float32 weights, on one rank of `parallelize`: milliseconds of a step
(forward and backward of the layer, embedding and head left out by a small vocabulary), operations
of matrix products over the rate of a bfloat16 product measured in the same run (MFU), the most
memory, and from the profiler kernels launched and waits of the host. The peer is transformers' own
layer with `grouped_mm` under FSDP2. The loss of each must be that of the same model without FSDP2
to the rounding of bfloat16.
"""

from __future__ import annotations

import copy
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from primeblocks import parallel
from primeblocks.parallel.adapters.transformers import parallelize

from ..harness import compare, main
from .gpu_dispatch import host_waits

__all__ = ["SMALL", "Sizes", "figures", "layer_flops"]

Figures = dict[str, tuple[float, str, str]]
# Of the loss: two models whose products sum in other orders, in bfloat16.
LOSS_ERROR = 2**-7
_COMMON = {"num_hidden_layers": 1, "vocab_size": 512, "use_cache": False}
# Shapes: their config.json on the hub.
QWEN = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128 // 8, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GLM = {
    "hidden_size": 5120, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "n_routed_experts": 160 // 8, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 0, "n_shared_experts": 1,
}  # fmt: skip
_TINY = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "moe_intermediate_size": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Tokens, the side of the square product of the roofline, and the layers by name."""

    tokens: int = 8192
    square: int = 8192
    layers: dict[str, tuple[str, dict[str, Any]]] = field(
        default_factory=lambda: {"qwen3_30b": ("qwen3_moe", QWEN), "glm45": ("glm4_moe", GLM)}
    )


SMALL = Sizes(
    tokens=64,
    square=64,
    layers={
        "qwen3_30b": ("qwen3_moe", QWEN | _TINY | {"num_experts": 4, "num_experts_per_tok": 2}),
        "glm45": ("glm4_moe", GLM | _TINY | {"n_routed_experts": 4, "num_experts_per_tok": 2}),
    },
)


def figures(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Figures]:
    """A step of each layer.

    Raises:
        SystemExit: there is no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.parallel_parts.gpu_layers needs a CUDA device")
    sizes = sizes or Sizes()
    with _one_rank(device):
        meshes = parallel.plan_mesh(world_size=1).build(device)
        rate = _matmul_rate(sizes.square, device)
        yield {"parallel.layer.gpu.matmul_tflops": (rate / 1e12, "TFLOP/s", "")}
        for name, (family, shapes) in sizes.layers.items():
            yield _of_layer(f"parallel.layer.gpu.{name}", family, shapes, meshes, sizes, rate)


def layer_flops(config: Any, tokens: int) -> float:
    """Operations of forward and backward: two a weight and token, three times; causal attention."""
    width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    attention = width * dim * (2 * heads + 2 * config.num_key_value_heads)
    experts = config.num_experts_per_tok + getattr(config, "n_shared_experts", 0)
    moe = 3 * width * config.moe_intermediate_size * experts
    pairs = tokens * (tokens + 1) / 2
    return 3 * (2 * tokens * (attention + moe) + 4 * pairs * heads * dim)


def _of_layer(
    name: str, family: str, shapes: dict[str, Any], meshes: Any, sizes: Sizes, rate: float
) -> Figures:
    device = meshes.loss.device_type
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_COMMON, **shapes)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(512, (1, sizes.tokens), device=device)
    with torch.no_grad():
        wanted = float(copy.deepcopy(model).bfloat16()(input_ids=tokens, labels=tokens).loss)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    theirs = copy.deepcopy(model)
    theirs.set_experts_implementation("grouped_mm")
    for part in (*theirs.model.layers, theirs):
        fully_shard(part, mesh=meshes.loss, mp_policy=precision)
    parallelize(model, meshes, precision=precision)

    def step_of(which: torch.nn.Module) -> torch.Tensor:
        logits = which(input_ids=tokens).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
        loss.backward()
        which.zero_grad()
        return loss.detach()

    step, plain = partial(step_of, model), partial(step_of, theirs)

    def agree() -> None:
        for one in (step, plain):
            off = abs(float(one()) - wanted) / wanted
            assert off <= LOSS_ERROR, f"{name}: the loss is off by {off}, over {LOSS_ERROR}"

    timing, peer = compare(step, plain, agree=agree, runs=5)
    del theirs, plain  # The peak is ours alone.
    gc.collect()
    flops = layer_flops(config, sizes.tokens)
    found: Figures = {
        f"{name}.step_ms": (1e3 * timing.median, "ms", ""),
        f"{name}.mfu": (flops / timing.median / rate, "ratio", "bfloat16 product"),
        f"{name}.time_ratio": (timing.median / peer.median, "ratio", "transformers under FSDP2"),
        f"{name}.spread": (timing.spread, "ratio", ""),
        f"{name}.host_waits": (host_waits(step), "count", ""),
        f"{name}.launches": (_launches(step), "count", ""),
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        found[f"{name}.peak_memory"] = torch.cuda.max_memory_allocated() / 2**30, "GiB", ""
    return found


def _launches(step: Callable[[], object]) -> float:
    """Count kernels of a step; on a CPU 0."""
    if not torch.cuda.is_available():
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return float(sum(each.device_type.name == "CUDA" for each in seen.events()))


def _matmul_rate(side: int, device: str) -> float:
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    (timing,) = compare(lambda: a @ b, agree=lambda: None)
    return 2 * side**3 / timing.median


@contextmanager
def _one_rank(device: str) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL))
