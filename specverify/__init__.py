"""specverify: does speculative decoding change what a model says, and may this pair go out?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specverify.door import certify_pair

__all__ = ["__version__", "certify_pair"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - what a module holds
    """`certify_pair`, imported when it is asked for: it brings torch along."""
    if name == "certify_pair":
        from specverify.door import certify_pair  # noqa: PLC0415 - as said

        return certify_pair
    msg = f"module 'specverify' has no attribute {name!r}"
    raise AttributeError(msg)
