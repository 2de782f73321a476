"""Saving and loading runs."""
