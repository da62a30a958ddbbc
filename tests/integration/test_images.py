"""Rollouts with images, from a conversation to a gradient, against transformers' own forward."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from primeblocks import losses, replay
from primeblocks.async_loop import Group, RolloutBuffer, StalenessPolicy
from primeblocks.async_loop.adapters.zmq import RolloutReceiver, RolloutSender
from primeblocks.async_loop.ledger import pack_trajectory, unpack_trajectory
from primeblocks.attachments import Aligned
from primeblocks.capture import Conversation
from primeblocks.capture.conversation import cut
from primeblocks.errors import UsageError
from primeblocks.losses.packing import pack
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models
from tests.integration.vision import (
    EARLY,
    END,
    IMAGE,
    LATE,
    START,
    VIDEO,
    VOCABULARY,
    A,
    B,
    C,
    D,
    E,
    F,
    alone,
    inputs_of,
    packed_logprobs,
    packed_routes,
    said,
)
from tests.parallel.float64 import Float64

CLIP = 0.2


def model_of(*, step: float = 0.0):
    """Return a model far from the symmetry of a fresh one, or one that went on since."""
    model = tiny_models.build(
        "qwen3_vl_moe", dtype="float64", num_layers=3, hidden=64, vocab=VOCABULARY
    )
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # The grouped kernel refuses float64.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            first, then = torch.randn(2, *parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(float(parameter.ndim == 1) + scale * (first + step * then))
    return model


def sample(model, conversation, prompt, shown, *, seed, count=5):
    """Ask transformers' own generation, and let the conversation hear what it did."""
    images = [each.value for each in shown]
    ids = torch.tensor(prompt)[None]
    given = {"attention_mask": torch.ones_like(ids), **inputs_of(images)}
    if images:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), Float64():
        torch.manual_seed(seed)
        made = model.generate(
            ids,
            **given,
            do_sample=True,
            min_new_tokens=count,
            max_new_tokens=count,
            suppress_tokens=[IMAGE, VIDEO, START, END],
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer = made.sequences[0, len(prompt) :]
        logprobs = torch.cat(made.logits).log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        with replay.record(routers(model)) as tape:
            alone(model, made.sequences[0], images)
    turn = conversation.append(
        prompt,
        answer.numpy(),
        logprobs=logprobs.numpy(),
        versions=np.zeros(count, np.int64),
        # The last token is never computed by an engine.
        attachments={"images": tuple(shown), "routes": Aligned.rows(tape.routes.experts[:-1])},
    )
    return made.sequences[0].tolist(), turn


def grows(model, first, second, *, seed):
    """A conversation of two turns; each says something, with images."""
    conversation = Conversation()
    prompt, shown = said([], *first)
    tokens, _ = sample(model, conversation, prompt, shown, seed=seed)
    prompt, more = said(tokens, *second)
    _, turn = sample(model, conversation, prompt, [*shown, *more], seed=seed + 1)
    assert turn.continuity == "clean"
    return conversation


def looks_again(model, ids, screens, more, *, seed):
    """A conversation in which a screen, at one place of the prompt, has changed meanwhile."""
    conversation = Conversation()
    prompt, shown = said([], ids, screens[:1])
    tokens, _ = sample(model, conversation, prompt, shown, seed=seed)
    _, changed = said([], ids, screens[1:])
    _, turn = sample(model, conversation, tokens + more, changed, seed=seed + 1)
    assert (turn.continuity, turn.matched) == ("fork", shown[0].start)
    return conversation


async def through_zmq(groups, policy):
    buffer = RolloutBuffer(capacity=3, staleness=policy)
    receiver = RolloutReceiver(buffer, "tcp://127.0.0.1:0")
    async with receiver, RolloutSender(receiver.address) as sender:
        for ordinal, group in enumerate(groups):
            await sender.put(replace(group, ordinal=ordinal), timeout_s=120)
        return await buffer.take(3, version=1, timeout_s=120)


@pytest.fixture(scope="module")
def batch():
    """Groups of rollouts as they come out of a buffer, and the images that each has seen."""
    model = model_of()
    late = [grows(model, *LATE, seed=seed) for seed in (10, 20)]
    early = [grows(model, *EARLY, seed=seed) for seed in (30, 40)]
    again = [looks_again(model, [16, START, 17], [E, F], [18], seed=seed) for seed in (50, 60)]
    seen = [[A, E], [], [B, C, D], [B, C, D], [E], [F], [E], [F]]
    groups = []
    for number, conversations in enumerate((late, early, again)):
        made = [each.rollouts(reward=float(i)) for i, each in enumerate(conversations)]
        groups.append(Group(number, tuple(itertools.chain(*made)), 0))
    # In the middle of the first image of its second turn.
    first, second = groups[0].rollouts
    short = cut(second, second.attachments["images"][0].stop - 1)
    assert len(short.tokens) == second.attachments["images"][0].start
    groups[0] = Group(0, (first, short), 0)
    policy = StalenessPolicy(1, correction="the ratio of the loss")
    taken = asyncio.run(through_zmq(groups, policy))
    return model, [rollout for group in taken for rollout in group.rollouts], seen


def test_images_come_back_in_their_places(batch):
    _, rollouts, seen = batch
    journal = [pack_trajectory(rollout, name="r") for rollout in rollouts]
    kept = [unpack_trajectory(each, name="r") for each in journal]
    packed = pack(kept, range(len(kept)), per_token=["routes"], multiple_of=16)
    found = packed.aligned("images")
    assert packed.padding
    assert len(found) == sum(map(len, seen)) == 12
    for each, wanted in zip(found, itertools.chain(*seen), strict=True):
        assert (packed.tokens[each.start : each.stop] == IMAGE).all()
        assert (packed.tokens[each.start - 1], packed.tokens[each.stop]) == (START, END)
        for name, values in wanted.items():
            np.testing.assert_array_equal(each.value[name], values)
    with pytest.raises(UsageError, match="'routes' does not belong to tokens"):
        packed.aligned("routes")


def test_a_pack_is_each_sample_alone(batch):
    """Under the engine's own weights: its choices and its log-probabilities, of every sample."""
    model, rollouts, _ = batch
    packed = pack(rollouts, [5, 1, 3, 0, 7, 2, 4, 6], per_token=["routes"], multiple_of=16)
    with Float64(), torch.no_grad(), replay.record(routers(model)) as tape:
        logprobs = packed_logprobs(model, packed)
    routes = packed_routes(packed)
    assert routes.known == sum(len(rollout.tokens) - 1 for rollout in rollouts) + 1
    known = ~routes.missing
    np.testing.assert_array_equal(tape.routes.experts[known], routes.experts[known])
    mask = packed.loss_mask
    assert packed.logprobs[mask].std() > 0.5
    np.testing.assert_allclose(logprobs.numpy()[mask], packed.logprobs[mask], rtol=0, atol=1e-12)


class Chosen(TorchFunctionMode):
    """Gives routers of transformers other choices in their own top-k, layer after layer."""

    def __init__(self, rows):
        self.layers = iter(torch.from_numpy(rows.astype(np.int64)).unbind(1))
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is not torch.topk:
            return found
        rows = next(self.layers)
        ids = torch.cat([rows, found.indices[len(rows) :]])  # The last token has none.
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def one_by_one(model, rollouts, seen):
    """GRPO by its definition, from each sample alone: loss, log-probabilities, tokens clipped."""
    gains, found, clipped = [], [], 0
    for rollout, images in zip(rollouts, seen, strict=True):
        with Chosen(rollout.attachments["routes"].value):
            logits = alone(model, rollout.tokens, images)
        kept = torch.tensor(rollout.loss_mask)
        targets = torch.tensor(rollout.completion)
        scores = logits.log_softmax(-1)[rollout.prompt_length - 1 : -1]
        logprobs = scores.gather(-1, targets[:, None])[:, 0]
        ratio = (logprobs - torch.tensor(rollout.logprobs))[kept].exp()
        advantage = 2 * rollout.reward - 1  # Half of each group has 1, the others 0.
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        clipped += int((gain != ratio * advantage).sum())
        gains.append(gain)
        found.append(logprobs.detach())
    loss = -torch.cat(gains).mean()
    loss.backward()
    return loss.detach(), torch.cat(found), clipped


def step(model, packed):
    """The same of a pack, by the library; and the choices that the model would have made."""
    rewards = torch.tensor([[other["reward"] for other in packed.others]], dtype=torch.float64)
    # By group: the third has a rollout for each of two screens.
    advantages = [
        losses.advantages.group_advantages(part, epsilon=0.0)[0]
        for part in rewards.split([2, 2, 4], dim=1)
    ]
    lengths = torch.from_numpy(packed.completion_lengths)
    routes = packed_routes(packed)
    with replay.record(routers(model)) as own, replay.impose(routers(model), routes):
        logprobs = packed_logprobs(model, packed)
        found = losses.grpo_loss(
            logprobs,
            torch.from_numpy(packed.logprobs),
            torch.cat(advantages).repeat_interleave(lengths),
            mask=torch.from_numpy(packed.loss_mask),
            clip_low=CLIP,
            clip_high=CLIP,
        )
        loss = losses.normalisation.divide(found)
        loss.backward()
    agreement = replay.compare(routes, own.routes).overall
    return loss.detach(), logprobs.detach(), found.clipped, agreement


def test_a_step_is_that_of_each_sample_alone(batch):
    """Under weights that went on since: GRPO, the engine's routes imposed, and all gradients."""
    _, rollouts, seen = batch
    model, theirs = (model_of(step=0.05) for _ in range(2))
    packed = pack(rollouts, range(len(rollouts)), per_token=["routes"], multiple_of=16)
    with Float64():
        loss, logprobs, clipped, agreement = step(model, packed)
        wanted, expected, stopped = one_by_one(theirs, rollouts, seen)
    # Else neither routes nor clips were looked at.
    assert 0.1 < agreement < 0.95
    assert 0 < clipped == stopped < packed.loss_mask.sum()
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        # Of the vision tower too, and of what it sends to the first layers.
        size = gradients[name].norm()
        assert size > 0, name
        assert (parameter.grad - gradients[name]).norm() < 1e-12 * size, name
