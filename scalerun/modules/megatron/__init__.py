"""Layers whose products are shared by the ranks of a mesh axis (tensor parallelism)."""
