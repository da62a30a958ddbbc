"""What a caller may pass by mistake at the top level: a typed error, and none of Python's own."""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from primeblocks import fp8, kvoffload, losses, parallel, replay, serving
from primeblocks.errors import UsageError
from primeblocks.fp8.adapters import transformers as fp8_of_transformers
from primeblocks.fp8.reference import ReferenceGemm
from primeblocks.planning import capacity, traffic
from primeblocks.replay.adapters.vllm import RouterShape
from primeblocks.testing import ranks

WEIGHT, ROWS, ENDS = torch.zeros(8, 128), torch.zeros(4, 128), torch.tensor([2, 4])
X = torch.zeros(7, 2, 4)
RECIPE, PLAN = fp8.Recipe(), parallel.plan_sequence([7], ranks=1)
SLOTS = {"x": torch.zeros(2, 4), "scores": torch.ones(2, 1), "expert_ids": torch.zeros(2, 1).long()}

FP8 = {
    "a pair for a tile": lambda: fp8.Recipe(activations=(1, 128)),
    "another pair": lambda: fp8.Recipe(weights=(128, 128)),
    "a pair to quantize by": lambda: fp8.quantize(WEIGHT, (1, 128)),
    "a recipe to quantize by": lambda: fp8.quantize(WEIGHT, RECIPE),
    "a list to quantize": lambda: fp8.quantize([[1.0]], fp8.Tile(1, 1)),
    "a batch of vectors": lambda: fp8.quantize(torch.ones(3), fp8.Tile(1, 1)),
    "another kind of scale": lambda: fp8.quantize(WEIGHT, fp8.Tile(1, 1), scale="e8m0"),
    "a quotient that is none": lambda: fp8.quantize(WEIGHT, fp8.Tile(1, 1), quotient="x/s"),
    "another answer": lambda: fp8.quantize(WEIGHT, fp8.Tile(1, 1), nonfinite="ignore"),
    "a wgrad of another kind": lambda: fp8.Recipe(wgrad="fp8"),
    "half a tile": lambda: fp8.Tile(1.5, 128),
    "text in a tile": lambda: fp8.Tile("1", 128),
    "an engine by name": lambda: fp8.Recipe(gemm="cublas"),
    "an engine's class": lambda: fp8.Recipe(gemm=ReferenceGemm),
    "no recipe": lambda: fp8.matmul(ROWS, WEIGHT, recipe=None),
    "a tile for a recipe": lambda: fp8.matmul(ROWS, WEIGHT, recipe=fp8.Tile(1, 128)),
    "no dims": lambda: fp8.matmul(torch.tensor(1.0), WEIGHT, recipe=RECIPE),
    "a quantized weight": lambda: fp8.matmul(
        ROWS, fp8.quantize(WEIGHT, RECIPE.weights), recipe=RECIPE
    ),
    "offsets in a list": lambda: fp8.grouped_matmul(
        ROWS, WEIGHT.expand(2, 8, 128), [2, 4], recipe=RECIPE
    ),
    "offsets with two dims": lambda: fp8.grouped_matmul(
        ROWS, WEIGHT.expand(2, 8, 128), ENDS[None], recipe=RECIPE
    ),
    "no experts": lambda: fp8.grouped_matmul(
        ROWS[:0], WEIGHT.expand(0, 8, 128), ENDS[:0], recipe=RECIPE
    ),
    "one number for experts": lambda: fp8.grouped_matmul(
        ROWS, torch.tensor(1.0), ENDS, recipe=RECIPE
    ),
    "no expression": lambda: fp8.convert(torch.nn.Linear(1, 1), RECIPE, only="["),
    "a list of layers": lambda: fp8.convert([torch.nn.Linear(1, 1)], RECIPE, only="w"),
    "a list for the adapter": lambda: fp8_of_transformers.convert([WEIGHT], RECIPE, only="w"),
    "names in a set": lambda: fp8.convert(torch.nn.Linear(1, 1), RECIPE, only={"w"}),
    "numbers for names": lambda: fp8.convert(torch.nn.Linear(1, 1), RECIPE, only=(3,)),
    "names to encode": lambda: fp8.encode_weights(RECIPE, only={"w"}, layouts=None),
    "a form by another name": lambda: fp8.encode_weights(
        RECIPE, only="w", layouts=None, form="fp8"
    ),
    "tensors for layouts": lambda: fp8.encode_weights(RECIPE, only="w", layouts={"w": WEIGHT}),
    "names for layouts": lambda: fp8.encode_weights(RECIPE, only="w", layouts=["w"]),
    "no recipe to audit by": lambda: fp8.audit({"w": WEIGHT}, {"w": WEIGHT}, None, only="w"),
    "a list to audit": lambda: fp8.audit([WEIGHT], {"w": WEIGHT}, RECIPE, only="w"),
    "numbers to audit": lambda: fp8.audit({"w": WEIGHT}, {"w": 1.0}, RECIPE, only="w"),
    "one entry of a list": lambda: fp8.audit(
        {"w": WEIGHT}, {"w": WEIGHT}, RECIPE, only="w", excluded="w"
    ),
    "nothing quantized": lambda: fp8.measure_error(WEIGHT, WEIGHT),
}
LOGPROBS = -torch.ones(2, 3)
ASYNC_LOOP = {
    "rewards in a list": lambda: losses.advantages.group_advantages([[1.0, 0.0]]),
    "rewards in an array": lambda: losses.advantages.group_advantages(torch.ones(2, 2).numpy()),
    "one group's rewards": lambda: losses.advantages.group_advantages(torch.ones(2)),
    "no mask": lambda: losses.grpo_loss(LOGPROBS, LOGPROBS, LOGPROBS, mask=None),
    "no mask either": lambda: losses.aipo_loss(LOGPROBS, LOGPROBS, LOGPROBS, mask=None),
    "a list of masks": lambda: losses.grpo_loss(LOGPROBS, LOGPROBS, LOGPROBS, mask=[True]),
    "advantages in a list": lambda: losses.grpo_loss(
        LOGPROBS, LOGPROBS, [1.0, 0.0], mask=LOGPROBS < 0
    ),
    "losses in a list": lambda: losses.normalisation.divide([losses.TokenLoss(X.sum(), 1, 0)]),
    "a tensor for a loss": lambda: losses.normalisation.divide(X.sum(), by=3),
    "log-probabilities in lists": lambda: losses.corrections.importance_weights(
        [0.0], [0.0], mask=LOGPROBS < 0
    ),
}
PARALLEL = {
    "text for ranks": lambda: parallel.plan_mesh(world_size="8"),
    "one length": lambda: parallel.plan_sequence(7, ranks=2),
    "no lengths": lambda: parallel.plan_sequence(None, ranks=2),
    "half a token": lambda: parallel.plan_sequence([1.5], ranks=2),
    "rows of lengths": lambda: parallel.plan_sequence(torch.ones(2, 2).long(), ranks=2),
    "no ranks": lambda: parallel.plan_sequence([7], ranks=None),
    "a cost that is a number": lambda: parallel.plan_sequence([7], ranks=2, cost=3.0),
    "split over no group": lambda: PLAN.split(X, group=None),
    "join over no group": lambda: PLAN.join(X, group=None),
    "labels of a list": lambda: PLAN.labels([1] * 7),
    "dispatch over no group": lambda: parallel.experts.AllToAllDispatcher(None),
    "dispatch over a number": lambda: parallel.experts.OncePerRankDispatcher(8),
    "dispatch over a mesh": lambda: parallel.experts.AllToAllDispatcher(_meshes().expert),
    "no experts to dispatch to": lambda: parallel.experts.LocalDispatcher().dispatch(
        **SLOTS, num_experts=None
    ),
    "combine nothing": lambda: parallel.experts.LocalDispatcher().combine(X[0], None),
    "a capacity that is on": lambda: parallel.experts.AllToAllDispatcher(
        dist.group.WORLD, capacity_rows=True
    ),
    "an alignment that is on": lambda: parallel.experts.LocalDispatcher(alignment=True),
    "no alignment": lambda: parallel.experts.LocalDispatcher(alignment=None),
    "ring over no group": lambda: parallel.attention.ring_attention(
        X, X, X, sequence=PLAN, group=None
    ),
    "lengths for a plan": lambda: parallel.attention.ulysses_attention(
        X, X, X, sequence=[7], group=dist.group.WORLD
    ),
    "counts in a list": lambda: parallel.experts.grouped_linear(X[0], [2], torch.zeros(1, 4, 4)),
    "counts of other experts": lambda: parallel.experts.grouped_linear(
        X[0], torch.tensor([1, 1]), torch.zeros(1, 4, 4)
    ),
    "rows of another width": lambda: parallel.experts.grouped_linear(
        X[0], torch.tensor([2]), torch.zeros(1, 4, 3)
    ),
    "no meshes to clip over": lambda: parallel.clip_grad_norm_([], 1.0, meshes=None),
    "a number to clip": lambda: parallel.clip_grad_norm_(5, 1.0, meshes=_meshes()),
    "more tokens than int64 holds": lambda: parallel.global_token_count(1 << 63, _meshes()),
    "a word to count": lambda: losses.normalisation.global_count("x", group=dist.group.WORLD),
    "a plan to count over": lambda: parallel.global_token_count(
        3, parallel.plan_mesh(world_size=1)
    ),
    "a plan to shard over": lambda: parallel.fully_shard_moe(
        torch.nn.Linear(1, 1), parallel.plan_mesh(world_size=1), layers=[], experts=[]
    ),
    "names of layers": lambda: parallel.fully_shard_moe(
        torch.nn.Linear(1, 1), _meshes(), layers=["layers.0"], experts=[]
    ),
    "no such device": lambda: parallel.plan_mesh(world_size=1).build("abacus"),
    "no plan to count bytes of": lambda: traffic.plan_traffic(None, None),
    "no sizes to count bytes of": lambda: traffic.plan_traffic(
        parallel.plan_mesh(world_size=1), None
    ),
    "no model to move": lambda: parallel.memory.HostMemory(None),
    "parameters to move": lambda: parallel.memory.HostMemory([torch.zeros(1)]),
    "no group to suspend": lambda: parallel.memory.GroupMemory(None),
    "a list of groups to suspend": lambda: parallel.memory.GroupMemory([dist.group.WORLD]),
    "meshes to suspend": lambda: parallel.memory.GroupMemory(_meshes()),
}
ROUTES = replay.Routes.from_array(np.zeros((2, 1, 1), int), num_experts=2, layer_ids=[0])
MODEL = torch.nn.Linear(2, 2)


