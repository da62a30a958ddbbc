"""Models of Hugging Face transformers over many ranks.

Experts run through transformers' registry of experts implementations (`ExpertsInterface`).
Attention over split sequences runs through transformers' registry of attention functions
(`AttentionInterface`). Recurrent layers have no registry, so the adapter replaces the forward of
each recurrent module. The adapter recognises recurrent modules by the names of their classes.
"""

from ....errors import needs

with needs("transformers", extra="transformers"):
    import transformers as _installed

from .checkpoint import load_pretrained
from .checkpoint_save import save_pretrained
from .indexed import IndexedAttention
from .parallelize import FAMILIES, local_inputs, parallelize

__all__ = [
    "FAMILIES",
    "IndexedAttention",
    "load_pretrained",
    "local_inputs",
    "parallelize",
    "save_pretrained",
]

del _installed
