"""torchtitan, told to use the CPU. It looks for a GPU once, when it is first imported.

The server that ranks are forked from imports this, so that no rank waits for torchtitan.
"""

import torch
import torch.testing._internal.distributed.fake_pg
import torchtitan.tools.utils as tools

tools.device_type, tools.device_module = "cpu", torch.cpu

from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common import moe, token_dispatcher  # noqa: E402

__all__ = ["ParallelDims", "moe", "parallel_dims", "token_dispatcher"]


def parallel_dims(world_size, *, replicate=1, context=1, expert=1, backend="partial_dtensor"):
    """Built. Collective. The default backend of torchtitan calls a collective that gloo lacks."""
    set_spmd_backend(backend)
    dims = ParallelDims(
        dp_replicate=replicate,
        dp_shard=world_size // replicate // context,
        cp=context,
        tp=1,
        pp=1,
        ep=expert,
        world_size=world_size,
        spmd_backend=backend,
    )
    dims.build_mesh()
    return dims
