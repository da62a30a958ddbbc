"""Run by test_vllm_plugin.py in its own process: `plugin_job.py FOLDER` writes facts.json.

What vLLM's log says is printed, phase by phase; its loggers are set up anew too often to listen.
One patch is switched off at first.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def applied(plugin: Any) -> list[str]:
    return [patch.name for patch in plugin.PATCHES if patch.applied()]


def required(plugin: Any, name: str) -> str:
    """The complaint."""
    try:
        plugin.require(name)
    except ValueError as error:
        return str(error)
    return ""


def attempt(model: str, **kwargs: Any) -> tuple[str, str] | None:
    """The complaint about a configuration with capture on."""
    from vllm.engine.arg_utils import EngineArgs

    args = {"enable_return_routed_experts": True, "skip_tokenizer_init": True, **kwargs}
    try:
        EngineArgs(model=model, max_model_len=128, dtype="float32", **args).create_engine_config()
    except ValueError as error:
        return type(error).__name__, str(error)
    return None


def checked_again(model: str) -> str:
    """The complaint of an engine's process, which checks the configuration that came to it."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=model, max_model_len=128, dtype="float32", enforce_eager=True)
    config = args.create_engine_config()
    config.aux_output_config.enable_return_routed_experts = True
    try:
        config.__post_init__()
    except ValueError as error:
        return str(error)
    return ""


def refused(model: str) -> dict[str, tuple[str, str] | None]:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    found = {
        "nothing": attempt(model, enforce_eager=True),
        "no_capture": attempt(model, enable_return_routed_experts=False),
        "speculative": attempt(model, enforce_eager=True, speculative_config=speculative),
        "no_prefix_caching": attempt(model, enforce_eager=True, enable_prefix_caching=False),
        "mooncake": attempt(model, enforce_eager=True, kv_transfer_config=over("Mooncake")),
        "nixl": attempt(model, enforce_eager=True, kv_transfer_config=over("Nixl")),
    }
    del os.environ["TORCH_COMPILE_DISABLE"]  # which would make every mode an eager one
    found["default"] = attempt(model)
    found["stock_torch_compile"] = attempt(model, compilation_config={"mode": 1})
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return found


def over(connector: str) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector=f"{connector}Connector", kv_role="kv_both")


def phase(name: str) -> None:
    print(f"== {name}", flush=True)


def main(folder: Path) -> None:
    import vllm
    from host_faults import FAULTS
    from vllm.logger import _configure_vllm_root_logger

    from primeblocks.plugins import vllm as plugin
    from primeblocks.testing import tiny_models

    facts: dict[str, Any] = {}
    os.environ |= {plugin.OFF: "moe_reload_on_cpu,no_such_patch", "VLLM_LOGGING_LEVEL": "INFO"}
    _configure_vllm_root_logger()
    phase("untested")
    version, vllm.__version__ = vllm.__version__, "0.99.1"
    plugin.register()
    plugin.register()
    facts["untested"] = {
        "applied": applied(plugin),
        "required": required(plugin, "moe_reload_on_cpu"),
    }
    vllm.__version__ = version

    from vllm.engine.arg_utils import EngineArgs

    phase("registered")
    plugin.register()
    create = EngineArgs.create_engine_config
    plugin.register()
    facts["registered"] = {
        "same_symbols": EngineArgs.create_engine_config is create,
        "applied": applied(plugin),
        "required": required(plugin, "moe_reload_on_cpu"),
        "unknown": required(plugin, "no_such_patch"),
        "faults": {name: look() for name, look in FAULTS.items()},
    }
    sizes = {"num_layers": 2, "hidden": 64, "num_experts": 4, "init_std": 0.2}
    model = str(tiny_models.save("qwen3_moe", folder / "model", dtype="float32", **sizes))
    phase("capture")
    facts["checked_again"] = checked_again(model)  # first: nothing is applied yet
    facts["refused"] = refused(model)
    facts["capture"] = applied(plugin)

    phase("plain_engine")

    engine = vllm.LLM(
        model,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
    )
    prompts = np.random.default_rng(0).integers(0, 256, (4, 64)).tolist()
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def logprobs() -> np.ndarray:
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        return np.array(
            [
                [
                    at[token].logprob
                    for at, token in zip(o.prompt_logprobs[1:], ids[1:], strict=True)
                ]
                for o, ids in zip(outputs, prompts, strict=True)
            ]
        )

    def k3() -> float:
        log_ratio = logprobs() - before
        return float(np.mean(np.exp(log_ratio) - 1 - log_ratio))

    facts["plain_engine"] = applied(plugin)
    before = logprobs()
    facts["k3_again"] = k3()
    engine.collective_rpc("reload_weights")
    facts["k3_stock_reload"] = k3()
    phase("all_required")
    del os.environ[plugin.OFF]
    for patch in plugin.PATCHES:
        plugin.require(patch.name)
    facts["all_required"] = {
        "applied": applied(plugin),
        "faults": {name: look() for name, look in FAULTS.items()},
    }
    engine.collective_rpc("reload_weights")
    facts["k3_patched_reload"] = k3()
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
