"""Ways to tell a model where a token stands; a part of a sequence model is handed one of them."""
