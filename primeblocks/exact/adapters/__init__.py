"""Engines that run a model inside of `batch_invariant()`, one file per package."""
