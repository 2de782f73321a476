"""Modules that plug scalerun into a side-by-side harness."""
