import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError, UsageError
from primeblocks.replay import Routes


def random_routes(*, tokens=10, layers=3, num_experts=32, seed=0):
    generator = np.random.default_rng(seed)
    scores = generator.random((tokens, layers, num_experts), dtype=np.float32)
    experts = np.argpartition(scores, 3, axis=-1)[..., :4]
    missing = generator.random(tokens) < 0.4
    return Routes.from_array(
        experts, num_experts=num_experts, layer_ids=range(1, layers + 1), missing=missing
    )


def rows(routes):
    """The value as plain lists, None where missing."""
    pairs = zip(routes.experts.tolist(), routes.missing.tolist(), strict=True)
    return [None if missing else experts for experts, missing in pairs]


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(1, "u1"), (256, "u1"), (257, "u2"), (65536, "u2")]
)
def test_dtype_follows_the_number_of_experts_and_not_the_data(num_experts, dtype):
    routes = Routes.from_array(
        np.zeros((3, 1, 1), np.int64), num_experts=num_experts, layer_ids=[0]
    )
    assert routes.experts.dtype == np.dtype(dtype)


def test_data_of_the_right_dtype_is_not_copied_and_cannot_be_written():
    array = np.zeros((3, 1, 1), np.uint8)
    routes = Routes.from_array(array, num_experts=8, layer_ids=[0])
    assert np.shares_memory(routes.experts, array)
    with pytest.raises(ValueError, match="read-only"):
        routes.experts[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        routes.missing[0] = True
    assert array.flags.writeable


@pytest.mark.parametrize("value", [8, -1, 300])
def test_ids_out_of_range_are_refused_with_their_place(value):
    array = np.tile(np.arange(2, dtype=np.int64), (3, 2, 1))
    array[1, 0, 1] = value
    remedy = r"Pass missing=" if value == -1 else "Check that"
    said = rf"expert {value} at token 1, .* 0, slot 1 .* 0\.\.7\. .*{remedy}"
    with pytest.raises(UsageError, match=said):
        Routes.from_array(array, num_experts=8, layer_ids=[0, 1])


def test_a_row_that_names_an_expert_twice_is_refused_unless_missing():
    array = np.tile(np.arange(2), (3, 2, 1))
    array[1, 1] = 0
    with pytest.raises(UsageError, match=r"1 rows .* is token 1 of layer position 1: \[0, 0\]"):
        Routes.from_array(array, num_experts=8, layer_ids=[0, 1])
    missing = np.array([False, True, False])
    Routes.from_array(array, num_experts=8, layer_ids=[0, 1], missing=missing)


def test_missing_rows_hold_zeros_whatever_came_with_them():
    array = np.full((2, 1, 1), 99)
    routes = Routes.from_array(array, num_experts=8, layer_ids=[0], missing=np.ones(2, bool))
    assert routes.experts.sum() == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"array": np.zeros((3, 2), int)},
        {"array": np.zeros((3, 2, 1))},
        {"array": np.zeros((3, 2, 0), int)},
        {"layer_ids": [0]},
        {"layer_ids": [4, 4]},
        {"layer_ids": [0, -1]},
        {"layer_ids": [0, 1 << 32]},
        {"missing": np.ones(2, bool)},
        {"missing": np.ones(3, np.int64)},
        {"num_experts": True},
        {"num_experts": 10**5000},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_arrays_that_do_not_fit_are_refused(odd):
    fits = {"array": np.zeros((3, 2, 1), int), "num_experts": 8, "layer_ids": [0, 1]}
    assert Routes.from_array(**fits).tokens == 3
    with pytest.raises(ShapeError):
        Routes.from_array(**fits | odd)


def test_a_value_of_the_wrong_dtype_or_mask_is_refused():
    experts, missing = np.zeros((3, 1, 1), np.uint16), np.zeros(3, bool)
    with pytest.raises(ShapeError, match="uint8"):
        Routes(experts, 8, (0,), missing)
    with pytest.raises(ShapeError, match=r"missing must be bool \[3\]"):
        Routes(experts.astype(np.uint8), 8, (0,), missing[:2])
    with pytest.raises(ShapeError, match=r"padding must be bool \[3\]"):
        Routes(experts.astype(np.uint8), 8, (0,), missing, missing[:2])
    with pytest.raises(ShapeError, match=r"top_k must be in 1\.\.8; got 9"):
        Routes(np.zeros((3, 1, 9), np.uint8), 8, (0,), missing)
    with pytest.raises(ShapeError, match="65537"):
        Routes(experts, 65537, (0,), missing)


