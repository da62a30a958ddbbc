"""Draw docs/walks.md: four values on their way through the files, followed in code that runs.

    python scripts/walks.py            # draw all; the first part starts a vLLM engine on the CPU
    python scripts/walks.py --check    # compare the page with the parts that need no engine
    python scripts/walks.py page       # print one part, with the functions between which it goes

A value is known by its bytes. Where a call of a function in our files has them in its arguments, or
brings them back (as its result, or in a buffer that it was given), the value goes from function to
function; other packages may lie between. Two functions count once, however often the one calls the
other. Reads of properties do not count, and neither does it when a coroutine goes on after a wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "walks.md"
OURS = ("primeblocks/", "examples/")
# Packages whose objects are looked into; the last makes namespaces.
PACKAGES = ("primeblocks", "async_grpo", "async_grpo_moe", "vllm", "types")
TEXT = "some words"  # of the prompt
VERSION = 1
TIMEOUT_S = 300.0

Function = tuple[str, str]
"""A file below the root, and the name of a function; the file is "" for other code."""


class Walk:
    """The way of one value while the context is open: pairs of functions, in order."""

    def __init__(self, value: bytes) -> None:
        self.steps: list[tuple[Function, Function]] = []
        self._value = value
        self._looking = threading.local()

    def __enter__(self) -> Walk:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def changes(self) -> list[tuple[Function, Function]]:
        """The steps that lead from one file into another."""
        return [(here, there) for here, there in self.steps if here[0] != there[0]]

    def _on_event(self, frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return") or not _file_of(frame.f_code):
            return
        if getattr(self._looking, "now", False):  # Looking for the value calls code, too.
            return
        self._looking.now = True
        try:
            self._look(frame, result, returns=event == "return")
        finally:
            self._looking.now = False

    def _look(self, frame: FrameType, result: Any, *, returns: bool) -> None:
        code, before = frame.f_code, frame.f_back
        while before is not None and not _file_of(before.f_code):
            before = before.f_back
        caller = ("", "") if before is None else _function(before.f_code)
        called = _function(code)
        if caller == called or {(caller, called), (called, caller)} & {*self.steps}:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        arguments = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
        kind = getattr(type(arguments.get("self")), code.co_name, None)
        # The argument of RESUME is 0 in a call, and not 0 after a yield or an await.
        resumes = not returns and code.co_code[frame.f_lasti + 1] & 3
        if resumes or isinstance(kind, property | cached_property):
            return
        if not returns and _holds(arguments, self._value):
            self.steps.append((caller, called))
        # Brought back: as the result, or in a buffer that the caller gave.
        elif returns and caller[0] and _holds((result, arguments), self._value):
            self.steps.append((called, caller))


@cache
def _file_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return name if name.startswith(OURS) else ""


def _function(code: CodeType) -> Function:
    name = re.sub(r"\.<locals>\.<\w+>", "", code.co_qualname)  # What stands within it is it.
    return _file_of(code), name.rpartition("<locals>.")[2]


def _holds(thing: Any, value: bytes, depth: int = 8) -> bool:
    """Look into containers and values of ours; not into what is closed or left: it owns much."""
    owns = any(hasattr(type(thing), name) for name in ("close", "__aexit__"))
    if owns or depth == 0 or isinstance(thing, nn.Module):
        return False
    if isinstance(thing, np.ndarray | torch.Tensor | bytes | bytearray | memoryview):
        return value in _bytes_of(thing)
    if isinstance(thing, dict | MappingProxyType):
        inside = [*thing.values()]
    elif isinstance(thing, list | tuple | set | deque):
        inside = [*thing]
        if value in _bytes_of_numbers(inside):
            return True
    elif type(thing).__module__.split(".")[0] in PACKAGES:
        slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
        inside = [getattr(thing, name, None) for name in slots]
        inside += getattr(thing, "__dict__", {}).values()
    else:
        return False
    return any(_holds(each, value, depth - 1) for each in inside)


def _bytes_of_numbers(things: list[Any]) -> bytes:
    """Return the bytes of a sequence of numbers, or of vLLM's log-probabilities, a dict a token."""
    each = [value for x in things for value in (x.values() if isinstance(x, dict) else (x,))]
    numbers = [getattr(x, "logprob", x) if isinstance(x, SimpleNamespace) else x for x in each]
    numeric = all(type(x) in (int, float) for x in numbers)
    return _bytes_of(np.array(numbers)) if numeric else b""


def _bytes_of(data: Any) -> bytes:
    """Return the bytes of floats, float64 as float32, and of integers as if each took one byte."""
    if isinstance(data, torch.Tensor):
        if type(data) not in (torch.Tensor, nn.Parameter) or data.device.type != "cpu":
            return b""
        # Cloned: an array would keep FSDP from freeing the tensor.
        data = data.detach().clone().contiguous().reshape(-1)
        data = data.view(torch.uint8).numpy() if data.is_floating_point() else data.numpy()
    if isinstance(data, np.ndarray) and data.dtype == np.float64:
        data = data.astype(np.float32)
    if isinstance(data, np.ndarray) and data.dtype.kind in "iub":
        data = data.astype(np.uint8)
    try:
        return bytes(data) if isinstance(data, bytes | bytearray) else data.tobytes()
    except ValueError:  # A view that was released.
        return b""


