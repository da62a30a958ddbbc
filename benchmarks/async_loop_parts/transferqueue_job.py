"""Run by `buffer` in a Python that has TransferQueue: prints a line of JSON a configuration.

Arguments: storage units, timed rounds, names of shapes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from primeblocks.async_loop import Group, StalenessPolicy
from primeblocks.async_loop.shared import SharedRolloutBuffer

from .rollouts import SHAPES, Shape, digests, make_groups

WARM, PRODUCERS, BATCHES = 1, (1, 4), 4
ARRAYS = ("tokens", "logprobs", "versions", "loss_mask")
SCALARS = ("prompt_length", "reward", "version", "ordinal", "sample")
PARTITION, TASK = "train", "trainer"


def _jagged(arrays: list[np.ndarray]) -> torch.Tensor:
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def as_fields(groups: list[Group]) -> TensorDict:
    """The same bytes as columns: a row is a rollout."""
    rows = [(g, i, rollout) for g in groups for i, rollout in enumerate(g.rollouts)]
    columns: dict[str, Any] = {
        name: _jagged([getattr(rollout, name) for *_, rollout in rows]) for name in ARRAYS
    }
    columns["routes"] = _jagged(
        [np.frombuffer(rollout.attachments["routes"], np.uint8) for *_, rollout in rows]
    )
    columns["prompt_length"] = torch.tensor([rollout.prompt_length for *_, rollout in rows])
    columns["reward"] = torch.tensor([rollout.reward for *_, rollout in rows])
    columns["version"] = torch.tensor([group.version for group, *_ in rows])
    columns["ordinal"] = torch.tensor([group.ordinal for group, *_ in rows])
    columns["sample"] = torch.tensor([sample for _, sample, _ in rows])
    return TensorDict(columns, batch_size=len(rows))


def keys_of(ordinals: Any, shape: Shape) -> list[str]:
    return [f"{ordinal}-{i}" for ordinal in ordinals for i in range(shape.samples)]


def digests_of(groups: list[Group]) -> dict[tuple[int, int], str]:
    return digests(
        (g.ordinal, i, [*(getattr(r, name) for name in ARRAYS), r.attachments["routes"]])
        for g in groups
        for i, r in enumerate(g.rollouts)
    )


class _Side:
    """What all processes have: each times its own calls, for they are started at a distance."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        transfer_queue.init(OmegaConf.create(settings))

    def ready(self) -> None:
        pass

    def close(self) -> None:
        transfer_queue.close()


@ray.remote(num_cpus=0)
class Producer(_Side):
    def begin(self, name: str, shape: Shape, ordinals: range) -> tuple[dict, int]:
        self.shape, self.groups = shape, make_groups(shape, ordinals)
        self.fields = as_fields(self.groups)
        self.by_group = [as_fields([group]) for group in self.groups]
        self.buffer = SharedRolloutBuffer.attach(name)
        return digests_of(self.groups), sum(group.nbytes for group in self.groups)

    def put_ours(self) -> float:
        groups = [replace(group) for group in self.groups]  # Without what it has computed already.
        start = time.perf_counter()
        for group in groups:
            self.buffer.put(group, timeout_s=600)
        return time.perf_counter() - start

    def put_theirs(self) -> float:
        start = time.perf_counter()
        keys = keys_of([group.ordinal for group in self.groups], self.shape)
        transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=self.fields)
        return time.perf_counter() - start

    def put_theirs_by_group(self) -> float:
        start = time.perf_counter()
        for group, fields in zip(self.groups, self.by_group, strict=True):
            keys = keys_of([group.ordinal], self.shape)
            transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields)
        return time.perf_counter() - start

    def end(self) -> None:
        self.buffer.close()
        del self.groups, self.fields, self.by_group


