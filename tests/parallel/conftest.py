"""Ranks are forked from a server that has imported the models already, those that are installed."""

from primeblocks.testing import ranks

ranks.preload(
    "primeblocks.parallel",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tests.parallel.torchtitan_on_cpu",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    "transformers.models.glm5_next.modeling_glm5_next",
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl",
)
