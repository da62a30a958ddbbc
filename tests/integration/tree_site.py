"""Agents whose rollouts fork, and their loss: as trees, and one rollout after the other."""

from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

from primeblocks import losses, replay
from primeblocks.async_loop import Rollout
from primeblocks.capture import Conversation
from primeblocks.losses.packing import pack, plan_trees
from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.testing import tiny_models

VOCABULARY, EXPERTS, TOP_K, LAYERS = 32, 8, 2, 2


def agent(generator, prompt, *, turns, thought=3, answer=2, question=2):
    """A conversation whose template strips the thoughts of earlier turns: each turn forks."""
    conversation, said = Conversation(), prompt.tolist()
    for _ in range(turns):
        sampled = generator.integers(4, VOCABULARY, thought + answer)
        conversation.append(
            np.array(said),
            sampled,
            logprobs=-3 - generator.random(len(sampled)),
            versions=np.zeros(len(sampled), np.int64),
        )
        asked = generator.integers(4, VOCABULARY, question)
        said += [*sampled[thought:].tolist(), *asked.tolist()]
    return conversation.rollouts()


def search(generator, prompt):
    """Rollouts that were sampled as a tree: the trained tokens are shared, too.

    One is a prefix of another one, two are equal, and one branch has a single token.
    """
    first = generator.integers(4, VOCABULARY, 9)
    other = np.concatenate([first[:4], (first[4:6] + 1) % VOCABULARY])
    for sampled in (first, first[:6], other, other, first[:1], [*first[:8], 3]):
        yield Rollout(
            tokens=np.concatenate([prompt, sampled]),
            prompt_length=len(prompt),
            logprobs=-3 - generator.random(len(sampled)),
            versions=np.zeros(len(sampled), np.int64),
            finish_reason="stop",
        )


def batch_of(seed):
    generator = np.random.default_rng(seed)
    prompt = generator.integers(4, VOCABULARY, 5)
    return [
        *agent(generator, prompt, turns=3),
        *agent(generator, prompt, turns=2),
        *search(generator, prompt),
    ]


def routes_of(batch, seed, *, differing):
    """Routes that depend on the tokens so far; with `differing` some rollouts have others."""
    found = []
    for i, rollout in enumerate(batch):
        rows = []
        for at in range(len(rollout.tokens) - 1):  # The last sampled token has no row.
            odd = differing and i % 2 and at in (2, 7)
            known = [seed, i if odd else 0, *rollout.tokens[: at + 1].tolist()]
            noise = np.random.default_rng(known).random((LAYERS, EXPERTS))
            rows.append(noise.argsort(-1)[:, :TOP_K])
        found.append(
            replay.Routes.from_array(
                np.stack(rows), num_experts=EXPERTS, layer_ids=tuple(range(LAYERS))
            )
        )
    return found


def loss_of(logits, packed, completions=slice(None)):
    """The loss of completion tokens, from the logits that predict them."""
    targets = torch.from_numpy(packed.targets)[completions]
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    own = logprobs.gather(-1, targets[:, None])[:, 0]
    engine, mask = (torch.from_numpy(x)[completions] for x in (packed.logprobs, packed.loss_mask))
    lengths = torch.from_numpy(packed.completion_lengths)
    rollout = torch.arange(len(lengths)).repeat_interleave(lengths)[completions]
    advantages = (rollout.double() * 0.7).cos()
    policy = losses.grpo_loss(own, engine, advantages, mask=mask, clip_low=1.0, clip_high=50.0)
    kl = losses.kl_loss(own, engine - 0.3, mask=mask)
    weights = advantages.square()
    return policy.sum + 0.1 * kl.sum - 0.01 * (entropy * weights * mask).sum()


def imposed(model, routes):
    from primeblocks.replay.adapters.transformers import routers

    return nullcontext() if routes is None else replay.impose(routers(model), routes)


def as_trees(model, group, batch, routes, *, rule="exact", order="balanced", count):
    """One forward and one backward of this rank's rows. Returns the loss and the plan."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    packed = pack(batch, range(len(batch)))
    rows = None if routes is None else [each.tensor()[0] for each in routes]
    trees = plan_trees(batch, routes=rule, imposed=rows)
    sequence = plan_sequence(
        trees.segment_lengths,
        ranks=group.size(),
        order=order,
        chunk_tokens=5,
        parents=trees.parents,
    )
    own = sequence.indices(group.rank()).numpy()
    if routes is not None:
        whole = replay.Routes.join(each.with_missing(after=1) for each in routes)
        whole = whole.take(trees.places[own])
        if rule == "own":
            missing = whole.missing | trees.differing[own]
            whole = replay.Routes.from_array(
                whole.experts, num_experts=EXPERTS, layer_ids=whole.layer_ids, missing=missing
            )
        routes = whole
    tokens = torch.from_numpy(packed.tokens[trees.places])
    completions, at = trees.held(own, packed.predictors)
    with imposed(model, routes):
        logits = model(**local_inputs(tokens, sequence=sequence, group=group)).logits[0]
        loss = loss_of(logits[at], packed, torch.from_numpy(completions)) / count
        loss.backward()
    return loss.detach(), trees


def separately(model, batch, routes, *, count):
    """Each rollout alone, by the model's own attention."""
    packed = pack(batch, range(len(batch)))
    total = 0.0
    # Each rollout's backward runs under its routes.
    for i, rollout in enumerate(batch):
        alone = pack(batch, [i])
        own = None if routes is None else routes[i].with_missing(after=1)
        with imposed(model, own):
            ids = torch.tensor(rollout.tokens)[None]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            at = torch.from_numpy(alone.predictors)
            before = int(packed.completion_lengths[:i].sum())
            of = torch.arange(before, before + len(at))
            loss = loss_of(logits[at], packed, of) / count
            loss.backward()
        total += loss.detach()
    return total


@contextmanager
def trees():
    """An agent of three turns whose thoughts are stripped, and the routes that it was served by."""
    generator = np.random.default_rng(0)
    rollouts = agent(generator, np.arange(4, 10), turns=3)
    model = tiny_models.build("qwen3_moe", num_layers=2, hidden=128, num_experts=4, dtype="float32")
    rows = generator.integers(0, 3, (40, 2, 1)) + np.arange(2)  # By position: equal where shared.
    names = {
        "model": model,
        "meshes": plan_mesh(world_size=dist.get_world_size()).build("cpu"),
        "rollouts": rollouts,
        "advantages": [1.0, 0.5, -1.0],
        "routes": [
            replay.Routes.from_array(rows[: len(each.tokens) - 1], num_experts=4, layer_ids=(0, 1))
            for each in rollouts
        ],
    }
    yield names
    assert len(names["trees"].places) < len(names["packed"].tokens)
    assert all(p.grad is not None for p in model.parameters())
