"""Heads that predict further ahead: labels within sequences, and a loss of these labels only."""

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from primeblocks.errors import ShapeError, UsageError
from primeblocks.losses import normalisation
from primeblocks.losses.mtp import mtp_labels, mtp_loss
from primeblocks.losses.packing import pack
from primeblocks.parallel import plan_sequence
from primeblocks.rollout import Rollout
from primeblocks.testing import ranks

LENGTHS = (5, 1, 2, 9, 4)  # The last is padding.
WORDS, WIDTH = 13, 6
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def sequences():
    """Return the tokens, which of them count, and the sequence of each."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    tokens = torch.randint(WORDS, ids.shape, generator=draw)
    counts = (torch.rand(ids.shape, generator=draw) < 0.7) & (ids != len(LENGTHS) - 1)
    return tokens, counts, ids


def policy_labels(tokens, counts):
    labels = plan_sequence(LENGTHS, ranks=1).labels(tokens)
    return labels.masked_fill(~counts.roll(-1), -100)


def expected_labels(depth):
    """By the definition, one token at a time."""
    tokens, counts, ids = (x.tolist() for x in sequences())
    found = []
    for t, own in enumerate(ids):
        to = t + depth + 1
        is_label = to < len(ids) and ids[to] == own and counts[to]
        found.append(tokens[to] if is_label else -100)
    return found


@pytest.mark.parametrize("depth", [1, 2, 30])
def test_labels_stay_within_sequences(depth):
    tokens, counts, ids = sequences()
    labels = mtp_labels(policy_labels(tokens, counts), depth=depth, sequence_ids=ids)
    assert labels.tolist() == expected_labels(depth)
    assert any(labels != -100) == (depth < 30)
    # Rows that are padded to one length, where each row is a sequence.
    rows = policy_labels(tokens, counts).new_full((len(LENGTHS), max(LENGTHS)), -100)
    want = rows.clone()
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = policy_labels(tokens, counts)[ids == row]
        want[row, :length] = labels[ids == row]
    assert torch.equal(mtp_labels(rows, depth=depth), want)


def test_labels_of_a_pack():
    rollouts = [
        Rollout(
            tokens=np.arange(start, start + size),
            prompt_length=2,
            logprobs=np.full(size - 2, -1.0),
            versions=np.zeros(size - 2, np.int64),
            finish_reason="stop",
        )
        for start, size in ((10, 5), (20, 4))
    ]
    packed = pack(rollouts, [0, 1], multiple_of=4)
    labels = torch.from_numpy(packed.at_predictors(packed.targets, fill=-100))
    lengths = torch.tensor(packed.document_lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    found = mtp_labels(labels, depth=1, sequence_ids=ids)
    ignored = [-100] * 2
    assert found.tolist() == [12, 13, 14, *ignored, 22, 23, *ignored, -100, *ignored]


class Policy(nn.Module):
    """An embedding, a trunk, an output layer, and one head that reads two tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.head = nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, tokens, after, *, detach):
        embedded, hidden = self.embed(after), self.trunk(self.embed(tokens)).tanh()
        if detach:
            embedded, hidden = embedded.detach(), hidden.detach()
        return self.head(torch.cat([hidden, embedded], -1)).tanh()

    def gradients(self, loss):
        named = dict(self.named_parameters())
        found = torch.autograd.grad(loss, named.values(), allow_unused=True, retain_graph=True)
        return dict(zip(named, found, strict=True))


def inputs():
    tokens, counts, ids = sequences()
    labels = mtp_labels(policy_labels(tokens, counts), depth=1, sequence_ids=ids)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)).double()
    return tokens, tokens.roll(-1), labels, ids, weights


