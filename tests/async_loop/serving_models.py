"""Configurations of published models as files: what vLLM's own configuration reads. No weights."""

import json
from pathlib import Path
from typing import Any

import transformers

from primeblocks.async_loop.recipes import MODELS, Model

# By the published `config.json`; what is not named is transformers' default for that very model.
CONFIGS: dict[str, Any] = {
    "Qwen3-30B-A3B": lambda: transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "GLM-4.5": lambda: transformers.Glm4MoeConfig(
        vocab_size=151552,
        hidden_size=5120,
        intermediate_size=12288,
        num_hidden_layers=92,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        n_routed_experts=160,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        n_shared_experts=1,
        max_position_embeddings=131072,
        use_qk_norm=True,
        attention_bias=True,
        tie_word_embeddings=False,
        num_nextn_predict_layers=1,
        architectures=["Glm4MoeForCausalLM"],
    ),
    "DeepSeek-V3": lambda: transformers.DeepseekV3Config(
        num_nextn_predict_layers=1, architectures=["DeepseekV3ForCausalLM"]
    ),
    "GLM-5": lambda: transformers.GlmMoeDsaConfig(
        num_nextn_predict_layers=1, architectures=["GlmMoeDsaForCausalLM"]
    ),
}


def model_in(folder: Path, name: str) -> Model:
    """A model of `MODELS` whose path is a folder with its configuration."""
    path = folder / name
    path.mkdir(exist_ok=True)
    config = CONFIGS[name]().to_dict() | {"dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config))
    facts = MODELS[name]
    return Model(str(path), facts.experts, facts.heads, facts.parameters, facts.expert_parameters)
