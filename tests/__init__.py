"""Tests, by block."""
