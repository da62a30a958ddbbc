"""Compute the loss and the gradients of a mixture-of-experts model on four ranks.

Experts, sequences and weights are split over the ranks. The script prints the plans, and the
differences of loss and gradients between four ranks and one rank.

    torchrun --nproc-per-node 4 examples/parallel_moe.py
"""

import copy

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from primeblocks import parallel
from primeblocks.layout import layout_of
from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

CONTEXT, EXPERT = 2, 4  # Ranks that share a sequence, ranks that share the experts.
DOCUMENTS = [300, 40, 172]  # Packed into each row; there are WORLD_SIZE / CONTEXT rows.
CONFIG = Qwen3MoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    intermediate_size=128, dtype="float64", experts_implementation="eager",
)  # fmt: skip


def loss_of(logits, labels):
    return cross_entropy(logits[0], labels, ignore_index=-100, reduction="sum")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # Equal weights on all ranks.
    model = AutoModelForCausalLM.from_config(CONFIG)
    whole = copy.deepcopy(model)
    plan = parallel.plan_mesh(world_size=dist.get_world_size(), context=CONTEXT, expert=EXPERT)
    meshes = plan.build("cpu")
    group = meshes.context.get_group()
    parallelize(model, meshes, attention=parallel.attention.ring_attention)

    rows = torch.randint(512, (plan.batch, sum(DOCUMENTS)), generator=torch.manual_seed(1))
    sequence = parallel.plan_sequence(DOCUMENTS, ranks=CONTEXT, chunk_tokens=32)
    tokens = rows[meshes.batch.get_local_rank()]
    labels = sequence.split(sequence.labels(tokens), group=group)
    count = parallel.global_token_count((labels != -100).sum(), meshes)
    logits = model(**local_inputs(tokens, sequence=sequence, group=group)).logits
    loss = loss_of(logits, labels) / count
    loss.backward()
    norm = parallel.clip_grad_norm_(model.parameters(), 1e9, meshes=meshes)
    dist.all_reduce(loss)

    # One rank: every document alone, with the model's own attention.
    documents = [document for row in rows for document in row.split(DOCUMENTS)]
    want = sum(loss_of(whole(d[None]).logits[:, :-1], d[1:]) for d in documents) / count
    want.backward()
    worst = 0.0
    for parameter, one in zip(model.parameters(), whole.parameters(), strict=True):
        part = one.grad[layout_of(parameter).shard.slices]
        off = (parameter.grad.to_local() - part).norm() / one.grad.norm()
        worst = max(worst, off.item())
    if dist.get_rank() == 0:
        print(plan.table(), sequence.table(), sep="\n\n")
        print(f"\nloss {loss.item():.6f}, gradient norm {norm.item():.6f}")
        print(f"off one rank: loss {abs(loss - want).item():.1e}, worst gradient {worst:.1e}")
    assert abs(loss - want) < 1e-12
    assert worst < 1e-12
    dist.barrier()  # Else a rank may abort at its end: Gloo drops the last tensors in a thread.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
