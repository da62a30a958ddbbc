"""Pages of tests, each known by a number: its hash, its routes, its key."""

ROWS = 24  # bytes of the routes of a page


def hash_of(number):
    return bytes([number]) * 32


def routes_of(number):
    return bytes([number + 100]) * ROWS


def keys_of(numbers):
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(hash_of(number), 0) for number in numbers]
