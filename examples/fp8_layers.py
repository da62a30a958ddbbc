"""Convert the layers and experts of a mixture-of-experts model to float8, and train the model.

The script prints the rounding error of each weight, and the number of roundings with and without a
cache. The script also compares the loss with the loss of a float32 model. At the end, the script
audits the weights for the engine, and prints the fingerprint that the engine must have. The script
takes ten seconds on a CPU, where FP8 products are exact and slow.

    python examples/fp8_layers.py
"""

import copy
import dataclasses

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from primeblocks import fp8
from primeblocks.fp8.adapters.transformers import convert

STEPS, MICRO_BATCHES, TOKENS, RATE = 16, 4, 64, 3e-3
ONLY = r"self_attn\.[qkvo]_proj|mlp\.experts"  # Without the router and the head.
# In training on a GPU: gemm= and quantizer= of primeblocks.fp8.adapters.
RECIPE = fp8.Recipe(activations=fp8.Tile(1, 128), weights=fp8.Tile(128, 128), wgrad="bfloat16")
CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
    intermediate_size=128, dtype="float32",
)  # fmt: skip


def text(generator: torch.Generator) -> torch.Tensor:
    """Draw a row of tokens in which every second token is a function of the previous token."""
    tokens = torch.randint(64, (1, TOKENS + 1), generator=generator)
    for t in range(1, TOKENS + 1, 2):
        tokens[:, t] = (5 * tokens[:, t - 1] + 3) % 64
    return tokens


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train the model. Return the loss of each step."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in tqdm(range(STEPS)):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            tokens = text(generator)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            # Divides by the tokens of the whole batch, over all micro-batches.
            loss = cross_entropy(logits[0], tokens[0, 1:], reduction="sum") / MICRO_BATCHES / TOKENS
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def exported(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return codes and scales of the quantized weights, and all other weights in bfloat16."""
    encode, tensors = fp8.encode_weights(RECIPE, only=ONLY, layouts=None), {}
    for name, weight in model.state_dict().items():
        tensors |= encode(name, weight.bfloat16())
    return tensors


def main() -> None:
    torch.set_num_threads(1)  # With tiny tensors, more threads are not faster.
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG)
    model = copy.deepcopy(plain)
    names = convert(model, RECIPE, only=ONLY)  # Before fully_shard and the optimizer.
    weights = {
        f"{name}.{of}": weight
        for name in names
        for of, weight in model.get_submodule(name).named_parameters()
    }
    print(f"{len(names)} modules multiply in float8; relative errors of their weights:")
    for name, weight in weights.items():
        error = fp8.measure_error(weight, RECIPE.quantize_weight(weight))
        print(f"  {name:40} {list(weight.shape)!s:15} {error:.4f}")

    optimizers = [torch.optim.AdamW(m.parameters(), lr=RATE) for m in (plain, model)]
    with fp8.WeightCache(model, optimizers[1]) as cache:  # After fully_shard and the optimizer.
        float32, float8 = train(plain, optimizers[0]), train(model, optimizers[1])
        without = len(weights) * STEPS * MICRO_BATCHES
        print(f"weights rounded {cache.roundings} times, without a cache {without}")
    print("step  float32   float8")
    for step in (0, STEPS // 2, STEPS - 1):
        print(f"{step:4} {float32[step]:8.4f} {float8[step]:8.4f}")

    # In your run, compare the engine's weights with the trainer's rounded weights before step 0.
    engine, master = exported(model), dataclasses.replace(RECIPE, source="float32")
    print(f"audit: {fp8.audit(model, engine, RECIPE, only=ONLY).table()}")
    apart = fp8.audit(model, engine, master, only=ONLY)
    print(f"audit, if the trainer rounds its master weights: findings {len(apart.findings)}")
    print(f"  {apart.findings[0].name}: {apart.findings[0].reason}")
    print(f"fingerprint {RECIPE.fingerprint(names)}")  # The engine must have the same fingerprint.


if __name__ == "__main__":
    main()
