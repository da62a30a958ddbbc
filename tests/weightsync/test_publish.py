"""Several trainer ranks: bytes against the reference, then everything that can go wrong."""

import re
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from primeblocks.errors import ClosedError, TransferError, UnsupportedError, UsageError
from primeblocks.testing import oracles, ranks
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
from primeblocks.weightsync.manifest import Manifest, gather_manifests
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.reference import gather_whole, slice_again
from tests.weightsync.test_manifest import _experts_under_fsdp

BUCKET_BYTES = 128


def transport_at(kind, path, *, owner):
    if kind == "file":
        return FileTransport(path, owner=owner)
    return SharedMemoryTransport("policy", owner=owner, root=path)


def join(kind, path, parameters, **kwargs):
    """This rank's Publisher, over one shared place; the owner is there when it returns."""
    manifests = gather_manifests(describe(parameters))
    plan = plan_sync(manifests, manifests[0].whole(dtype=torch.bfloat16), bucket_bytes=BUCKET_BYTES)
    transport = transport_at(kind, path, owner=dist.get_rank() == 0)
    dist.barrier()
    return plan, transport, Publisher(plan, parameters, transport, **kwargs)


def received(plan, transport, **kwargs):
    """What an engine that joins now would load."""
    got = {}
    load = lambda tensors: got.update({n: t.clone() for n, t in tensors})  # noqa: E731
    with Subscriber(plan, load, transport) as subscriber:
        receipt = subscriber.receive(timeout_s=kwargs.get("timeout_s", TIMEOUT_S))
    return receipt, got


# --- bytes -------------------------------------------------------------------------------------


