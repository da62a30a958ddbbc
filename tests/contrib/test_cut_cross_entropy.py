"""Cut cross-entropy, the package itself, on a CPU: our log-probabilities, and what is refused."""

import inspect

import pytest
import torch

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.losses import logprobs

pytest.importorskip("cut_cross_entropy", reason="not installed; scripts/peers does")
pytest.importorskip("triton", reason="it imports triton")
from primeblocks.contrib.adapters import cut_cross_entropy as adapter

pytestmark = [  # Of torch's compiler itself.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
TOKENS, WORDS, WIDTH = 13, 101, 24


def operands(dtype, *, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(WORDS, (tokens,), generator=generator)
    return hidden, weight, ids, torch.randn(tokens, generator=generator)


def run(function, hidden, weight, ids, weights, **options):
    found = function(hidden, weight, ids, **options)
    kept = torch.where(found.isnan(), 0, found)
    return found, *torch.autograd.grad((kept * weights).sum(), (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_ours_with_another_gradient_for_every_token(dtype):
    """To the operands' rounding: a product is rounded once, and so is a gradient.

    Logits are sums of 24 products of about 5 in all: rounded to u of it, 5 u at most times the
    slope of a log-probability, at most 2. Gradients are as much larger as weights sum up to.
    """
    hidden, weight, ids, weights = operands(dtype)
    ids[[3, 7]] = torch.tensor([-100, WORDS])
    found = run(adapter.token_logprobs, hidden, weight, ids, weights)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = run(logprobs.token_logprobs, *exact, ids, weights)
    assert found[0].dtype == torch.float32
    assert found[0].isnan().nonzero()[:, 0].tolist() == [3, 7]
    assert not found[1][[3, 7]].any()
    for x, y in zip(found, expected, strict=True):
        limit = 8 * torch.finfo(dtype).eps * y.nan_to_num().abs().max()
        assert (x - y).nan_to_num().abs().max() <= limit


def test_no_tokens_and_operands_that_are_not_contiguous():
    hidden, weight, ids, weights = operands(torch.float32, tokens=0)
    found = run(adapter.token_logprobs, hidden, weight, ids, weights)
    assert [list(x.shape) for x in found] == [[0], [0, WIDTH], [WORDS, WIDTH]]
    assert not found[2].any()
    hidden, weight, ids, weights = operands(torch.float32)
    turned = [x.detach().T.contiguous().T.requires_grad_() for x in (hidden, weight)]
    assert not turned[0].is_contiguous()
    of_turned = run(adapter.token_logprobs, *turned, ids.int(), weights)
    torch.testing.assert_close(of_turned, run(adapter.token_logprobs, hidden, weight, ids, weights))


def test_what_it_does_not_do_is_refused_with_a_remedy():
    hidden, weight, ids, _ = operands(torch.float32)
    call = inspect.unwrap(adapter.token_logprobs)
    assert call(hidden, weight, ids, temperature=1.0, head_dtype=None).shape == (TOKENS,)
    for options in (
        {"temperature": 0.7},
        {"temperature": torch.ones(TOKENS)},
        {"head_dtype": torch.float32},
        {"first_word": 5},
        {"chunk_tokens": 512},
    ):
        with pytest.raises(
            UnsupportedError, match=f"support {next(iter(options))}.*Use primeblocks"
        ):
            call(hidden, weight, ids, **options)
    with pytest.raises(UnsupportedError, match="one word per row.*Use primeblocks"):
        call(hidden, weight, ids[:, None])
    with pytest.raises(UnsupportedError, match="float64 on cpu. Use primeblocks"):
        call(hidden.double(), weight.double(), ids)
    with pytest.raises(UnsupportedError, match="float32 on meta. Use primeblocks"):
        call(hidden.to("meta"), weight.to("meta"), ids.to("meta"))
    with pytest.raises(ShapeError, match="flatten"):
        call(hidden[None], weight, ids)


def test_its_kernels_take_half_precision_alone(monkeypatch):
    """The device is asked for by name: their backward asserts bfloat16 or float16."""
    monkeypatch.setitem(adapter._DTYPES, "cpu", adapter._DTYPES["cuda"])
    hidden, weight, ids, _ = operands(torch.float32)
    with pytest.raises(UnsupportedError, match="bfloat16, torch.float16; got torch.float32"):
        adapter.token_logprobs(hidden, weight, ids)
