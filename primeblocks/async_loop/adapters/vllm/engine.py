"""A vLLM engine in which every call has a deadline, and a failed request has a typed error.

An engine runs from `start` until `close`, or until one of its processes dies. `close` or the death,
whichever is first, sets `_gone` to an error. All running and later calls raise this error. `_gone`
is needed because vLLM fails pending requests when its process dies, but not pending control calls.
`close` asks vLLM to shut down, waits for at most `timeout_s`, and then kills the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import vllm
import xxhash
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from ....attachments import Aligned
from ....clock import Clock, MonotonicClock, within
from ....codec import lower
from ....errors import (
    ClosedError,
    DeadlineError,
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
    check_version,
    how_it_ended,
)
from ...worker import WorkerThread
from .completion import Completion, completion_of
from .launch import Launch, check_checkpoint, kill

__all__ = ["VllmEngine", "base_engine_args"]

T = TypeVar("T")
_IMAGE_FIELDS = ("pixel_values", "image_grid_thw")


def base_engine_args(
    model: str | Path,
    *,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_bytes: int,
    block_size: int = 32,
    seed: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return engine arguments for rollouts. Local.

    The engine works on token ids, without a tokenizer. The engine returns log-probabilities of the
    distribution that it sampled from, and ignores the checkpoint's own sampling defaults. The model
    is not compiled, because compiled models on a CPU return zeros as routes. On a GPU, you may pass
    `enforce_eager=False` (not tested). The KV cache has `kv_bytes` bytes. The engine does not
    normalise pixels, because transformers' processor has normalised them.

    Args:
        seed: the engine's seed. With None, each call draws one, because engines with equal seeds
            may return equal samples.
        more: other arguments of vLLM, which override the arguments that this function sets.
    """
    arguments = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": kv_bytes,
        "block_size": block_size,
        "seed": secrets.randbits(31) if seed is None else seed,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "mm_device_do_normalize": False,
    }
    return arguments | more


