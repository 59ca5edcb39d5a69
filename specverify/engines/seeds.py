"""Seeds of single samples, for engines that take few bits."""

from __future__ import annotations

import hashlib

__all__ = ["seed32"]


def seed32(seed: int, sample: int) -> int:
    """32 bits of a hash, as neighbouring seeds are not to be trusted; the largest, llama.cpp's word for "any", is left out.

    >>> seed32(1, 0) != seed32(1, 1)
    True
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**32 - 1)