def _random_layouts(path, seed):
    """Parameters that are sharded at random; returns what the parent needs to check the bytes."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for i in range(6):
        dims = int(torch.randint(0, 4, (), generator=generator))
        shape = torch.randint(1, 9, (dims,), generator=generator).tolist()
        whole = torch.randn(shape, generator=generator)
        choice = int(torch.randint(-1, max(1, dims), (), generator=generator))
        placement = Replicate() if choice < 0 or not dims else Shard(choice)
        plain = i % 3 == 2
        tensor = whole if plain else distribute_tensor(whole, mesh, [placement])
        parameters[f"t{i}"] = tensor
    plan, transport, publisher = join("file", path, parameters)
    receipt = publisher.publish(3, timeout_s=TIMEOUT_S)
    local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in parameters.items()}
    got = received(plan, transport)
    dist.barrier()
    transport.close()
    return describe(parameters).to_json(), local, receipt.digest, got[0].digest, got[1]


def test_received_bytes_equal_the_reference(tmp_path):
    for seed, world_size in enumerate((3, 4)):
        path = tmp_path / str(seed)
        path.mkdir()
        results = ranks.run(_random_layouts, str(path), seed, world_size=world_size)
        sources = [Manifest.from_json(result[0]) for result in results]
        target = sources[0].whole(dtype=torch.bfloat16)
        whole = gather_whole(sources, [result[1] for result in results], target)
        for _, _, sent, seen, got in results:
            assert sent == seen == results[0][2]
            assert list(got) == list(target)
            for name in target:
                oracles.assert_same_bits(got[name], whole[name])
        for source, result in zip(sources, results, strict=True):
            for name, part in slice_again(whole, source).items():
                oracles.assert_same_bits(part, result[1][name].to(torch.bfloat16).float())
        assert [each.name for each in path.rglob("version-*")] == ["version-3.safetensors"]


def _fsdp_over_experts(path):
    model, whole = _experts_under_fsdp()
    manifests = gather_manifests(describe(model))
    plan = plan_sync(manifests, manifests[0].whole(), bucket_bytes=BUCKET_BYTES)
    transport = transport_at("shared_memory", path, owner=dist.get_rank() == 0)
    dist.barrier()
    with Publisher(plan, model, transport) as publisher:
        publisher.publish(1, timeout_s=TIMEOUT_S)
    got = received(plan, transport)[1]
    for name, tensor in whole.items():
        oracles.assert_same_bits(got[name], tensor.data)
    dist.barrier()
    transport.close()
    return [plan.written_bytes(rank) for rank in range(4)], plan.bytes_total


def test_fsdp_over_experts_arrives_whole_and_nobody_gathers(tmp_path):
    for sent, total in ranks.run(_fsdp_over_experts, str(tmp_path), world_size=4):
        assert total == sum(sent) == (8 * 3 * 5 + 7) * 4
        assert max(sent) - min(sent) <= 7 * 4


@settings(max_examples=8)
@given(st.integers(0, 2**16), st.sampled_from([torch.bfloat16, torch.float16, torch.float64]))
def test_the_sender_casts(tmp_path_factory, seed, dtype):
    weights = {"w": torch.randn(13, 5, generator=torch.Generator().manual_seed(seed)) * 1e3}
    source = describe(weights)
    plan = plan_sync([source], source.whole(dtype=dtype), bucket_bytes=64)
    with SharedMemoryTransport(f"primeblocks-test-{seed}", owner=True) as transport:
        Publisher(plan, weights, transport).publish(0, timeout_s=TIMEOUT_S)
        oracles.assert_same_bits(received(plan, transport)[1]["w"], weights["w"].to(dtype))


# --- one rank: versions, encode ----------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    weights = {"w": torch.arange(64.0)}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=64)
    with SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport:
        yield weights, plan, transport


def test_versions_strictly_increase(alone):
    weights, plan, transport = alone
    with Publisher(plan, weights, transport) as publisher:
        first = publisher.publish(5, timeout_s=TIMEOUT_S)
        with pytest.raises(UsageError, match="version 4 after version 5"):
            publisher.publish(4, timeout_s=TIMEOUT_S)
        with pytest.raises(UsageError, match="from 0 to"):
            publisher.publish(-1, timeout_s=TIMEOUT_S)
        assert publisher.publish(5, timeout_s=TIMEOUT_S).digest == first.digest
        weights["w"][0] = 9
        with pytest.raises(UsageError, match="version 5 is committed already, with other bytes"):
            publisher.publish(5, timeout_s=TIMEOUT_S)
        assert publisher.publish(6, timeout_s=TIMEOUT_S).digest != first.digest
    with pytest.raises(ClosedError):
        publisher.publish(7, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("wrong", [1 << 63, True])
def test_what_is_no_version_is_refused_on_both_sides(alone, wrong, monkeypatch):
    (weights, plan, transport), aborted = alone, []
    with Publisher(plan, weights, transport) as publisher:
        monkeypatch.setattr(transport, "abort", aborted.append)
        with pytest.raises(UsageError, match=f"got {re.escape(repr(wrong))}"):
            publisher.publish(wrong, timeout_s=TIMEOUT_S)
        assert aborted == []  # It was not begun, and may not even be hashable.
        assert publisher.publish(3, timeout_s=TIMEOUT_S).version == 3
    with (
        Subscriber(plan, list, transport) as subscriber,
        pytest.raises(UsageError, match=f"got {re.escape(repr(wrong))}"),
    ):
        subscriber.receive(wrong, timeout_s=TIMEOUT_S)


def test_pairs_from_an_iterator_are_published_every_time(alone):
    weights, plan, transport = alone
    publisher = Publisher(plan, iter(weights.items()), transport)
    publisher.publish(0, timeout_s=TIMEOUT_S)
    weights["w"].add_(1)
    publisher.publish(1, timeout_s=TIMEOUT_S)
    oracles.assert_same_bits(received(plan, transport)[1]["w"], weights["w"])


def test_encode_sees_each_tensor_once_and_changes_what_is_sent(alone):
    weights, plan, transport = alone
    seen = []

    def encode(name, tensor):
        seen.append(name)
        return {name: (tensor / 4).round().double() * 4}

    Publisher(plan, weights, transport, encode=encode).publish(0, timeout_s=TIMEOUT_S)
    assert seen == ["w"]
    oracles.assert_same_bits(received(plan, transport)[1]["w"], (weights["w"] / 4).round() * 4)


@pytest.mark.parametrize(
    "encode",
    [
        lambda name, tensor: {name: tensor, name + "_scale": tensor[:1]},
        lambda name, tensor: {name: tensor[1:]},
        lambda name, tensor: {},
    ],
)
def test_encode_must_keep_names_and_shapes(alone, encode):
    weights, plan, transport = alone
    publisher = Publisher(plan, weights, transport, encode=encode)
    with pytest.raises(UsageError, match="It must keep the name and the shape"):
        publisher.publish(0, timeout_s=TIMEOUT_S)
    assert transport.markers() == ()


def test_the_group_must_fit_the_plan(alone):
    weights, _, transport = alone
    two = plan_sync([describe(weights)] * 2, describe(weights), bucket_bytes=64)
    with pytest.raises(UsageError, match="plan is for 2 ranks, but the group has 1"):
        Publisher(two, weights, transport)


@pytest.mark.parametrize("full_every", [0, 2.5, True])
def test_what_does_not_count_versions_is_refused(alone, full_every):
    weights, plan, transport = alone
    with pytest.raises(UsageError, match=f"full_every must be .*; got {full_every}"):
        Publisher(plan, weights, transport, full_every=full_every)


def test_a_lost_write_is_noticed_by_the_receiver(alone):
    weights, plan, transport = alone

    class Sieve:
        def __getattr__(self, name):
            return getattr(transport, name)

        def send(self, outgoing, *, deadline):
            for index in outgoing.plan.of_rank(0):
                boxes = [copy.box.sizes for copy in outgoing.plan.buckets[index].copies]
                outgoing.fill_all([(index, [torch.empty(sizes) for sizes in boxes])])

    publisher = Publisher(plan, weights, transport)
    publisher._transport = Sieve()
    publisher.publish(0, timeout_s=TIMEOUT_S)
    with pytest.raises(Exception, match="fails its digest"):
        received(plan, transport)


# --- several ranks: faults ---------------------------------------------------------------------


def _weights(value):
    """Two shards a rank: the world's rank count times 4 rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((4 * dist.get_world_size(), 6), float(value))
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": torch.full((5,), float(value))}


