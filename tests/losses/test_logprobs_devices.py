"""Log-probabilities on each device: equal to the plain ones, on a GPU in little memory."""

import pytest
import torch

from primeblocks.losses.logprobs import chunked_loss, token_logprobs, token_scores
from tests.losses.test_logprobs import CHUNKS, OPTIONS, loss_of, operands, plain, scores


@pytest.mark.parametrize("given", OPTIONS)
def test_equal_to_the_plain_ones(given, device):
    leaves, ids, options, weights = operands(given)
    expected = plain(leaves, ids, options)
    grads = torch.autograd.grad(loss_of(expected, weights), leaves)
    there = [x.detach().to(device).requires_grad_() for x in leaves]
    if isinstance(options.get("temperature"), torch.Tensor):
        options["temperature"] = options["temperature"].to(device)
    seen = scores(there, ids.to(device), options)
    found = torch.autograd.grad(loss_of(seen, [x.to(device) for x in weights]), there)
    close = {"rtol": 1e-12, "atol": 1e-12, "check_device": False}
    torch.testing.assert_close(tuple(seen), expected, **close)
    torch.testing.assert_close(found, grads, **close)
    alone = token_logprobs(*there, ids.to(device), **options, **CHUNKS)
    torch.testing.assert_close(alone, expected[0], **close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_host_waits_and_memory_is_that_of_chunks(dtype):
    tokens, words, width = 4096, 32_768, 128
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(words, width, device="cuda", dtype=dtype, requires_grad=True)
    ids = torch.randint(words, (tokens,), device="cuda")
    token_scores(hidden[:8], weight, ids[:8]).entropy.sum().backward()  # Loads the library.
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (token_scores(hidden, weight, ids).logprobs.sum()).backward()
        total = chunked_loss(hidden, weight, ids, loss=lambda seen, _: seen.logprobs.sum())
        total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Of chunked_loss the logits of 512 tokens and two chunks beside, a bit for what is small.
    kept = 4 * (512 * words + 2 * 512 * 4096)
    assert torch.cuda.max_memory_allocated() - before < 2 * kept < 4 * tokens * words
