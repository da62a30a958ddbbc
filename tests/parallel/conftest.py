"""Ranks are forked from a server that has imported the models already."""

from primeblocks.testing import ranks

ranks.preload("primeblocks.parallel", "transformers.models.qwen3_moe.modeling_qwen3_moe")
