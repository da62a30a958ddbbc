"""Agents whose template strips thoughts: a step on their trees beside one on packed rollouts.

`python -m benchmarks.trees` from the repository; two minutes of two idle cores.

An agent of 20 turns thinks 40 tokens, answers 8, and is told 16. One of 64 turns thinks 20, answers
16, and is told 32. Both start from a prompt of 60 tokens that a group shares. Positions, pairs of
attention and FLOPs are counted. FLOPs are those of Qwen3-30B-A3B. A step is forward and backward of
a Qwen3-MoE of four layers in float32, with the loss of the sampled tokens, plans included. Both
steps use the same attention kernel. Processor time is compared too: other processes of a machine
move it least. Peak memory counts the storages that live beside parameters.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from primeblocks import losses
from primeblocks.capture import Conversation
from primeblocks.losses.packing import Pack, pack, plan_trees
from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.rollout import Rollout
from primeblocks.testing import tiny_models

from .async_loop_parts.logprobs import Live
from .harness import Figures, compare, main

__all__ = ["dry", "measure"]

PROMPT, VOCABULARY = 60, 512
# By turns: tokens of a thought, of an answer, and of what the agent is told then.
SHAPES = {20: (40, 8, 16), 64: (20, 16, 32)}
SIZES = {"num_layers": 4, "num_experts": 16, "top_k": 2, "vocab": VOCABULARY}
WIDTHS = (128, 256)


def agents(turns: int, members: int) -> list[Rollout]:
    """The rollouts of a group: each turn forks from the one before."""
    generator = np.random.default_rng(0)
    thought, answer, told = SHAPES[turns]
    prompt = generator.integers(4, VOCABULARY, PROMPT).tolist()
    found: list[Rollout] = []
    for _ in range(members):
        conversation, said = Conversation(), [*prompt]
        for _ in range(turns):
            sampled = generator.integers(4, VOCABULARY, thought + answer)
            conversation.append(
                np.array(said),
                sampled,
                logprobs=np.full(len(sampled), -6.0),
                versions=np.zeros(len(sampled), np.int64),
            )
            said += [*sampled[thought:].tolist(), *generator.integers(4, VOCABULARY, told).tolist()]
        found += conversation.rollouts()
    return found


def _step(model: Any, group: Any, batch: list[Rollout], *, trees: bool) -> torch.Tensor:
    """Forward and backward of one micro-batch, from its rollouts on."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    model.zero_grad(set_to_none=True)
    packed = pack(batch, range(len(batch)))
    if trees:
        plan = plan_trees(batch)
        sequence = plan_sequence(plan.segment_lengths, ranks=1, parents=plan.parents)
        tokens, predictors = packed.tokens[plan.places], plan.rows[packed.predictors]
    else:
        sequence = plan_sequence(packed.document_lengths, ranks=1)
        tokens, predictors = packed.tokens, packed.predictors
    inputs = local_inputs(torch.from_numpy(tokens), sequence=sequence, group=group)
    places, targets = torch.from_numpy(predictors), torch.from_numpy(packed.targets)
    head = model.lm_head
    # Inside the model's forward, where FSDP2 has the head's weight whole.
    head.forward = lambda hidden: losses.logprobs.token_logprobs(
        hidden[0, places], head.weight, targets
    ).clone()
    loss = _loss(model(**inputs).logits, packed)
    loss.backward()
    return loss.detach()


def _loss(own: torch.Tensor, packed: Pack) -> torch.Tensor:
    engine, mask = (torch.from_numpy(x) for x in (packed.logprobs, packed.loss_mask))
    advantages = torch.arange(len(own), dtype=own.dtype).cos()
    loss = losses.cispo_loss(own, engine.to(own.dtype), advantages, mask=mask, clip_high=5.0)
    return losses.normalisation.divide(loss)


def _processor_s(step: Any) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _gradients(model: Any, step: Any) -> list[torch.Tensor]:
    loss = step()
    grads = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    return [loss, *(grad.clone() for grad in grads)]


def _agree(model: Any, *steps: Any, bound: float = 1e-3) -> None:
    one, other = (_gradients(model, step) for step in steps)
    for x, y in zip(one, other, strict=True):
        error = float((x - y).norm() / y.norm().clamp_min(1e-30))
        assert error < bound, error  # Norms are float32, whatever the model is.


def _model(dtype: str, width: int) -> tuple[Any, Any]:
    from primeblocks.parallel.adapters.transformers import parallelize

    model: Any = tiny_models.build("qwen3_moe", dtype=dtype, hidden=width, **SIZES).train()
    meshes = plan_mesh(world_size=1).build("cpu")
    parallelize(model, meshes)
    return model, meshes.context.get_group()


def _counts(turns: int, members: int) -> Figures:
    plan = plan_trees(agents(turns, members))
    name, peer = f"{turns}_turns.{members}", "packed rollouts"
    separate, shared = plan.flops()
    return {
        f"trees.positions.{name}": (len(plan.places), "positions", ""),
        f"trees.positions_ratio.{name}": (len(plan.rows) / len(plan.places), "ratio", peer),
        f"trees.pairs_ratio.{name}": (plan.pairs[0] / plan.pairs[1], "ratio", peer),
        f"trees.flops_ratio.{name}": (separate / shared, "ratio", peer),
    }


def _steps(turns: int, members: int, width: int, runs: int) -> Iterator[Figures]:
    name, peer = f"{turns}_turns.{members}.width_{width}", "packed rollouts"
    batch = agents(turns, members)
    model, group = _model("float64", width)
    small = agents(turns, 1)
    both = (partial(_step, model, group, small, trees=each) for each in (True, False))
    _agree(model, *both, bound=1e-6)
    model, group = _model("float32", width)
    ours, packed = (partial(_step, model, group, batch, trees=each) for each in (True, False))
    timings = compare(ours, packed, agree=partial(_agree, model, ours, packed), runs=runs)
    yield {
        f"trees.step.{name}": (timings[0].median, "s", ""),
        f"trees.step_spread.{name}": (timings[0].spread, "ratio", ""),
        f"trees.packed_step.{name}": (timings[1].median, "s", ""),
        f"trees.packed_step_spread.{name}": (timings[1].spread, "ratio", ""),
        f"trees.step_time_ratio.{name}": (timings[1].median / timings[0].median, "ratio", peer),
    }
    least = [min(_processor_s(step) for _ in range(runs)) for step in (ours, packed)]
    yield {
        f"trees.processor_time.{name}": (least[0], "s", ""),
        f"trees.processor_time_ratio.{name}": (least[1] / least[0], "ratio", peer),
    }
    most = []
    for step in (ours, packed):
        model.zero_grad(set_to_none=True)
        with Live() as live:
            step()
        most.append(live.most)
    yield {
        f"trees.peak_memory.{name}": (most[0] / 2**20, "MiB", ""),
        f"trees.packed_peak_memory.{name}": (most[1] / 2**20, "MiB", ""),
        f"trees.peak_memory_fraction.{name}": (most[0] / most[1], "ratio", peer),
    }


def measure() -> Iterator[Figures]:
    for turns, members in itertools.product(SHAPES, (8, 16)):
        yield _counts(turns, members)
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/ranks"
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        for width in WIDTHS:
            yield from _steps(20, 8, width, runs=3)
        dist.destroy_process_group()


def dry() -> Iterator[Figures]:
    yield _counts(20, 2)


if __name__ == "__main__":
    main(measure, dry=dry)
