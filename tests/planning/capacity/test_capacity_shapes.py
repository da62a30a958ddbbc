"""Bytes a token of published models, by the arithmetic that their configurations state."""

import types

import pytest
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.planning.capacity import Gpu, KvGroup, Rollouts, Weights, kv_groups, plan_capacity

# From the config.json of each model.
LLAMA_3_70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
QWEN3_235B = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_window_layers": 94,
    "sliding_window": None,
    "use_sliding_window": False,
}
GLM_4_5 = {
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_V3_2 = DEEPSEEK_V3 | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
GPT_OSS_120B = {
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
QWEN3_NEXT_80B = {
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("config", "kv_dtype", "token_bytes"),
    [
        (LLAMA_3_70B, "bfloat16", [327_680]),  # 80 layers x 8 heads x 128 x 2 x 2 bytes
        (LLAMA_3_70B, "fp8", [163_840]),
        (QWEN3_235B, "bfloat16", [192_512]),  # 94 x 4 x 128 x 2 x 2
        (GLM_4_5, "bfloat16", [376_832]),  # 92 x 8 x 128 x 2 x 2
        (DEEPSEEK_V3, "bfloat16", [70_272]),  # 61 x (512 + 64) x 2
        (DEEPSEEK_V3, "fp8", [35_136]),
        (DEEPSEEK_V3_2, "bfloat16", [70_272, 8_052]),  # and 61 x (128 + 4)
        (DEEPSEEK_V3_2, "fp8_ds_mla", [40_016, 8_052]),  # 61 x (512 + 16 + 64 x 2)
        (GPT_OSS_120B, "bfloat16", [36_864, 36_864]),  # 18 x 8 x 64 x 2 x 2, twice
        (QWEN3_NEXT_80B, "bfloat16", [0, 24_576]),  # 12 x 2 x 256 x 2 x 2
    ],
)
def test_bytes_of_published_models(config, kv_dtype, token_bytes):
    as_object = types.SimpleNamespace(**config)
    nested = types.SimpleNamespace(text_config=as_object)
    for given in (config, as_object, nested):
        groups = kv_groups(given, kv_dtype=kv_dtype)
        assert [group.token_bytes for group in groups] == token_bytes


def test_windows_and_states_of_published_models():
    sliding, full = kv_groups(GPT_OSS_120B)
    assert (sliding.window, full.window) == (128, None)
    linear, _ = kv_groups(QWEN3_NEXT_80B)
    # 32 heads of 128 x 128 float32, and three columns of 8,192 channels in bfloat16.
    assert linear.state_bytes() == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2)
    assert linear.state_bytes(tensor=4) == linear.state_bytes() // 4


def test_attention_flops_of_published_models():
    assert kv_groups(LLAMA_3_70B)[0].pair_flops == 2 * 64 * (128 + 128)
    latents, index = kv_groups(DEEPSEEK_V3_2)
    (expanded,) = kv_groups(DEEPSEEK_V3)
    assert (latents.pair_flops, latents.max_keys) == (2 * 128 * (512 + 64 + 512), 2048)
    assert (expanded.pair_flops, expanded.max_keys) == (2 * 128 * (192 + 128), None)
    assert (index.pair_flops, index.max_keys) == (2 * 64 * 128, None)


def test_latents_are_on_every_rank_of_a_replica():
    """DeepSeek-V3 in FP8 on H100s: 4.0 GiB a rollout of 61k tokens, whatever tensor is."""
    kind = Rollouts(prompts=1, prompt_tokens=1024, completion_tokens=60 * 1024 + 1)
    how = {"weights": Weights(0), "gpu": Gpu(80 << 30), "page_tokens": 64}
    peaks = {
        plan_capacity(kv_groups(DEEPSEEK_V3), [kind], tensor=tensor, **how).peak_bytes
        for tensor in (1, 8, 16)
    }
    assert peaks == {61 * 1024 * 70_272}


@pytest.mark.parametrize(
    ("config", "tensor", "copies"),
    [
        (QWEN3_235B, 4, 1),
        (QWEN3_235B, 8, 2),  # four heads
        (DEEPSEEK_V3_2, 8, 1),
        (KimiLinearConfig(), 8, 8),  # latents next to states, which vLLM does not store once
    ],
    ids=["heads", "copied heads", "latents", "latents and states"],
)
def test_host_memory_stores_heads_that_ranks_copy_once_per_copy(config, tensor, copies):
    groups = [group for group in kv_groups(config) if group.head_bytes]
    states = [group for group in kv_groups(config) if not group.head_bytes]
    kind = Rollouts(prompts=4, prompt_tokens=64, completion_tokens=65)
    each = sum(group.token_bytes for group in groups) * 128 * copies
    each += sum(group.state_bytes() for group in states)
    plan = plan_capacity(
        (*states, *groups),
        [kind],
        gpu=Gpu(1, memory_fraction=1.0, reserve_bytes=0),
        weights=Weights(0),
        tensor=tensor,
        gpus=tensor,
        host_bytes=2 * each,
        disk_bytes=2 * each - 1,
    )
    assert [(tier.rollouts, tier.used_bytes) for tier in plan.tiers] == [
        (0, 0),
        (2, 2 * each),
        (1, each),
    ]


def test_index_keys_are_counted_where_layers_have_their_own():
    kinds = ["full"] * 3 + ["shared"] * 58
    latents, index = kv_groups(DEEPSEEK_V3_2 | {"indexer_types": kinds, "index_topk_freq": 4})
    assert (latents.layers, index.layers) == (61, 3)


def test_latents_are_counted_where_layers_have_them():
    state, latents = kv_groups(KimiLinearConfig())
    assert (state.layers, latents.layers, latents.token_bytes) == (21, 6, 6 * (512 + 64) * 2)
    kinds = ["indexed_attention", "indexed_attention", "linear_attention"]
    sparse = {"num_hidden_layers": 3, "layer_types": kinds, "indexer_types": ["full", *kinds[:2]]}
    heads = {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
    latents, index, state = kv_groups(DEEPSEEK_V3_2 | sparse | heads, kv_dtype="fp8_ds_mla")
    assert (latents.layers, index.layers, state.layers) == (2, 1, 1)


def test_kimi_linear_is_what_transformers_keeps():
    """The cache of a small model, after a prompt."""
    layers = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4]}
    sizes = {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4}
    config = KimiLinearConfig(
        **{"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16},
        **{"num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        linear_attn_config=layers | sizes,
    )
    tokens = 7
    model = KimiLinearForCausalLM(config).eval()
    with torch.no_grad():
        cached = model(torch.arange(1, tokens + 1)[None], use_cache=True).past_key_values.layers
    keys = sum(each.keys.nbytes + each.values.nbytes for each in (cached[1], cached[4]))
    linear = [cached[at] for at in (0, 2, 3)]
    recurrent = sum(each.recurrent_states[0].nbytes for each in linear)
    # transformers keeps the newest column of the convolution as well.
    columns = sum(each.conv_states[0][..., 1:].nbytes for each in linear)
    state, latents = kv_groups(config, kv_dtype="float32")
    assert latents.token_bytes * tokens == keys
    assert state.state_bytes() == recurrent + columns


@pytest.mark.parametrize(
    ("config", "kv_dtype", "error", "message"),
    [
        (LLAMA_3_70B, "int3", UnsupportedError, "got 'int3'"),
        (LLAMA_3_70B, "fp8_ds_mla", UnsupportedError, "this model does not have latents"),
        ({"num_hidden_layers": 2}, "fp8", PlanError, "num_attention_heads of at least 1; got None"),
        (GPT_OSS_120B | {"layer_types": ["odd"] * 36}, "fp8", UnsupportedError, "odd"),
        (GPT_OSS_120B | {"num_hidden_layers": 3}, "fp8", UnsupportedError, "36 layer_types for 3"),
        (GPT_OSS_120B | {"sliding_window": None}, "fp8", PlanError, "sliding_window"),
        (LLAMA_3_70B | {"linear_attn_config": {"a": 1}}, "fp8", UnsupportedError, "linear_attn"),
        (LLAMA_3_70B | {"sliding_window_pattern": 6}, "fp8", UnsupportedError, "as transformers"),
        # Of config.json: Gemma 2, MiniMax, Nemotron-NAS, Llama 4, Jamba, Bamba, RecurrentGemma.
        *(
            (LLAMA_3_70B | told, "fp8", UnsupportedError, "as transformers")
            for told in (
                {"sliding_window": 4096, "model_type": "gemma2"},
                {"attn_type_list": [0, 1]},
                {"block_configs": [{}]},
                {"attention_chunk_size": 8192},
                {"attn_layer_period": 8},
                {"attn_layer_indices": [9, 18]},
                {"block_types": ["recurrent", "attention"]},
                {"mamba_d_ssm": 1024},
                {"cross_attention_layers": [3]},
                {"use_cla": True},
            )
        ),
        ({"num_kv_heads": 8, "num_hidden_layers": 2}, "fp8", UnsupportedError, "num_kv_heads"),
        (LLAMA_3_70B | {"v_head_dim": 64}, "fp8", UnsupportedError, "v_head_dim"),
        (
            LLAMA_3_70B | {"per_layer_config": {"5": {}}},
            "fp8",
            UnsupportedError,
            "per_layer_config",
        ),
        (DEEPSEEK_V3_2 | {"index_topk_freq": 4}, "fp8", UnsupportedError, "index_topk_freq"),
        (DEEPSEEK_V3_2 | {"index_kpool": 16}, "fp8", UnsupportedError, "index_kpool"),
        (DEEPSEEK_V3 | {"linear_attn_config": {"a": 1}}, "fp8", UnsupportedError, "linear_attn"),
        (DEEPSEEK_V3 | {"layer_types": ["odd"] * 61}, "fp8", UnsupportedError, "odd"),
        (LLAMA_3_70B | {"head_dim": "128"}, "fp8", PlanError, "head_dim in the configuration"),
        (LLAMA_3_70B | {"num_key_value_heads": -8}, "fp8", PlanError, "num_key_value_heads"),
        (LLAMA_3_70B | {"num_hidden_layers": True}, "fp8", PlanError, "num_hidden_layers"),
        (LLAMA_3_70B | {"num_hidden_layers": 10**10}, "fp8", PlanError, "at most 65536"),
        (LLAMA_3_70B | {"layer_types": 80}, "fp8", PlanError, "layer_types must be a list; got 80"),
        (GPT_OSS_120B | {"layer_types": [[]] * 36}, "fp8", UnsupportedError, "unknown"),
        (DEEPSEEK_V3_2 | {"indexer_types": ["full"]}, "fp8", PlanError, "must name 61 layers"),
        (
            QWEN3_NEXT_80B | {"linear_num_value_heads": 24},
            "fp8",
            PlanError,
            "cannot share 16 heads of keys",
        ),
    ],
)
def test_what_is_not_read_is_refused(config, kv_dtype, error, message):
    with pytest.raises(error, match=message):
        kv_groups(config, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("told", "heads"),
    [
        ({"multi_query": True, "num_kv_heads": 71}, 1),
        ({"multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True}, 8),
        ({"multi_query": False, "num_kv_heads": 71}, 71),
    ],
)
def test_falcons_heads(told, heads):
    config = {"num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544}
    (group,) = kv_groups(config | told)
    assert (group.heads, group.head_bytes) == (heads, 2 * 64 * 2)


@pytest.mark.parametrize("told", [{"model_type": "gemma"}, {"attn_type_list": [1] * 80}])
def test_what_only_looks_like_layers_of_several_kinds_is_read(told):
    (group,) = kv_groups(LLAMA_3_70B | told)
    assert (group.name, group.layers) == ("full_attention", 80)


def test_all_layers_slide_where_a_model_has_one_window():
    config = LLAMA_3_70B | {"sliding_window": 4096}
    (group,) = kv_groups(config)
    assert (group.name, group.window) == ("sliding_attention", 4096)


def test_a_table_names_groups_and_tiers():
    kind = Rollouts(prompts=4, prompt_tokens=1000, completion_tokens=9000, samples=4)
    how = {"gpu": Gpu(80 << 30), "weights": Weights(65 << 30), "tensor": 2}
    plan = plan_capacity(kv_groups(GPT_OSS_120B), [kind], **how)
    assert repr(plan) == "<CapacityPlan of 2 GPUs, 2 groups of layers, 3 tiers: nothing is evicted>"
    table = plan.table()
    for word in ("sliding_attention", "full_attention", "nothing is evicted", "host", "disk"):
        assert word in table
    assert len(table.splitlines()) == 1 + 2 + 1 + 3 + 3 + 1


@pytest.mark.parametrize("bad", [{"layers": 0}, {"heads": 0}, {"window": 0}, {"max_keys": 0}])
def test_groups_are_checked(bad):
    with pytest.raises(PlanError, match="at least 1"):
        KvGroup(**({"name": "a", "layers": 1, "head_bytes": 1} | bad))
