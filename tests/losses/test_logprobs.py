"""Log-probabilities without logits: equal to the plain ones, on one rank and on several."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from primeblocks.errors import PlanError, RankError, ShapeError, UsageError
from primeblocks.losses.logprobs import chunked_loss, token_logprobs, token_scores
from primeblocks.testing import ranks
from tests.fp8.launches import Launches

TOKENS, WORDS, WIDTH = 11, 23, 5
CHUNKS = {"chunk_tokens": 4, "chunk_words": 7}  # Divide neither.
OPTIONS = (
    {"temperature": 0.7},
    {"temperature": "each", "choices": 3},
)


def operands(options=None, *, dtype=torch.float64):
    options = dict(options or {})
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    leaves = [draw(TOKENS, WIDTH), draw(WORDS, WIDTH)]
    choices = [options.pop("choices")] if "choices" in options else []
    ids = torch.randint(WORDS, (TOKENS, *choices), generator=generator)
    if options.get("temperature") == "each":
        options["temperature"] = torch.rand(TOKENS, generator=generator, dtype=dtype) + 0.5
    weights = [
        torch.randn(ids.shape, generator=generator),
        torch.randn(TOKENS, generator=generator),
    ]
    return leaves, ids, options, weights


def plain(leaves, ids, options):
    """The definition, with all logits."""
    hidden, weight = leaves
    logits = hidden @ weight.T
    scale = options.get("temperature", 1.0)
    logits = logits / (scale[:, None] if isinstance(scale, torch.Tensor) else scale)
    every = torch.log_softmax(logits, -1)
    chosen = every.gather(1, ids.reshape(len(ids), -1)).reshape(ids.shape)
    return chosen, -(every.exp() * every).sum(1)


def scores(leaves, ids, options, **more):
    return token_scores(*leaves, ids, **options, **CHUNKS, **more)


def loss_of(seen, weights, own=slice(None)):
    return (seen[0] * weights[0][own]).sum() + (seen[1] * weights[1][own]).sum()


def chunked(leaves, ids, options, weights, **more):
    total = chunked_loss(
        *leaves,
        ids,
        loss=lambda seen, own: loss_of(seen, weights, own),
        **CHUNKS,
        **options,
        **more,
    )
    return 2 * total  # So that its gradient is not 1.


@pytest.mark.parametrize("given", OPTIONS)
def test_equal_to_the_plain_ones_with_gradients(given):
    leaves, ids, options, weights = operands(given)
    expected = plain(leaves, ids, options)
    grads = torch.autograd.grad(loss_of(expected, weights), leaves, retain_graph=True)
    close = {"rtol": 1e-12, "atol": 1e-12}
    # Recomputed by a checkpoint, as a layer of a model is.
    again = checkpoint(lambda *x: scores(x, ids, options), *leaves, use_reentrant=False)
    for seen in (scores(leaves, ids, options), again):
        torch.testing.assert_close(tuple(seen), expected, **close)
        torch.testing.assert_close(
            torch.autograd.grad(loss_of(seen, weights), leaves), grads, **close
        )
    alone = token_logprobs(*leaves, ids, **options, **CHUNKS)
    torch.testing.assert_close(alone, expected[0], **close)
    # One output alone has a path of its own.
    for own, seen in ((0, alone), (1, scores(leaves, ids, options)[1])):
        weighted = [torch.autograd.grad((x * weights[own]).sum(), leaves, retain_graph=True)
                    for x in (seen, expected[own])]  # fmt: skip
        torch.testing.assert_close(*weighted, **close)
    total = chunked(leaves, ids, options, weights)
    torch.testing.assert_close(total, 2 * loss_of(expected, weights), **close)
    found = torch.autograd.grad(total, leaves)
    torch.testing.assert_close(found, tuple(2 * x for x in grads), **close)
    with torch.no_grad():
        torch.testing.assert_close(chunked(leaves, ids, options, weights), total, **close)


def test_chunks_whose_loss_does_not_depend_on_the_scores_have_no_gradient():
    leaves, ids, options, weights = operands(OPTIONS[0])
    first = CHUNKS["chunk_tokens"]

    def loss(seen, own):
        alone = own.start >= first  # As where a chunk has masked tokens alone.
        return torch.zeros((), requires_grad=True) if alone else loss_of(seen, weights, own)

    found = torch.autograd.grad(chunked_loss(*leaves, ids, loss=loss, **CHUNKS, **options), leaves)
    seen = [x[:first] for x in plain(leaves, ids, options)]
    expected = torch.autograd.grad(loss_of(seen, weights, slice(first)), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_autocast_does_not_round_the_gradients_of_chunks():
    leaves, ids, options, weights = operands(OPTIONS[0], dtype=torch.float32)

    def gradients(autocast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total = chunked(leaves, ids, options, weights, head_dtype=torch.float32)
        return torch.autograd.grad(total, leaves)

    found, expected = gradients(True), gradients(False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_device_without_autocast_is_fine():
    hidden, weight = torch.empty(3, 8, device="meta"), torch.empty(50, 8, device="meta")
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert token_scores(hidden, weight, ids).logprobs.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_to_another_dtype_changes_nothing(dtype):
    leaves, ids, options, weights = operands(OPTIONS[0], dtype=torch.bfloat16)

    def run(autocast):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            seen = token_scores(*leaves, ids, **options)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            return [*seen, *torch.autograd.grad(loss_of(seen, weights), leaves)]

    for one, other in zip(run(True), run(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errs_no_more_than_the_plain_ones_in_low_precision(dtype):
    """Of bfloat16 operands in float32: there the plain computation has float32 operands too."""
    given, ids, options, weights = operands(OPTIONS[0], dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    naive = [x.detach().float().requires_grad_() for x in given]

    def run(leaves, seen):
        return [*seen, *torch.autograd.grad(loss_of(seen, weights), leaves)]

    truth = run(exact, plain(exact, ids, options))
    ours = run(given, scores(given, ids, options, head_dtype=torch.float32))
    for x, y, z in zip(ours, run(naive, plain(naive, ids, options)), truth, strict=True):
        # A gradient is rounded to the operands' dtype once.
        rounding = torch.finfo(x.dtype).eps / 2
        limit = 2 * (y - z).abs().max() + (rounding + 1e-6) * z.abs().max()
        assert (x - z).abs().max() <= limit


def test_gradients_of_hidden_in_float32_over_a_whole_vocabulary():
    """Within 1e-6 of the plain ones', in the norm.

    They differ in how 151,936 terms are summed. Of n sums in turn, rounded at random, the error is
    u / sqrt(3) * sqrt(n / 2) of the result. A product adds blocks of up to 448 terms each: n is 448
    in a block, 9 in a chunk of 4,096 words and 37 over chunks, 6e-7 in all; 340 blocks in the plain
    one, 7e-7. The root of their squares is 9e-7, and 4e-7 was seen.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(151_936, 64, generator=generator).mul_(0.2)
    hidden = torch.randn(16, 64, generator=generator).requires_grad_()
    ids = torch.randint(len(weight), (16,), generator=generator)
    expected = plain([hidden, weight], ids, {})[0]
    found = token_logprobs(hidden, weight, ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(x.sum(), hidden)[0] for x in (found, expected))
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("given", OPTIONS)
def test_no_host_waits_for_a_chunk(given):
    leaves, ids, options, weights = operands(given)
    with Launches() as launches:
        torch.autograd.grad(loss_of(scores(leaves, ids, options), weights), leaves)
        torch.autograd.grad(chunked(leaves, ids, options, weights), leaves)
    assert len(launches.names) > 12 * 10  # Twelve chunks.
    assert not launches.waits


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator gave."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_holds_more_than_a_few_chunks():
    leaves, ids, options, weights = operands()
    with Largest() as seen:
        loss_of(scores(leaves, ids, options), weights).backward()
    assert seen.most <= max(2 * 4 * 7, WORDS * WIDTH) < TOKENS * WORDS
    with Largest() as seen:
        chunked(leaves, ids, options, weights).backward()
    assert seen.most <= max(4 * WORDS, WORDS * WIDTH) < TOKENS * WORDS


