"""The plan of a step's bytes against the bytes of a real step, counted in its collectives."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError
from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.parallel.attention import ring_attention, ulysses_attention
from primeblocks.parallel.experts import OncePerRankDispatcher
from primeblocks.planning.traffic import StepSizes, plan_traffic
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import StepCounter

ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}
TOKENS, EXPERTS, TOP_K = 240, 16, 4


def _step(degrees, dispatch, attention, recompute):
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    plan = plan_mesh(world_size=dist.get_world_size(), **degrees)
    meshes = plan.build("cpu")
    model = tiny_models.build(
        "qwen3_moe", dtype="float32", num_layers=2, num_experts=EXPERTS, top_k=TOP_K, hidden=64
    ).train()
    sizes = _sizes(model, recompute, TOKENS // plan.context)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    group = meshes.expert.get_group()
    dispatcher = OncePerRankDispatcher(group) if dispatch == "once_per_rank" else None
    parallelize(model, meshes, attention=ATTENTIONS[attention], dispatcher=dispatcher)
    sequence = plan_sequence([TOKENS], ranks=plan.context, order="contiguous")
    g = torch.Generator().manual_seed(meshes.batch.get_local_rank())
    tokens = torch.randint(4, 512, (TOKENS,), generator=g)
    inputs = local_inputs(tokens, sequence=sequence, group=meshes.context.get_group())
    with StepCounter() as step:
        model(**inputs).logits.square().mean().backward()
    planned = plan_traffic(plan, sizes, dispatch=dispatch, attention=attention)
    return dict(step.received_bytes), {axis: planned.of(axis) for axis, *_ in planned.rows}


def _sizes(model, recompute, tokens):
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    layers = sum(p.numel() for p in model.model.layers.parameters())
    return StepSizes(
        tokens=tokens,
        hidden=64,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_layers=2,
        layers=2,
        heads=2,
        key_heads=2,
        head_dim=32,
        root_parameters=sum(p.numel() for p in model.parameters()) - layers,
        layer_parameters=layers - experts,
        expert_parameters=experts,
        parameter_bytes=4,
        activation_bytes=4,
        recompute=recompute,
    )


def _mean(by_rank):
    total = Counter()
    for one in by_rank:
        total.update(one)
    return {name: value / len(by_rank) for name, value in total.items()}


STEPS = (
    ({"expert": 2, "context": 2}, "once_per_rank", "ulysses", True),
    ({"expert": 4, "context": 4}, "once_per_choice", "ring", True),
    ({"expert": 2, "replicate": 2}, "once_per_rank", "ring", False),
)


def _every_step():
    return [_step(*each) for each in STEPS]


def test_a_step_receives_what_was_planned():
    for results in zip(*ranks.run(_every_step, world_size=4), strict=True):
        _check(_mean([counted for counted, _ in results]), results[0][1])


def _check(counted, planned):
    sharded = planned.get("fsdp", 0) + planned.get("expert_fsdp", 0)
    # Shards are padded to equal rows; a part of the tokens are on a rank of their own choice.
    assert counted["_allgather_base_"] + counted["_reduce_scatter_base_"] == pytest.approx(
        sharded, rel=0.02
    )
    assert counted.get("allreduce_", 0) == pytest.approx(planned.get("replicate", 0), rel=0.02)
    exchanged = counted.get("alltoall_base_", 0) + counted.get("recv_", 0)
    travelled = planned.get("expert", 0) + planned.get("context", 0)
    assert exchanged == pytest.approx(travelled, rel=0.05)


SIZES = StepSizes(
    tokens=16384, hidden=6144, num_experts=256, top_k=8, expert_layers=75, layers=78, heads=64,
    key_heads=64, head_dim=256, root_parameters=2 * 154880 * 6144, layer_parameters=17 * 10**9,
    expert_parameters=720 * 10**9,
)  # fmt: skip


def test_the_table_says_what_is_large():
    traffic = plan_traffic(plan_mesh(world_size=256, context=8, expert=32), SIZES)
    lines = traffic.table().splitlines()
    assert lines[0].split() == ["axis", "MiB", "received", "for"]
    assert [line.split()[0] for line in lines[1:]] == [axis for axis, *_ in traffic.rows] + ["all"]
    assert traffic.total_bytes == pytest.approx(sum(map(traffic.of, {r[0] for r in traffic.rows})))
    saving = plan_traffic(
        plan_mesh(world_size=256, context=8, expert=2), SIZES, dispatch="once_per_rank"
    ).of("expert") / plan_traffic(plan_mesh(world_size=256, context=8, expert=2), SIZES).of(
        "expert"
    )
    assert 0.24 < saving < 0.26


def test_one_rank_sends_nothing():
    assert plan_traffic(plan_mesh(world_size=1), SIZES).rows == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dispatch": "twice"}, "got 'twice' and 'ring'"),
        ({"attention": "flash"}, "one of .*'ulysses'.*; got"),
    ],
    ids=str,
)
def test_other_words_are_refused(arguments, said):
    with pytest.raises(PlanError, match=said):
        plan_traffic(plan_mesh(world_size=1), SIZES, **arguments)


def test_experts_must_be_shared_equally():
    with pytest.raises(PlanError, match="expert=3 does not divide 256 experts"):
        plan_traffic(plan_mesh(world_size=3, expert=3), SIZES)