@ray.remote(num_cpus=0)
class Consumer(_Side):
    def begin(self, name: str, shape: Shape, size_bytes: int) -> None:
        self.shape = shape
        self.buffer = SharedRolloutBuffer.create(
            name,
            capacity=shape.groups,
            capacity_bytes=size_bytes + size_bytes // 8,
            staleness=StalenessPolicy(4, "pace", "none: a benchmark"),
        )
        self.keys = keys_of(range(shape.groups), shape)
        self.forget()

    def forget(self) -> None:
        self.groups: list[Group] = []
        self.fields: list[TensorDict] = []

    def take_ours(self, batches: int) -> float:
        start = time.perf_counter()
        for _ in range(batches):
            self.groups += self.buffer.take(self.shape.groups // batches, version=4, timeout_s=600)
        return time.perf_counter() - start

    def get_theirs(self) -> float:
        """All that was put, by keys that need no asking; clearing it is not timed."""
        start = time.perf_counter()
        self.fields = [transfer_queue.kv_batch_get(keys=self.keys, partition_id=PARTITION)]
        return time.perf_counter() - start

    def clear_theirs(self) -> None:
        transfer_queue.kv_clear(keys=self.keys, partition_id=PARTITION)

    def get_theirs_by_batch(self, batches: int) -> float:
        """Batches of whatever has arrived, cleared as they are taken."""
        client = transfer_queue.get_client()
        start = time.perf_counter()
        for _ in range(batches):
            while True:
                meta = client.get_meta(
                    data_fields=[*ARRAYS, "routes", *SCALARS],
                    batch_size=len(self.keys) // batches,
                    partition_id=PARTITION,
                    task_name=TASK,
                )
                if meta.size:
                    break
                time.sleep(0.001)
            self.fields.append(client.get_data(meta))
            client.clear_samples(meta)
        return time.perf_counter() - start

    def taken_ours(self) -> dict:
        return digests_of(self.groups)

    def taken_theirs(self) -> dict:
        rows: list[tuple[int, int, list[np.ndarray]]] = []
        for fields in self.fields:
            columns = [[x.numpy() for x in fields[name].unbind()] for name in (*ARRAYS, "routes")]
            places = [fields[name].flatten().tolist() for name in ("ordinal", "sample")]
            rows += zip(*places, map(list, zip(*columns, strict=True)), strict=True)
        return digests(rows)

    def end(self) -> None:
        self.buffer.unlink()
        self.buffer.close()


def rounds(producers: list[Any], consumer: Any, sent: dict, runs: int) -> dict[str, list[float]]:
    """All ways of every round in turn; each has to bring the bytes that were sent."""

    def all_put(method: str) -> list[Any]:
        return [getattr(producer, method).remote() for producer in producers]

    def check(taken: dict) -> None:
        if taken != sent:
            raise AssertionError(f"{len(taken)} rollouts came, which are not the {len(sent)} put")
        ray.get(consumer.forget.remote())

    def both(puts: list[Any], take: Any) -> float:
        start = time.perf_counter()
        ray.get([*puts, take])
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(WARM + runs):
        ours = max(ray.get(all_put("put_ours"))) + ray.get(consumer.take_ours.remote(1))
        check(ray.get(consumer.taken_ours.remote()))
        theirs = max(ray.get(all_put("put_theirs"))) + ray.get(consumer.get_theirs.remote())
        check(ray.get(consumer.taken_theirs.remote()))
        ray.get(consumer.clear_theirs.remote())
        stream = both(all_put("put_ours"), consumer.take_ours.remote(BATCHES))
        check(ray.get(consumer.taken_ours.remote()))
        their_stream = both(
            all_put("put_theirs_by_group"), consumer.get_theirs_by_batch.remote(BATCHES)
        )
        check(ray.get(consumer.taken_theirs.remote()))
        if number >= WARM:
            taken = {"whole": ours, "their_whole": theirs}
            taken |= {"stream": stream, "their_stream": their_stream}
            for key, value in taken.items():
                seconds[key].append(value)
    return seconds


def measure(units: int, runs: int, shapes: list[str]) -> None:
    settings = {
        # An empty answer instead of a wait of seconds, where a batch is not complete.
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": units}},
    }
    ray.init(
        num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False
    )
    consumer = Consumer.remote(settings)
    ray.get(consumer.ready.remote())
    producers = [Producer.remote(settings) for _ in range(max(PRODUCERS))]
    for shape_name in shapes:
        shape = SHAPES[shape_name]
        size = shape.samples * shape.groups * shape.tokens * (25 + shape.route_bytes) * 3 // 2
        for count in PRODUCERS:
            name, used = f"benchmark-{os.getpid()}-{shape_name}-{count}", producers[:count]
            ray.get(consumer.begin.remote(name, shape, size))
            begun = [
                producer.begin.remote(name, shape, range(i, shape.groups, count))
                for i, producer in enumerate(used)
            ]
            sent, nbytes = {}, 0
            for part, part_bytes in ray.get(begun):
                sent, nbytes = sent | part, nbytes + part_bytes
            seconds = rounds(used, consumer, sent, runs)
            measured = {"bytes": nbytes, "seconds": seconds}
            print(json.dumps({f"{shape_name}.{count}_producers": measured}), flush=True)
            ray.get([producer.end.remote() for producer in used])
            ray.get(consumer.end.remote())
    ray.get([side.close.remote() for side in (consumer, *producers)])
    ray.shutdown()


if __name__ == "__main__":
    measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
