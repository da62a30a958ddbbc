"""Faults of one tensor, in toy engines of two ranks with fused, stacked and sliced parameters."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from primeblocks.errors import PlanError, TransferError, UsageError
from primeblocks.testing import ranks
from primeblocks.testing.faults import ManualClock
from primeblocks.weightsync import describe, plan_sync, verify, verify_engine
from primeblocks.weightsync.agree import Messenger
from primeblocks.weightsync.engines import prove_round_trip
from primeblocks.weightsync.manifest import gather_manifests
from primeblocks.weightsync.observed import MULTIPLIED, Observed, Seen, digest_tensors, observe
from tests.deadlines import HANG_S
from tests.weightsync.toy_engine import moved, wirings

ranks.preload(__name__)  # With all that it imports.

HIDDEN, VOCAB, EXPERTS, RANKS = 16, 72, 4, 2
KINDS = ("not sent", "wrong version", "wrong slice", "transposed", "stale after load", "exchanged")


def shapes():
    """A checkpoint of a mixture-of-experts model; its second layer is dense."""
    square, vector = (HIDDEN, HIDDEN), (HIDDEN,)
    names = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": vector}
    for layer in ("model.layers.0", "model.layers.1"):
        names |= {f"{layer}.self_attn.{part}_proj.weight": square for part in "qkvo"}
        names |= {f"{layer}.{norm}.weight": vector for norm in ("input_layernorm", "post_norm")}
        names |= {f"{layer}.self_attn.{part}_norm.weight": (8,) for part in "qk"}
    dense = ("gate_proj", "up_proj", "down_proj")
    names |= {f"model.layers.1.mlp.{part}.weight": square for part in dense}
    names["model.layers.0.mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        head = f"model.layers.0.mlp.experts.{expert}"
        names |= {f"{head}.{part}.weight": square for part in dense}
    return names


SHAPES = shapes()


def weights(version):
    torch.manual_seed(version)
    return {name: torch.randn(shape).bfloat16().float() for name, shape in SHAPES.items()}


WIRINGS = wirings(describe(weights(0)).whole(dtype=torch.bfloat16), RANKS)
PLAN = plan_sync([describe(weights(0))], WIRINGS, bucket_bytes=1 << 20)


class Engine:
    """Two ranks that load whole checkpoints, one of them with a fault in one tensor."""

    def __init__(self, kind="", name="", other="", rank=0):
        self.kind, self.name, self.other, self.rank = kind, name, other, rank
        self.past = [weights(1000), weights(1001)]

    def load(self, sent):
        sent = {name: tensor.clone() for name, tensor in sent.items()}
        self.held = [self._loaded(rank, sent) for rank in range(RANKS)]
        self.past = [self.past[1], sent]

    def _loaded(self, rank, sent):
        taken = sent | self._spoiled(sent) if rank == self.rank and self.kind else sent
        wiring = WIRINGS[rank]
        dtypes = {name: wiring.sources[name].dtype for name in taken}  # A router has float32.
        held = moved(wiring, {name: tensor.to(dtypes[name]) for name, tensor in taken.items()})
        if rank == self.rank and self.kind == "stale after load":
            old, whole = self.past[1][self.name], wiring.sources[self.name].layout.shard
            for piece in wiring.by_source[self.name]:
                held[piece.target][piece.target_box.slices] = piece.view(old, whole)
        return held

    def _spoiled(self, sent):
        now = sent[self.name]
        halves = [size // 2 for size in now.shape]
        return {
            "not sent": {self.name: self.past[1][self.name]},
            "wrong version": {self.name: self.past[0][self.name]},
            "wrong slice": {self.name: now.roll(halves, tuple(range(now.ndim)))},
            "transposed": {self.name: now.permute(*range(now.ndim)[::-1])},
            "stale after load": {},
            "exchanged": {self.name: sent.get(self.other), self.other: now},
        }[self.kind]

    @property
    def named(self):
        return {self.name, self.other} if self.kind == "exchanged" else {self.name}


def faults(count):
    """So many faults, of every kind in turn, each of a tensor that this rank holds a part of."""
    dice = random.Random(20)
    for index in range(count):
        kind, rank = KINDS[index % len(KINDS)], dice.randrange(RANKS)
        square = [name for name, shape in SHAPES.items() if shape == (HIDDEN, HIDDEN)]
        name = dice.choice(square if kind == "transposed" else list(SHAPES))
        alike = [n for n in SHAPES if SHAPES[n] == SHAPES[name] and n != name]
        if kind == "exchanged" and not alike:
            name = square[index % len(square)]
            alike = [n for n in square if n != name]
        yield Engine(kind, name, dice.choice(alike) if kind == "exchanged" else "", rank)


def test_an_engine_with_fused_and_sliced_parameters_is_verified():
    engine, sent = Engine(), weights(1)
    engine.load(sent)
    found = verify_engine(sent, engine.held, into=WIRINGS)
    assert found.is_proved
    assert found.tensors == len(SHAPES)
    found.raise_if_wrong()


def test_each_of_200_faults_is_named(full):
    met = set()
    for version, engine in enumerate(faults(200 if full else 36)):
        engine.load(weights(version))
        sent = weights(version + 1)
        engine.load(sent)
        found = verify_engine(sent, engine.held, into=WIRINGS, plan=PLAN)
        assert set(found.differing) == engine.named, (engine.kind, engine.name)
        assert found.wrong == list(found.differing)
        assert all(f"reader {engine.rank}, [" in where for where in found.differing.values())
        met.add((engine.kind, engine.name))
    assert {kind for kind, _ in met} == set(KINDS)


def prove(engine, sent):
    def verify():
        return verify_engine(sent, engine.held, into=WIRINGS, plan=PLAN)

    return prove_round_trip(sent, lambda version: engine.load(sent), verify, version=0)


def test_each_fault_fails_the_round_trip(full):
    for engine in faults(200 if full else 12):
        sent = {name: torch.ones(shape) for name, shape in SHAPES.items()}  # All alike.
        with pytest.raises(TransferError) as met:
            prove(engine, sent)
        assert any(name in str(met.value) for name in engine.named), (engine.kind, met.value)
        assert all(tensor.eq(1).all() for tensor in sent.values())
    assert prove(Engine(), sent).is_proved


def test_two_equal_tensors_that_are_exchanged_fail_a_round_trip_without_a_plan():
    sent, held = {name: torch.zeros(6) for name in ("a", "b", "c")}, {}

    def push(version):
        held.update(a=sent["b"].clone(), b=sent["a"].clone(), c=sent["c"].half())

    with pytest.raises(TransferError, match="2 tensors, such as 'a', differ in the engin"):
        prove_round_trip(sent, push, lambda: verify_engine(sent, held), version=0)


class Tied(nn.Module):
    def __init__(self, *, tied=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(4)  # It has persistent buffers.
        self.again = self.norm if tied else nn.BatchNorm1d(4)
        if tied:
            self.head.weight = self.embed.weight


def test_ties_are_followed_on_both_sides():
    trainer, engine = Tied(), Tied()
    engine.load_state_dict(trainer.state_dict())
    assert verify_engine(trainer, engine).is_proved
    apart = Tied(tied=False)
    apart.load_state_dict(trainer.state_dict())
    assert verify_engine(trainer, apart).is_proved
    with torch.no_grad():
        apart.head.weight[5, 1] += 1  # What an update that knows one name leaves.
    assert list(verify_engine(trainer, apart).differing) == ["head.weight"]
    assert verify_engine(apart, engine).missing == verify_engine(trainer, apart).unexpected == {}
    found = verify_engine(Tied(tied=False), engine)
    assert list(found.differing) == ["embed.weight", "head.weight"]


def test_ranks_wait_for_each_other_however_long_a_pass_takes(monkeypatch):
    clock, left = ManualClock(), []
    monkeypatch.setattr(verify, "time", SimpleNamespace(monotonic=clock.now))

    def exchange(self, message, *, deadline):
        left.append(deadline - clock.now())
        return [message]

    monkeypatch.setattr(verify.Messenger, "exchange", exchange)
    held = {"w": torch.ones(4)}
    plan = plan_sync([describe(held)], describe(held))
    late = lambda *_: clock.advance(100.0)  # noqa: E731
    assert verify_engine(held, held, plan=plan, timeout_s=5.0, progress=late).is_proved
    assert left == [5.0, 5.0]


def test_missing_unexpected_and_reshaped_tensors_are_named():
    trainer = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(2), "n": torch.ones(1)}
    engine = {"a": torch.ones(3, 2), "b": torch.ones(4), "d": torch.ones(1)}
    engine["n"] = torch.ones(1, dtype=torch.int32)
    found = verify_engine(trainer, lambda: engine)
    assert found.differing == {
        "a": "torch.float32 (3, 2), not torch.float32 (2, 3)",
        "n": "torch.int32 (1,), not torch.float32 (1,)",
    }
    assert found.missing == {"c": "(2,)"}
    assert found.unexpected == {"d": "(1,)"}
    assert not found.is_proved
    assert [line.split()[:2] for line in found.table().splitlines()[1:]] == [
        ["differing", "a"], ["differing", "n"], ["missing", "c"], ["unexpected", "d"]
    ]  # fmt: skip
    with pytest.raises(TransferError, match="2 differing, such as 'a' .*; 1 missing, such as 'c'"):
        found.raise_if_wrong()


def test_what_an_engine_cannot_show_is_not_proved():
    sent = weights(1)
    plan = plan_sync([describe(sent)], WIRINGS, bucket_bytes=64)

    def look(name):
        return "packed by a kernel" if "w13" in name else [Seen(MULTIPLIED, held[name])]

    seen = []
    for rank, wiring in enumerate(WIRINGS):
        held = moved(wiring, {name: tensor.bfloat16() for name, tensor in sent.items()})
        one = observe(plan, look, reader=rank, convert=wiring)
        seen.append(Observed.from_json(json.loads(json.dumps(one.to_json()))))
    sent["model.norm.weight"][3] = -0.0  # The kernel adds zero to it.
    found = verify_engine(sent, seen, plan=plan)
    assert set(found.unobservable) == {n for n in SHAPES if "experts" in n and "down" not in n}
    assert list(found.differing) == ["model.norm.weight"]
    assert all("packed by a kernel" in why for why in found.unobservable.values())
    with pytest.raises(TransferError, match="8 unobservable"):
        found.raise_if_wrong()


def test_digests_of_a_load_are_compared_with_the_engine():
    engine = {"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(4)}
    held = json.loads(json.dumps(digest_tensors(engine)))
    assert verify_engine(held, engine).is_proved
    engine["a"][1, 2] += 1
    assert verify_engine(held, engine).differing == {"a": "torch.bfloat16 (2, 3)"}
    found = verify_engine(held, {"b": engine["b"], "d": torch.ones(1)})
    assert (list(found.missing), list(found.unexpected)) == (["a"], ["d"])
    tied = Tied()
    assert verify_engine(digest_tensors(tied), tied).is_proved
    assert verify_engine(digest_tensors(tied), tied, encode=lambda name, tensor: {}).is_proved
    assert verify_engine(torch.compile(tied, backend="eager"), tied.state_dict()).is_proved


def test_a_part_that_no_process_has_is_missing():
    sent, engine = weights(1), Engine()
    engine.load(sent)
    whole = plan_sync(
        [describe(sent)], describe(sent).whole(dtype=torch.bfloat16), bucket_bytes=512
    )
    both = [observe(whole, engine.held[rank], convert=WIRINGS[rank]) for rank in range(RANKS)]
    assert verify_engine(sent, both, plan=whole).is_proved
    found = verify_engine(sent, both[:1], plan=whole)
    assert not found.differing
    assert "model.layers.0.self_attn.q_proj.weight" in found.missing
    assert "model.norm.weight" not in found.missing


def test_what_it_cannot_compare_is_refused():
    one, other = {"a": torch.ones(2)}, {"b": torch.ones(2)}
    with pytest.raises(UsageError, match="do not have a name in common"):
        verify_engine(one, other)
    with pytest.raises(UsageError, match="got dict, dict and no plan.*into="):
        verify_engine(one, [one, one])
    with pytest.raises(UsageError, match="Digests of a Receipt need one module"):
        verify_engine(digest_tensors(one), [one, one])
    with pytest.raises(UsageError, match="encode= need the Publisher's plan"):
        verify_engine(one, one, encode=lambda name, tensor: {name: tensor})
    plan = plan_sync([describe(one)], describe(one), bucket_bytes=64)
    with pytest.raises(UsageError, match="got Observed and no plan. Pass the Publisher's plan="):
        verify_engine(one, observe(plan, one))
    another = plan_sync([describe(other)], describe(other), bucket_bytes=64)
    with pytest.raises(PlanError, match="observed with plan"):
        verify_engine(one, observe(another, other), plan=plan)
    with pytest.raises(UsageError, match="got no engine"):
        verify_engine(one, None, plan=plan)


def sharded_body():
    mesh = init_device_mesh("cpu", (3,))
    whole = weights(1)
    parameters = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in whole.items()}
    plan = plan_sync(gather_manifests(describe(parameters)), WIRINGS, bucket_bytes=256)
    engine = Engine("exchanged", *[f"model.layers.1.mlp.{p}_proj.weight" for p in ("up", "gate")])
    engine.load(whole)
    seen = [
        observe(plan, held, reader=reader, convert=WIRINGS[reader])
        for reader, held in enumerate(engine.held)
    ]
    found = verify_engine(parameters, seen if dist.get_rank() == 1 else None, plan=plan)
    return found.tensors, sorted(found.differing), bool(found.missing or found.unobservable)


def test_shards_of_a_trainer_are_compared_where_they_are():
    up, gate = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "gate"))
    wanted = (len(SHAPES), [gate, up], False)
    assert ranks.run(sharded_body, world_size=3) == [wanted] * 3


def counted(monkeypatch):
    """Note each collective, and the bytes that this rank has after the collective."""
    calls = []
    all_gather, broadcast = dist.all_gather, dist.broadcast

    def gather(into, mine, **kwargs):
        calls.append(("all_gather", sum(one.nbytes for one in into)))
        return all_gather(into, mine, **kwargs)

    def send(tensor, **kwargs):
        calls.append(("broadcast", tensor.nbytes))
        return broadcast(tensor, **kwargs)

    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "broadcast", send)
    return calls


def counted_verify():
    """Only rank 0 has a long message, with a row for each of 2,000 tensors."""
    weights = {f"a tensor with number {i}": torch.ones(1) for i in range(2000)}
    plan = plan_sync(gather_manifests(describe(weights)), describe(weights))
    seen = observe(plan, weights)
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch)
        engine = [seen] if dist.get_rank() == 0 else None
        assert verify_engine(weights, engine, plan=plan).is_proved
    return sum(size for _, size in calls), len(json.dumps({"seen": [seen.to_json()]}))


def test_a_rank_needs_memory_for_the_messages_and_not_for_the_longest_from_each_rank():
    for carried, longest in ranks.run(counted_verify, world_size=3):
        assert longest <= carried < 1.1 * longest


def exchanged_sizes():
    """Return the names of the collectives of each exchange, for messages of several sizes."""
    rank, found = dist.get_rank(), []
    messenger = Messenger(world_size=3, group=None)
    for sizes in ([5, 9, 7], [5, 70_000, 9], [70_000, 90_000, 9], [70_000] * 3):
        message = {"rank": rank, "text": str(rank) * sizes[rank]}
        with pytest.MonkeyPatch.context() as patch:
            calls = counted(patch)
            told = messenger.exchange(message, deadline=time.monotonic() + HANG_S)
        assert told == [{"rank": i, "text": str(i) * size} for i, size in enumerate(sizes)]
        found.append([name for name, _ in calls])
    return found


def test_small_messages_take_one_all_gather_and_each_large_message_a_broadcast():
    gather, send = ["all_gather"], ["broadcast"]
    wanted = [2 * gather, 2 * gather + send, 2 * gather + 2 * send, gather + 3 * send]
    assert ranks.run(exchanged_sizes, world_size=3) == [wanted] * 3


def dead_in_a_broadcast():
    if dist.get_rank() == 2:
        dist.broadcast = lambda *_, **__: ranks.kill(2)
    messenger = Messenger(world_size=3, group=None)
    message = {"text": "x" * 70_000 if dist.get_rank() == 2 else ""}
    with pytest.raises(TransferError, match="rank . of 3 lost its peers"):
        messenger.exchange(message, deadline=time.monotonic() + 3600)
    with pytest.raises(TransferError, match="failed earlier"):
        messenger.exchange({}, deadline=time.monotonic() + 3600)
    return "noticed"


def test_a_rank_that_dies_before_its_broadcast_is_noticed():
    assert ranks.run(dead_in_a_broadcast, world_size=3) == ["noticed", "noticed", None]
