"""Named bf16 tensors as a mixture of experts has them: many of the same few sizes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["tensors"]

LAYERS = 4


def tensors(scale: float = 1.0, *, seed: int = 0, experts: int = 24) -> dict[str, Tensor]:
    """Four layers of Qwen3-30B-A3B with some of its 128 experts, under checkpoint names.

    With 24 experts 324 tensors, 1.06 GB. `scale` shrinks both sides of every matrix by its root.
    """
    root = scale**0.5
    hidden, expert, heads = (max(16, int(size * root) // 16 * 16) for size in (2048, 768, 4096))
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads, hidden),
            f"{at}.self_attn.k_proj.weight": (heads // 8, hidden),
            f"{at}.self_attn.v_proj.weight": (heads // 8, hidden),
            f"{at}.self_attn.q_norm.weight": (128,),
            f"{at}.self_attn.k_norm.weight": (128,),
            f"{at}.self_attn.o_proj.weight": (hidden, heads),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate.weight": (experts, hidden),
        }
        for index in range(experts):
            shapes |= {
                f"{at}.mlp.experts.{index}.gate_proj.weight": (expert, hidden),
                f"{at}.mlp.experts.{index}.up_proj.weight": (expert, hidden),
                f"{at}.mlp.experts.{index}.down_proj.weight": (hidden, expert),
            }
    # Integers under a view: drawing normal numbers would take longer than what is measured.
    return {
        name: torch.randint(
            -(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator
        ).view(torch.bfloat16)
        for name, shape in shapes.items()
    }
