"""Sentences with their translations."""
