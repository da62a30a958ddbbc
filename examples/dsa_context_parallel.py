"""Run latent attention with an indexer on a packed sequence that is split over ranks.

The first layer selects tokens, and the second layer reuses the selection. The script prints the
costs of one layer of GLM-5.2 for 131,072 tokens on 8 ranks. The script also computes masked dense
attention on one rank, and prints how much the results of the ranks differ from dense attention.

    torchrun --nproc-per-node 4 examples/dsa_context_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn

from primeblocks import parallel
from primeblocks.parallel.attention import dsa
from primeblocks.planning.dsa import DsaSizes, dsa_cost, plan_dsa

DOCUMENTS = [300, 1, 40, 171]
HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT = 64, 4, 16, 8, 16, 32
INDEX_HEADS, INDEX_DIM, TOP_K = 4, 16, 48
ROWS = dsa.Rows.latent(LATENT, ROPE)
GLM_5_2 = DsaSizes(heads=64, index_heads=32, layers=78, index_layers=21, index_speed=2.0)


def rotate(x, positions):
    """Apply rotary embedding to pairs of neighbouring dims, as in GLM-5."""
    rates = 10_000.0 ** -(torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    angles = (positions[:, None] * rates).view(len(x), *[1] * (x.ndim - 2), -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class LatentAttention(nn.Module):
    """Latent attention whose queries absorb the key projection. Keys and values are latents."""

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.up_k = nn.Parameter(torch.randn(HEADS, NOPE, LATENT) * NOPE**-0.5)
        self.up_v = nn.Parameter(torch.randn(HEADS, VALUE, LATENT) * LATENT**-0.5)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)
        sizes = [INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS]
        self.index = nn.Linear(HIDDEN, sum(sizes), bias=False) if selects else None

    def projected(self, x, positions):
        q, latent = self.q(x).unflatten(1, (HEADS, -1)), self.kv(x)
        q = torch.cat([
            torch.einsum("thn,hnl->thl", q[..., :NOPE], self.up_k),
            rotate(q[..., NOPE:], positions),
        ], -1)  # fmt: skip
        return q, torch.cat([latent[:, :LATENT], rotate(latent[:, LATENT:], positions)], -1)

    def indexer(self, x, positions):
        q, k, weights = self.index(x).split([INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS], 1)
        q = rotate(q.unflatten(1, (INDEX_HEADS, -1)), positions)
        return dsa.IndexerInputs(q, rotate(k, positions), weights)

    def result(self, out):
        return self.out(torch.einsum("thl,hvl->thv", out, self.up_v).flatten(1))

    def forward(self, x, indices, *, sequence, group):
        positions = sequence.positions(group.rank())
        q, kv = self.projected(x, positions)
        # The scale uses the size of a head before the absorption.
        rules = {"sequence": sequence, "group": group, "rows": ROWS, "scale": (NOPE + ROPE) ** -0.5}
        if self.index is None:
            return self.result(dsa.sparse_attention(q, kv, indices, **rules)), indices
        out, indices = dsa.dsa_attention(
            q, kv, self.indexer(x, positions), selector=dsa.TopK(TOP_K), **rules
        )
        return self.result(out), indices

    def dense(self, x, chosen, sequence):
        """Compute masked dense attention on one rank. A layer without indexer reuses `chosen`."""
        positions = sequence.positions(0)
        q, kv = self.projected(x, positions)
        if self.index is not None:
            starts, places = sequence.document_starts(0), torch.arange(len(x))
            seen = (starts[:, None] == starts) & (places[:, None] >= places)
            query, key, weights = self.indexer(x, positions)
            scores = torch.einsum("thd,sd->ths", query, key).relu()
            scores = torch.einsum("ths,th->ts", scores, weights).masked_fill(~seen, -torch.inf)
            best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :TOP_K]
            chosen = torch.zeros_like(seen).scatter_(1, best, True) & seen
        scores = torch.einsum("thd,sd->hts", q, kv) * (NOPE + ROPE) ** -0.5
        weights = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
        return self.result(torch.einsum("hts,sl->thl", weights, kv[:, :LATENT])), chosen


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    torch.manual_seed(0)  # Equal weights on all ranks.
    torch.set_default_dtype(torch.float64)
    layers = nn.ModuleList([LatentAttention(selects=True), LatentAttention(selects=False)])
    x = torch.randn(sum(DOCUMENTS), HIDDEN)

    # Ranks get tokens by cost. Index scores are a large part of the cost, because k is small.
    sizes = DsaSizes(
        heads=HEADS, index_heads=INDEX_HEADS, layers=2, index_layers=1, top_k=TOP_K,
        key_dim=LATENT + ROPE, value_dim=LATENT, index_dim=INDEX_DIM,
    )  # fmt: skip
    sequence = parallel.plan_sequence(
        DOCUMENTS, ranks=group.size(), cost=dsa_cost(sizes), chunk_tokens=16
    )
    hidden, indices = sequence.split(x, group=group), None
    for layer in layers:
        change, indices = layer(hidden, indices, sequence=sequence, group=group)
        hidden = hidden + change
    hidden.square().sum().backward()
    for parameter in layers.parameters():  # FSDP would do this.
        if parameter.grad is not None:  # The selection gives the indexer no gradient.
            dist.all_reduce(parameter.grad)
    found = {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}

    layers.zero_grad()
    whole, chosen = x, None
    for layer in layers:
        change, chosen = layer.dense(whole, chosen, sequence.whole)
        whole = whole + change
    whole.square().sum().backward()
    off = float((hidden - sequence.split(whole, group=group)).detach().abs().max())
    named = dict(layers.named_parameters())
    worst = max(float((g - named[n].grad).norm() / named[n].grad.norm()) for n, g in found.items())
    ids = indices[:, 0].long()  # Ascending positions in the whole sequence, then -1.
    mine = torch.zeros(len(ids), len(x) + 1, dtype=torch.bool)
    mine.scatter_(1, ids.where(ids >= 0, len(x)), True)
    assert torch.equal(mine[:, :-1], sequence.split(chosen, group=group))
    assert off < 1e-10
    assert worst < 1e-10
    if dist.get_rank() == 0:
        print(sequence.table())
        print(f"\noff one rank: output {off:.1e}, worst gradient {worst:.1e}")
        far = parallel.plan_sequence([100_000, 31_072], ranks=8, cost=dsa_cost(GLM_5_2))
        print(f"\nGLM-5.2, 131,072 tokens on 8 ranks, a layer:\n{plan_dsa(far, GLM_5_2).table()}")
    dist.barrier()  # Else a rank may abort at its end: Gloo drops the last tensors in a thread.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
