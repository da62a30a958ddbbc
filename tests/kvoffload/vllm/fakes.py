"""Fakes of what surrounds our manager and our tier: vLLM's scheduler, and its pool."""

import numpy as np

from tests.kvoffload.vllm.named_pages import ROWS, hash_of, keys_of, routes_of
from tests.kvoffload.vllm.specs import config_of

PAGE, ROW = 8000, 12288  # bytes of keys and values, of a row of the pool
FRAME, CHUNKS = 8192, 8  # a page and its routes in our store, chunks of the pool
STEPS = 200


class Scheduler:
    """A fake of vLLM's: asks for requests in order, loads those that have all they can get."""

    def __init__(self, spec):
        import vllm
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        self.planned_first = vllm.__version__.startswith("0.32.")  # before a step's stores
        self.results, self.context, self.end = LookupResult, ReqContext, ScheduleEndContext
        self.manager = spec.get_manager()
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def request(self, name, **said):
        context = self.context(name, **said)
        self.manager.on_new_request(context)
        return context

    def queue(self, name, numbers, **said):
        """A request that waits in the engine's queue and would load these pages."""
        context = self.request(name, **said)
        self.manager.expect(context, lambda: keys_of(numbers))
        return context

    def step(self, *, begins=(), resumes=(), preempts=(), computes=()):
        for name in (*begins, *resumes):
            self.manager.leave(name)
        for is_planned in (self.planned_first, not self.planned_first):
            if is_planned:
                self.manager.on_schedule_end(self.end(begins, preempts))
                continue
            for number in computes:
                assert self.manager.prepare_store(keys_of([number]), self.request(f"new {number}"))

    def settle(self):
        for _ in range(STEPS):
            self.manager.on_schedule_end(self.end((), ()))
            if not self.manager.has_pending_work():
                return
            for tier in self.manager.secondary_tiers:
                tier.drain_jobs()
        raise AssertionError("transfers do not end")

    def store(self, numbers):
        for number in numbers:
            request = self.request(f"store {number}")
            output = self.manager.prepare_store(keys_of([number]), request)
            self.rows[output.store_spec.chunk_ids] = number
            self.manager.complete_store(keys_of([number]), request)
            self.manager.on_request_finished(request)
            self.settle()

    def serve(self, wanted):
        """Pages that each request gets from the pool, and the steps that it took them all."""
        waiting = {name: (self.request(name), numbers) for name, numbers in wanted.items()}
        served = {}
        for step in range(STEPS):
            loading = []
            for name, (request, numbers) in list(waiting.items()):
                found = self._look_up(request, numbers)
                if found is None:
                    continue
                served[name] = numbers[:found]
                if found:
                    spec = self.manager.prepare_load(keys_of(numbers[:found]), request)
                    assert self.rows[spec.chunk_ids, 0].tolist() == numbers[:found]
                self.manager.leave(name)
                loading.append((name, request))
                del waiting[name]
            self.manager.on_schedule_end(self.end([name for name, _ in loading], ()))
            for name, request in loading:
                self.manager.complete_load(keys_of(served[name]), request)
                self.manager.on_request_finished(request)
            if not waiting:
                return served, step
            for tier in self.manager.secondary_tiers:
                tier.drain_jobs()
        raise AssertionError(f"{list(waiting)} are never served")

    def _look_up(self, request, numbers):
        found, defer = 0, False
        for key in keys_of(numbers):
            result = self.manager.lookup(key, request)
            if result is self.results.MISS:
                break
            defer |= result is not self.results.HIT
            found += result is not self.results.RETRY
        return None if defer else found


class Pool:
    """A fake of what surrounds the tier: vLLM's pool, its jobs and its requests."""

    def __init__(self, adapter, tmp_path=None, *, routes=True, model="m", **how):
        self.adapter = adapter
        self.tail = adapter.routes.Tail(PAGE, ROWS) if routes else None
        self.rows = np.zeros((CHUNKS, ROW), np.int8)
        disk = {} if tmp_path is None else {"disk_path": str(tmp_path), "disk_bytes": 8 * FRAME}
        spec = _fake_spec()
        spec.config, spec.tail = config_of(page=PAGE, model=model), self.tail
        self.tier = adapter.StoreTier(
            spec, memoryview(self.rows), "StoreTier", host_bytes=64 * FRAME, **disk, **how
        )
        self.jobs = 0

    def request(self, **said):
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext("r", self.adapter.request_args(**said)["kv_transfer_params"])
        self.tier.on_new_request(context)
        return context

    def submit(self, move, keys, chunks, context):
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.jobs += 1
        is_load = move == self.tier.submit_load
        move(TransferJob(self.jobs, keys, np.array(chunks), is_load, context))

    def job(self, move, keys, chunks, context):
        self.submit(move, keys, chunks, context)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return [key in result.successful_keys for key in keys]

    def store(self, numbers, context, *, routes=True):
        """Fill chunks with pages of these numbers, with their routes, and store them."""
        for chunk, number in enumerate(numbers):
            self.rows[chunk] = -1
            self.rows[chunk, :PAGE] = number
            if routes:
                self.tail.write(self.rows[chunk], hash_of(number), routes_of(number))
        chunks = range(len(numbers))
        return self.job(self.tier.submit_store, keys_of(numbers), chunks, context)

    def load(self, numbers, context):
        self.rows[:] = 99
        chunks = range(CHUNKS - len(numbers), CHUNKS)
        found = self.job(self.tier.submit_load, keys_of(numbers), chunks, context)
        for chunk, number, hit in zip(chunks, numbers, found, strict=True):
            assert (self.rows[chunk, :PAGE] == (number if hit else 99)).all()
        return found

    def routes(self, numbers):
        chunks = range(CHUNKS - len(numbers), CHUNKS)
        return [
            self.tail.read(self.rows[chunk], hash_of(number))
            for chunk, number in zip(chunks, numbers, strict=True)
        ]

    def holds(self, number, context):
        return self.tier.lookup(keys_of([number])[0], context).name == "HIT"


def _fake_spec():
    from vllm.v1.kv_offload.base import OffloadingSpec

    class FakeSpec(OffloadingSpec):
        def __init__(self): ...
        def get_manager(self): ...
        def get_worker(self, kv_caches): ...

    return FakeSpec()