def test_words_outside_and_tokens_without_weight():
    leaves, ids, options, _ = operands()
    ids[[2, 5]] = torch.tensor([-100, WORDS])
    seen = scores(leaves, ids, options)
    assert seen.logprobs.isnan().nonzero()[:, 0].tolist() == [2, 5]
    assert seen.entropy.isfinite().all()
    kept = torch.where(seen.logprobs.isnan(), 0, seen.logprobs)
    grads = torch.autograd.grad(kept.sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][[2, 5]].any()
    empty = token_scores(leaves[0][:0], leaves[1], ids[:0])
    assert empty.logprobs.shape == empty.entropy.shape == (0,)


def test_temperatures_may_be_of_another_dtype():
    leaves, ids, options, _ = operands(OPTIONS[1])
    options["temperature"] = options["temperature"].bfloat16()
    expected = plain(leaves, ids, dict(options, temperature=options["temperature"].double()))
    seen = scores(leaves, ids, options)
    torch.testing.assert_close(tuple(seen), expected, rtol=1e-12, atol=1e-12)


CUTS = (0, 16, 16, WORDS)  # Of the vocabulary, by rank; the second has no word.


def over_ranks():
    return [_over_ranks(given) for given in OPTIONS]


def _over_ranks(given):
    leaves, ids, options, weights = operands(given)
    expected = plain(leaves, ids, options)
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = slice(CUTS[rank], CUTS[rank + 1])
    grads = torch.autograd.grad(loss_of(expected, weights), leaves)
    grads = grads[0], grads[1][rows]
    own = [leaves[0], leaves[1].detach()[rows].clone().requires_grad_()]
    sharded = {"group": group, "first_word": rows.start}
    close = {"rtol": 1e-12, "atol": 1e-12}
    seen = scores(own, ids, options, **sharded)
    torch.testing.assert_close(tuple(seen), expected, **close)
    torch.testing.assert_close(torch.autograd.grad(loss_of(seen, weights), own), grads, **close)
    found = torch.autograd.grad(chunked(own, ids, options, weights, **sharded), own)
    torch.testing.assert_close(found, tuple(2 * x for x in grads), **close)
    with torch.no_grad():  # One rank makes another call, or another number of sums.
        summed = partial(chunked_loss, loss=lambda seen, _: seen.entropy.sum())
        call = token_scores if rank else summed
        with pytest.raises(PlanError, match=r"the call must be .*\[chunked_loss, token_scores"):
            call(*own, ids, **options, **sharded)
        with pytest.raises(PlanError, match="chunk_tokens must be equal on all ranks"):
            summed(*own, ids, chunk_tokens=4 + rank, **sharded)
    # Words that no rank holds, as where a first word is wrong, are seen.
    shifted = scores(own, ids, options, group=group, first_word=rows.start + WORDS * (not rank))
    assert shifted.logprobs.isnan().any()
    try:
        scores(own if rank else [own[0][:-1], own[1]], ids, options, **sharded)
    except ShapeError:
        return rank == 0, seen
    except RankError:
        return rank != 0, seen


def test_over_ranks_that_share_the_vocabulary():
    by_rank = ranks.run(over_ranks, world_size=3)
    for results in zip(*by_rank, strict=True):
        assert all(told for told, _ in results)
        for _, seen in results:
            assert all(map(torch.equal, seen, results[0][1]))


def test_refusals_say_what_to_pass():
    leaves, ids, _, _ = operands()
    hidden, weight = leaves
    unchecked = inspect.unwrap(token_scores)
    for error, words, call in (
        (ShapeError, "flatten", lambda: unchecked(hidden[None], weight, ids)),
        (ShapeError, "int64", lambda: unchecked(hidden, weight, ids.double())),
        (ShapeError, "head_dtype", lambda: unchecked(hidden, weight.float(), ids)),
        (UsageError, "temperature", lambda: unchecked(hidden, weight, ids, temperature=0)),
        (
            ShapeError,
            "a scalar tensor",
            lambda: chunked_loss(hidden, weight, ids, loss=lambda seen, _: seen.logprobs),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
