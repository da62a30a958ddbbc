"""Messages that somebody changed on their way: typed errors, and never a wrong tensor.

With --full, 100,000 of them. No file elsewhere is opened, and memory stays within a gigabyte: a
length of 2**60 is refused, not allocated.
"""

import json
import random
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from primeblocks import weightsync
from primeblocks.errors import PrimeblocksError
from primeblocks.testing import ranks
from primeblocks.weightsync import describe, plan_sync
from primeblocks.weightsync.convert.conversion import Reads
from primeblocks.weightsync.delta.deltas import (
    apply_delta,
    apply_payloads,
    encode_delta,
    take_payload,
)
from primeblocks.weightsync.held import Blob
from primeblocks.weightsync.manifest import Manifest
from primeblocks.weightsync.marker import Marker
from primeblocks.weightsync.observed import Observed, observe
from primeblocks.weightsync.plan import Plan
from primeblocks.weightsync.transports.board import Board, Transaction
from tests.deadlines import HANG_S
from tests.weightsync.contents import PACKED
from tests.weightsync.mutations import (
    SOON_S,
    TIMEOUT_S,
    mutated,
    mutated_bytes,
    pairs,
    plan_of,
    resealed,
    resealed_delta,
    watched,
)
from tests.weightsync.packed_site import parameters

ranks.preload(__name__)


def refused(call, *args, **named):
    """Whether a call raised an error of ours."""
    try:
        call(*args, **named)
    except PrimeblocksError:
        return True
    return False


# --- texts -------------------------------------------------------------------------------------


def texts(rng, cases, where):
    """Texts that were read by whoever got them."""
    weights = parameters(0)
    plan = plan_of(weights)
    reads = Reads(plan.target, plan.wants[0], {"a": "why"})
    observed = json.dumps(observe(plan, weights).to_json())
    marker = Marker.make(
        run="r", version=7, plan=plan.fingerprint(), base=6, sizes=(12, 3), buckets=("aa", "bb")
    )

    def manifest(text):
        found = Manifest.from_json(text)
        assert Manifest.from_json(found.to_json()) == found

    def a_plan(text):
        found = Plan.from_json(text)
        found.fingerprint(), found.table(), found.lower_bound_bytes
        if found != plan:
            weightsync.load_into(weights.items(), found)

    kinds = {
        "marker": (marker.to_json(), Marker.from_json),
        "manifest": (plan.target.to_json(), manifest),
        "plan": (plan.to_json(), a_plan),
        "observed": (observed, lambda text: Observed.from_json(json.loads(text))),
        "reads": (reads.to_json(), lambda text: Reads.from_json(text, plan.target)),
    }
    count = 0
    for case in range(cases):
        text, read = list(kinds.values())[case % len(kinds)]
        try:
            changed = mutated(rng, text).decode()
            if read is kinds["observed"][1]:
                json.loads(changed)
        except (ValueError, RecursionError):  # An observation comes parsed.
            continue
        count += refused(read, changed)
        if read is Marker.from_json:
            again = resealed(rng, marker)
            count += refused(read, again)
    return count


# --- deltas ------------------------------------------------------------------------------------


def deltas(rng, cases, where):
    """Deltas of a tensor and of a bucket, in the midst of memory that is not theirs."""
    weights = {"a": torch.arange(900).bfloat16(), "b": torch.arange(300.0)}
    manifest = describe(weights)
    plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1 << 16)
    room = torch.full((9000,), 0x5A, dtype=torch.uint8)
    mine = slice(4096, 4096 + plan.blob_bytes)
    old = room.clone()
    blob = Blob(plan, old[mine])
    before = torch.cat([view.flatten().view(torch.uint8) for view in blob.views(0)])
    after = before.clone()
    after.view(torch.int16)[::37] ^= 3
    whole = before.clone().view(torch.int16)
    payload = take_payload(plan, 0, iter([(after.numpy(), before.numpy())]), before)
    delta = encode_delta(after.view(torch.int16), whole)
    count = 0
    for _ in range(cases):
        seal = resealed_delta if rng.random() < 0.6 else mutated_bytes
        changed = seal(rng, delta)
        target = whole.clone()
        count += refused(apply_delta, target, changed)
        # One that its digest covers, and the numbers around it.
        inside = payload.index(b"PBWD")
        size = len(payload) - inside if rng.random() < 0.5 else rng.randrange(len(payload))
        body = seal(rng, payload[inside : inside + size])
        head = payload[: inside - 8] + len(body).to_bytes(8, "little")
        sent = head + body + payload[inside + size :]
        if rng.random() < 0.3:
            sent = mutated_bytes(rng, sent)
        blob = Blob(plan, old[mine].copy_(room[mine]))
        count += refused(apply_payloads, plan, 0, blob.views(0), [memoryview(sent)])
        assert old[: mine.start].equal(room[: mine.start])
        assert old[mine.stop :].equal(room[mine.stop :])
    return count


# --- what lies in a directory, in a store and in buffers ------------------------------------------


def notes(rng, cases, where):
    """The notes of trainer ranks about their buffers."""
    count = 0
    for pair, each in pairs(PACKED, where, cases):
        until = time.monotonic() + 3600
        note = pair.commits.look("rank-0", deadline=until)
        for _ in each:
            changed = mutated(rng, note).decode(errors="replace")
            pair.commits.post("rank-0", changed, deadline=until)
            count += pair.receive()
        pair.commits.post("rank-0", note, deadline=until)
        assert not pair.receive(timeout_s=TIMEOUT_S)
    return count


def own(where, pattern):
    (path,) = where.rglob(pattern)
    return path


