import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.replay.sets import rows_with_duplicates


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_duplicates_are_found(top_k, seed):
    rows = np.random.default_rng(seed).integers(0, 20, (50, top_k)).astype(np.uint8)
    expected = [len(set(row)) < top_k for row in rows.tolist()]
    assert rows_with_duplicates(rows).tolist() == expected
