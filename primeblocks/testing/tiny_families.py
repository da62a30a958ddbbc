"""Sizes that make a family of transformers small: data for `tiny_models`."""

from collections.abc import Callable
from typing import Any

__all__ = ["CONFIGS", "OTHERS", "composite", "layer_kinds"]


def _gqa(hidden: int) -> dict[str, int]:
    """Return sizes with two key-value heads where the number of heads allows it."""
    return {"num_key_value_heads": 2 if hidden % 64 == 0 else 1, "head_dim": 32}


def _qwen3_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "num_experts": num_experts,
        "norm_topk_prob": True,
    }


def _olmoe(hidden: int, num_experts: int) -> dict[str, Any]:
    return {
        "intermediate_size": hidden,
        "num_key_value_heads": hidden // 32,
        "num_experts": num_experts,
    }


def _mixtral(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {"intermediate_size": hidden, "num_local_experts": num_experts}


def _gpt_oss(hidden: int, num_experts: int) -> dict[str, Any]:
    return _mixtral(hidden, num_experts) | {"sliding_window": 128}


def _deepseek_router(hidden: int, num_experts: int) -> dict[str, Any]:
    """Return sizes for biased sigmoid scores, a shared expert, and a dense first layer."""
    return {
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }


def _glm4_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | _deepseek_router(hidden, num_experts) | {"use_qk_norm": True}


def _deepseek_v3(hidden: int, num_experts: int) -> dict[str, Any]:
    return _deepseek_router(hidden, num_experts) | {
        "num_key_value_heads": hidden // 32,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 64,
        # Latent attention keeps its real sizes, because vLLM's kernels accept only these.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }


def _glm_moe_dsa(hidden: int, num_experts: int) -> dict[str, Any]:
    # Fewer indexed tokens than a test sequence has, so that attention is sparse.
    indexer = {"index_topk": 8, "index_head_dim": 128, "index_n_heads": 2}
    return _deepseek_v3(hidden, num_experts) | indexer | {"head_dim": 64}


def _axk2(hidden: int, num_experts: int) -> dict[str, Any]:
    return _glm_moe_dsa(hidden, num_experts) | {"gated_norm_rank": 8}


def _hy_v4(hidden: int, num_experts: int) -> dict[str, Any]:
    sizes = _glm_moe_dsa(hidden, num_experts) | {"hc_mult": 2}
    del sizes["first_k_dense_replace"]  # This family always has one dense layer.
    return sizes


def _exaone_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    sizes = _gqa(hidden) | _deepseek_router(hidden, num_experts)
    return sizes | {"num_experts": num_experts, "sliding_window": 128}


def _qwen2_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    return _qwen3_moe(hidden, num_experts) | {"shared_expert_intermediate_size": hidden}


def _qwen3_5_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    return _qwen2_moe(hidden, num_experts) | {
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": hidden // 32,
        "linear_num_value_heads": hidden // 32,
    }


def _nemotron_h(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {
        "intermediate_size": hidden,
        "n_routed_experts": num_experts,
        "moe_intermediate_size": hidden,
        "moe_shared_expert_intermediate_size": hidden,
        "moe_latent_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "ssm_state_size": 16,
        "mamba_num_heads": hidden // 16,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "chunk_size": 16,
    }


def _afmoe(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "num_dense_layers": 1,
        "num_experts": num_experts,
        "num_shared_experts": 1,
        "sliding_window": 128,
    }


def _laguna(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden,
        "shared_expert_intermediate_size": hidden,
        "num_experts": num_experts,
        "moe_router_logit_softcapping": 3.0,
        "sliding_window": 128,
    }


def _dense(hidden: int, num_experts: int) -> dict[str, Any]:
    return _gqa(hidden) | {"intermediate_size": 2 * hidden}


def _qwen3_vl_moe(hidden: int, num_experts: int) -> dict[str, Any]:
    """Return the sizes of the text model. The vision model is as small as possible."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [8, 4, 4],
        "mrope_interleaved": True,
    }
    # Wider than the model, because transformers recognises the published orientation of an expert's
    # weights only by their shape. It would not transpose square weights.
    sizes = {"moe_intermediate_size": 2 * hidden, "rope_parameters": rope}
    return _qwen3_moe(hidden, num_experts) | sizes


def _vision(hidden: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 1,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
        "patch_size": 4,
    }


def composite(class_name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a configuration in which the text model's sizes are one part."""
    if class_name != "Qwen3VLMoeConfig":
        return sizes
    last = sizes["vocab_size"] - 1
    return {
        "text_config": sizes,
        "vision_config": _vision(sizes["hidden_size"]),
        "tie_word_embeddings": False,
        # The last four words of the vocabulary.
        "image_token_id": last,
        "video_token_id": last - 1,
        "vision_start_token_id": last - 2,
        "vision_end_token_id": last - 3,
    }


def layer_kinds(family: str, num_layers: int) -> dict[str, Any]:
    """Return the kinds of layers, for families that mix kinds. The last layer has experts."""
    if family in ("minimax", "qwen3_5_moe", "qwen3_next"):
        kinds = ["linear_attention", "full_attention"]
        return {"layer_types": [kinds[layer % 2] for layer in range(num_layers)]}
    if family in ("glm_moe_dsa", "hy_v4"):
        kinds = ["full", "shared"]
        return {"indexer_types": [kinds[layer % 2] for layer in range(num_layers)]}
    if family == "nemotron_h":
        from_last = ["moe", "attention", "moe", "mamba"]
        kinds = [from_last[i % 4] for i in range(num_layers)]
        return {"layers_block_type": kinds[::-1]}
    return {}


CONFIGS: dict[str, tuple[str, Callable[[int, int], dict[str, Any]]]] = {
    "afmoe": ("AfmoeConfig", _afmoe),
    "axk2": ("AXK2Config", _axk2),
    "deepseek_v3": ("DeepseekV3Config", _deepseek_v3),
    "deepseek_v32": ("DeepseekV32Config", _glm_moe_dsa),
    "dots1": ("Dots1Config", _glm4_moe),
    "exaone_moe": ("ExaoneMoeConfig", _exaone_moe),
    "flex_olmo": ("FlexOlmoConfig", _olmoe),
    "glm4_moe": ("Glm4MoeConfig", _glm4_moe),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _deepseek_v3),
    "glm_moe_dsa": ("GlmMoeDsaConfig", _glm_moe_dsa),
    "gpt_oss": ("GptOssConfig", _gpt_oss),
    "hy_v4": ("HYV4Config", _hy_v4),
    "laguna": ("LagunaConfig", _laguna),
    "minimax": ("MiniMaxConfig", _mixtral),
    "minimax_m2": ("MiniMaxM2Config", _mixtral),
    "mixtral": ("MixtralConfig", _mixtral),
    "nemotron_h": ("NemotronHConfig", _nemotron_h),
    "olmoe": ("OlmoeConfig", _olmoe),
    "qwen2_moe": ("Qwen2MoeConfig", _qwen2_moe),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _qwen3_5_moe),
    "qwen3_moe": ("Qwen3MoeConfig", _qwen3_moe),
    "qwen3_next": ("Qwen3NextConfig", _qwen3_5_moe),
    "solar_open": ("SolarOpenConfig", _glm4_moe),
}

# Families without experts, or with vision. Tests that need experts use only `CONFIGS`.
OTHERS: dict[str, tuple[str, Callable[[int, int], dict[str, Any]]]] = {
    "llama": ("LlamaConfig", _dense),
    "qwen3": ("Qwen3Config", _dense),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", _qwen3_vl_moe),
}