class VllmEngine:
    """A running vLLM engine.

    Start an engine with `await VllmEngine.start(...)`, and use it as an async context manager. Use
    an engine only in the event loop that started it. The attribute `llm` is vLLM's own `AsyncLLM`,
    which you need for transfers of weights.
    """

    def __init__(self, llm: AsyncLLM, processes: Sequence[BaseProcess], clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.llm = llm
        self._processes = tuple(processes)
        self._clock = clock
        self._ids = itertools.count()
        self._closed = False
        self._gone: asyncio.Future[BaseException] = loop.create_future()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._on_death, process)

    @classmethod
    async def start(
        cls,
        engine_kwargs: Mapping[str, Any],
        *,
        timeout_s: float,
        version: int = 0,
        clock: Clock | None = None,
    ) -> "VllmEngine":
        """Start the engine process and label its weights `version`. Local.

        The call does not block the event loop, and works in a process that torchrun started.

        Raises:
            EngineError: the checkpoint is wrong, vLLM refused arguments, or the process died.
            DeadlineError: the engine was not ready within `timeout_s`, and its processes were
                killed.
            UnsupportedError: the installed vLLM is not 0.32.
        """
        if not vllm.__version__.startswith("0.32."):
            raise UnsupportedError(
                f"VllmEngine was tested with vLLM 0.32.*; found {vllm.__version__}. Run: pip "
                "install 'vllm==0.32.*'"
            )
        version = check_version(version)
        model = str(engine_kwargs["model"])
        is_path = Path(model).is_dir() or Path(model).is_absolute() or model.startswith(".")
        if is_path and engine_kwargs.get("load_format") != "dummy":
            check_checkpoint(model)
        clock = MonotonicClock() if clock is None else clock
        launch = Launch(engine_kwargs, clock)
        try:
            llm = await within(
                launch.run(), timeout_s=timeout_s, clock=clock, what="the start of the vLLM engine"
            )
            engine = cls(llm, launch.processes, clock)
        except BaseException:
            launch.abandon()
            raise
        try:
            await engine.call(llm.update_weight_version(str(version)), timeout_s=timeout_s)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def __aenter__(self) -> "VllmEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the engine."""
        return tuple(p.pid for p in self._processes if p.pid is not None)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        timeout_s: float,
        n: int = 1,
        temperature: float = 1.0,
        images: Sequence[Aligned] = (),
        stop_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        seed: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        routed_experts_prompt_start: int = 0,
        lora_request: LoRARequest | None = None,
        adapter_version: int | None = None,
    ) -> tuple[Completion, ...]:
        """Sample `n` completions of one prompt.

        If the call is cancelled or misses its deadline, the engine removes the request.

        Args:
            images: images for models of the Qwen-VL families. The prompt must contain the
                placeholder tokens of the images. The `value` of an image is a dict of
                `pixel_values` and `image_grid_thw`, the arrays that transformers' processor returns
                for this image. An engine that gets images needs `skip_tokenizer_init=False`.
            cache_salt: two requests share KV pages only if their salts are equal. Use one salt per
                policy version.
            extra_args: values that vLLM passes to its connectors and plug-ins.
            routed_experts_prompt_start: the index of the first prompt token whose routes are
                returned.
            lora_request: a LoRA adapter, which the engine uses for all tokens of the request.
            adapter_version: the policy version of `lora_request`. The call labels tokens with
                `adapter_version`, because vLLM labels tokens only with the version of the base
                weights.

        Raises:
            DeadlineError: no answer within `timeout_s`, for instance because the engine hangs.
            EngineError: the engine died before or during the request, or the label of the engine's
                weights is not a version.
            PrimeblocksError: the request failed or was aborted in the engine. Send it again.
            UsageError: vLLM refused the request, for instance because the engine lacks the adapter.
                UsageError is also raised if only one of `lora_request` and `adapter_version` is
                given, or the adapter has `load_inplace`.
            ClosedError: the engine was closed before or during the request.
        """
        version = _check_adapter(lora_request, adapter_version)
        settings = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            "seed": seed,
            "extra_args": None if extra_args is None else dict(extra_args),
            "logprobs": 0,  # the sampled token's only
            "routed_experts_prompt_start": routed_experts_prompt_start,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        tokens = tuple(int(token) for token in prompt)
        inputs: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        inputs |= _image_inputs(images, salt=cache_salt)
        if cache_salt is not None:
            inputs["cache_salt"] = cache_salt
        name = f"primeblocks-{next(self._ids)}"
        asked = self._last_output(inputs, settings, name, lora_request)
        output = await self.call(asked, timeout_s=timeout_s)
        outputs = sorted(output.outputs, key=lambda one: one.index)
        cached = output.num_cached_tokens or 0
        return tuple(
            completion_of(tokens, one, num_cached_tokens=cached, version=version) for one in outputs
        )

    async def call(self, awaitable: Awaitable[T], *, timeout_s: float) -> T:
        """Await one of `llm`'s coroutines until a deadline, or until the engine dies.

        Raises:
            DeadlineError, EngineError, UsageError, ClosedError, PrimeblocksError: as for
                `generate`.
            Exception: vLLM's own error for a utility call that failed, such as `collective_rpc`.
        """
        if self._gone.done():
            # A coroutine that is never awaited would warn.
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise self._gone.result().with_traceback(None)
        try:
            return await within(
                awaitable,
                timeout_s=timeout_s,
                clock=self._clock,
                what="a call to the vLLM engine",
                unless=self._gone,
            )
        except (EngineError, ClosedError) as error:
            if self._gone.done() and error is self._gone.result():
                error = error.with_traceback(None)  # All calls raise it: its traceback would grow.
            raise error
        except EngineDeadError as error:
            raise EngineError(f"the vLLM engine failed: {error}") from error
        except EngineGenerateError as error:  # vLLM raises it for any error in a request.
            cause = error.__cause__
            if self.llm.errored:
                raise EngineError(f"the vLLM engine failed: {cause!r}") from error
            if isinstance(cause, ValueError):
                raise UsageError(f"vLLM refused the request: {cause}") from error
            raise PrimeblocksError(f"the vLLM engine failed in this request: {cause!r}") from error
        except (VLLMClientError, ValueError) as error:
            raise UsageError(f"vLLM refused the request: {error}") from error

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Stop the engine, and kill its processes that do not end within `timeout_s`.

        A cancelled call kills the processes at once.
        """
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            asyncio.get_running_loop().remove_reader(process.sentinel)
        self._end(ClosedError("the vLLM engine is closed. Start another engine."))
        handler = self.llm.output_handler
        worker = WorkerThread("vllm-close")
        try:
            if handler is not None:
                # Otherwise the handler takes the shutdown for a crash and logs a traceback.
                handler.cancel()
                await asyncio.wait({handler}, timeout=1.0)
            with contextlib.suppress(DeadlineError):
                await within(
                    worker.call(self.llm.shutdown, timeout=timeout_s / 2),
                    timeout_s=timeout_s,
                    clock=self._clock,
                    what="vLLM's shutdown",
                )
        finally:
            worker.close()
            # AsyncLLM shuts down again when garbage-collected, at worst while the interpreter ends.
            self.llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]
            kill(self._processes)

    async def _last_output(
        self, inputs: Any, settings: dict[str, Any], request_id: str, lora: LoRARequest | None
    ) -> Any:
        params = SamplingParams(**settings)  # Here, because `call` converts vLLM's errors.
        generated = self.llm.generate(inputs, params, request_id, lora_request=lora)
        async with contextlib.aclosing(generated) as outputs:
            answers = [output async for output in outputs]
        return answers[-1]

    def _on_death(self, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(1.0)  # It has ended, and only its exit code may be a moment late.
        self._end(
            EngineError(
                f"the vLLM engine's process {process.pid} {how_it_ended(process.exitcode)}. "
                "Start another engine."
            )
        )

    def _end(self, error: BaseException) -> None:
        if not self._gone.done():
            self._gone.set_result(error)


def _check_adapter(lora: LoRARequest | None, version: int | None) -> int | None:
    if (lora is None) != (version is None):
        raise UsageError(
            f"lora_request and adapter_version must be passed together; got {lora!r} and "
            f"{version!r}. vLLM labels tokens only with the version of the base weights."
        )
    if lora is not None and lora.load_inplace:
        raise UsageError(
            f"{lora.lora_name!r} has load_inplace, which silently changes the weights of requests "
            "in flight. Load each version of an adapter under a name and id of its own."
        )
    return None if version is None else check_version(version)


def _image_inputs(images: Sequence[Aligned], *, salt: str | None) -> dict[str, Any]:
    """Return vLLM's inputs for the images of a prompt, or {} without images. Local. Copies.

    vLLM caches outputs of the vision tower by the image's name only, also when weights change. So
    the salt is part of the name.
    """
    if not images:
        return {}
    ordered = sorted(images, key=lambda each: each.start)
    for each in ordered:
        _check_image(each)
    values = {
        name: torch.from_numpy(np.concatenate([each.value[name] for each in ordered]))
        for name in _IMAGE_FIELDS
    }
    sizes = values["image_grid_thw"].prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    places = [PlaceholderRange(offset=x.start, length=x.stop - x.start) for x in ordered]
    return {
        "type": "multimodal",
        "mm_kwargs": MultiModalKwargsItems.from_hf_inputs(values, fields),
        "mm_hashes": {"image": [_image_name(each.value, salt) for each in ordered]},
        "mm_placeholders": {"image": places},
    }


def _check_image(image: Aligned) -> None:
    value, tokens = image.value, image.stop - image.start
    if not isinstance(value, dict) or value.keys() != set(_IMAGE_FIELDS):
        named = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise UsageError(f"an image must be a dict of {' and '.join(_IMAGE_FIELDS)}; got {named}")
    pixels, grid = (np.shape(value[name]) for name in _IMAGE_FIELDS)
    patches = int(np.prod(value["image_grid_thw"]))
    if grid != (1, 3) or len(pixels) != 2 or pixels[0] != patches or patches % tokens:
        raise UsageError(
            "an image needs image_grid_thw [1, 3], one row of pixel_values per patch, and "
            f"equally many patches per token; got {list(grid)}, {list(pixels)} and {tokens} tokens"
        )


def _image_name(value: dict[str, Any], salt: str | None) -> str:
    """Return a name made from the contents. It also identifies pages of the KV cache."""
    header, buffers = lower([salt, value], name="an image")
    state = xxhash.xxh3_128(header)
    for each in buffers:
        state.update(each)
    return state.hexdigest()
