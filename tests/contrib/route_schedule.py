"""An engine reduced to what routes depend on, driven by random events.

Each KV position remembers the policy version that computed it. From that and the tokens before it
follows the row that its router must have chosen, so every row that a request is handed can be
judged. The cache has a device and two tiers that evict in different orders; pages move, load badly,
and are computed twice by requests that run at the same time, also under different versions.
"""

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import numpy as np

from primeblocks.contrib.route_store import RouteStore
from primeblocks.replay import Routes

PAGE, LAYERS, TOP_K, EXPERTS = 4, (1, 3), 2, 251
VOCAB = 3  # few, so that prompts share prefixes


def prefix_hash(tokens):
    return hashlib.blake2b(bytes(tokens), digest_size=8).digest()


def oracle_row(version, tokens):
    """What the router of `version` chooses for the last of `tokens`: `[layers, top_k]`."""
    seed = hashlib.blake2b(bytes(tokens) + version.to_bytes(2, "big"), digest_size=4).digest()
    first = np.frombuffer(seed, np.uint16).astype(np.int64)[:, None]
    return ((first + np.arange(TOP_K) * (1 + first % 7)) % EXPERTS).astype(np.uint8)


@dataclass(eq=False)
class Request:
    tokens: list
    prompt: int
    salt: int
    wanted: int
    kv: list = field(default_factory=list)  # version that computed each position
    keys: list = field(default_factory=list)  # of whole pages of tokens, retained
    rows: list = field(default_factory=list)  # handed out: (row or None, version expected)
    computed: list = field(default_factory=list)  # rows of positions computed since admission
    running: bool = False

    @property
    def output(self):
        return len(self.tokens) - self.prompt


