"""Models of the transformers library, for scalerun's, and the way there."""