def records(rng, cases, where):
    """The record of commits, by somebody who can seal markers, and by one who cannot."""
    count = 0
    for pair, each in pairs(("shared_memory", "file", *PACKED), where, cases):
        store, commits = None, pair.commits
        if pair.kind.startswith("store"):
            store, key = commits._board, "commits"
            text = store.read(key, deadline=time.monotonic() + TIMEOUT_S)
        else:
            path = own(pair.where, "commits.json")
            text = path.read_text()
        rows = json.loads(text)
        for _ in each:
            markers = pair.owner.markers()
            if rng.random() < 0.5:
                sealed = [resealed(rng, m) if rng.random() < 0.7 else m.to_json() for m in markers]
                if store:
                    digests = []
                    for marker in sealed:
                        digest = (re.findall(r'"digest": "(\w+)"', marker) or ["none"])[0]
                        digests.append(digest)
                        until = time.monotonic() + HANG_S
                        pair.commits.post(f"marker-{digest}", marker, deadline=until)
                    listed = [[m.version, d] for m, d in zip(markers, digests, strict=True)]
                changed = json.dumps({**rows, "markers": listed} if store else sealed).encode()
            else:
                changed = mutated(rng, text)
            if store:
                store.post(
                    key, changed.decode(errors="replace"), deadline=time.monotonic() + HANG_S
                )
            else:
                path.write_bytes(changed)
            count += pair.receive()
            if store:
                store.post(key, text, deadline=time.monotonic() + HANG_S)
            else:
                path.write_text(text)
        assert not pair.receive(timeout_s=TIMEOUT_S)
    return count


def announcements(rng, cases, where):
    """A plan that is found by name."""
    count = 0
    for pair, each in pairs(("shared_memory", "file", "store-tcp"), where, cases):
        text = pair.plan.to_json()
        for _ in each:
            changed = mutated(rng, text).decode(errors="replace")
            pair.commits.post("announced", changed, deadline=time.monotonic() + HANG_S)
            try:
                plan, _ = weightsync.find(pair.reader, timeout_s=SOON_S)
            except PrimeblocksError:
                count += 1
            else:
                count += refused(weightsync.load_into, parameters(0).items(), plan)
                if plan != pair.plan:
                    assert pair.receive(plan)
    return count


def files(rng, cases, where):
    """Bytes of weights: full versions, deltas, headers and the note of a run."""
    count = 0
    for pair, each in pairs(("file",), where, cases):
        paths = [
            path for path in pair.where.rglob("*") if path.suffix in (".safetensors", ".delta")
        ]
        paths += [own(pair.where, "primeblocks-run.json")]
        for _ in each:
            path = rng.choice(paths)
            before = path.read_bytes()
            path.write_bytes(mutated_bytes(rng, before))
            count += pair.receive()
            path.write_bytes(before)
        assert not pair.receive(timeout_s=TIMEOUT_S)
    return count


def buffers(rng, cases, where):
    """Bytes of packed buckets where trainer ranks have them."""
    count = 0
    for pair, each in pairs(PACKED, where, cases):
        shared = [*pair.owner._full.used.values(), *pair.owner._deltas.used.values()]
        for _ in each:
            buffer = np.asarray(rng.choice(shared).buffer)
            before = buffer.copy()
            changed = mutated_bytes(rng, before.tobytes())[: len(buffer)]
            buffer[: len(changed)] = np.frombuffer(changed, dtype=np.uint8)
            count += pair.receive()
            buffer[:] = before
        assert not pair.receive(timeout_s=TIMEOUT_S)
    return count


# --- groups --------------------------------------------------------------------------------------


def messages(rng, cases, where):
    """Notes of a sync over a group, by their readers."""
    store, count = dist.FileStore(str(where / "notes"), -1), 0
    markers = Marker.make(run="1", version=2, plan="p", base=None, sizes=(4,), buckets=("a",))
    reads = {
        "begun": ('{"version": 1, "plan": "p"}', lambda t, at: t.read_begun(deadline=at)),
        "join/0": ("3", lambda t, at: t.read_join(0, deadline=at)),
        "go": ('[null, ""]', lambda t, at: t.read_go(deadline=at)),
        "sizes/0": ("[[0, 12], [1, 99]]", lambda t, at: t.read_or_abort("sizes/0", deadline=at)),
        "marker": (
            json.dumps(markers.to_json()),
            lambda t, at: t.read_or_abort("marker", deadline=at),
        ),
        "decision": ('"abort: x"', lambda t, at: t.read_or_abort("nothing", deadline=at)),
    }
    for case in range(cases):
        board = Board(store, "mutations")
        key = rng.choice(list(reads))
        text, read = reads[key]
        store.set(f"mutations/{case}/{key}", mutated(rng, text))
        count += refused(read, Transaction(board, case, rank=0), time.monotonic() + SOON_S)
        store.delete_key(f"mutations/{case}/{key}")
    return count


KINDS = {  # and the thousands of each with --full
    texts: 24,
    deltas: 16,
    notes: 16,
    records: 12,
    announcements: 10,
    files: 6,
    buffers: 6,
    messages: 10,
}


def body(kind, where, cases):
    torch.set_num_threads(1)
    kind_of = KINDS_BY_NAME[kind]
    with watched(where):
        return kind_of(random.Random(kind), cases, where)


KINDS_BY_NAME = {kind.__name__: kind for kind in KINDS}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS_BY_NAME)
def test_a_changed_message_is_a_typed_error_or_harmless(kind, full, tmp_path):
    cases = 1000 * KINDS[KINDS_BY_NAME[kind]] if full else 30
    (count,) = ranks.run(body, kind, tmp_path, cases, world_size=1, timeout_s=3000)
    print(f"{kind}: {cases} changed, {count} refused")
    assert count > cases / 5


def test_they_are_so_many():
    assert 1000 * sum(KINDS.values()) >= 100_000