class Engine:
    """One engine; `store` is what is tested."""

    def __init__(self, generator, *, device, host, disk, store_pages):
        self.generator = generator
        page_bytes = PAGE * len(LAYERS) * TOP_K + PAGE
        self.store = RouteStore(
            num_experts=EXPERTS,
            layer_ids=LAYERS,
            top_k=TOP_K,
            page_tokens=PAGE,
            capacity_bytes=store_pages * page_bytes,
        )
        self.tiers = [(OrderedDict(), device), (OrderedDict(), host), (OrderedDict(), disk)]
        self.version = 0
        self.counts = Counter()

    # --- the KV cache

    def insert(self, tier, key, versions):
        pages, capacity = self.tiers[tier]
        if key in pages and self.generator.random() < 0.5:
            return  # the page that was there first stays, or the new one takes its name
        pages[key] = versions
        while len(pages) > capacity:
            # The device evicts the oldest, the host the newest but one, the disk any.
            order = list(pages)
            index = (0, len(order) - 2, int(self.generator.integers(len(order))))[tier]
            victim = order[max(index, 0)]
            moved = pages.pop(victim)
            self.counts["evictions"] += 1
            if tier < 2 and self.generator.random() < 0.7:
                self.insert(tier + 1, victim, moved)

    def find(self, key):
        for tier, (pages, _) in enumerate(self.tiers):
            if key not in pages:
                continue
            if tier and self.generator.random() < 0.05:
                # A page that loads badly is dropped wherever it is.
                for other, _ in self.tiers:
                    other.pop(key, None)
                self.counts["bad loads"] += 1
                return None
            versions = pages[key]
            if tier:
                self.insert(0, key, versions)
            else:
                pages.move_to_end(key)
            self.counts["hits"] += 1
            return versions
        return None

    # --- requests

    def know_keys(self, request):
        """Retain the names of pages whose tokens are known."""
        while (len(request.keys) + 1) * PAGE <= len(request.tokens):
            end = (len(request.keys) + 1) * PAGE
            request.keys.append((request.salt, prefix_hash(request.tokens[:end])))
            self.store.retain(request.keys[-1:])

    def admit(self, request):
        self.know_keys(request)
        request.running, request.kv, request.computed = True, [], []
        for key in request.keys[: (len(request.tokens) - 1) // PAGE]:
            versions = self.find(key)
            if versions is None:
                break
            request.kv.extend(versions)
        request.computed = [None] * len(request.kv)

    def step(self, request):
        """One chunk of the forward, and a token when it reaches the end."""
        begin = len(request.kv)
        end = min(len(request.tokens), begin + int(self.generator.integers(1, 8)))
        for position in range(begin, end):
            request.kv.append(self.version)
            request.computed.append(oracle_row(self.version, request.tokens[: position + 1]))
            if (position + 1) % PAGE == 0:
                self.publish(request, position // PAGE)
        if end == len(request.tokens):
            self.hand_out(request, end)
            request.tokens.append(int(self.generator.integers(VOCAB)))
            self.know_keys(request)

    def publish(self, request, page):
        span = slice(page * PAGE, (page + 1) * PAGE)
        rows = request.computed[span]
        # A page that was partly there: its own rows only, so it is whole or not published.
        assert all(row is not None for row in rows)
        self.insert(0, request.keys[page], tuple(request.kv[span]))
        self.store.put(request.keys[page], as_routes(rows))

    def hand_out(self, request, end):
        """Rows of positions that were not handed out: computed now, or by page from the store."""
        begin = len(request.rows)
        if begin and request.computed[begin] is not None:
            pages = begin  # decoding: straight from the forward
            fresh = request.computed[begin:end]
        else:
            pages = end // PAGE * PAGE
            stored = self.store.get(request.keys[begin // PAGE : pages // PAGE])
            rows = stored[begin % PAGE :]
            fresh = [
                None if missing else row
                for row, missing in zip(rows.experts, rows.missing, strict=True)
            ]
            fresh += request.computed[pages:end]
        for row, version in zip(fresh, request.kv[begin:end], strict=True):
            request.rows.append((row, version))

    def preempt(self, request):
        request.running, request.kv, request.computed = False, [], []
        self.counts["preemptions"] += 1

    def finish(self, request):
        request.running = False
        self.store.release(reversed(request.keys))


def as_routes(rows):
    return Routes.from_array(np.stack(rows), num_experts=EXPERTS, layer_ids=LAYERS)


def judge(request, counts):
    """Every row that was handed out is its position's, or missing."""
    for position, (row, version) in enumerate(request.rows):
        if row is None:
            counts["missing"] += 1
        elif np.array_equal(row, oracle_row(version, request.tokens[: position + 1])):
            counts["known"] += 1
        else:
            counts["wrong"] += 1


def run(seed, *, events=60, roomy=None, updates=True):
    """One schedule. Returns counts, `wrong` among them.

    Args:
        roomy: whether caches and store hold everything; None draws it.
        updates: whether the policy version changes.
    """
    generator = np.random.default_rng(seed)
    roomy = generator.random() < 0.3 if roomy is None else roomy
    salted = generator.random() < 0.7  # a salt for each version, or one for all
    sizes = generator.integers(2, 12, 3)
    engine = Engine(
        generator,
        device=10_000 if roomy else int(sizes[0]),
        host=int(sizes[1]),
        disk=int(sizes[2]),
        store_pages=10_000 if roomy else int(generator.integers(1, 20)),
    )
    prompts = [generator.integers(VOCAB, size=n).tolist() for n in generator.integers(1, 20, 3)]
    waiting, running, done = [], [], []
    for _ in range(events):
        match int(generator.integers(12)):
            case 0 | 1 | 2:
                text = prompts[int(generator.integers(len(prompts)))]
                prompt = text + generator.integers(VOCAB, size=generator.integers(0, 4)).tolist()
                salt = engine.version if salted else 0
                length = int(generator.integers(1, 12))
                waiting.append(Request(list(prompt), len(prompt), salt, length))
            case 3 if updates:
                engine.version += 1
                engine.counts["version changes"] += 1
            case 4 if running:
                request = running.pop(int(generator.integers(len(running))))
                engine.preempt(request)
                waiting.insert(0, request)
            case 5 if running:
                request = running.pop(int(generator.integers(len(running))))
                engine.finish(request)
                engine.counts["aborts"] += 1
                done.append(request)
            case 6 if done:
                # The next turn goes on from an answer, under the salt of its day.
                before = done[int(generator.integers(len(done)))]
                prompt = before.tokens + generator.integers(VOCAB, size=2).tolist()
                salt = engine.version if salted else 0
                waiting.append(Request(list(prompt), len(prompt), salt, 4))
                engine.counts["turns"] += 1
            case _:
                if waiting and len(running) < 4:
                    running.append(waiting.pop(0))
                    engine.admit(running[-1])
                for request in list(running):
                    engine.step(request)
                    if request.output >= request.wanted:
                        running.remove(request)
                        engine.finish(request)
                        done.append(request)
    for request in done + running + waiting:
        judge(request, engine.counts)
    engine.counts["requests"] = len(done)
    engine.counts["disputed"] = engine.store.statistics.disputed
    return engine.counts


def run_disaggregated(seed):
    """Prefill on one engine, decode on another that gets its pages and none of their rows."""
    generator = np.random.default_rng(seed)
    sizes = {"device": 8, "host": 4, "disk": 4, "store_pages": 6}
    prefill, decode = Engine(generator, **sizes), Engine(generator, **sizes)
    counts = Counter()
    for _ in range(6):
        prompt = generator.integers(VOCAB, size=generator.integers(2, 20)).tolist()
        decode.version = prefill.version = prefill.version + int(generator.integers(2))
        first = Request(list(prompt), len(prompt), prefill.version, 1)
        second = Request(list(prompt), len(prompt), prefill.version, 6)
        prefill.admit(first)
        while not first.output:
            prefill.step(first)
        for page in range(len(prompt) // PAGE):
            versions = tuple(first.kv[page * PAGE : (page + 1) * PAGE])
            decode.insert(0, (first.salt, prefix_hash(prompt[: (page + 1) * PAGE])), versions)
        decode.admit(second)
        while second.output < second.wanted:
            decode.step(second)
        prefill.finish(first)
        decode.finish(second)
        whole = handed_out(first, len(second.rows)).fill(handed_out(second, len(second.rows)))
        expected = [
            oracle_row(version, second.tokens[: position + 1])
            for position, (_, version) in enumerate(second.rows)
        ]
        known = ~whole.missing
        counts["wrong"] += int((whole.experts != expected)[known].any(axis=(1, 2)).sum())
        counts["missing"] += int(whole.missing.sum())
        counts["missing on decode"] += sum(row is None for row, _ in second.rows)
        counts["known"] += int(known.sum())
    return counts


def handed_out(request, tokens):
    """Everything that a request was given, as Routes of so many tokens."""
    rows = [row for row, _ in request.rows[:tokens]]
    nothing = np.zeros((len(LAYERS), TOP_K), np.uint8)
    routes = Routes.from_array(
        np.stack([nothing if row is None else row for row in rows]),
        num_experts=EXPERTS,
        layer_ids=LAYERS,
        missing=np.array([row is None for row in rows]),
    )
    return routes.with_missing(after=tokens - len(rows))
