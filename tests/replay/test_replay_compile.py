"""torch.compile. In ranks of their own: annotations checked at run time cannot be compiled."""

import traceback
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from primeblocks.errors import UsageError
from primeblocks.replay import Routes, allow_compile, follow, impose, record
from primeblocks.testing import ranks
from tests.replay.conftest import ToyModel
from tests.replay.test_follow import WAYS, Swallows, routers_of

FLAG = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def _routes(seed, tokens, *, some_missing=True):
    generator = torch.Generator().manual_seed(seed)
    missing = np.arange(tokens) % 5 == 2 if some_missing else None
    return Routes.from_array(
        torch.rand(tokens, 3, 6, generator=generator).topk(2).indices.numpy(),
        num_experts=6,
        layer_ids=range(3),
        missing=missing,
    )


def _inputs(seed, sequence=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, sequence, 5, dtype=torch.float64, generator=generator)


def _step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def _assert_equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _compiled(whole, checkpoint=None, *, fullgraph=True, backend="eager"):
    """A model that looks up hooks again, and the counter of its compilations."""
    torch._dynamo.reset()
    model, counter = ToyModel("sigmoid", checkpoint=checkpoint), CompileCounterWithBackend(backend)
    allow_compile(model.routers)
    for part in [model] if whole else model.layers:
        part.compile(backend=counter, fullgraph=fullgraph)
    return model, counter


def _contexts_share_code(whole, checkpoint, options):
    setattr(torch._dynamo.config, FLAG, True)
    eager = ToyModel("sigmoid")
    model, counter = _compiled(whole, checkpoint)
    counts = []
    for i in range(8):
        # Shapes change once, from where on they are symbols; every third step is plain.
        sequence = 4 if i < 4 else 4 + i
        x, routes = _inputs(i, sequence), _routes(i, 2 * sequence)
        if i % 3 == 1:
            _assert_equal(_step(model, x), _step(eager, x))
        else:
            with impose(model.routers, routes, **options), record(model.routers) as tape:
                found = _step(model, x)
            with impose(eager.routers, routes, **options), record(eager.routers) as eager_tape:
                _assert_equal(found, _step(eager, x))
            assert tape.routes == eager_tape.routes
            assert options or (tape.routes.experts == routes.experts)[~routes.missing].all()
        counts.append(counter.frame_count)
    # Imposed and plain, with fixed shapes; the same with any shape.
    assert counts[1] == counts[3], counts
    assert counts[5] == counts[7], counts
    assert options or counts[-1] <= 4


def _gates_loop():
    model, counter = _compiled(False, backend="aot_eager")
    with record(model.routers, gates=True) as tape:
        own = _step(model, _inputs(0))
    assert np.abs(tape.gates).max() > 0
    counts = []
    for seed in range(3):
        gates = torch.rand(8, 3, 2, generator=torch.Generator().manual_seed(seed))
        routes = _routes(seed, 8)
        eager = ToyModel("sigmoid")
        with impose(eager.routers, routes, gates=gates):
            wanted = _step(eager, _inputs(0))
        with impose(model.routers, routes, gates=gates) as imposed:
            _assert_equal(_step(model, _inputs(0)), wanted)
        assert imposed.replacement_rate == 0
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
    _assert_equal(_step(model, _inputs(0)), own)


def _late_backward(model, closed):
    """Backward in the next micro-batch's context, or after the only one."""
    with impose(model.routers, _routes(1, 8)):
        loss = model(_inputs(1).requires_grad_()).square().sum()
    if closed:
        loss.backward()
        return
    with impose(model.routers, _routes(2, 8)):
        loss = loss + model(_inputs(2).requires_grad_()).square().sum()
        loss.backward()


def _late_is_right(whole, checkpoint):
    """Compiled code saves the rows that it was given; nothing is looked up again."""
    setattr(torch._dynamo.config, FLAG, True)
    for closed in (False, True):
        eager = ToyModel("sigmoid")
        model, _ = _compiled(whole, checkpoint, backend="aot_eager")
        _late_backward(model, closed)
        _late_backward(eager, closed)
        for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)


