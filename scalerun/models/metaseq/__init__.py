"""Checkpoints of metaseq, whose decoders are OPT models."""
