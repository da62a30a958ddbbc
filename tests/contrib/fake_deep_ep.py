"""A FAKE of deep_ep, for gloo and CPU tensors. It is not DeepEP and says nothing about DeepEP.

It implements what the adapter relies on, as DeepEP 2.1 and 1.2.1 document and check it: names and
order of arguments and results, dtypes, contiguity, one row a token for each rank that owns a
chosen expert, local ids with -1 for choices elsewhere, handles, sums without weights. It is
stricter than the real one: a handle of another buffer is refused, scores of choices elsewhere are
NaN, and rows arrive in a random order where DeepEP promises none.
"""

import torch
import torch.distributed as dist

__version__ = "0.0 (FAKE)"
topk_idx_t = torch.int64

# DeepEP sums bfloat16 and carries float32 weights. Exactness is tested in float64.
ROWS, WEIGHTS = torch.bfloat16, torch.float32


def _check(x, dtype, *dims):
    assert isinstance(x, torch.Tensor)
    assert x.dtype == dtype, f"{x.dtype} where DeepEP takes {dtype}"
    assert x.ndim == len(dims), f"{x.ndim} dims"
    assert x.is_contiguous()
    assert all(want in (None, got) for got, want in zip(x.shape, dims, strict=True)), (
        x.shape,
        dims,
    )
    assert not torch.is_grad_enabled(), "DeepEP records no gradients"


def _check_rows(x, rows=None):
    _check(x, ROWS, rows, None)
    assert x.shape[1] * x.element_size() % 16 == 0
    assert x.isfinite().all(), "a row that nobody wrote was sent"


