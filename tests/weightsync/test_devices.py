"""Tensors on each device: digests and deltas of the host's bytes, and versions from end to end.

At the end, carriers of a faked GPU. CUDA IPC and NIXL on a GPU have not run in a test.
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from primeblocks.testing.oracles import assert_same_bits
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    load_into,
    plan_sync,
)
from primeblocks.weightsync.delta import apply_delta, encode_delta
from primeblocks.weightsync.digest import bucket_digest, cast_and_digest
from primeblocks.weightsync.transports import IpcTransport, carriers
from primeblocks.weightsync.transports.carriers import Span, WireCarrier
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine, same_bytes

# Of bfloat16 more than two pieces that cross a bus, with a ragged last one.
ROWS, COLUMNS = 9, (1 << 20) + 3


def draw(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def step(tensor, seed):
    """Flip the last bit of one element in a hundred."""
    lots = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed))
    tensor.view(torch.int16).bitwise_xor_((lots < 0.01).short().to(tensor.device))


def test_digests_and_casts_are_those_of_the_host(device):
    host = [
        draw(ROWS, COLUMNS, seed=0),
        draw(64, 30, seed=1).mT,
        torch.tensor(0.5),
        draw(0, 4, seed=2),
    ]
    there = [tensor.to(device) for tensor in host]
    assert bucket_digest(there) == bucket_digest(host)
    narrow = [tensor.bfloat16() for tensor in host]
    dtypes = [tensor.dtype for tensor in narrow]
    for place in ("cpu", device):
        into = [torch.empty_like(tensor, device=place) for tensor in narrow]
        assert cast_and_digest(there, dtypes, into) == bucket_digest(narrow)
        for found, wanted in zip(into, narrow, strict=True):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_deltas_are_those_of_the_host(device, dtype):
    old = draw(100_000, seed=0, dtype=dtype)
    new = torch.where(draw(100_000, seed=1) > 2.5, -old.float(), old.float()).to(dtype)
    delta = encode_delta(new.to(device), old.to(device))
    assert delta == encode_delta(new, old)
    target = old.to(device)
    apply_delta(target, delta)
    assert_same_bits(target, new)


@pytest.mark.parametrize("full_every", [1, 100])
def test_an_engine_on_the_device_loads_what_lies_there(device, full_every, tmp_path):
    weights = {f"layer{i}": draw(96, 64, seed=i, dtype=torch.bfloat16).to(device) for i in range(3)}
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    source = describe(weights)
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 14)
    with (
        SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, weights, transport, full_every=full_every) as publisher,
        Subscriber(plan, load_into(engine, plan), transport) as subscriber,
    ):
        for version in range(1, 4):
            for seed, tensor in enumerate(weights.values()):
                step(tensor, seed + 10 * version)
            sent = publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(version, timeout_s=TIMEOUT_S)
            assert (sent.bytes < plan.blob_bytes) is (full_every > 1 < version)
            for name, tensor in weights.items():
                assert_same_bits(engine[name], tensor)


@pytest.fixture
def fake_gpu(monkeypatch):
    """GPU 0, whose memory is host memory. Returns its buffers, by their handle."""
    empty, buffers = torch.empty, []

    def on_host(*args, device=None, **kwargs):
        is_fake = device is not None and torch.device(device).type == "cuda"
        return empty(*args, device="cpu" if is_fake else device, **kwargs)

    def handle(buffer):
        buffers.append(buffer)
        return [len(buffers) - 1]

    monkeypatch.setattr(torch, "empty", on_host)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(carriers, "_uuid", lambda device: "GPU-0")
    monkeypatch.setattr(carriers, "_cuda_handle", handle)
    monkeypatch.setattr(carriers, "_open_cuda", lambda note: buffers[note["cuda"][0]])
    return buffers


def test_deltas_from_a_gpu_take_no_memory_of_it(fake_gpu, tmp_path):
    """Torch frees a GPU buffer that was shared only if one process opened it, once."""
    weights, engine = {"a": torch.arange(600)}, Engine()
    source = describe(weights)
    planned = plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    with (
        IpcTransport("policy", owner=True, device="cuda", root=str(tmp_path)) as owner,
        Publisher(planned, weights, owner, full_every=99) as publisher,
        Subscriber(planned, engine, owner) as subscriber,
    ):
        for version in range(6):
            weights["a"][version] = -1
            base = publisher.publish(version, timeout_s=TIMEOUT_S).base
            assert (base is None) is (version == 0)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert same_bytes(engine.tensors, weights)
    assert len(fake_gpu) == 1


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_keeps_no_mapping_of_a_gpu(keep, fake_gpu, tmp_path, monkeypatch):
    """A mapping keeps the memory of a dead trainer, which the next trainer needs."""
    mappings = []

    def open_cuda(note):
        mapped = fake_gpu[note["cuda"][0]].numpy()[:]
        mappings.append(weakref.ref(mapped))
        return torch.from_numpy(mapped)

    monkeypatch.setattr(carriers, "_open_cuda", open_cuda)
    weights, engine = {"a": torch.arange(600)}, Engine()
    source = describe(weights)
    planned = plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    with (
        IpcTransport("policy", owner=True, device="cuda", root=str(tmp_path)) as owner,
        IpcTransport("policy", root=str(tmp_path), keep=keep) as reader,
        Publisher(planned, weights, owner) as publisher,
        Subscriber(planned, engine, reader) as subscriber,
    ):
        for version in range(4):
            weights["a"][version] = -1
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert same_bytes(engine.tensors, weights)
            assert len(mappings) == version + 1
            gc.collect()
            assert all(mapping() is None for mapping in mappings)
    assert len(fake_gpu) == 2


def test_a_wire_writes_to_a_gpu_after_all_queued_work(fake_gpu, monkeypatch):
    """A load may still copy from the buffer of the last fetch, which the next fetch uses again."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(str(device)))
    wire = SimpleNamespace(
        share=lambda buffer: {}, read=lambda reads, *, deadline: done.append("read")
    )
    carrier = WireCarrier(wire, device="cuda")
    for _ in range(2):
        carrier.fetch([Span({}, 0, 10)], again=True, deadline=0.0).close()
    assert done == 2 * ["cuda:0", "read"]
