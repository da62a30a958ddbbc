"""Replace functions of torch 2.13 and torchtitan 0.3.0, so that torchtitan's Trainer runs on a CPU.

Import this file before torchtitan. The Trainer reads memory counters, which a CPU does not have,
and the attention of torchtitan needs CUDA. The Trainer also calls `torch.distributed.set_timeout`,
which torch 2.13 does not have.
"""

import types
from dataclasses import dataclass

import tiny
import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools

if not torch.cuda.is_available():
    tools.device_type = "cpu"
    own = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 40),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda: None,
    }
    tools.device_module = types.SimpleNamespace(**vars(torch.cpu) | own)
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["HEAD", "Batches", "NoTokenizer", "sum_on_gloo", "tiny_spec"]

HEAD = 32  # the dimension of a head


class Batches(BaseDataLoader):
    """A data loader that repeats one batch of rollouts. Each rank gets a share of the batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        rollouts: int

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_):
        parts = tiny.rollouts(config.rollouts).items()
        batch = {name: part[dp_rank::dp_world_size] for name, part in parts}
        ids, mask = batch.pop("input_ids"), batch.pop("mask")
        self.labels = ids.masked_fill(~mask, IGNORE_INDEX)[:, 1:]
        self.batch = {"input": ids[:, :-1]} | {name: part[:, 1:] for name, part in batch.items()}

    def __iter__(self):
        while True:
            yield dict(self.batch), self.labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    """A tokenizer that is never called, because rollouts already consist of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


def tiny_spec() -> ModelSpec:
    """Return the specification of a Qwen3-MoE model with the sizes of `tiny.model`."""
    sizes = tiny.SIZES
    spec = qwen3.model_registry("debugmodel_moe")
    model = spec.model
    model.dim, model.vocab_size = sizes["hidden"], sizes["vocab"]
    model.norm.normalized_shape = model.lm_head.in_features = model.dim
    model.tok_embeddings.embedding_dim = model.dim
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = model.vocab_size
    model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=sizes["num_layers"],
        dim=model.dim,
        n_heads=model.dim // HEAD,
        n_kv_heads=model.dim // HEAD,
        head_dim=HEAD,
        moe_hidden_dim=model.dim,
        num_experts=sizes["num_experts"],
        top_k=sizes["top_k"],
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=HEAD, max_seq_len=64, theta=1e4),
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def sum_on_gloo(model: torch.nn.Module) -> None:
    """Make FSDP2 sum gradients and then scale the sum, because gloo cannot scale while summing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
