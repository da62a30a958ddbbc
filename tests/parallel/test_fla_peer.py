"""The kernels of flash-linear-attention 0.6.0 in recurrent layers over a split sequence.

Its plain torch ones, which its own Triton kernels are tested against and whose arguments these
share: a CPU runs no others.
"""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.testing import ranks
from tests.parallel.float64 import Float64
from tests.parallel.test_transformers_families import DOCUMENTS, _model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # It finds no GPU, and says so.
    naive = pytest.importorskip(
        "fla.ops.gated_delta_rule.naive", reason="flash-linear-attention is not installed"
    )


def _run(family, kernel):
    """The logits of this rank's tokens, the gradients, and the calls of the kernel."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    calls = []

    def counted(q, k, v, **more):
        calls.append(tuple(q.shape))
        return kernel(q, k, v, **more)

    model = _model(family)
    meshes = plan_mesh(world_size=dist.get_world_size(), context=dist.get_world_size()).build("cpu")
    parallelize(model, meshes, recurrence_kernel=None if kernel is None else counted)
    group = meshes.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=group.size(), order="contiguous")
    tokens = torch.randint(32, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(0))
    with Float64():
        logits = model(**local_inputs(tokens, sequence=plan, group=group)).logits
        logits.square().sum().backward()
    return logits.detach(), [p.grad.full_tensor() for p in model.parameters()], calls


def _theirs(name):
    chosen = partial(getattr(naive, name), output_final_state=True)
    if "chunk" in name:
        chosen = partial(chosen, chunk_size=4)
    return chosen


def _compare(family, name):
    logits, grads, calls = _run(family, _theirs(name))
    assert calls  # And not ours once more.
    want, wanted, _ = _run(family, None)
    pairs = [(logits, want), *zip(grads, wanted, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_next", "naive_chunk_gated_delta_rule"),
        ("qwen3_5_moe", "naive_recurrent_gated_delta_rule"),
    ],
)
def test_their_kernels_serve_split_sequences(family, name):
    assert max(ranks.run(_compare, family, name, world_size=2)) < 1e-12