@pytest.mark.parametrize("detach", [False, True])
def test_value_and_gradients_are_those_of_all_logits(detach):
    policy = Policy()
    tokens, after, labels, ids, weights = inputs()
    hidden = policy(tokens, after, detach=detach)
    damaged = hidden.masked_fill((labels == -100)[:, None], torch.nan)
    loss = mtp_loss(
        damaged,
        policy.output.weight,
        labels,
        detach_weight=detach,
        weights=weights,
        sequence_ids=ids,
        chunk_tokens=4,
        chunk_words=5,
        temperature=0.8,
    )
    weight = policy.output.weight.detach() if detach else policy.output.weight
    losses = nn.functional.cross_entropy(hidden @ weight.T / 0.8, labels, reduction="none")
    expected = (losses * weights).sum()
    torch.testing.assert_close(loss.sum, expected, **CLOSE)
    counted = ids[labels != -100]
    assert (loss.tokens, loss.sequences) == (len(counted), len(counted.unique()))
    found, want = policy.gradients(loss.sum), policy.gradients(expected)
    learns = {name for name, grad in found.items() if grad is not None and grad.any()}
    assert learns == ({"head.weight", "head.bias"} if detach else {*found})
    for name in learns:
        torch.testing.assert_close(found[name], want[name], **CLOSE)
    row = mtp_loss(damaged[None], policy.output.weight, labels[None], temperature=0.8)
    torch.testing.assert_close(row.sum, losses.sum(), **CLOSE)


def test_without_labels_the_loss_is_zero_with_gradients():
    policy = Policy()
    tokens, after, labels, _, _ = inputs()
    hidden = policy(tokens, after, detach=False)
    loss = mtp_loss(hidden, policy.output.weight, torch.full_like(labels, -100))
    assert (loss.sum.item(), loss.tokens) == (0, 0)
    assert not policy.gradients(normalisation.divide(loss))["head.weight"].any()


ORDERS = ("contiguous", "zigzag", "balanced")


def in_every_order():
    return [on_parts(order) for order in ORDERS]


def on_parts(order):
    """Return the loss and gradients of a rank, and how many of its labels other ranks hold."""
    policy, group = Policy(), dist.group.WORLD
    tokens, after, labels, ids, _ = inputs()
    plan = plan_sequence(LENGTHS, ranks=group.size(), order=order, chunk_tokens=3)
    tokens, after, labels, ids = (plan.split(x, group=group) for x in (tokens, after, labels, ids))
    hidden = policy(tokens, after, detach=False)
    loss = mtp_loss(hidden, policy.output.weight, labels, detach_weight=False, sequence_ids=ids)
    loss = normalisation.divide(loss, group=group)
    places = plan.indices(group.rank())
    away = (~torch.isin(places + 2, places) & (labels != -100)).sum().item()
    return loss.item(), policy.gradients(loss), away


def test_on_two_ranks_that_share_the_sequence():
    policy = Policy()
    tokens, after, labels, _, _ = inputs()
    hidden = policy(tokens, after, detach=False)
    loss = mtp_loss(hidden, policy.output.weight, labels, detach_weight=False)
    whole = normalisation.divide(loss)
    gradients = policy.gradients(whole)
    for by_rank in zip(*ranks.run(in_every_order, world_size=2), strict=True):
        assert sum(away for *_, away in by_rank)  # Or this would show nothing.
        assert sum(part for part, *_ in by_rank) == pytest.approx(whole.item(), rel=1e-12)
        for name, want in gradients.items():
            torch.testing.assert_close(sum(grads[name] for _, grads, _ in by_rank), want, **CLOSE)


def test_refusals_say_what_to_pass():
    _, _, labels, ids, _ = inputs()
    hidden, weight = torch.randn(len(labels), WIDTH), torch.randn(WORDS, WIDTH)
    unchecked = inspect.unwrap(mtp_loss)
    for error, words, call in (
        (UsageError, "depth 1", lambda: mtp_labels(labels, depth=0, sequence_ids=ids)),
        (ShapeError, "integer per token", lambda: mtp_labels(labels, depth=1)),
        (ShapeError, "integer per token", lambda: mtp_labels(labels[None], depth=1)),
        (ShapeError, "shapes are not broadcast", lambda: unchecked(hidden[:-1], weight, labels)),
        (ShapeError, "must be floating", lambda: unchecked(hidden, weight, labels, weights=ids)),
    ):
        with pytest.raises(error, match=words):
            call()
