"""Tokenizers: text to ids and back, and the vocabularies behind them."""
