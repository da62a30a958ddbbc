"""Benchmarks on a real vLLM: they need it installed, and start engines of their own."""
