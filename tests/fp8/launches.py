"""Operations that a GPU would launch, and those for which a host would wait."""

from torch.utils._python_dispatch import TorchDispatchMode

_NO_LAUNCH = {"empty", "empty_strided", "new_empty", "new_empty_strided", "detach", "empty_like"}
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Names of operations in order, the bytes that copies write, and what a host would wait for.

    On the `meta` device a wait is an error besides: there are no values to read.
    """

    def __init__(self):
        super().__init__()
        self.names, self.waits, self.copied_bytes = [], [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in _WAITS:
            self.waits.append(name)
        if not function.is_view and name not in _NO_LAUNCH:
            self.names.append(name)
        if name in ("copy_", "clone", "_to_copy"):
            self.copied_bytes += out.nbytes
        return out
