"""Sparse attention of three models of transformers: their own modules, and ours over ranks."""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from primeblocks.contrib.dsa_rules.entries import (
    gated_mean,
    plan_entries,
    tokens_and_entries,
    windows,
)
from primeblocks.contrib.dsa_rules.selectors import (
    TopEntries,
    TopPools,
    TopTiles,
    all_entries,
)
from primeblocks.parallel.attention.dsa import (
    IndexerInputs,
    Rows,
    dsa_attention,
    gather_tokens,
    select,
    sparse_attention,
)
from tests.parallel.float64 import Float64

HIDDEN = 16
COMMON = {"hidden_size": HIDDEN, "num_attention_heads": 4, "attn_implementation": "eager"}


class StableTopK(TorchFunctionMode):
    """Of equal scores the earlier one: `topk` of transformers may choose any."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.topk:
            x, k, *_ = args
            values, indices = x.sort(dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., :k], indices[..., :k]))
        return function(*args, **(kwargs or {}))


@contextmanager
def as_computed(dtype):
    """Within it, float64 means float64."""
    if dtype == torch.float64:
        with Float64():
            yield
    else:
        yield


class _NoRotation(nn.Module):
    """Rotary embedding by no angle: integers stay what they are."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, position_ids, **_):
        cos = torch.ones(*position_ids.shape, self.dim, dtype=x.dtype)
        return cos, torch.zeros_like(cos)


