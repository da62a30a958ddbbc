import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import describe
from primeblocks.weightsync.convert.conversion import Conversion
from primeblocks.weightsync.convert.rules import (
    crop,
    drop,
    fuse,
    pad,
    rename,
    round_up,
    share,
    split,
    stack,
    transpose,
    unstack,
)
from primeblocks.weightsync.manifest import Manifest, TensorSpec


def without(shape, dim):
    return (*shape[:dim], *shape[dim + 1 :])


class Chain:
    """A random chain of rules, and beside it the same in plain torch."""

    def __init__(self, draw, *, steps):
        self.draw, self.rules, self.exact = draw, [], True
        self.sources, count = {}, 1
        for i in range(draw(st.integers(1, 3))):
            shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
            n = math.prod(shape)
            self.sources[f"m.{i}"] = torch.arange(count, count + n).reshape(shape)
            count += n
        self.now = dict(self.sources)
        for step in range(draw(st.integers(0, steps))):
            kinds = [self.rename, self.transpose, self.split, self.restack, self.fuse, self.pad]
            draw(st.sampled_from(kinds))(f"s{step}")

    def pick(self, min_dims=0):
        names = sorted(name for name, x in self.now.items() if x.ndim >= min_dims)
        return self.draw(st.sampled_from(names)) if names else None

    def dim_of(self, name):
        return self.draw(st.integers(0, self.now[name].ndim - 1))

    def rename(self, new):
        if (name := self.pick()) is not None:
            self.rules.append(rename(name, new))
            self.now[new] = self.now.pop(name)

    def transpose(self, new):
        if (name := self.pick()) is not None:
            dims = tuple(self.draw(st.permutations(range(self.now[name].ndim))))
            self.rules.append(transpose(name, dims))
            self.now[name] = self.now[name].permute(dims)

    def split(self, new):
        if (name := self.pick(1)) is not None:
            dim = self.dim_of(name)
            size = self.now[name].shape[dim]
            parts = self.draw(
                st.sampled_from([p for p in [(1, 1), (2, 1), (1,)] if size % sum(p) == 0])
            )
            targets = [f"{new}.{i}" for i in range(len(parts))]
            self.rules.append(split(name, targets, dim=dim, parts=parts))
            sizes = [size * part // sum(parts) for part in parts]
            self.now |= dict(zip(targets, self.now.pop(name).split(sizes, dim), strict=True))

    def restack(self, new):
        """Take apart along one dim, put together along another."""
        name = self.pick(1)
        if name is None or not self.now[name].numel():
            return
        dim, again = self.dim_of(name), self.dim_of(name)
        self.rules.append(unstack(name, f"{new}.{{i}}", index="i", dim=dim))
        parts = self.now.pop(name).unbind(dim)
        if self.draw(st.booleans()):
            self.rules.append(stack(f"{new}.{{i}}", new, index="i", dim=again))
            self.now[new] = torch.stack(parts, again)
        else:
            self.now |= {f"{new}.{i}": part for i, part in enumerate(parts)}

    def fuse(self, new):
        name = self.pick(1)
        if name is None:
            return
        dim = self.dim_of(name)
        mine = without(self.now[name].shape, dim)
        others = [
            n
            for n, x in self.now.items()
            if n != name and x.ndim == len(mine) + 1 and without(x.shape, dim) == mine
        ]
        if not others:
            return
        both = (name, self.draw(st.sampled_from(sorted(others))))
        lengths = tuple(self.now[n].shape[dim] for n in both)
        if 0 in lengths or self.draw(st.booleans()):
            self.rules.append(fuse(both, new, dim=dim, parts=None))
            self.exact = False  # Bound backwards, it cannot know where to cut.
        else:
            self.rules.append(fuse(both, new, dim=dim, parts=lengths))
        self.now[new] = torch.cat([self.now.pop(n) for n in both], dim)

    def pad(self, new):
        if (name := self.pick(1)) is not None:
            dim = self.dim_of(name)
            x, at = self.now[name], self.draw(st.integers(0, 2))
            size = x.shape[dim]
            padded = at + size + self.draw(st.integers(0, 2))
            self.rules.append(pad(name, dim=dim, size=size, padded=padded, at=at))
            shape = list(x.shape)
            shape[dim] = padded
            self.now[name] = torch.zeros(shape, dtype=x.dtype)
            self.now[name].narrow(dim, at, size).copy_(x)


@st.composite
def chains(draw):
    return Chain(draw, steps=6)


@st.composite
def shards(draw, shape):
    """Boxes that tile a shape: cut along up to two dims."""
    boxes = [Shard((0,) * len(shape), shape)]
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)) if shape else []:
        boxes = [half for box in boxes for half in draw(halves(box, dim))]
    return boxes


