"""Copies and digests of tensors that lie in memory in every way."""

from threading import local

import torch

from primeblocks.testing import oracles
from primeblocks.weightsync import digest as digests
from primeblocks.weightsync.digest import bucket_digest, cast_and_digest, crossing


def test_copies_are_cast_and_digested_however_they_lie(monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 56)
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(10, 14, generator=generator) for _ in range(6)]
    sources = [wide[0], wide[1].t(), wide[2][:, 3:9], wide[3][0, 0], wide[4], wide[5][:0]]
    sources.append(wide[3][:1, 5])  # A single element: contiguous, whatever its stride.
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    dtypes += [torch.float32, torch.float32]
    into = [torch.empty(s.shape, dtype=dtype) for s, dtype in zip(sources, dtypes, strict=True)]
    into[4] = torch.empty(14, 10, dtype=torch.bfloat16).t()
    digest = cast_and_digest(sources, dtypes, into)
    for source, made in zip(sources, into, strict=True):
        oracles.assert_same_bits(made, source.to(made.dtype))
    assert digest == bucket_digest(into) == cast_and_digest(sources, dtypes, None)


def test_parts_of_a_device_cross_once_one_ahead_in_two_buffers(monkeypatch):
    """The order of the copies, on the host: a fake of the bus, which delivers when waited for."""
    monkeypatch.setattr(digests, "_PINNED_BYTES", 24)
    source = torch.randn(50, generator=torch.Generator().manual_seed(0))
    rooms, crossed, most, pending = [], 0, 0, []

    def allocate(size_bytes):
        rooms.append(torch.zeros(size_bytes, dtype=torch.uint8))
        return rooms[-1]

    def send(room, cast):
        nonlocal crossed, most
        crossed += cast.nbytes
        pending.append(room)
        most = max(most, len(pending))

        def wait():
            assert pending.pop(0) is room
            room.copy_(cast)

        return wait

    parts = ((part, None) for part in source.split(6))
    arrived = [plain.clone() for plain, _ in crossing(parts, allocate, send)]
    oracles.assert_same_bits(torch.cat(arrived), source)
    assert (crossed, most, len(rooms)) == (source.nbytes, 2, 2)


class _Gpus:
    """Torch's functions for CUDA devices and streams: a new thread has device 0."""

    def __init__(self, monkeypatch):
        self.here, self.recorded = local(), []
        gpus = self

        class Event:
            def record(self, stream=None):
                gpus.recorded.append(stream or gpus.stream())

            def synchronize(self):
                raise AssertionError

        for name, function in {
            "Event": Event,
            "is_initialized": lambda: True,
            "current_stream": self.stream,
            "set_stream": lambda stream: setattr(self.here, "stream", stream),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def stream(self, device=None):
        own = getattr(self.here, "stream", ("cuda:0", "default"))
        return own if device in (None, own[0]) else (str(device), "default")


def test_the_end_of_a_copy_is_recorded_on_the_device_of_the_copy(monkeypatch):
    gpus = _Gpus(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **how: None)
    digests._send(torch.empty(2), torch.empty(2, device="meta"))
    assert gpus.recorded == [("meta", "default")]


def test_new_threads_have_the_callers_device_and_stream(monkeypatch):
    gpus = _Gpus(monkeypatch)
    gpus.here.stream = "cuda:3", "side"
    with digests.pool_of(2) as pool:
        assert pool.submit(gpus.stream).result() == ("cuda:3", "side")
