"""Requests that begin alike share KV-cache blocks: which ones a request finds, and when its own can be found.

A full block is known by a digest over the digest of the block before it and its own token ids; the chain begins with
the request's cache salt and a secret of this process. So equal digests mean the same salt and the same tokens from the
first one on, and nobody can work out a collision beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import blake2b

from engine.blocks import BlockPool
from engine.request import Request

DIGEST_BYTES = 16
TOKEN_BYTES = 4  # token ids are hashed as `<i4`


class PrefixCache:
    """Owner: the loop thread; `chain` alone may be called from any.

    A request's blocks are published as far as its tokens are committed and their keys and values written: never what is
    in flight, never surplus tokens (rule 11).
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self.queries = 0  # tokens of requests that looked for a prefix, each at its first admission
        self.hits = 0  # of these, tokens found
        self._pool = pool
        self._enabled = enabled
        self._secret = os.urandom(DIGEST_BYTES)

    def chain(self, salt: str, tokens: bytes) -> list[bytes]:
        """Digests of the salt and then of each full block of `tokens`, `<i4`. About a microsecond a block, which is
        why it is not done on the loop's thread."""
        if not self._enabled:
            return []
        digests = [blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=self._secret).digest()]
        size = self._pool.block_size * TOKEN_BYTES
        for start in range(0, len(tokens) - size + 1, size):
            digests.append(_link(digests[-1], tokens[start : start + size]))
        return digests

    def find(self, request: Request) -> list[int]:
        """Blocks of its beginning that are published. Its last token is never among them, for somebody must compute
        what follows; a prompt that is scored needs the logits of all its tokens, and finds nothing."""
        if not self._reads(request):
            return []
        usable = (request.total - 1) // self._pool.block_size
        self._extend(request, usable)
        return self._pool.find(request.chain[1 : usable + 1])

    def start(self, request: Request) -> list[int]:
        """The same for a request that starts now: it holds the blocks from now on."""
        found = self.find(request)
        self._pool.share(found)
        tokens = len(found) * self._pool.block_size
        if request.cached_tokens is None:
            request.cached_tokens = min(tokens, len(request.prompt))
            if self._reads(request):
                self.queries += request.total
                self.hits += tokens
        return found

    def publish(self, request: Request) -> None:
        """Publishes what it has computed since it was called last."""
        full = request.computed // self._pool.block_size
        if not self._enabled or full <= request.published:
            return
        self._extend(request, full)
        for index in range(request.published, full):
            self._pool.publish(request.blocks[index], request.chain[index + 1])
        request.published = full

    def awaits(self, request: Request, running: Iterable[Request]) -> bool:
        """A running request computes at least half of what this one would have to: it had better wait for that.

        The n requests of one prompt, and prompts with a long beginning in common, arrive together.
        """
        found = len(self.find(request))
        usable = (request.total - 1) // self._pool.block_size
        half = (found + usable + 1) // 2
        if not self._reads(request) or half <= found:
            return False
        digest = request.chain[half]
        return any(other.published < half < len(other.chain) and other.chain[half] == digest for other in running)

    def _reads(self, request: Request) -> bool:
        return self._enabled and request.params.prompt_logprobs is None

    def _extend(self, request: Request, blocks: int) -> None:
        """Sees to the digests of its first `blocks` blocks; all their tokens are committed."""
        size = self._pool.block_size
        for index in range(len(request.chain) - 1, blocks):
            tokens = request.tokens(index * size, (index + 1) * size)
            request.chain.append(_link(request.chain[-1], tokens.astype("<i4").tobytes()))


def _link(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()