@st.composite
def halves(draw, box, dim):
    first = draw(st.integers(0, box.sizes[dim]))

    def change(values, value):
        return (*values[:dim], value, *values[dim + 1 :])

    return [
        Shard(box.offsets, change(box.sizes, first)),
        Shard(
            change(box.offsets, box.offsets[dim] + first),
            change(box.sizes, box.sizes[dim] - first),
        ),
    ]


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@given(chains())
def test_chains_do_what_torch_does_and_come_back(chain):
    conversion = Conversion(tuple(chain.rules))
    got = conversion.forward(chain.sources)
    assert_same(got, chain.now)
    wiring = conversion.bind(describe(chain.sources))
    assert_same(wiring.inverse().move(got), chain.sources)
    if chain.exact:
        assert_same(conversion.inverse().forward(got), chain.sources)
        assert conversion.inverse().inverse() == conversion


@given(chains(), st.data())
def test_shards_land_where_forward_puts_them_each_element_once(chain, data):
    conversion = Conversion(tuple(chain.rules))
    wiring = conversion.bind(describe(chain.sources))
    made = {name: torch.zeros_like(x) for name, x in chain.now.items()}
    filled = {name: torch.zeros_like(x) for name, x in chain.now.items()}
    for name, whole in chain.sources.items():
        for box in data.draw(shards(tuple(whole.shape))):
            held = Manifest(((name, TensorSpec(whole.dtype, Layout(tuple(whole.shape), box))),))
            local = whole[box.slices].clone()
            for piece in wiring.map(held):
                view = piece.view(local, box)
                assert view.numel()
                assert view.untyped_storage().data_ptr() == local.data_ptr()
                made[piece.target][piece.target_box.slices] = view
                filled[piece.target][piece.target_box.slices] += 1
    assert_same(made, chain.now)
    # Identities begin at 1, so that what is 0 was padded.
    assert_same(filled, {name: (x > 0).to(x.dtype) for name, x in chain.now.items()})
    holes = {name: torch.zeros_like(x) for name, x in chain.now.items()}
    for name, boxes in wiring.unfilled.items():
        for box in boxes:
            holes[name][box.slices] += 1
    assert_same(holes, {name: (x == 0).to(x.dtype) for name, x in chain.now.items()})


@given(chains(), st.data())
def test_what_fills_a_box_of_a_target_fills_nothing_else(chain, data):
    wiring = Conversion(tuple(chain.rules)).bind(describe(chain.sources))
    for name, whole in chain.now.items():
        box = data.draw(shards(tuple(whole.shape)))[-1]
        made = torch.zeros_like(whole[box.slices])
        for piece in wiring.by_target[name]:
            if (part := piece.to_target(box)) is not None:
                source = chain.sources[part.source]
                held = wiring.sources[part.source].layout.shard
                made[part.target_box.within(box).slices] = part.view(source, held)
        assert torch.equal(made, whole[box.slices])


def test_every_bit_pattern_survives():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensors = {"a": bits.view(torch.bfloat16).reshape(256, 256)}
    conversion = Conversion((transpose("a", (1, 0)), split("a", ["b", "c"])))
    whole = conversion.inverse().forward(conversion.forward(tensors))["a"]
    assert torch.equal(whole.view(torch.int16), tensors["a"].view(torch.int16))


