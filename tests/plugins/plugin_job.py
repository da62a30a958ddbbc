"""Run by test_vllm_plugin.py in its own process: `plugin_job.py FOLDER` writes facts.json."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def save_model(folder: Path) -> str:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        max_position_embeddings=512,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def state(plugin: Any, warnings: Warnings) -> dict[str, Any]:
    found = {
        "applied": [patch.name for patch in plugin.PATCHES if patch.applied()],
        "warnings": warnings.messages[:],
        "self_tests": {
            patch.name: [test.needed, test.effective]
            for patch in plugin.PATCHES
            for test in [patch.self_test()]
        },
        "required": "",
    }
    try:
        plugin.require("moe_reload_on_cpu")
    except ValueError as error:
        found["required"] = str(error)
    warnings.messages.clear()
    return found


def refused(model: str) -> dict[str, tuple[str, str] | None]:
    from vllm.engine.arg_utils import EngineArgs

    def attempt(**kwargs: Any) -> tuple[str, str] | None:
        args = {"enable_return_routed_experts": True, "skip_tokenizer_init": True, **kwargs}
        try:
            EngineArgs(
                model=model, max_model_len=128, dtype="float32", **args
            ).create_engine_config()
        except ValueError as error:
            return type(error).__name__, str(error)
        return None

    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    found = {
        "speculative": attempt(enforce_eager=True, speculative_config=speculative),
        "no_prefix_caching": attempt(enforce_eager=True, enable_prefix_caching=False),
        "no_capture": attempt(enable_return_routed_experts=False),
    }
    del os.environ["TORCH_COMPILE_DISABLE"]  # which would make every mode an eager one
    found["default"] = attempt()
    found["stock_torch_compile"] = attempt(compilation_config={"mode": 1})
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    return found


def main(folder: Path) -> None:
    import vllm

    from primeblocks.plugins import vllm as plugin

    warnings = Warnings()
    logging.getLogger(plugin.__name__).addHandler(warnings)
    facts: dict[str, Any] = {}

    version, vllm.__version__ = vllm.__version__, "0.99.1"
    plugin.register()
    plugin.register()
    facts["untested"] = state(plugin, warnings)
    vllm.__version__ = version

    plugin.register()
    facts["off"] = state(plugin, warnings)
    from vllm.v1.worker import cpu_worker

    runner = cpu_worker.CPUModelRunner
    plugin.register()
    facts["same_symbols"] = cpu_worker.CPUModelRunner is runner
    try:
        plugin.require("no_such_patch")
    except ValueError as error:
        facts["unknown"] = str(error)

    model = save_model(folder / "model")
    facts["refused"] = refused(model)

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

    before = logprobs()
    facts["k3_again"] = k3()
    engine.collective_rpc("reload_weights")
    facts["k3_stock_reload"] = k3()
    del os.environ[plugin.OFF]
    plugin.register()
    facts["on"] = state(plugin, warnings)
    engine.collective_rpc("reload_weights")
    facts["k3_patched_reload"] = k3()
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
