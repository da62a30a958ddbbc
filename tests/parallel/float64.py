"""Float64 throughout, where a model's own code says float32."""

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """transformers computes norms, scores and states in float32, whatever the model is."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **kwargs)


def _wide(argument):
    return torch.float64 if argument is torch.float32 else argument


class StableTopK(TorchFunctionMode):
    """An indexer of transformers takes any of equal scores; here it takes the earliest token."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.topk:
            return function(*args, **(kwargs or {}))
        scores, k = args
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], ids[..., :k]))
