"""Small and real stand-ins for what the docs' snippets presuppose: a function a page.

Each looks at what the snippets did. vLLM's configurations, signatures and command lines are its
own; engines, servers and Mooncake are fakes.
"""

import asyncio
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import anyio
import numpy as np
import torch
import torch.distributed as dist

from primeblocks.async_loop import Rollout
from primeblocks.kvoffload import HostTier, PageKey, TieredStore
from primeblocks.replay import impose, record
from primeblocks.testing import tiny_models
from primeblocks.weightsync import SharedMemoryTransport
from primeblocks.weightsync.engines.remote import WorkerState
from tests.contrib.sglang_fake import FakeSglang
from tests.deadlines import HANG_S
from tests.engine_job import ENVIRONMENT
from tests.front_pages import FRONT
from tests.integration.tree_site import trees
from tests.kvoffload.mooncake_fake import FakeClient, FakeMaster
from tests.loop_pages import conversations, metrics, processes, resume
from tests.serving_page import serving, serving_vllm
from tests.weightsync.fake_engine import FakeEngine
from tests.weightsync.test_vllm_server import FakeServer

SIZES = {"num_layers": 2, "hidden": 128, "num_experts": 4, "dtype": "float32"}
TOKENS = torch.arange(10, 26)[None]


def loss_of(output):
    return output.logits.square().sum()


@contextmanager
def async_loop():
    batches, published = [], []

    async def generate(prompt, *, version):
        ends = {"prompt_length": 2, "finish_reason": "stop"}
        return [Rollout(tokens=[5, 6, 7], logprobs=[-1.0], versions=[version], **ends)]

    async def complete(prompt, sampling_params, request_id, *, lora_request):
        from vllm import outputs
        from vllm.logprobs import Logprob

        spans = [outputs.WeightVersionSpan("3", 0, 1)]
        answers = [
            outputs.CompletionOutput(i, "", [7], -1.0, [{7: Logprob(-1.0)}], weight_versions=spans)
            for i in range(sampling_params.n)
        ]
        yield outputs.RequestOutput(request_id, None, [5, 6], None, answers, finished=True)

    with vllm_without_engines() as (engine, _):
        engine.generate.side_effect = complete
        names = {
            "prompts": range(5 * 16),
            "generate": generate,
            "train": lambda groups, *, version: batches.append(len(groups)),
            "publish": published.append,
            "path": tiny_models.save("qwen3_moe", "model", **SIZES),
            "prompt_ids": [5, 6],
            "version": 3,
        }
        yield names
    assert (batches, published) == ([16] * 5, [1, 2, 3, 4, 5])
    assert [answer.token_ids for answer in names["answers"]] == [(7,)] * 8


@contextmanager
def losses():
    names = {}
    yield names
    assert names["trainer"].grad[names["mask"]].abs().sum() > 0
    assert names["correction"].tokens == 32 + 20 + 7 + 25


@contextmanager
def a_plan():
    names = {}
    yield names
    assert names["split"].gain > 1
    assert len(names["loop"].steps) == 8


@contextmanager
def fp8():
    from primeblocks.fp8 import Recipe, encode_weights

    model, engine = tiny_models.build("qwen3_moe", **SIZES), {}
    encode = encode_weights(Recipe(), only=r"self_attn\.[qkvo]_proj", layouts=None)
    for name, weight in model.state_dict().items():
        engine |= encode(name, weight)
    names = {"model": model, "engine_weights": engine}
    yield names
    assert len(names["names"]) == 2 * 4


@contextmanager
def kvoffload():
    names = {}
    yield names
    assert len(names["lead"]) == 1


@contextmanager
def kvoffload_vllm():
    with vllm_without_engines():
        names = {"model": str(tiny_models.save("qwen3_moe", "model", **SIZES))}
        yield names
        assert_served(["--model", "model", *names["words"]])


@contextmanager
def kvoffload_disk():
    master = FakeMaster()
    package, store = ModuleType("mooncake"), ModuleType("mooncake.store")

    class MooncakeDistributedStore(FakeClient):
        def __init__(self):
            super().__init__(master)

        def setup(self, hostname, metadata, segment, buffer, protocol, devices, address):
            return 0

    store.MooncakeDistributedStore = MooncakeDistributedStore
    names = {}
    with (
        mock.patch.dict(sys.modules, {package.__name__: package, store.__name__: store}),
        socket.create_server(("127.0.0.1", 0)) as listener,
        found_at({"10.0.0.1:50051": listener.getsockname()[1]}),
    ):
        yield names
        with names["store"] as tiers:
            page = np.zeros(tiers.page_bytes, np.uint8)
            tiers.save(PageKey("s", b"1"), page).wait(timeout_s=HANG_S)
    assert "put" in master.calls