# --- the walks -----------------------------------------------------------------------------------


def engine() -> Walk:
    """A request of a real engine, from the captured rows to the answer."""
    import vllm

    from primeblocks.replay.adapters import vllm as capture
    from primeblocks.testing import tiny_models

    shape = capture.RouterShape(num_layers=1, moe_layers=(0,), num_experts=8, top_k=2)
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.save("qwen3_moe", folder, num_layers=1)
        llm = vllm.LLM(
            folder,
            dtype="float32",
            max_model_len=64,
            block_size=32,
            num_gpu_blocks_override=8,
            skip_tokenizer_init=True,
            **capture.engine_args(
                max_bytes=capture.plan_capture_bytes(shape, page_tokens=32, device_pages=8),
                device="cpu",
            ),
        )

        def rows(first: int) -> np.ndarray:
            prompt = {"prompt_token_ids": list(range(first, first + 40))}
            greedy = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            return llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].routed_experts

        value = rows(4)[:16].tobytes()
        for first in range(100, 500, 50):  # Over whatever memory still holds it.
            rows(first)
        llm.reset_prefix_cache()
        with Walk(value) as walk:
            assert value in rows(4).tobytes()
        llm.llm_engine.engine_core.shutdown()
    return walk


class _Answering:
    """The part of `AsyncLLM` that `VllmEngine.generate` calls, with rows instead of a model."""

    def __init__(self, answer: list[int], logprobs: list[float], rows: np.ndarray) -> None:
        self._output = SimpleNamespace(
            index=0,
            token_ids=answer,
            logprobs=[
                {t: SimpleNamespace(logprob=p)} for t, p in zip(answer, logprobs, strict=True)
            ],
            weight_versions=[SimpleNamespace(version=str(VERSION), start=0, end=len(answer))],
            spec_decode_metrics=None,
            finish_reason="stop",
            routed_experts=rows,
        )

    async def generate(self, *_: object, lora_request: object) -> Any:
        yield SimpleNamespace(outputs=[self._output], num_cached_tokens=0)


def trainer(*, follow_routes: bool = True) -> Walk:
    """A step of examples/async_grpo_moe.py on one rank, from the engine's answer on."""
    import async_grpo_moe as example
    import torch.distributed as dist
    from async_grpo.rollouts import Rollouts
    from async_grpo.task import answer_of, prompt_of

    from primeblocks import weightsync
    from primeblocks.async_loop import AsyncLoop, RolloutBuffer, StalenessPolicy
    from primeblocks.async_loop.adapters.vllm import VllmEngine
    from primeblocks.clock import MonotonicClock
    from primeblocks.replay.adapters.vllm import RouterShape
    from primeblocks.testing import tiny_models

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        tiny_models.save("qwen3_moe", folder, **example.MODEL | {"num_layers": 1})
        transport = weightsync.SharedMemoryTransport(f"walks-{os.getpid()}", owner=True)
        one_rank = example.Trainer(Path(folder), torch.device("cpu"), transport)
    shape = RouterShape.from_config(one_rank.model.config)
    tokens = len(prompt_of(TEXT)) + len(answer_of(TEXT))
    every = np.tile(np.arange(shape.num_experts, dtype=np.uint8), (tokens - 1, 1, 1))
    rows = np.random.default_rng(0).permuted(every, axis=2)[:, :, : shape.top_k].copy()
    logprobs = -np.arange(1, len(answer_of(TEXT)) + 1) / 16

    async def step() -> None:
        llm: Any = _Answering(answer_of(TEXT), logprobs.tolist(), rows)
        rollouts = Rollouts(VllmEngine(llm, (), MonotonicClock()))
        loop = AsyncLoop(
            prompts=[TEXT],
            generate=rollouts.one,
            train=lambda groups, version: one_rank.train(groups),
            publish=lambda version: None,
            buffer=RolloutBuffer(capacity=1, staleness=StalenessPolicy(1, correction="none")),
            batch_size=1,
            max_in_flight=2,
            group_size=2,
            version=VERSION,
        )
        async with loop:
            async for _ in loop.steps(1):
                pass

    with Walk(_bytes_of((rows if follow_routes else logprobs)[:8])) as walk:
        asyncio.run(step())
    one_rank.close()
    dist.destroy_process_group()
    return walk


def rollout() -> Walk:
    """The log-probabilities in such a step, from the engine's answer to the loss."""
    walk = trainer(follow_routes=False)
    called = [there for _, (_, there) in walk.steps]
    del walk.steps[called.index("off_policy_metrics") :]
    return walk


