"""Kernels alone: no shape is checked here, and nothing of the package is imported."""
