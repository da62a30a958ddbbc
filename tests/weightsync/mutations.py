"""Messages that were changed, byte by byte or value by value, and a pair who exchange them."""

import json
import os
import resource
import sys
from contextlib import contextmanager

import xxhash

from primeblocks import weightsync
from primeblocks.errors import PrimeblocksError
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine, packed_end, same_bytes
from tests.weightsync.packed_site import parameters

SOON_S = 0.2

SIZES = (0, 1, 7, 255, 1 << 31, 1 << 32, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES = (
    *(*SIZES, -1, 10**400, 0.5, float("inf"), float("nan"), None, True, False),
    *("", "x", "../../x", "/dev/zero", "\0", "\udcff", "float32", [], {}, [[]], [0, 0], {"a": 0}),
)


def mutated(rng, text):
    """A text as somebody else may have written it, in bytes."""
    if rng.random() < 0.02:
        return rng.choice([b"", b"[" * 100_000, b"null", b"\xff\xfe", b"0" * 5000, b"NaN"])
    if rng.random() < 0.4:
        return mutated_bytes(rng, text.encode())
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = mutated_value(rng, value)
    return json.dumps(value).encode()


def mutated_bytes(rng, data):
    """Bits, bytes and numbers changed, or a part of it lost, doubled or put elsewhere."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 4, 8, 50)))
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:end] = rng.randbytes(end - at)
            case 2:
                del data[at:]
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end]
            case 5:
                data[at : at + 8] = rng.choice(SIZES).to_bytes(8, "little")
    return bytes(data)


def mutated_value(rng, value):
    """JSON of which one value, at any depth, is another; JSON in strings is JSON."""
    inner = _parsed(value) if isinstance(value, str) else value
    if not (isinstance(inner, list | dict) and inner) or rng.random() < 0.05:
        if isinstance(value, int) and rng.random() < 0.3:
            return value + rng.choice((-1, 1, 1 << 20))
        return rng.choice(VALUES)
    if isinstance(value, str):
        return json.dumps(mutated_value(rng, inner))
    made = value.copy()
    key = rng.choice(list(made) if isinstance(made, dict) else range(len(made)))
    draw = rng.random()
    if draw < 0.7:
        made[key] = mutated_value(rng, made[key])
    elif draw < 0.8:
        del made[key]
    elif isinstance(made, dict):
        made[rng.choice(["", "x", key + "x"])] = made[key]
    elif draw < 0.9:
        made.insert(key, made[key])
    else:
        other = rng.randrange(len(made))
        made[key], made[other] = made[other], made[key]
    return made


def resealed(rng, marker):
    """The text of a marker whose fields were changed by somebody who can seal it."""
    raw = json.loads(marker.to_json())
    del raw["digest"]
    raw = mutated_value(rng, raw)
    try:
        return Marker.make(**raw).to_json()
    except (TypeError, ValueError):  # No marker at all: as it is.
        return json.dumps(raw)


def resealed_delta(rng, delta):
    """A delta whose body was changed, with a digest that is right."""
    body = mutated_bytes(rng, delta[:-16])
    return body + xxhash.xxh3_128_digest(body)


def _parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


_opened: list[str] = []


@contextmanager
def watched(*roots, room_bytes=1 << 30):
    """Fail on files that are opened elsewhere than in `roots`, and on memory beyond some room.

    For the rest of a process's life: nothing takes the watch away.
    """
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, resource.RLIM_INFINITY))
    allowed = (*map(str, roots), *sys.path, sys.prefix, sys.base_prefix, "/proc/", "/dev/null")

    def note(event, args):
        if event == "open" and isinstance(args[0], str | bytes):
            path = os.path.abspath(os.fsdecode(args[0]))
            if not path.startswith(tuple(one for one in allowed if one)):
                _opened.append(path)

    sys.addaudithook(note)
    yield
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not _opened, _opened


def plan_of(weights):
    manifest = describe(weights)
    return plan_sync([manifest], manifest.whole(), bucket_bytes=1000)


class Pair:
    """A trainer that has published two versions, the second as a delta or in full."""

    def __init__(self, kind, where, *, delta):
        self.kind, self.where, self.weights = kind, where, parameters(1)
        self.plan = plan_of(self.weights)
        self.owner = self.end(owner=True)
        weightsync.announce(self.owner, self.weights, bucket_bytes=1000)
        self.publisher = Publisher(self.plan, self.weights, self.owner, full_every=4)
        self.versions = {}
        for version in (1, 2):
            for name, tensor in parameters(version).items():
                if delta:
                    self.weights[name].view(-1)[version] = version
                else:
                    self.weights[name].copy_(tensor)
            base = self.publisher.publish(version, timeout_s=TIMEOUT_S).bytes
            self.versions[version] = {n: t.clone() for n, t in self.weights.items()}
        assert (base < self.plan.bytes_total) is delta
        self.reader = self.end(owner=False)

    def end(self, *, owner):
        if self.kind == "file":
            return FileTransport(self.where, owner=owner)
        if self.kind == "shared_memory":
            return weightsync.SharedMemoryTransport("p", owner=owner, root=str(self.where))
        return packed_end(self.kind, self.where, owner=owner)

    @property
    def commits(self):
        return self.owner.commits

    def receive(self, plan=None, *, timeout_s=SOON_S):
        """Whether it was refused; a version that was not has its tensors."""
        engine = Engine()
        try:
            with Subscriber(plan or self.plan, engine, self.reader) as subscriber:
                version = subscriber.receive(timeout_s=timeout_s).version
        except PrimeblocksError:
            assert engine.loads == 0
            return True
        assert same_bytes(engine.tensors, self.versions[version])
        return False

    def close(self):
        for one in (self.publisher, self.reader, self.owner):
            one.close()


def pairs(kinds, where, cases):
    """Pairs of each kind, in full and with deltas, and the cases of each."""
    for kind in kinds:
        for delta in (False, True):
            folder = where / f"{kind}-{delta}"
            folder.mkdir()
            pair = Pair(kind, folder, delta=delta)
            assert not pair.receive(timeout_s=TIMEOUT_S)
            yield pair, range(-(-cases // (2 * len(kinds))))
            pair.close()
