"""Sizes of models that are served, as far as a deployment depends on them."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError, check_counts, shown

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """A mixture-of-experts model, by the numbers that its parallel degrees must divide.

    Args:
        path: what vLLM is given: a name or a folder.
        experts: routed experts of a layer.
        heads: attention heads.
        parameters: all of them, without layers that only draft.
        expert_parameters: those of routed experts.

    Raises:
        UsageError: numbers that no such model has.
    """

    path: str
    experts: int
    heads: int
    parameters: int
    expert_parameters: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path or self.path.startswith("-"):
            raise UsageError(f"path must be a name or a folder; got {shown(self.path)}.")
        check_counts(experts=self.experts, heads=self.heads, parameters=self.parameters)
        check_counts(expert_parameters=self.expert_parameters)
        if self.expert_parameters >= self.parameters:
            raise UsageError(
                "parameters must be more than expert_parameters; got "
                f"{self.parameters} and {self.expert_parameters}"
            )


# Counted by transformers from the published configurations.
MODELS = {
    each.path.split("/")[1]: each
    for each in (
        Model("Qwen/Qwen3-30B-A3B", 128, 32, 30_532_122_624, 28_991_029_248),
        Model("zai-org/GLM-4.5", 160, 96, 352_797_814_784, 335_963_750_400),
        Model("deepseek-ai/DeepSeek-V3", 256, 128, 671_026_404_352, 653_908_770_816),
        Model("zai-org/GLM-5", 256, 64, 743_911_199_232, 724_775_731_200),
    )
}