def _routes(array, **others):
    return replay.Routes.from_array(array, **{"num_experts": 2, "layer_ids": [0]} | others)


REPLAY = {
    "half a token to pad": lambda: ROUTES.pad(3.5),
    "no tokens to pad": lambda: ROUTES.pad(None),
    "nothing to compare": lambda: replay.compare(None, ROUTES),
    "nothing to compare with": lambda: replay.compare(ROUTES, None),
    "rows that are no rectangle": lambda: _routes([[[0]], [[0], [1]]]),
    "rows without numbers": lambda: _routes(torch.zeros(1, 1, 1, dtype=torch.int, device="meta")),
    "a mask that is none": lambda: _routes(np.zeros((1, 1, 1), int), missing="x"),
    "half an expert": lambda: _routes(np.zeros((1, 1, 1), int), num_experts=8.5),
    "no experts": lambda: _routes(np.zeros((1, 1, 1), int), num_experts=None),
    "names of layers": lambda: _routes(np.zeros((1, 1, 1), int), layer_ids=["a"]),
    "no layers": lambda: _routes(np.zeros((1, 1, 1), int), layer_ids=None),
    "names of routers to follow": lambda: replay.follow(MODEL, ["gate"]),
    "nothing to follow": lambda: replay.follow(MODEL, None),
    "half a row of a batch": lambda: ROUTES.tensor(batch=0.5),
    "a batch in words": lambda: ROUTES.tensor(batch="2"),
    "a model to follow without its routers": lambda: replay.follow(MODEL, MODEL),
    "no routers to follow": lambda: replay.follow(MODEL, []),
    "an array to compare with": lambda: replay.compare(ROUTES, ROUTES.experts),
}