def _checkpoint_around(fullgraph):
    """The hook leaves compiled code and has all its checks."""
    model, _ = _compiled(False, checkpoint=False, fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="inside_a_checkpoint"):
            _late_backward(model, closed=False)
        return
    with pytest.raises(UsageError, match="recomputed under the routes of another"):
        _late_backward(model, closed=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        _late_backward(model, closed=True)
    eager = ToyModel("sigmoid")
    for seed in range(3):
        with impose(model.routers, _routes(seed, 8)):
            found = _step(model, _inputs(seed))
        with impose(eager.routers, _routes(seed, 8)):
            _assert_equal(found, _step(eager, _inputs(seed)))


def _recorded_twice():
    model, _ = _compiled(False, checkpoint=False, fullgraph=False)
    for seed in range(2):
        with record(model.routers) as tape:
            found = _step(model, _inputs(seed))  # Recomputes.
            with pytest.raises(UsageError, match="layer 0 ran twice .*8 tokens, then 8"):
                model(_inputs(seed))
        eager = ToyModel("sigmoid")
        with record(eager.routers) as own:
            _assert_equal(found, _step(eager, _inputs(seed)))
        assert tape.routes == own.routes


def _transformers(family):
    """Layers compiled one by one; their experts leave compiled code by themselves."""
    from primeblocks.replay.adapters.transformers import routers
    from primeblocks.testing import tiny_models

    counts = []
    sizes = {"num_layers": 2, "hidden": 32, "num_experts": 6, "vocab": 32, "init_std": 0.2}
    eager, model = (tiny_models.build(family, dtype="float32", **sizes).train() for _ in "ab")
    for each in (eager, model):
        each.set_experts_implementation("eager")
    allow_compile(routers(model))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    for seed in range(3):
        tokens = torch.randint(4, 32, (1, 8), generator=torch.Generator().manual_seed(seed))
        with impose(routers(model), _routes(seed, 8).select_layers(range(2))):
            found = model(input_ids=tokens, use_cache=False).logits
            found.square().sum().backward()
        with impose(routers(eager), _routes(seed, 8).select_layers(range(2))):
            wanted = eager(input_ids=tokens, use_cache=False).logits
            wanted.square().sum().backward()
        assert torch.equal(found, wanted)
        counts.append(counter.frame_count)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
    assert len(set(counts)) == 1, counts


def _compiled_before():
    model = ToyModel("sigmoid")
    model.compile(backend="eager")
    model(_inputs(0))
    with (
        pytest.raises(UsageError, match=r"layer 0 never ran.*call allow_compile\(routers\)"),
        impose(model.routers, _routes(0, 8)),
    ):
        model(_inputs(0))
    with record(model.routers) as tape:
        model(_inputs(0))
    with pytest.raises(UsageError, match=r"\[0, 1, 2\] have not run.*allow_compile"):
        _ = tape.routes


def _flight(model, seeds, sequence, call):
    """Gradients of several forwards whose backwards follow together; None is a plain forward."""
    model.zero_grad()
    total, leaves = 0, []
    for i, seed in enumerate(seeds):
        leaves.append(_inputs(i, sequence).requires_grad_())
        routes = None if seed is None else _routes(seed, 2 * sequence)
        total = total + call(model, leaves[-1], routes).square().sum()
    total.backward()
    return [leaf.grad for leaf in leaves] + [p.grad.clone() for p in model.parameters()]


def _by_argument(model, x, routes):
    return model(x) if routes is None else model(x, routed_experts=routes.tensor(batch=2))


def _by_context(model, x, routes):
    if routes is None:
        return model(x)
    with impose(model.routers, routes):
        return model(x)


def _follows(way, whole, checkpoint):
    """Micro-batches in flight follow their rows, with code that they share."""
    setattr(torch._dynamo.config, FLAG, True)  # As torchtitan sets it, for checkpoints inside.
    model, counter = WAYS[way](checkpoint), CompileCounterWithBackend("aot_eager")
    following = follow(model, routers_of(model))
    for part in [model] if whole else model.layers:
        part.compile(backend=counter, fullgraph=True)
    eager, counts = ToyModel(), []
    # Shapes change, and are symbols from then on.
    for i, sequence in enumerate((4, 6, 7)):
        seeds = (i, i + 1, None)
        found = _flight(model, seeds, sequence, _by_argument)
        wanted = _flight(eager, seeds, sequence, _by_context)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        counts.append(counter.frame_count)
    following.close()
    assert counts[1] == counts[2] <= 12, counts


def _not_handed_on():
    model = Swallows()
    follow(model, model.routers)
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="did not reach layers"):
        model(_inputs(0), routed_experts=_routes(0, 8).tensor(batch=2))


CASES = {
    "contexts share code of a model with checkpoints": partial(
        _contexts_share_code, True, False, {}
    ),
    "contexts share code of layers, with the score filter": partial(
        _contexts_share_code, False, None, {"min_score_ratio": 0.9}
    ),
    "gates": _gates_loop,
    "a late backward, with a checkpoint inside": partial(_late_is_right, True, False),
    "a late backward": partial(_late_is_right, False, None),
    "a checkpoint around": partial(_checkpoint_around, False),
    "a checkpoint around, fullgraph": partial(_checkpoint_around, True),
    "a second forward is told from recomputation": _recorded_twice,
    "layers of transformers": partial(_transformers, "gpt_oss"),
    "a model compiled without its hooks is reported": _compiled_before,
    "rows that a model hands on": partial(_follows, "handed on", True, False),
    "rows of wrapped layers": partial(_follows, "wrapped", False, None),
    "rows that do not arrive": _not_handed_on,
}


def _run_all():
    """The traceback of each case that failed, all in one process: starting the compiler is slow."""
    failed = {}
    for name, case in CASES.items():
        torch._dynamo.reset()
        setattr(torch._dynamo.config, FLAG, False)
        try:
            case()
        except BaseException:
            failed[name] = traceback.format_exc()
    return failed


@pytest.fixture(scope="module")
def failed():
    return ranks.run(_run_all, world_size=1)[0]


@pytest.mark.parametrize("case", CASES)
def test_compiled_code_replays(failed, case):
    assert case not in failed, failed[case]
