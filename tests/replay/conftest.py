import pytest
import torch
from torch import nn

from primeblocks.replay import Routes
from primeblocks.replay.gates import chosen_softmax_gates, sigmoid_gates, softmax_gates
from primeblocks.testing import ranks, tiny_models

# Of `float64_model`.
TOP_K, HIDDEN, VOCABULARY = 2, 32, 32

ranks.preload("primeblocks.parallel", "transformers.models.gpt_oss.modeling_gpt_oss")


class ToyRouter(nn.Module):
    """A router in the dtype of its weight throughout; it is its own `replay.Router`."""

    num_experts = 6
    top_k = 2

    def __init__(self, kind: str, layer_id: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.layer_id = layer_id
        self.weight = nn.Parameter(torch.randn(self.num_experts, hidden, dtype=torch.float64))
        bias = torch.randn(self.num_experts, dtype=torch.float64)
        self.register_buffer("bias", bias)

    @property
    def module(self):
        return self

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        scores = logits.sigmoid() + self.bias if self.kind == "sigmoid" else logits
        ids = scores.topk(self.top_k).indices
        return logits, self.gates((logits,), ids), ids

    def experts(self, output):
        return output[2]

    def gates(self, output, experts):
        if self.kind == "sigmoid":
            return sigmoid_gates(output[0], experts, renormalise=True, scale=1.5)
        if self.kind == "chosen":
            return chosen_softmax_gates(output[0], experts)
        renormalise = self.kind == "renormalised"
        return softmax_gates(output[0], experts, renormalise=renormalise, dtype=torch.float64)

    def replace(self, output, experts, gates):
        return output[0], gates, experts


class ToyLayer(nn.Module):
    def __init__(self, kind: str, layer_id: int, hidden: int) -> None:
        super().__init__()
        self.gate = ToyRouter(kind, layer_id, hidden)
        shape = (self.gate.num_experts, hidden, hidden)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64) / hidden)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        _, gates, ids = self.gate(flat)
        mixed = torch.einsum("th,tkhj,tk->tj", flat, self.weight[ids], gates)
        return x + mixed.reshape(x.shape)


class ToyModel(nn.Module):
    """Float64 layers of routers and experts; `[batch, sequence, hidden]` in and out."""

    hidden = 5

    def __init__(self, kind: str = "softmax", layers: int = 3, checkpoint: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ToyLayer(kind, i, self.hidden) for i in range(layers))
        self.reentrant = checkpoint

    @property
    def routers(self):
        return [layer.gate for layer in self.layers]

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(scope="session")
def toy():
    return ToyModel


@pytest.fixture
def inputs():
    """Two sequences of four tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, ToyModel.hidden, dtype=torch.float64, generator=generator)


@pytest.fixture
def foreign():
    """Choices for eight tokens that no router of ours made, two of them missing."""

    def make(layers: int = 3, tokens: int = 8, seed: int = 2) -> Routes:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(tokens, layers, ToyRouter.num_experts, generator=generator)
        missing = torch.zeros(tokens, dtype=torch.bool)
        missing[[2, tokens - 1]] = True
        return Routes.from_array(
            draws.topk(ToyRouter.top_k).indices.numpy(),
            num_experts=ToyRouter.num_experts,
            layer_ids=range(layers),
            missing=missing.numpy(),
        )

    return make


def float64_model(family, *, checkpoint=None, num_layers, num_experts):
    """A tiny model of transformers in float64, in training."""
    model = tiny_models.build(
        family,
        dtype="float64",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=TOP_K,
        hidden=HIDDEN,
        vocab=VOCABULARY,
        init_std=0.3,
    ).train()
    model.set_experts_implementation("eager")  # The grouped kernel refuses float64.
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    return model