def test_a_batch_is_no_flag():
    with pytest.raises(ShapeError, match="be split into True rows"):
        random_routes().tensor(batch=True)


def test_slices_are_views():
    routes = random_routes()
    part = routes[2:5]
    assert rows(part) == rows(routes)[2:5]
    assert np.shares_memory(part.experts, routes.experts)
    for index, remedy in ((2, r"routes\[2:3\]"), (-1, r"routes\[-1:\]")):
        with pytest.raises(UsageError, match=rf"{index} is not a slice.*{remedy}"):
            routes[index]


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_join_undoes_split(lengths):
    routes = random_routes(tokens=sum(lengths))
    parts = routes.split(lengths)
    assert [part.tokens for part in parts] == lengths
    assert Routes.join(parts) == routes


def test_split_that_does_not_add_up_is_refused():
    with pytest.raises(ShapeError, match="add up to 9, but the routes have 10"):
        random_routes().split([4, 5])
    with pytest.raises(ShapeError):
        random_routes().split([-1, 11])


def test_parts_of_different_models_do_not_join():
    with pytest.raises(ShapeError, match="does not continue"):
        Routes.join([random_routes(), random_routes(num_experts=33)])
    with pytest.raises(ShapeError, match="empty list"):
        Routes.join([])


def test_missing_tokens_are_added_on_either_side():
    routes = random_routes()
    longer = routes.with_missing(before=2, after=1)
    assert rows(longer) == [None, None, *rows(routes), None]
    assert longer.known == routes.known == routes.tokens - routes.missing.sum()
    assert longer.pad(longer.tokens + 5).known == longer.known
    with pytest.raises(ShapeError, match="-1"):
        routes.with_missing(after=-1)


def test_fill_takes_a_row_wherever_one_of_the_two_has_it():
    ours, other = random_routes(seed=1), random_routes(seed=3)
    halves = [rows(ours), rows(other)]
    wanted = [row if row is not None else theirs for row, theirs in zip(*halves, strict=True)]
    known = {(row is not None, theirs is not None) for row, theirs in zip(*halves, strict=True)}
    assert len(known) == 4  # A row that both have, each alone, and neither.
    assert rows(ours.fill(other)) == wanted
    assert ours.fill(other).known == sum(row is not None for row in wanted) > ours.known
    padded = random_routes(tokens=6, seed=2).pad(10)
    filled = ours.fill(padded)
    assert filled.padding.tolist() == (ours.missing & padded.padding).tolist()
    with pytest.raises(ShapeError, match="not of the same tokens"):
        ours.fill(random_routes(tokens=9))


def loads(routes):
    """Slots of padding by layer and expert."""
    rows = routes.experts[routes.padding]
    layers = range(rows.shape[1])
    return [np.bincount(rows[:, i].ravel(), minlength=routes.num_experts) for i in layers]


def random_rectangle(lengths, width, *, layers=2, num_experts=256, top_k=8):
    generator = np.random.default_rng(0)
    experts = generator.random((sum(lengths), layers, num_experts)).argsort(-1)[..., :top_k]
    whole = Routes.from_array(experts, num_experts=num_experts, layer_ids=range(layers))
    return [row.pad(width) for row in whole.split(lengths)]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    extra=st.integers(0, 4),
    model=st.sampled_from([(1, 1), (8, 2), (7, 3), (6, 6), (60, 4), (256, 8), (300, 5)]),
    cut=st.integers(0, 60),
)
def test_padding_is_even_however_a_batch_is_made(lengths, extra, model, cut):
    num_experts, top_k = model
    rows = random_rectangle(
        lengths, max(lengths) + extra, layers=1, num_experts=num_experts, top_k=top_k
    )
    whole = Routes.join(rows)
    at = np.arange(max(lengths) + extra)
    assert whole.padding.tolist() == [x for length in lengths for x in (at >= length).tolist()]
    bare = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    assert Routes.join(bare, pad_to=max(lengths) + extra) == whole
    order = np.random.default_rng(cut).permutation(whole.tokens)
    for routes in (whole, whole[cut:], whole.take(order), Routes.join([whole[cut:], whole[:cut]])):
        (load,) = loads(routes)
        assert load.max() - load.min() <= 1
        Routes.from_array(routes.experts, num_experts=num_experts, layer_ids=[0])
    assert Routes.join([whole[:cut], whole[cut:]]) == whole
    assert not whole.take(~whole.padding).padding.any()
    assert not whole.missing.any()
    fewer = whole.tokens - 1
    for pad in (lambda: whole.pad(fewer), lambda: Routes.join([whole], pad_to=fewer)):
        with pytest.raises(ShapeError, match=f"cannot pad {whole.tokens} tokens to {fewer}"):
            pad()


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (128, 8), (64, 6), (512, 22)])
def test_few_padding_tokens_load_all_expert_parallel_ranks(num_experts, top_k, ranks):
    """A rank pads a few tokens only, and all ranks of a group may do so alike."""
    (row,) = random_rectangle([1], 9, layers=1, num_experts=num_experts, top_k=top_k)
    for tokens in range(1, 9):
        (load,) = loads(row[: 1 + tokens])
        by_rank = load.reshape(ranks, -1).sum(1)
        assert by_rank.max() - by_rank.min() <= 1