def _trade(x, send, receive, group):
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class _Layout:
    """Which tokens went where; both handles hold one."""

    def __init__(self, owner, ids, num_experts, group, shuffle):
        ranks, rank = group.size(), group.rank()
        assert num_experts % ranks == 0
        self.owner, self.ids, self.group = owner, ids, group
        share = num_experts // ranks
        self.rank_of = torch.where(ids >= 0, ids // share, -1)
        assert int(self.rank_of.max()) < ranks
        chosen = [(self.rank_of == r).any(1).nonzero().squeeze(1) for r in range(ranks)]
        self.tokens = torch.cat(chosen)
        self.send = [len(tokens) for tokens in chosen]
        counts = torch.tensor(self.send)
        self.receive = _trade(counts, [1] * ranks, [1] * ranks, group).tolist()
        total = sum(self.receive)
        self.order = torch.randperm(total) if shuffle else torch.arange(total)
        local = self.there(ids) - rank * share
        self.local = local.where((local >= 0) & (local < share), -1)
        self.counts = [int((self.local == expert).sum()) for expert in range(share)]

    def there(self, x):
        return _trade(x[self.tokens], self.send, self.receive, self.group)[self.order]

    def back(self, x):
        """By rank, then token."""
        arrived = torch.empty_like(x)
        arrived[self.order] = x
        return _trade(arrived, self.receive, self.send, self.group)

    def weights_there(self, weights):
        return self.there(weights).masked_fill(self.local < 0, float("nan"))

    def sum_back(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        out = torch.zeros(len(self.ids), x.shape[1], dtype=wide)
        return out.index_add(0, self.tokens, self.back(x).to(wide)).to(x.dtype)


class _Destroyable:
    def _init(self, group, explicitly_destroy):
        self.group, self.explicitly_destroy, self.alive = group, explicitly_destroy, True
        dist.barrier(group)

    def destroy(self):
        assert self.explicitly_destroy
        assert self.alive
        self.alive = False
        dist.barrier(self.group)


class EPHandle:
    """FAKE."""

    def __init__(self, num_sms, num_recv_tokens_per_expert_list, _layout=None):
        self.num_sms = num_sms
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self._layout = _layout


class ElasticBuffer(_Destroyable):
    """FAKE."""

    def __init__(
        self,
        group,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        deterministic=False,
        explicitly_destroy=False,
    ):
        self._init(group, explicitly_destroy)
        self.room = num_max_tokens_per_rank, hidden, num_topk
        self.deterministic = deterministic

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, num_experts=None, num_sms=0, handle=None
    ):
        assert self.alive
        _check_rows(x)
        tokens, hidden, top_k = self.room
        assert 1 <= x.shape[0] <= tokens, "no tokens, or more than the buffer holds"
        assert x.shape[1] <= hidden
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert num_sms == handle.num_sms != 0, "num_sms=0 is worked out from num_experts=None"
            layout = handle._layout
            assert layout.owner is self, "a handle of another buffer"
            assert len(x) == len(layout.ids)
            return layout.there(x), layout.local, None, handle, None
        _check(topk_idx, topk_idx_t, len(x), None)
        _check(topk_weights, WEIGHTS, *topk_idx.shape)
        assert topk_idx.shape[1] <= top_k
        ids = topk_idx.sort(1).values
        assert not ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(), "an expert twice: traps"
        layout = _Layout(self, topk_idx.clone(), num_experts, self.group, not self.deterministic)
        handle = EPHandle(num_sms or 24, layout.counts, layout)
        weights = layout.weights_there(topk_weights)
        return layout.there(x), layout.local.clone(), weights, handle, None

    def combine(self, x, handle, topk_weights=None):
        assert self.alive
        layout = handle._layout
        assert layout.owner is self, "a handle of another buffer"
        _check_rows(x, len(layout.local))
        out = layout.sum_back(x)
        if topk_weights is None:
            return out, None, None
        _check(topk_weights, WEIGHTS, *layout.local.shape)
        # The weight of a choice is read from the rank that owns its expert.
        arrived = layout.back(topk_weights)
        sender = torch.arange(len(layout.send)).repeat_interleave(torch.tensor(layout.send))
        mine = layout.rank_of[layout.tokens] == sender.unsqueeze(1)
        kept = torch.zeros(layout.ids.shape, dtype=arrived.dtype)
        kept.index_add_(0, layout.tokens, arrived.masked_fill(~mine, 0))
        return out, kept, None


class Config:
    """FAKE."""

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 128 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer(_Destroyable):
    """FAKE."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        self._init(group, explicitly_destroy)
        assert num_nvl_bytes % 128 == 0
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert self.alive
        _check(topk_idx, torch.int64, None, None)
        share = num_experts // self.group.size()
        rank_of = torch.where(topk_idx >= 0, topk_idx // share, -1)
        every = torch.arange(self.group.size())
        in_rank = (rank_of.unsqueeze(2) == every).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0).int(), None, per_expert.int(), in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        config=None,
    ):
        assert self.alive
        _check_rows(x)
        assert len(x) >= 1, "no tokens"
        assert self.num_nvl_bytes >= config.get_nvl_buffer_size_hint(
            x.shape[1] * x.element_size(), self.group.size()
        )
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            layout, known = handle
            assert layout.owner is self, "a handle of another buffer"
            assert known is config, "a handle fits the setting it was made with"
            assert len(x) == len(layout.ids)
            return layout.there(x), None, None, None, None, None
        _check(topk_idx, torch.int64, len(x), None)
        _check(topk_weights, WEIGHTS, *topk_idx.shape)
        _check(num_tokens_per_rank, torch.int32, self.group.size())
        _check(num_tokens_per_expert, torch.int32, None)
        _check(is_token_in_rank, torch.bool, len(x), self.group.size())
        assert num_tokens_per_rdma_rank is None, "one node"
        num_experts = len(num_tokens_per_expert)
        layout = _Layout(self, topk_idx.clone(), num_experts, self.group, shuffle=True)
        assert torch.equal(num_tokens_per_rank.long(), torch.tensor(layout.send))
        weights = layout.weights_there(topk_weights)
        handle = layout, config
        return layout.there(x), layout.local.clone(), weights, layout.counts, handle, None

    def combine(self, x, handle, topk_weights=None, config=None):
        assert self.alive
        assert isinstance(config, Config)
        layout, _ = handle
        assert layout.owner is self, "a handle of another buffer"
        _check_rows(x, len(layout.local))
        if topk_weights is None:
            return layout.sum_back(x), None, None
        _check(topk_weights, WEIGHTS, *layout.local.shape)
        return layout.sum_back(x), layout.sum_back(topk_weights), None