SHAPE = {"num_layers": 6, "moe_layers": (0, 1), "num_experts": 8, "top_k": 2}
REPLAY |= {
    f"{odd!r} for {name}": partial(RouterShape, **SHAPE | {name: odd})
    for name in SHAPE
    for odd in (None, "6", 1.5, [None], {})
}
ASYNC_LOOP |= {
    "half a request in flight": lambda: serving.EngineState("a", float("nan"), 1),
    "half a limit": lambda: serving.Fleet({"a": print}, max_in_flight=1.5),
    "no limit": lambda: serving.Fleet({"a": print}, max_in_flight=None),
    "pages in words": lambda: serving.Fleet({"a": print}, cache_pages="3"),
    "a list of engines": lambda: serving.Fleet([print]),
    "no engines": lambda: serving.Fleet(None),
    "an engine that is none": lambda: serving.Fleet({"a": 3}),
    "no route": lambda: serving.Fleet({"a": print}, route=None),
    "no request": lambda: serving.Fleet({"a": print}).choose(None),
    "a list for a weight": lambda: serving.PrefixAndLoad(beta=[1]),
}
GROUP, KIND = capacity.KvGroup("a", 1, 1), capacity.Rollouts(1, 1, 1)
GPU = capacity.Gpu(80 << 30)
KVOFFLOAD = {
    f"{odd!r} for {build.__name__} {place}": partial(build, *many[:place], odd, *many[place + 1 :])
    for build, many in {
        capacity.KvGroup: ("a", 1, 1, 1, 1, 1, 1, 1),
        capacity.Rollouts: (1, 1, 1, 1),
        capacity.Gpu: (80 << 30, 0.5, 0),
        capacity.Weights: (1, 1, 1),
    }.items()
    for place in range(build is capacity.KvGroup, len(many))
    for odd in ("6", 1.5, [None], {}, float("nan"))
} | {
    f"{odd!r} for {name}": partial(
        capacity.plan_capacity, [GROUP], [KIND], gpu=GPU, weights=capacity.Weights(1), **{name: odd}
    )
    for name in ("tensor", "gpus", "page_tokens", "host_bytes", "disk_bytes")
    for odd in ("6", 1.5, [None], {})
} | {
    "no prompt": lambda: kvoffload.page_hashes(None, page_tokens=1),
    "no size of a page": lambda: kvoffload.page_hashes([1], page_tokens=None),
    "half a token in a page": lambda: kvoffload.page_hashes([1], page_tokens=1.5),
    "no configuration": lambda: capacity.kv_groups(None),
    "a configuration's name": lambda: capacity.kv_groups("config.json"),
}  # fmt: skip
MISTAKES = [ASYNC_LOOP, FP8, KVOFFLOAD, PARALLEL, REPLAY]


def _meshes():
    return parallel.plan_mesh(world_size=1).build("cpu")


def _met():
    """In a rank nothing checks annotations, as where users are."""
    found = {}
    for name, mistake in (pair for block in MISTAKES for pair in block.items()):
        try:
            mistake()
            found[name] = "nothing"
        except UsageError:
            continue
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_mistake_is_a_typed_error():
    assert ranks.run(_met, world_size=1) == [{}]
