"""Mixtures of experts: which expert sees which token, and the experts themselves."""
