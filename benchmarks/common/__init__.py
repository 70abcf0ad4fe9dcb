"""Helpers that several benchmarks share."""
