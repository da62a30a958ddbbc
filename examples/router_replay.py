"""Sample with vLLM, record the routes, and train with these routes (router replay).

    python examples/router_replay.py

vLLM generates in bfloat16 and returns the experts that each token visited. A transformers model
with the same weights makes one training step on the sampled tokens, with the experts that vLLM
chose. The script prints the mismatch between engine and trainer, once with the trainer's own routes
and once with the engine's routes. The model is tiny and random, with large weights, so that
rounding changes many expert choices. To use another model, pass its path.
"""

import os
import sys
import tempfile

# What vLLM needs on a CPU: no model hub, no compilation, an engine in this process.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(name, value)

import torch
import vllm
from transformers import AutoModelForCausalLM

from primeblocks import replay
from primeblocks.replay.adapters import vllm as capture
from primeblocks.replay.adapters.transformers import routers
from primeblocks.testing import tiny_models

MODEL = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}
PROMPTS, PROMPT, GENERATED = 8, 32, 64
PAGES, PAGE_TOKENS = 64, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the engine


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    path = sys.argv[1] if len(sys.argv) > 1 else folder.name
    if path == folder.name:
        tiny_models.save("qwen3_moe", path, init_std=0.06, **MODEL)
    trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = trainer.config
    shape = capture.RouterShape.from_config(config)

    room = capture.plan_capture_bytes(shape, page_tokens=PAGE_TOKENS, device_pages=PAGES)
    engine = vllm.LLM(
        path,
        max_model_len=PROMPT + GENERATED,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=PAGES,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        **capture.engine_args(max_bytes=room, device=DEVICE),
    )
    prompts = torch.randint(4, config.vocab_size, (PROMPTS, PROMPT)).tolist()
    answers = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        vllm.SamplingParams(max_tokens=GENERATED, logprobs=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )

    outputs = [answer.outputs[0] for answer in answers]
    routes = replay.Routes.join(
        capture.routes_from_output(output, shape, prompt_tokens=PROMPT) for output in outputs
    )
    tokens = torch.tensor([p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)])
    rollout = torch.tensor(
        [[at[i].logprob for at, i in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    )

    def logprobs() -> torch.Tensor:
        logits = trainer(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]

    with torch.no_grad():
        own = logprobs()
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-5)
    with replay.impose(routers(trainer), routes):
        replayed = logprobs()
        advantages = torch.ones_like(replayed)  # put your advantages here
        (-advantages * (replayed - rollout).exp()).mean().backward()
    optimizer.step()

    without = replay.measure_mismatch(trainer_logprobs=own, rollout_logprobs=rollout)
    with_replay = replay.measure_mismatch(trainer_logprobs=replayed, rollout_logprobs=rollout)
    print(f"k3 without replay {without.k3:.2e} +- {without.k3_standard_error:.0e}")
    print(f"k3 with replay    {with_replay.k3:.2e} +- {with_replay.k3_standard_error:.0e}")


if __name__ == "__main__":
    main()
