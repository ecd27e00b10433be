"""Models: preparing, loading, attention over the paged cache, linear layers."""
