"""specverify: does speculative decoding change what a model says, and may this pair go out?"""

from __future__ import annotations

__version__ = "0.1.0"
