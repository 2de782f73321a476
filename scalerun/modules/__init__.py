"""Parts of a model: each takes plain typed arguments, never a configuration object."""
