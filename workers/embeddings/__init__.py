"""Embeddings in shared memory, and what vLLM's connector needs of them."""
