"""Names of weights in vLLM 0.32 by family of models, made of those in checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import PlanError, UnsupportedError
from .conversion import Conversion
from .rules import Rule, fuse, rename, round_up, share, stack, transpose

__all__ = ["VLLM", "checkpoint_to_vllm"]


def checkpoint_to_vllm(
    family: str,
    *,
    rank: int = 0,
    ranks: int = 1,
    kv_copies: int = 1,
    whole_experts: bool = False,
) -> Conversion:
    """Return the conversion from a checkpoint to the parameters of one rank of vLLM.

    The parameters are as vLLM's loader leaves them: kernels may pack them afterwards, and what vLLM
    computes from them, such as latent attention's absorbed matrices, has no table. Bind the
    conversion to the checkpoint; the way back is `Wiring.inverse()`.

    Args:
        family: the `model_type` of the configuration, one of `VLLM`.
        rank, ranks: those of tensor parallelism.
        kv_copies: ranks that hold the same key and value heads, where there are more ranks than
            heads.
        whole_experts: with vLLM's `enable_expert_parallel`, each rank has some experts whole.

    Raises:
        UnsupportedError: a family without a table.
        PlanError: a rank that is not among the ranks.
    """
    if family not in VLLM:
        raise UnsupportedError(
            f"no table for {family!r} in vLLM; there are {', '.join(VLLM)}. "
            "Write its rules as a Conversion."
        )
    if not 0 <= rank < ranks or kv_copies < 1 or ranks % kv_copies:
        raise PlanError(
            f"needs 0 <= rank < ranks and ranks divisible by kv_copies; got rank={rank}, "
            f"ranks={ranks}, kv_copies={kv_copies}"
        )
    return Conversion(tuple(VLLM[family](_Engine(rank, ranks, kv_copies, whole_experts))))


@dataclass(frozen=True)
class _Engine:
    """One rank of vLLM, and its place among those that share a model."""

    rank: int
    ranks: int
    kv_copies: int
    whole_experts: bool

    def share(self, names: str, dim: int, *, copies: int = 1, optional: bool = False) -> list[Rule]:
        """Return rules for this rank's part of a tensor, which `copies` neighbours have too."""
        rank, ranks = self.rank // copies, self.ranks // copies
        if ranks == 1:
            return []
        return [share(names, dim=dim, rank=rank, ranks=ranks, optional=optional)]

    def routed(self, gate: str, up: str, down: str) -> list[Rule]:
        """Return the rules from a matrix for each expert to vLLM's two."""
        one, every = "{*head}.experts.{expert}", "{*head}.experts.routed_experts"
        names = {f"{every}.{gate}": 1, f"{every}.{up}": 1, f"{every}.w2_weight": 2}
        return [
            stack(f"{one}.{gate}.weight", f"{every}.{gate}", index="expert"),
            stack(f"{one}.{up}.weight", f"{every}.{up}", index="expert"),
            stack(f"{one}.{down}.weight", f"{every}.w2_weight", index="expert"),
            *(r for name, d in names.items() for r in self.share(name, self.expert_dim(d))),
            fuse([f"{every}.{gate}", f"{every}.{up}"], f"{every}.w13_weight", dim=1),
        ]

    def expert_dim(self, dim: int) -> int:
        return 0 if self.whole_experts else dim

    def qkv(self) -> list[Rule]:
        names = [f"{{*head}}.self_attn.{part}_proj.{{kind}}" for part in "qkv"]
        return [
            *self.share(names[0], 0),
            *self.share(names[1], 0, copies=self.kv_copies),
            *self.share(names[2], 0, copies=self.kv_copies),
            fuse(names, "{*head}.self_attn.qkv_proj.{kind}", parts=None),
            *self.share("{*head}.self_attn.o_proj.weight", 1),
        ]

    def latent(self) -> list[Rule]:
        """Return rules of latent attention: all projections down, this rank's heads of those up."""
        parts = ["q_a_proj.{kind}", "kv_a_proj_with_mqa.{kind}"]
        names = [f"{{*head}}.self_attn.{part}" for part in parts]
        return [
            fuse(names, "{*head}.self_attn.fused_qkv_a_proj.{kind}", parts=None),
            *self.share("{*head}.self_attn.q_b_proj.{kind}", 0),
            *self.share("{*head}.self_attn.kv_b_proj.{kind}", 0),
            *self.share("{*head}.self_attn.o_proj.weight", 1),
        ]

    def dense(self) -> list[Rule]:
        """Return rules of dense layers and shared experts, to follow `routed`: names look alike."""
        gate, up = "{*head}.gate_proj.{kind}", "{*head}.up_proj.{kind}"
        return [
            *self.share(gate, 0, optional=True),
            *self.share(up, 0, optional=True),
            *self.share("{*head}.down_proj.weight", 1, optional=True),
            fuse([gate, up], "{*head}.gate_up_proj.{kind}", optional=True),
        ]

    def vocabulary(self) -> list[Rule]:
        # A tied head is not there.
        rules = []
        for name, optional in (("model.embed_tokens.weight", False), ("lm_head.weight", True)):
            rules.append(round_up(name, dim=0, multiple=64, optional=optional))
            rules += self.share(name, 0, optional=optional)
        return rules