def test_the_next_turn_replaces_rows_from_its_start_on():
    routes, newer = random_routes(), random_routes(tokens=4, seed=1)
    assert rows(routes.extend(newer, start=8)) == rows(routes)[:8] + rows(newer)
    with pytest.raises(ShapeError, match="from token 11 on do not continue 10"):
        routes.extend(newer, start=11)


@given(order=st.permutations(range(10)))
def test_take_follows_an_order_and_its_inverse_leads_back(order):
    routes = random_routes()
    taken = routes.take(order)
    assert rows(taken) == [rows(routes)[i] for i in order]
    assert taken.take(np.argsort(order)) == routes


def test_take_reads_a_mask_as_a_mask():
    routes = random_routes()
    mask = np.arange(10) % 3 == 0
    for form in (mask, mask.tolist(), torch.from_numpy(mask)):
        assert rows(routes.take(form)) == rows(routes)[::3]
    assert routes.take(np.zeros(10, bool)).tokens == routes.take([]).tokens == 0


@pytest.mark.parametrize(
    "order",
    [
        [0, 10],
        [-1],
        np.array([[0, 1]]),
        np.ones(9, bool),
        np.ones((10, 1), bool),
        [0.5],
        ["a"],
        np.array([2**64 - 1], np.uint64),
        5,
    ],
)
def test_orders_outside_the_tokens_are_refused(order):
    with pytest.raises(ShapeError, match=r"0\.\.9"):
        random_routes().take(order)


def test_only_keeps_the_named_layers():
    routes = random_routes(layers=4)
    part = routes.select_layers([4, 2])
    assert part.layer_ids == (4, 2)
    assert np.array_equal(part.experts, routes.experts[:, [3, 1]])
    with pytest.raises(ShapeError, match=r"\[9\]"):
        routes.select_layers([9])


def test_equality_is_by_value():
    routes = random_routes()
    assert routes == random_routes()
    assert routes != routes.with_missing(after=1)
    assert routes != random_routes(seed=1)
    assert routes != "routes"
    other = np.zeros(10, bool)
    assert Routes(routes.experts, 32, (1, 2, 3), other) != routes


def _opcodes(function):
    """Count the steps of Python's interpreter, calls included, that a call takes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_no_operation_loops_over_tokens():
    def round_trip(tokens):
        experts = np.tile(np.arange(8, dtype=np.uint8), (tokens, 8, 1))
        routes = Routes.from_array(experts, num_experts=128, layer_ids=range(8))
        return _opcodes(lambda: Routes.unpack(routes.pack()))

    few, many = round_trip(16), round_trip(131072)
    # One step for every hundredth token would show.
    assert many - few < 131072 / 100, (few, many)


def test_the_tensor_of_routes(foreign):
    routes = foreign()[:5].pad(8)
    rows = routes.tensor(batch=2)
    assert rows.shape == (2, 4, 3, 2)
    assert rows.dtype == torch.int16
    flat = rows.flatten(0, 1).numpy()
    assert (flat[2] == -1).all()
    assert np.array_equal(flat[[0, 1, 3, 4]], routes.experts[[0, 1, 3, 4]])
    assert np.array_equal(flat[5:], routes.experts[5:])
    assert foreign()[:0].tensor().shape == (1, 0, 3, 2)
    for batch in (0, 3, 16):
        with pytest.raises(ShapeError, match=f"8 tokens cannot be split into {batch} rows"):
            routes.tensor(batch=batch)


@pytest.mark.parametrize(("num_experts", "dtype"), [(32767, torch.int16), (65536, torch.int32)])
def test_every_id_fits(num_experts, dtype):
    last = num_experts - 1
    routes = Routes(np.full((2, 1, 1), last, np.uint16), num_experts, (0,), np.array([False, True]))
    rows = routes.tensor()
    assert rows.dtype == dtype
    assert rows.flatten().tolist() == [last, -1]