def _drawn(module, dtype, integers):
    """Parameters from one seed, small; or quarters, and norms and gates that do nothing."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        x = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
        if integers:
            x = torch.randint(-1, 2, parameter.shape, generator=generator).double() / 4
            if any(word in name for word in ("gate", "position_bias", "ape")):
                x.zero_()
        parameter.data = x.to(dtype)
    if integers:
        for path, _ in list(module.named_modules()):
            name = path.rpartition(".")[2]
            if "norm" in name:
                module.set_submodule(path, nn.Identity())
            elif name == "rotary_emb":
                module.set_submodule(path, _NoRotation(2))
    return module.to(dtype)


class Glm:
    """GLM-5.3-Flash: pooled keys, an always-selected tail, latents."""

    def __init__(self, dtype=torch.float64, *, integers=False):
        config = Glm5NextTextConfig(
            **COMMON,
            num_key_value_heads=4,
            num_hidden_layers=1,
            kv_lora_rank=6,
            q_lora_rank=8,
            v_head_dim=5,
            qk_nope_head_dim=4,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=4,
            index_kpool=4,
            layer_types=["indexed_attention"],
            indexer_types=["full"],
        )
        self.attention = _drawn(glm.Glm5NextTextAttention(config, 0), dtype, integers)
        self.indexer = self.chooser = self.attention.indexer
        self.ratio = config.index_kpool

    def whole(self, hidden):
        mask = torch.ones(1, hidden.shape[1], dtype=torch.bool)
        return self.attention(hidden, mask)[0]

    def ids(self, found, place):
        return [[row] for row in _listed(found[0], place.document)]

    def split(self, hidden, *, sequence, group, chunk_bytes):
        a, i, pool = self.attention, self.indexer, self.indexer.index_kpool
        entries, rank = plan_entries(sequence, pool), group.rank()
        residual = a.q_a_layernorm(a.q_a_proj(hidden))
        with torch.no_grad():
            keys = i.k_norm(i.wk(hidden))
            gates = F.linear(hidden, i.index_kpool_compress_gate)
            taken, present = windows(
                torch.cat([keys, gates], -1), sequence=sequence, group=group, ratio=pool
            )
            keys, gates = taken.chunk(2, -1)
            pooled = gated_mean(keys, gates + i.index_kpool_compress_ape, present)
            weights = i.weights_proj(hidden) * (i.n_heads**-0.5 * i.softmax_scale)
            q = i.wq_b(residual).unflatten(-1, (-1, i.head_dim))
        (keys,) = gather_tokens(pooled, sequence=entries, group=group)
        indices = select(
            IndexerInputs(q, pooled, weights),
            keys,
            selector=TopPools(i.index_topk, pool, chunk_bytes=chunk_bytes),
            sequence=sequence,
            rank=rank,
        )
        q = a.q_b_proj(residual).unflatten(-1, (-1, a.qk_head_dim))
        up = a.kv_b_proj.weight.view(a.num_heads, -1, a.kv_lora_rank)
        of_key, of_value = up.split([a.qk_nope_head_dim, a.v_head_dim], dim=1)
        out = sparse_attention(
            torch.einsum("thn,hnl->thl", q, of_key),
            a.kv_a_layernorm(a.kv_a_proj_with_mqa(hidden)),
            indices,
            sequence=sequence,
            group=group,
            rows=Rows.latent(a.kv_lora_rank),
            scale=a.scaling,
        )
        return a.o_proj(torch.einsum("thl,hvl->thv", out, of_value).flatten(1)), indices, keys


class M3:
    """MiniMax M3: tiles of keys, for each key head by itself."""

    def __init__(self, dtype=torch.float64, *, integers=False):
        config = MiniMaxM3VLTextConfig(
            **COMMON,
            num_key_value_heads=2,
            head_dim=8,
            num_hidden_layers=1,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=3,
            index_local_blocks=1,
            layer_types=["minimax_m3_sparse"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        )
        self.attention = _drawn(m3.MiniMaxM3VLAttention(config, 0), dtype, integers)
        self.indexer = self.chooser = self.attention.indexer
        self.ratio = config.index_block_size
        self.rotary = _NoRotation(4) if integers else m3.MiniMaxM3VLRotaryEmbedding(config)

    def whole(self, hidden):
        positions = torch.arange(hidden.shape[1])[None]
        return self.attention(hidden, self.rotary(hidden, positions), None, position_ids=positions)[
            0
        ]

    def ids(self, found, place):
        """Tokens of the tiles, up to the query."""
        lists = []
        for query, of_groups in enumerate(found[0].transpose(0, 1).tolist()):
            tiles = [sorted(tile for tile in row if tile >= 0) for row in of_groups]
            tokens = [[4 * tile + i for tile in row for i in range(4)] for row in tiles]
            lists.append([[place.document + t for t in row if t <= query] for row in tokens])
        return lists

    def split(self, hidden, *, sequence, group, chunk_bytes):
        a, i, rank = self.attention, self.indexer, group.rank()
        cos, sin = self.rotary(hidden, sequence.positions(rank)[None])
        cos, sin = cos[0], sin[0]
        with torch.no_grad():
            q = i.q_norm(i.q_proj(hidden).unflatten(-1, (-1, i.head_dim)))
            k = i.k_norm(i.k_proj(hidden).unflatten(-1, (1, i.head_dim)))
            q, k = m3.apply_rotary_pos_emb(q, k, cos, sin)
        shape = (-1, a.head_dim)
        main_q = a.q_norm(a.q_proj(hidden).unflatten(-1, shape))
        main_k = a.k_norm(a.k_proj(hidden).unflatten(-1, shape))
        main_q, main_k = m3.apply_rotary_pos_emb(main_q, main_k, cos, sin)
        out, indices = dsa_attention(
            main_q,
            torch.cat([main_k, a.v_proj(hidden).unflatten(-1, shape)], -1),
            IndexerInputs(q, k[:, 0], q.new_ones(q.shape[:2])),
            selector=TopTiles(i.topk_blocks, i.block_size, i.local_blocks, chunk_bytes=chunk_bytes),
            sequence=sequence,
            group=group,
            rows=Rows.heads(a.head_dim, a.head_dim),
        )
        return a.o_proj(out.flatten(1)), indices, None


class V4:
    """DeepSeek-V4: a window and compressed entries in one softmax, with sinks; CSA."""

    layer, ratio = "compressed_sparse_attention", 4

    def __init__(self, dtype=torch.float64, *, integers=False):
        config = DeepseekV4Config(
            **COMMON,
            num_hidden_layers=1,
            head_dim=8,
            q_lora_rank=8,
            o_groups=2,
            o_lora_rank=4,
            index_n_heads=4,
            index_head_dim=16,
            index_topk=3,
            sliding_window=5,
            layer_types=[self.layer],
            mlp_layer_types=["moe"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 7},
            partial_rotary_factor=0.5,
        )
        self.window = config.sliding_window
        self.attention = v4.DeepseekV4Attention(config, 0)
        self.attention.rotary_emb = v4.DeepseekV4RotaryEmbedding(config)
        _drawn(self.attention, dtype, integers)
        self.indexer = getattr(self.attention.compressor, "indexer", None)
        self.chooser = self.indexer or self.attention.compressor

    def whole(self, hidden):
        self.length = hidden.shape[1]
        positions = torch.arange(self.length)[None]
        back = positions[0][:, None] - positions[0]
        mask = torch.where((back >= 0) & (back < self.window), 0.0, -torch.inf).to(hidden.dtype)
        angles = self.attention.rotary_emb(hidden, position_ids=positions, layer_type="compress")
        return self.attention(hidden, {"compress": angles}, positions, mask[None, None])[0]

    def ids(self, found, place):
        """The window, and entries behind all tokens."""
        entries = _listed(found[0], place.tokens + place.entry)
        windows = [range(max(0, t + 1 - self.window), t + 1) for t in range(len(entries))]
        windows = [[place.document + t for t in window] for window in windows]
        return [[one + other] for one, other in zip(windows, entries, strict=True)]

    def split(self, hidden, *, sequence, group, chunk_bytes):
        a, rank = self.attention, group.rank()
        entries, positions = plan_entries(sequence, self.ratio), sequence.positions(rank)
        both = tokens_and_entries(sequence, entries)
        cos, sin = self._angles(hidden, positions)
        residual = a.q_a_norm(a.q_a_proj(hidden))
        q = a.q_b_norm(a.q_b_proj(residual).unflatten(-1, (-1, a.head_dim)))
        q = v4.apply_rotary_pos_emb(q, cos, sin)
        kv = v4.apply_rotary_pos_emb(a.kv_norm(a.kv_proj(hidden))[:, None], cos, sin)[:, 0]
        compressed, keys, indices = self._compressed(
            hidden, residual, positions, sequence=sequence, group=group, chunk_bytes=chunk_bytes
        )
        out = sparse_attention(
            q,
            torch.cat([kv, compressed]),
            indices,
            sequence=sequence,
            group=group,
            rows=Rows((0, a.head_dim), (0, a.head_dim)),
            sinks=a.sinks,
            entries=both,
        )
        out = v4.apply_rotary_pos_emb(out, cos, -sin)
        # Not by its module, which cannot take no tokens.
        groups = a.config.o_groups
        weight = a.o_a_proj.weight.unflatten(0, (groups, -1))
        out = out.view(len(out), groups, weight.shape[2])
        return a.o_b_proj(torch.einsum("tgi,goi->tgo", out, weight).flatten(1)), indices, keys

    def _compressed(self, hidden, residual, positions, *, sequence, group, chunk_bytes):
        c, i, ratio, rank = self.attention.compressor, self.indexer, self.ratio, group.rank()
        sent = [part for m in (c, i) for part in self._sent(m, hidden, positions)]
        taken, present = windows(
            torch.cat(sent, -1), sequence=sequence, group=group, ratio=ratio, overlap=ratio
        )
        of_c, of_i = taken.split([4 * c.head_dim, 4 * i.head_dim], -1)
        entries = plan_entries(sequence, ratio)
        angles = self._angles(hidden, entries.positions(rank) * ratio)
        compressed = self._pooled(c, of_c, present, angles)
        with torch.no_grad():
            own = self._pooled(i, of_i, present, angles)
            q = i.q_b_proj(residual).unflatten(-1, (-1, i.head_dim))
            q = v4.apply_rotary_pos_emb(q, *self._angles(hidden, positions))
            scorer = i.scorer
            weights = scorer.weights_proj(hidden) * (scorer.weights_scaling * scorer.softmax_scale)
        (keys,) = gather_tokens(own, sequence=entries, group=group)
        indices = select(
            IndexerInputs(q, own, weights),
            keys,
            selector=TopEntries(i.index_topk, ratio, self.window, chunk_bytes=chunk_bytes),
            sequence=sequence,
            rank=rank,
        )
        return compressed, keys, indices

    def _sent(self, m, hidden, positions):
        bias = m.position_bias[positions % self.ratio]
        return m.kv_proj(hidden), m.gate_proj(hidden) + bias

    def _pooled(self, m, taken, present, angles):
        """The first half of the columns of the window before, the second of the window."""
        before, own = taken[:, : self.ratio], taken[:, self.ratio :]
        d = m.head_dim
        values = torch.cat([before[..., :d], own[..., d : 2 * d]], 1)
        gates = torch.cat([before[..., 2 * d : 3 * d], own[..., 3 * d :]], 1)
        found = m.kv_norm(gated_mean(values, gates, present))
        return v4.apply_rotary_pos_emb(found[:, None], *angles)[:, 0]

    def _angles(self, hidden, positions):
        angles = self.attention.rotary_emb(hidden, positions[None], layer_type="compress")
        return angles[0][0], angles[1][0]


class V4Heavy(V4):
    """DeepSeek-V4's HCA: all entries, windows that do not overlap."""

    layer, ratio = "heavily_compressed_attention", 7

    def ids(self, found, place):
        """From the mask of the entries, none where there are none."""
        compressed, mask = found
        tokens, entries = self.length, compressed.shape[2]
        seen = torch.zeros(tokens, entries) if mask is None else mask[0, 0]
        listed = torch.where(seen == 0, torch.arange(entries), -1)
        return super().ids(listed[None], place)

    def _compressed(self, hidden, residual, positions, *, sequence, group, chunk_bytes):
        c, ratio, rank = self.attention.compressor, self.ratio, group.rank()
        taken, present = windows(
            torch.cat(self._sent(c, hidden, positions), -1),
            sequence=sequence,
            group=group,
            ratio=ratio,
        )
        found = c.kv_norm(gated_mean(*taken.chunk(2, -1), present))
        angles = self._angles(hidden, plan_entries(sequence, ratio).positions(rank) * ratio)
        indices = all_entries(
            sequence, rank, ratio=ratio, window=self.window, chunk_bytes=chunk_bytes
        )
        return v4.apply_rotary_pos_emb(found[:, None], *angles)[:, 0], None, indices


class Place(NamedTuple):
    """Where a document begins, its first entry, and the tokens of all documents."""

    document: int
    entry: int
    tokens: int


MODELS = {"glm": Glm, "m3": M3, "v4": V4, "v4 heavy": V4Heavy}


def _listed(rows, first):
    return [sorted(first + i for i in row if i >= 0) for row in rows.tolist()]