def _qwen(engine: _Engine) -> list[Rule]:
    experts = engine.routed("gate_proj", "up_proj", "down_proj")
    return [*experts, *engine.qkv(), *engine.dense(), *engine.vocabulary()]


def _latent(engine: _Engine) -> list[Rule]:
    experts = engine.routed("gate_proj", "up_proj", "down_proj")
    return [*experts, *engine.latent(), *engine.dense(), *engine.vocabulary()]


def _mixtral(engine: _Engine) -> list[Rule]:
    return [*engine.routed("w1", "w3", "w2"), *engine.qkv(), *engine.vocabulary()]


def _dense(engine: _Engine) -> list[Rule]:
    return [*engine.qkv(), *engine.dense(), *engine.vocabulary()]


def _gpt_oss(engine: _Engine) -> list[Rule]:
    experts, every = "{*head}.mlp.experts", "{*head}.mlp.experts.routed_experts"
    return [
        rename(f"{experts}.gate_up_proj", f"{every}.w13_weight"),
        rename(f"{experts}.gate_up_proj_bias", f"{every}.w13_bias"),
        rename(f"{experts}.down_proj", f"{every}.w2_weight"),
        rename(f"{experts}.down_proj_bias", f"{every}.w2_bias"),
        transpose(f"{every}.w13_weight", (0, 2, 1)),
        transpose(f"{every}.w2_weight", (0, 2, 1)),
        *engine.share(f"{every}.w13_weight", engine.expert_dim(1)),
        *engine.share(f"{every}.w13_bias", engine.expert_dim(1)),
        *engine.share(f"{every}.w2_weight", engine.expert_dim(2)),
        # What all ranks would add comes from all of them, unless each has its own experts.
        *(engine.share(f"{every}.w2_bias", 0) if engine.whole_experts else ()),
        *engine.qkv(),
        *engine.share("{*head}.self_attn.sinks", 0),
        rename("{*head}.self_attn.{*tail}", "{*head}.attn.{*tail}"),
        *engine.vocabulary(),
        rename("model.embed_tokens.weight", "model.embedding.weight"),
    ]


# By `model_type`; one of each table was compared with engines.
VLLM: dict[str, Callable[[_Engine], list[Rule]]] = {
    "deepseek_v3": _latent,
    "exaone_moe": _qwen,
    "flex_olmo": _qwen,
    "glm4_moe": _qwen,
    "glm4_moe_lite": _latent,
    "gpt_oss": _gpt_oss,
    "llama": _dense,
    "mixtral": _mixtral,
    "olmoe": _qwen,
    "qwen2_moe": _qwen,
    "qwen3": _dense,
    "qwen3_moe": _qwen,
}
