"""Pipelines whose micro-batches take their routes along, against one rank under `impose`."""

from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from primeblocks.replay import Routes, follow, impose
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import ranks
from primeblocks.testing.oracles import max_relative_error
from tests.replay.conftest import HIDDEN, TOP_K, VOCABULARY, float64_model

LAYERS, EXPERTS = 6, 8
MICRO_BATCHES, ROWS, SEQUENCE = 6, 2, 5
CHECKPOINTS = (None, False, True)
# Stages a rank has, and whether autograd runs each backward whole: reentrant checkpoints need it.
SCHEDULES = {
    "GPipe": (1, True),
    "1F1B": (1, True),
    "Interleaved1F1B": (2, True),
    "InterleavedZeroBubble": (2, False),
}


def _model(checkpoint=None):
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS}
    return float64_model("gpt_oss", checkpoint=checkpoint, **sizes)


def _batch():
    """Tokens of all micro-batches, and choices that no router made; every fifth is missing."""
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES * ROWS, SEQUENCE)
    tokens = torch.randint(4, VOCABULARY, shape, generator=generator)
    draws = torch.rand(tokens.numel(), LAYERS, EXPERTS, generator=generator)
    missing = np.arange(tokens.numel()) % 5 == 4
    routes = Routes.from_array(
        draws.topk(TOP_K).indices.numpy(),
        num_experts=EXPERTS,
        layer_ids=range(LAYERS),
        missing=missing,
    )
    return tokens, routes


def _loss(logits, tokens):
    return -logits.log_softmax(-1).gather(-1, tokens[..., None]).sum()


class Stage(nn.Module):
    """Some layers of a model; keywords go on to them."""

    def __init__(self, model, layers, *, first, last):
        super().__init__()
        self.model, self.first = model.model, first
        self.model.layers = nn.ModuleList(self.model.layers[i] for i in layers)
        self.head = model.lm_head if last else nn.Identity()
        if not first:
            del self.model.embed_tokens
        if not last:
            self.model.norm = nn.Identity()

    def forward(self, x, **kwargs):
        name = "input_ids" if self.first else "inputs_embeds"
        out = self.model(**{name: x}, use_cache=False, **kwargs)
        return self.head(out.last_hidden_state)


def _shapes(stage, tokens):
    hidden = torch.zeros(*tokens.shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    x = tokens if stage.first else hidden
    return {"input_args": (x,), "output_args": (stage(x),)}


def one_stage(model, tokens):
    """Name what the snippet of the docs takes for granted, on one rank: a pipeline of one stage."""
    layers = range(len(model.model.layers))
    module = Stage(model, layers, first=True, last=True)
    names = {"model": model, "layers": layers, "stage_module": module, "targets": tokens}
    return names | {"loss_fn": _loss, "rank": 0, "ranks": 1, "micro_batches": 1}


def _one_rank(tokens, routes):
    model = _model()
    with impose(routers(model), routes):
        _loss(model(input_ids=tokens, use_cache=False).logits, tokens).backward()
    return [layer.state_dict(keep_vars=True) for layer in model.model.layers]


def _stages(count, checkpoint, whole_rows):
    """This rank's stages, those layers' places, and the rows that they take."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, routes = _batch()
    stages, places = [], []
    for index in range(rank, count * size, size):
        model, width = _model(checkpoint), LAYERS // (count * size)
        layers = range(index * width, (index + 1) * width)
        own = [router for router in routers(model) if router.layer_id in layers]
        part = Stage(model, layers, first=index == 0, last=index == count * size - 1)
        follow(part, own, layer_ids=routes.layer_ids if whole_rows else None)
        # torch infers shapes with autograd.grad, which reentrant checkpoints do not allow.
        shapes = {} if checkpoint is None else _shapes(part, tokens[:ROWS])
        where = index, count * size, torch.device("cpu")
        stages.append(pipelining.PipelineStage(part, *where, **shapes))
        places += [(part.model.layers[i], layer) for i, layer in enumerate(layers)]
    rows = routes if whole_rows else routes.select_layers([layer for _, layer in places])
    return stages, places, rows.tensor(batch=MICRO_BATCHES * ROWS)


def _run(name, checkpoint, wanted, whole_rows):
    """The largest relative error of a weight's gradient."""
    count, _ = SCHEDULES[name]
    tokens, _ = _batch()
    stages, places, rows = _stages(count, checkpoint, whole_rows)
    schedule = pipelining.schedules.get_schedule_class(name)(
        stages if count > 1 else stages[0], MICRO_BATCHES, loss_fn=_loss, scale_grads=False
    )
    inputs = (tokens,) if dist.get_rank() == 0 else ()
    schedule.step(*inputs, target=tokens, routed_experts=rows)
    worst = []
    for layer, place in places:
        for parameter, weight in layer.named_parameters():
            worst.append(max_relative_error(weight.grad, wanted[place][parameter].grad))
    assert len(worst) > 8 * len(places)
    return max(worst)


def _compare():
    wanted = _one_rank(*_batch())
    run = partial(_run, wanted=wanted)
    errors = {}
    for name, checkpoint in product(SCHEDULES, CHECKPOINTS):
        stages, whole_backward = SCHEDULES[name]
        if checkpoint and not whole_backward:
            continue
        # Stages of one rank are all given the same keywords: the rows of the whole model.
        errors[name, checkpoint] = run(name, checkpoint, whole_rows=stages > 1)
    errors["GPipe", "whole rows"] = run("GPipe", None, whole_rows=True)
    return errors


def test_pipelines_equal_one_rank():
    for errors in ranks.run(_compare, world_size=3):
        assert len(errors) == 3 * len(SCHEDULES)  # One less without, one more with whole rows.
        assert max(errors.values()) < 1e-12, errors