@contextmanager
def planning_capacity():
    names = {"config": tiny_models.config("qwen3_moe")}
    yield names
    assert names["plan"].fits


@contextmanager
def sparse_attention():
    """Two ranks with the widths of DeepSeek-V3.2, few heads, and documents of which one is cut."""
    lengths, tokens = [300, 212], 256
    q, hidden = torch.randn(tokens, 2, 576), torch.randn(tokens, 4, requires_grad=True)
    widths = {"kv": (576,), "index_q": (2, 128), "index_k": (128,), "gates": (128,)}
    drawn = {name: torch.randn(tokens, *width) for name, width in widths.items()}
    yield {
        "torch": torch,
        "document_lengths": lengths,
        "q": q,
        "index_weights": torch.randn(tokens, 2),
        "bias": torch.zeros(16, 128),
        "hidden": hidden,
        "layer": torch.nn.Linear(4, 4),
        **drawn,
    }


@contextmanager
def parallel():
    model = tiny_models.build("qwen3_moe", **SIZES)
    if dist.get_rank() == 0:
        model.save_pretrained("checkpoint")
    dist.barrier()
    part = 512 // dist.get_world_size()
    yield {
        "x": torch.randn(6, 8),
        "scores": torch.rand(6, 2),
        "expert_ids": torch.randint(256, (6, 2)),
        "gate_up": torch.randn(part // 2, 16, 8),
        "down": torch.randn(part // 2, 8, 8),
        "document_lengths": [300, 40, 172],
        "tokens": torch.randint(512, (512,)),
        "q": torch.randn(part, 4, 8),
        "k": torch.randn(part, 2, 8),
        "v": torch.randn(part, 2, 8),
        "model": model,
        "rollout": lambda: None,
        "checkpoint": "checkpoint",
    }


@contextmanager
def replay():
    from primeblocks.replay.adapters.transformers import routers
    from tests.replay.test_follow_pipeline import one_stage

    engine, trainer = (tiny_models.build("qwen3_moe", seed=seed, **SIZES) for seed in (0, 1))
    with record(routers(trainer)) as tape:
        logits = trainer(TOKENS).logits
    names = {
        "engine_model": engine,
        "trainer": trainer,
        "tokens": TOKENS,
        "loss_of": loss_of,
        **one_stage(tiny_models.build("qwen3_moe", **SIZES), TOKENS),
        **dict.fromkeys(("trainer_logprobs", "rollout_logprobs"), torch.rand(1, 16).log()),
        "mask": TOKENS > 0,
        "other_routes": tape.routes,
        "output": SimpleNamespace(token_ids=[7] * 6, routed_experts=tape.routes.experts[:15]),
        "evaluate": lambda removed: torch.full((1, 16), -2.0 + len(removed)),
        "torch": torch,
        **{
            name: tiny_models.build("glm_moe_dsa", seed=seed, **SIZES)
            for seed, name in enumerate(("indexed_engine", "indexed_trainer"))
        },
    }
    yield names
    theirs = [(one.module, one.layer_id, one.num_experts, one.top_k) for one in routers(trainer)]
    with impose([names["MyRouter"](*one) for one in theirs], tape.routes):
        assert torch.equal(trainer(TOKENS).logits, logits)


@contextmanager
def weightsync():
    import peft

    path = str(tiny_models.save("qwen3_moe", "model", **SIZES))
    tiny_models.save("qwen3", "base", num_layers=2)
    model = tiny_models.build("qwen3_moe", seed=1, **SIZES)
    base = tiny_models.build("qwen3", num_layers=2)
    memory = SharedMemoryTransport.__init__.__kwdefaults__
    with (
        mock.patch.dict(memory, root=os.getcwd()),  # Others run beside this test.
        vllm_without_engines() as (engine, offline),
        closing(FakeServer()) as server,
        closing(FakeSglang(path)) as sglang,
        found_at({"host:8000": server.server.server_port, "host:30000": urlsplit(sglang.url).port}),
        mock.patch.object(subprocess, "Popen", autospec=True) as popen,
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1, 2)),
    ):
        names = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "path": path,
            "peft_model": peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])),
            "base": "base",
            "rollout": lambda: None,
        }
        yield names
        assert engine.fake.serving == ((8,), "8")
        assert server.engine.serving == ((8, 8), "8")
        assert sglang.label == "8"
        assert offline.fake.label == "9"
        ((_, _, module, *words),), _ = popen.call_args
        assert importlib.util.find_spec(module)
        assert_served(words)