def _refused(path):
    """Ranks that disagree, a group that cannot be used, a group that a death has broken."""
    weights = _weights(1)
    plan, transport, publisher = join("shared_memory", path, weights)
    with pytest.raises(UsageError, match=r"disagree about the version: \[1, 2\]"):
        publisher.publish(1 + dist.get_rank(), timeout_s=TIMEOUT_S)
    assert transport.markers() == ()
    dist.barrier()
    publisher.publish(1, timeout_s=TIMEOUT_S)
    publisher._messenger._broken = "a test"
    with pytest.raises(TransferError, match="failed earlier: a test"):
        publisher.publish(2, timeout_s=TIMEOUT_S)
    # What the error tells to do: a new group, a new Publisher, the same transport.
    group = dist.new_group(backend="gloo")
    Publisher(plan, weights, transport, group=group).publish(2, timeout_s=TIMEOUT_S)
    assert received(plan, transport)[0].version == 2
    dist.barrier()
    transport.close()
    dist.get_backend_config = lambda group=None: "cuda:nccl"  # This process ends with the test.
    with pytest.raises(UnsupportedError, match="new_group"):
        Publisher(plan, {}, transport)


def test_ranks_that_disagree_or_have_no_group_that_works_publish_nothing(tmp_path):
    ranks.run(_refused, str(tmp_path), world_size=2)
    assert list(tmp_path.iterdir()) == []


def _one_rank_dies(path, victim):
    parameters = _weights(1)
    plan, transport, publisher = join("shared_memory", path, parameters)
    publisher.publish(1, timeout_s=TIMEOUT_S)
    ranks.kill(victim)
    with pytest.raises(TransferError, match="Make a new group"):
        publisher.publish(2, timeout_s=3600)  # It is not waited for: the gang would be ended.
    with pytest.raises(TransferError, match="failed earlier"):
        publisher.publish(2, timeout_s=TIMEOUT_S)
    version = None
    with suppress(TransferError):  # What was in the memory of a dead rank is gone.
        version = received(plan, transport)[0].version
    ends, living = dist.FileStore(f"{path}/ends"), {0, 1, 2} - {victim}  # The owner clears up.
    ends.set(str(dist.get_rank()), "read")
    ends.wait([str(rank) for rank in living], timedelta(seconds=TIMEOUT_S))
    return version


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_rank_is_noticed_and_the_old_version_stays(victim, tmp_path):
    results = ranks.run(_one_rank_dies, str(tmp_path), victim, world_size=3)
    assert results.pop(victim) is None
    assert results == ([None] * 2 if victim == 0 else [1, 1])


def _one_rank_hangs(path):
    plan, transport, publisher = join("shared_memory", path, _weights(1))
    publisher.publish(1, timeout_s=TIMEOUT_S)
    if dist.get_rank() == 0:
        with pytest.raises(TransferError, match="deadline passed"):
            publisher.publish(2, timeout_s=0.5)
        assert received(plan, transport)[0].version == 1
        ranks.tell("done")
    else:
        dist.recv(torch.zeros(1), src=0)  # Never comes; the parent kills it.


def test_a_hanging_rank_costs_no_more_than_the_deadline(tmp_path):
    with ranks.gang(_one_rank_hangs, str(tmp_path), world_size=2) as gang:
        assert gang.hear(0) == "done"
        gang.kill(1)
        gang.wait()
