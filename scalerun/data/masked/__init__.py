"""Sequences with tokens hidden, for masked language models."""
