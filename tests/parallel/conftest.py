"""Ranks are forked from a server that has imported the models already, those that are installed."""

import pytest
import torch.distributed as dist

from primeblocks.testing import ranks

ranks.preload(
    "primeblocks.parallel",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tests.parallel.torchtitan_on_cpu",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    "transformers.models.glm5_next.modeling_glm5_next",
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
)


@pytest.fixture
def group(tmp_path, device):
    """This process alone, on a device."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    """This process alone, on a CPU."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
