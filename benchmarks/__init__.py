"""Benchmarks, one file a block: `python -m benchmarks.<block> --json FILE`."""
