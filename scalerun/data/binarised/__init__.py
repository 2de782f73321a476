"""Text that was turned into rows of token ids before training."""