def test_experts_taken_apart_and_put_together_are_one_piece():
    rules = (
        split("l.{n}.gate_up", ["l.{n}.gate", "l.{n}.up"], dim=1),
        unstack("l.{n}.gate", "l.{n}.{expert}.gate", index="expert"),
        unstack("l.{n}.up", "l.{n}.{expert}.up", index="expert"),
        stack("l.{n}.{expert}.gate", "l.{n}.w1", index="expert"),
        stack("l.{n}.{expert}.up", "l.{n}.w3", index="expert"),
        fuse(["l.{n}.w1", "l.{n}.w3"], "l.{n}.w13", dim=1),
    )
    tensors = {f"l.{n}.gate_up": torch.randn(5, 6, 4) for n in range(2)}
    wiring = Conversion(rules).bind(describe(tensors))
    box = Shard((0, 0, 0), (5, 6, 4))
    assert [(p.source_box, p.target_box, p.dims) for p in wiring.pieces] == [
        (box, box, (0, 1, 2))
    ] * 2


def test_only_neighbours_on_both_sides_are_joined():
    tensors = {"a": torch.arange(12).reshape(6, 2), "b": torch.arange(20, 24).reshape(2, 2)}
    x, y, z = tensors["a"].split(2)
    cut = split("a", ["x", "y", "z"])
    between = Conversion((cut, fuse(["x", "b", "z"], "t"))).forward(tensors)
    assert_same(between, {"t": torch.cat([x, tensors["b"], z]), "y": y})
    apart = Conversion((cut, fuse(["x", "z"], "t"), fuse(["y", "b"], "u"))).forward(tensors)
    assert_same(apart, {"t": torch.cat([x, z]), "u": torch.cat([y, tensors["b"]])})
    turned = Conversion((cut, fuse(["z", "y", "x"], "t"))).forward(tensors)
    assert torch.equal(turned["t"], torch.cat([z, y, x]))
    wiring = Conversion((cut, fuse(["x", "y", "z"], "t"))).bind(describe(tensors))
    assert len(wiring.by_target["t"]) == 1


def test_a_rank_with_some_experts_fills_those_alone():
    spec = TensorSpec(torch.bfloat16, Layout((8, 6, 4), Shard((2, 0, 0), (2, 6, 4))))
    held = Manifest((("l.gate_up", spec),))
    rules = (
        split("l.gate_up", ["l.gate", "l.up"], dim=1),
        unstack("l.gate", "l.{expert}.gate", index="expert"),
        unstack("l.up", "l.{expert}.up", index="expert"),
    )
    wiring = Conversion(rules).bind(held)
    assert len(wiring.targets) == 16
    pieces = {piece.target: piece for piece in wiring.map(held)}
    assert set(pieces) == {"l.2.gate", "l.2.up", "l.3.gate", "l.3.up"}
    assert pieces["l.3.up"].source_box == Shard((3, 3, 0), (1, 3, 4))
    assert pieces["l.3.up"].target_box == Shard((0, 0), (3, 4))


def test_ranks_with_different_names_are_bound_together():
    ranks = [describe({f"e.{i}": torch.zeros(2, 3)}) for i in range(3)]
    conversion = Conversion((stack("e.{i}", "e", index="i"),))
    wiring = conversion.bind(*ranks)
    assert wiring.targets["e"].shape == (3, 2, 3)
    (piece,) = wiring.map(ranks[2])
    assert piece.target_box == Shard((2, 0, 0), (1, 2, 3))
    with pytest.raises(PlanError, match=r"'e' is made of 2 tensors; 1 are missing, first 'e.1'"):
        conversion.bind(ranks[0], ranks[2])