class _Linear(nn.Module):
    """A model of one tensor, which loads as models of vLLM do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 8, bias=False)

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        return {self._load(name, tensor) for name, tensor in tensors}

    def _load(self, name: str, tensor: torch.Tensor) -> str:
        parameter: Any = self.get_parameter(name)
        parameter.weight_loader(parameter, tensor)
        return name


def shard() -> Walk:
    """A trainer's tensor over shared memory into the model of a vLLM worker."""
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader import reload

    from primeblocks import weightsync
    from primeblocks.weightsync.adapters.vllm.worker import InitInfo, PrimeblocksEngine, UpdateInfo

    ours, theirs = _Linear(), _Linear()
    held = weightsync.describe(ours)
    plan = weightsync.plan_sync([held], held, bucket_bytes=1 << 20)
    reload.record_metadata_for_reloading(theirs)
    config: Any = SimpleNamespace(quantization=None, dtype=torch.float32)
    worker = object.__new__(PrimeblocksEngine)  # Without the engine that it would ask for.
    worker.model = theirs
    worker.vllm_config = VllmConfig()
    worker.model_config = worker.vllm_config.model_config = config
    worker.parallel_config = worker.vllm_config.parallel_config
    with (
        weightsync.SharedMemoryTransport(f"walks-{os.getpid()}", owner=True) as transport,
        weightsync.Publisher(plan, ours, transport) as publisher,
    ):
        worker.init_transfer_engine(InitInfo(transport.spec(), plan.to_json()))
        with Walk(_bytes_of(ours.proj.weight)[:32]) as walk:
            publisher.publish(VERSION, timeout_s=TIMEOUT_S)
            worker.verify(info := UpdateInfo(VERSION, "update", TIMEOUT_S))
            worker.receive_weights(info)
        worker.shutdown()
    assert torch.equal(ours.proj.weight, theirs.proj.weight)
    return walk


def page() -> Walk:
    """A page that leaves host memory for a disk when another is saved, and is loaded again."""
    from primeblocks.kvoffload import DiskTier, HostTier, PageKey, TieredStore, copier

    pages = np.random.default_rng(0).integers(0, 256, (2, 256), dtype=np.uint8)
    keys = [PageKey("walks", b"0"), PageKey("walks", b"1")]
    into = np.zeros_like(pages[0])
    copier._TICK_S = TIMEOUT_S  # No step of the way goes by the clock.
    with tempfile.TemporaryDirectory() as folder, Walk(pages[0][:32].tobytes()) as walk:
        host = HostTier(capacity_bytes=4096, page_bytes=256)
        disk = DiskTier(folder, capacity_bytes=1 << 16, io="buffered", page_bytes=256)
        with TieredStore([host, disk], copy_threads=1) as store:
            for key, data in zip(keys, pages, strict=True):
                assert store.save(key, data).wait(timeout_s=TIMEOUT_S).stored
            assert store.load(keys[0], into=into).wait(timeout_s=TIMEOUT_S).tier == "disk"
    assert np.array_equal(into, pages[0])
    return walk


# --- the page ------------------------------------------------------------------------------------
PARTS: dict[str, Any] = {part.__name__: part for part in (engine, trainer, rollout, shard, page)}


def drawn(walk: Walk) -> str:
    """Draw a box for each file, with the file changes that lead into it and where from."""
    boxes: dict[str, list[str]] = {}
    for number, ((here, _), (there, _)) in enumerate(walk.changes, 1):
        if here:
            boxes.setdefault(here, [])
        boxes.setdefault(there, []).append(f"{number:4}  from {here or 'a host or a thread'}")
    edge = f"+{'-' * 74}+"
    lines = [edge]
    for file, entries in boxes.items():
        lines += [f"| {line:<72} |" for line in (file, *entries)] + [edge]
    numbers = f"{len(walk.changes)} file changes, {len(boxes)} files."
    return "\n".join([numbers, "", "```text", *lines, "```"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import async_grpo_moe  # noqa: F401  It sets what vLLM reads from the environment.

    sys.setswitchinterval(60.0)  # Threads take turns where they wait, or the order would vary.
    if options.part:
        walk = PARTS[options.part]()
        for here, there in walk.steps:
            print("  " if here[0] == there[0] else "->", *here, "->", *there)
        print(len(walk.changes), "file changes")
        return
    text, stale = PAGE.read_text(), []
    for name, part in PARTS.items():
        if options.check and part is engine:
            continue
        pattern = rf"<!-- {name} -->\n\n(.*?)\n\n<!-- end of {name} -->"
        if (place := re.search(pattern, text, re.DOTALL)) is None:
            sys.exit(f"{PAGE} has no place for {name}: {pattern}")
        if (now := drawn(part())) != place[1]:
            stale.append(f"{name}:\n{now}")
        text = text[: place.start(1)] + now + text[place.end(1) :]
    if not options.check:
        PAGE.write_text(text)
    elif stale:
        sys.exit("\n".join(["docs/walks.md differs: run python scripts/walks.py. Now", *stale]))


if __name__ == "__main__":
    main()
