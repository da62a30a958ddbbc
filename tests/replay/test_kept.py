import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import (
    CorruptionError,
    PrimeblocksError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from primeblocks.replay import KeptTokens
from primeblocks.replay.sampling import kept_logprobs, kept_tokens


@st.composite
def values(draw):
    vocab = draw(st.sampled_from([5, 300, 65536, 65537, 1 << 24, (1 << 24) + 1]))
    row = st.sets(st.integers(0, vocab - 1), max_size=6)
    return KeptTokens.from_lists(
        [sorted(ids) for ids in draw(st.lists(row, max_size=12))], vocab_size=vocab
    )


def rows(kept):
    return [
        kept.ids[a:b].tolist() for a, b in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)
    ]


@given(value=values())
def test_unpack_undoes_pack(value):
    assert KeptTokens.unpack(value.pack()) == value


@given(value=values(), data=st.data())
def test_any_change_is_refused(value, data):
    payload = bytearray(value.pack())
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError):
        KeptTokens.unpack(payload)
    with pytest.raises(CorruptionError):
        KeptTokens.unpack(bytes(value.pack())[:place])


@given(st.binary(max_size=80))
def test_a_sealed_body_of_nonsense_never_crashes(body):
    data = struct.pack("<4sHHQ", b"PBKT", 2, 0, len(body)) + body
    try:
        KeptTokens.unpack(data + xxhash.xxh3_128_digest(data))
    except PrimeblocksError:
        return
    assert len(body) >= 24


def test_another_version_is_refused():
    body = bytes(KeptTokens.from_lists([[1]], vocab_size=5).pack()[16:-16])
    data = struct.pack("<4sHHQ", b"PBKT", 1, 0, len(body)) + body
    with pytest.raises(UnsupportedError, match="version 1"):
        KeptTokens.unpack(data + xxhash.xxh3_128_digest(data))


@given(value=values(), data=st.data())
def test_slices_and_joins(value, data):
    cut = data.draw(st.integers(0, value.tokens))
    assert rows(value[:cut]) + rows(value[cut:]) == rows(value)
    assert KeptTokens.join([value[:cut], value[cut:]]) == value
    unmasked = KeptTokens.from_lists([[], []], vocab_size=value.vocab_size)
    assert rows(KeptTokens.join([unmasked, value])) == [[], [], *rows(value)]


def test_rows_are_put_in_order_and_views_are_read_only():
    kept = KeptTokens.from_lists([[3, 1], [], [2]], vocab_size=5)
    assert rows(kept) == [[1, 3], [], [2]]
    assert kept.counts.tolist() == [2, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        kept.ids[0] = 2
    assert np.shares_memory(kept[1:].ids, kept.ids)
    for index, remedy in ((2, r"kept\[2:3\]"), (-1, r"kept\[-1:\]")):
        with pytest.raises(UsageError, match=rf"{index} is not a slice.*{remedy}"):
            kept[index]


@pytest.mark.parametrize(
    ("sets", "message"),
    [([[5]], "from 5 to 5"), ([[-1]], "from -1"), ([[2, 2]], "token 0 keeps the id 2 twice")],
)
def test_ids_from_outside_are_checked(sets, message):
    with pytest.raises(UsageError, match=message):
        KeptTokens.from_lists(sets, vocab_size=5)


@pytest.mark.parametrize("sets", [[[1.7]], [[1], [], [2.0]], [["1"]], [[[1, 2]]]])
def test_ids_that_are_not_whole_numbers_are_refused(sets):
    with pytest.raises(ShapeError, match="one-dimensional integers|a list of ids; got int64"):
        KeptTokens.from_lists(sets, vocab_size=5)


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="rise from 0 to 2"):
        KeptTokens.from_arrays(np.arange(2), np.array([0, 2, 1, 2]), vocab_size=5)
    with pytest.raises(ShapeError, match="integers"):
        KeptTokens.from_arrays(np.zeros(2), np.array([0, 2]), vocab_size=5)
    with pytest.raises(ShapeError, match="int32"):
        KeptTokens(np.arange(2), np.array([0, 2]), 5)
    with pytest.raises(ShapeError, match="one vocabulary"):
        KeptTokens.join([])
    with pytest.raises(ShapeError, match="step 1"):
        KeptTokens.from_lists([[1], [2]], vocab_size=5)[::-1]


# --- log-probabilities


def draw_logits(tokens=7, vocab=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(tokens, vocab, dtype=torch.float64, generator=generator)


def dense(logits, targets, kept, temperature):
    """The same in plain float64, with a mask as large as the logits."""
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for token, ids in enumerate(rows(kept)):
        mask[token, ids or slice(None)] = True
    scores = (logits / temperature).masked_fill(~mask, -torch.inf)
    return scores.log_softmax(-1).gather(1, targets[:, None])[:, 0]


@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.3, 1.0, 1.7]))
def test_log_probabilities_and_gradients_equal_the_dense_ones(seed, temperature):
    generator = np.random.default_rng(seed)
    logits = draw_logits(seed=seed).requires_grad_()
    targets = torch.from_numpy(generator.integers(0, 11, 7))
    sets = []
    for target in targets.tolist():
        others = generator.permutation(11)[: generator.integers(0, 6)].tolist()
        sets.append([] if generator.random() < 0.3 else sorted({target, *others}))
    kept = KeptTokens.from_lists(sets, vocab_size=11)
    weights = torch.from_numpy(generator.random(7))

    found = kept_logprobs(logits, targets, kept, temperature=temperature)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    expected = dense(logits, targets, kept, temperature)
    (expected_gradient,) = torch.autograd.grad((weights * expected).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_low_precision_logits_are_widened():
    logits = draw_logits(tokens=3).bfloat16()
    kept = KeptTokens.from_lists([[0, 1], [], [2]], vocab_size=11)
    found = kept_logprobs(logits, torch.tensor([1, 4, 2]), kept)
    assert found.dtype == torch.float32
    expected = dense(logits.double(), torch.tensor([1, 4, 2]), kept, 1.0)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=1e-6)


def test_a_target_outside_its_set_is_refused():
    kept = KeptTokens.from_lists([[], [1, 2], [3]], vocab_size=11)
    with pytest.raises(UsageError, match="1 targets .* first at token 2"):
        kept_logprobs(draw_logits(tokens=3), torch.tensor([9, 2, 4]), kept)
    for target in (-100, 11):
        with pytest.raises(UsageError, match=rf"token 0 is {target}, outside 0\.\.10\. Select"):
            kept_logprobs(draw_logits(tokens=3), torch.tensor([target, 2, 3]), kept)


def test_shapes_and_settings_are_checked():
    kept = KeptTokens.from_lists([[]] * 3, vocab_size=11)
    logits = draw_logits(tokens=3)
    with pytest.raises(ShapeError, match="one target and one kept row"):
        kept_logprobs(logits, torch.tensor([1, 2]), kept)
    with pytest.raises(ShapeError, match="one target and one kept row"):
        kept_logprobs(logits[:, :-1], torch.tensor([1, 2, 3]), kept)
    with pytest.raises(UsageError, match="positive; got 0"):
        kept_logprobs(logits, torch.tensor([1, 2, 3]), kept, temperature=0)
    with pytest.raises(UsageError, match="got 0 and 0"):
        kept_tokens(logits, top_p=0)
    with pytest.raises(ShapeError, match="floating"):
        kept_tokens(torch.zeros(3, dtype=torch.int64))