# --- Hosts


@contextmanager
def vllm_without_engines():
    """Give what `AsyncLLM` and `LLM` make: signatures and configurations are vLLM's own."""
    os.environ |= ENVIRONMENT
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = mock.create_autospec(AsyncLLM, instance=True, errored=False, output_handler=None)
    engine.engine_core = mock.Mock(**{"resources.engine_manager": None})
    engine.output_processor = mock.Mock(request_states={})
    offline = mock.create_autospec(vllm.LLM, instance=True)
    offline.llm_engine = mock.create_autospec(LLMEngine, instance=True)
    for host, how in ((engine, lambda call: call), (offline, blocking)):
        host.fake = FakeWithAdapters([1])
        calls = [name for name in dir(FakeEngine) if hasattr(host, name) and name[0] != "_"]
        for name in calls:
            getattr(host, name).side_effect = how(getattr(host.fake, name))

    def start(arguments):
        engine.vllm_config = arguments.create_engine_config()
        return engine

    def start_offline(model, **arguments):
        vllm.EngineArgs(model=model, **arguments).create_engine_config()
        return offline

    with (
        mock.patch.object(AsyncLLM, "from_engine_args", start),
        mock.patch.object(AsyncLLM, "from_vllm_config", autospec=True, return_value=engine),
        mock.patch.object(vllm, "LLM", start_offline),
        # Configurations ask for it, and a CPU has none.
        mock.patch.object(type(current_platform), "is_sleep_mode_available", return_value=True),
    ):
        yield engine, offline


class FakeWithAdapters(FakeEngine):
    """Its workers hold any adapter."""

    async def collective_rpc(self, method, timeout=None, args=()):
        from primeblocks.weightsync.adapters.vllm.lora_worker import Adapters

        if "lora" not in method:
            return await super().collective_rpc(method, timeout, args)
        inspect.signature(getattr(Adapters, args[0])).bind(self, *args[1:])
        return [asdict(WorkerState())]


def blocking(call):
    """An `LLM`'s call, of an `AsyncLLM`'s."""
    return lambda *args, **kwargs: asyncio.run(call(*args, **kwargs))


@contextmanager
def found_at(ports):
    """Lead connections to an address, "host:port", to a port of this machine."""
    connect, connect_tcp = socket.create_connection, anyio.connect_tcp

    def led(host, port):
        here = ports.get(f"{host}:{port}")
        return (host, port) if here is None else ("127.0.0.1", here)

    def to(address, *args, **kwargs):
        return connect(led(*address), *args, **kwargs)

    async def to_tcp(remote_host, remote_port, **kwargs):
        return await connect_tcp(*led(remote_host, remote_port), **kwargs)

    with (
        mock.patch.object(socket, "create_connection", to),
        mock.patch.object(anyio, "connect_tcp", to_tcp),  # By which httpx connects.
    ):
        yield


def assert_served(words):
    """vLLM's server knows the words of a command line."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert make_arg_parser(FlexibleArgumentParser()).parse_args(words).model == "model"


PAGES = {
    **FRONT,
    "docs/async_loop.md": async_loop,
    "docs/async_loop_processes.md": processes,
    "docs/async_loop_resume.md": resume,
    "docs/capture.md": conversations,
    "docs/exact.md": lambda: nullcontext({}),
    "docs/dsa.md": sparse_attention,
    "docs/fp8.md": fp8,
    "docs/kvoffload.md": kvoffload,
    "docs/planning_capacity.md": planning_capacity,
    "docs/kvoffload_disk.md": kvoffload_disk,
    "docs/kvoffload_eviction.md": lambda: nullcontext(
        {"store": TieredStore([HostTier(capacity_bytes=1 << 20, page_bytes=4096)])}
    ),
    "docs/kvoffload_vllm.md": kvoffload_vllm,
    "docs/losses.md": losses,
    "docs/parallel.md": parallel,
    "docs/recipes/metrics.md": metrics,
    "docs/planning.md": a_plan,
    "docs/replay.md": replay,
    "docs/serving.md": serving,
    "docs/serving_vllm.md": serving_vllm,
    "docs/trees.md": trees,
    "docs/weightsync.md": weightsync,
    "docs/weightsync_transports.md": lambda: nullcontext({}),
}
