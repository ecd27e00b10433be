"""Attention over the paged KV cache: one protocol, several backends, and the hook through which models call them."""
