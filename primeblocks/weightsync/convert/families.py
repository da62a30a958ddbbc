"""Names of weights by family of models: in transformers' modules, in checkpoints, in vLLM.

Checkpoints are where both sides meet: each table leads to or from the names and shapes that
`save_pretrained` writes. Data; nothing is imported. Names of transformers 5.19 and vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import PlanError, UnsupportedError
from .conversion import Conversion
from .rules import Rule, fuse, rename, round_up, share, split, stack, transpose, unstack

__all__ = ["TRANSFORMERS", "VLLM", "checkpoint_to_vllm", "transformers_to_checkpoint"]


def transformers_to_checkpoint(family: str) -> Conversion:
    """Return the conversion from a module of transformers 5 to its checkpoint.

    Args:
        family: the `model_type` of the configuration, one of `TRANSFORMERS`.

    Raises:
        UnsupportedError: a family without a table.
    """
    _check_known(TRANSFORMERS, family, "transformers")
    return TRANSFORMERS[family]


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
    _check_known(VLLM, family, "vLLM")
    if not 0 <= rank < ranks or kv_copies < 1 or ranks % kv_copies:
        raise PlanError(
            f"needs 0 <= rank < ranks and ranks divisible by kv_copies; got rank={rank}, "
            f"ranks={ranks}, kv_copies={kv_copies}"
        )
    return Conversion(tuple(VLLM[family](_Engine(rank, ranks, kv_copies, whole_experts))))


def _check_known(table: Mapping[str, object], family: str, host: str) -> None:
    if family not in table:
        raise UnsupportedError(
            f"no table for {family!r} in {host}; there are {', '.join(table)}. "
            "Write its rules as a Conversion."
        )


def _experts(gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules from one module of transformers for all experts to a matrix for each."""
    experts = "{*head}.experts"
    return (
        split(f"{experts}.gate_up_proj", [f"{experts}.{gate}", f"{experts}.{up}"], dim=1),
        _unstacked(experts, gate, gate),
        _unstacked(experts, up, up),
        _unstacked(experts, "down_proj", down),
    )


def _unstacked(experts: str, now: str, later: str) -> Rule:
    target = f"{experts}.{{expert}}.{later}.weight"
    return unstack(f"{experts}.{now}", target, index="expert")


_PLAIN = Conversion(())
_EXPERTS = Conversion(_experts("gate_proj", "up_proj", "down_proj"))
# Every layer has experts, so no other `mlp` takes part.
_SPARSE_MOE = Conversion(
    (
        *_experts("w1", "w3", "w2"),
        rename("{*head}.mlp.{*tail}", "{*head}.block_sparse_moe.{*tail}"),
    )
)

# By `model_type`; the families that `parallel` supports.
TRANSFORMERS: dict[str, Conversion] = {
    "afmoe": _EXPERTS,
    "axk2": _EXPERTS
    + Conversion(
        (
            rename("{*head}.mlp.fc1.weight", "{*head}.W_down.weight"),
            rename("{*head}.mlp.fc2.weight", "{*head}.W_up.weight"),
            rename("{*head}.self_attn.q_gate_proj.{*tail}", "{*head}.self_attn.q_b_proj.{*tail}"),
        )
    ),
    "deepseek_v3": _EXPERTS,
    "deepseek_v32": _EXPERTS,
    "dots1": _EXPERTS,
    "exaone_moe": _EXPERTS
    + Conversion(
        (rename("{*head}.mlp.gate.e_score_correction_bias", "{*head}.mlp.e_score_correction_bias"),)
    ),
    "flex_olmo": _EXPERTS,
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _EXPERTS,
    "glm_moe_dsa": _EXPERTS,
    "gpt_oss": _PLAIN,
    "hy_v4": Conversion(  # Its experts stay stacked.
        (
            rename("{*head}.attn_hc.{part}", "{*head}.hc_pre.hc_attn_layer.hc_{part}"),
            rename("{*head}.ffn_hc.{part}", "{*head}.hc_pre.hc_mlp_layer.hc_{part}"),
            rename("model.hc_head.hc_{part}", "model.hc_pre.hc_head.hc_head_{part}"),
            rename("{*head}.sinks", "{*head}.learnable_sink_param"),
            rename("{*head}.gate_proj.{*tail}", "{*head}.linear_gate.{*tail}"),
        )
    ),
    "laguna": _EXPERTS
    + Conversion(
        (
            rename(
                "{*head}.mlp.gate.e_score_correction_bias",
                "{*head}.mlp.experts.e_score_correction_bias",
            ),
            rename("{*head}.mlp.shared_experts.{*tail}", "{*head}.mlp.shared_expert.{*tail}"),
        )
    ),
    "llama": _PLAIN,
    "minimax": _SPARSE_MOE,
    "minimax_m2": _SPARSE_MOE,
    "mixtral": _SPARSE_MOE,
    "nemotron_h": Conversion(
        (
            _unstacked("{*head}.experts", "up_proj", "up_proj"),
            _unstacked("{*head}.experts", "down_proj", "down_proj"),
            rename("model.{*tail}", "backbone.{*tail}"),
        )
    ),
    "olmoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3": _PLAIN,
    "qwen3_5_moe_text": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "qwen3_vl_moe": _PLAIN,
    "solar_open": _EXPERTS,
}


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