def test_a_field_is_one_part_of_a_name_a_starred_one_any_number():
    tensors = {name: torch.zeros(1) for name in ("m.x", "m.n.x", "mx", "x")}
    one = Conversion((rename("{a}.x", "{a}.y"),)).forward(tensors)
    assert set(one) == {"m.y", "m.n.x", "mx", "x"}
    any_number = Conversion((rename("{*a}.x", "{*a}.y"),)).forward(tensors)
    assert set(any_number) == {"m.y", "m.n.y", "mx", "x"}


def test_heads_are_proportions():
    qkv = {f"a.{n}": torch.randn(rows, 3) for n, rows in zip("qkv", (8, 2, 2), strict=True)}
    rule = fuse(["a.q", "a.k", "a.v"], "a.qkv", parts=(4, 1, 1))
    got = Conversion((rule,)).forward(qkv)
    assert torch.equal(got["a.qkv"], torch.cat([qkv["a.q"], qkv["a.k"], qkv["a.v"]]))
    assert_same(Conversion((rule.inverse(),)).forward(got), qkv)


def test_a_crop_is_filled_on_the_way_back():
    tensors = {"e": torch.arange(1, 11).reshape(5, 2)}
    wiring = Conversion((crop("e", dim=0, size=3, padded=5, at=1),)).bind(describe(tensors))
    got = wiring.move(tensors)
    assert torch.equal(got["e"], tensors["e"][1:4])
    assert wiring.inverse().unfilled == {"e": [Shard((0, 0), (1, 2)), Shard((4, 0), (1, 2))]}
    with pytest.raises(PlanError, match="1 tensors were dropped or cropped, first 'e'"):
        wiring.inverse().move(got)
    fill = torch.full((5, 2), -1)
    back = wiring.inverse().move(got, fill={"e": fill})
    assert back["e"][:, 0].tolist() == [-1, 3, 5, 7, -1]
    assert fill.max() == -1


def test_the_shares_of_all_ranks_make_the_whole():
    whole = torch.arange(12).reshape(2, 6)
    rules = [share("x", dim=1, rank=rank, ranks=3) for rank in range(3)]
    parts = [Conversion((rule,)).forward({"x": whole})["x"] for rule in rules]
    assert torch.equal(torch.cat(parts, 1), whole)
    back = Conversion((rules[1].inverse(),)).forward({"x": parts[1]})["x"]
    assert torch.equal(back, torch.cat([0 * parts[0], parts[1], 0 * parts[2]], 1))


def test_a_vocabulary_is_rounded_up():
    tensors = {"embed": torch.ones(70, 2), "even": torch.ones(64)}
    rule = round_up("{name}", dim=0, multiple=64)
    wiring = Conversion((rule,)).bind(describe(tensors))
    got = wiring.move(tensors)
    assert got["embed"].shape == (128, 2)
    assert got["embed"].sum() == 140
    assert got["even"].shape == (64,)
    assert_same(wiring.inverse().move(got), tensors)
    with pytest.raises(PlanError, match="not known on the way back.*Wiring.inverse"):
        Conversion((rule.inverse(),)).bind(wiring.targets)


def test_what_was_dropped_is_listed_and_has_to_be_filled():
    tensors = {"a": torch.ones(2), "b.cache": torch.full((3,), 7.0)}
    conversion = Conversion((drop("{*any}.cache"),))
    wiring = conversion.bind(describe(tensors))
    assert wiring.dropped == ("b.cache",)
    assert list(wiring.targets) == ["a"]
    got = wiring.move(tensors)
    assert_same(conversion.inverse().forward(got), {"a": tensors["a"]})
    with pytest.raises(
        PlanError, match=r"1 tensors were dropped or cropped, first 'b.cache': .*fill="
    ):
        wiring.inverse().move(got)
    assert_same(wiring.inverse().move(got, fill=tensors), tensors)
    with pytest.raises(PlanError, match="'b.cache' is torch.float32.*fill has torch.int64"):
        wiring.inverse().move(got, fill={"b.cache": torch.zeros(3, dtype=torch.int64)})
