"""The bodies of requests, each validated once from its bytes, and the shapes of the answers."""
