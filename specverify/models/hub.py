"""The hub: whether it can be reached, asked once, before its own client tries again and again; and what is not fetched from it."""

from __future__ import annotations

import socket
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub.constants

from specverify.errors import PairError
from specverify.redaction import is_address

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["require_hub", "require_own_attention"]

_TIMEOUT_S = 3.0


def require_hub(name: str) -> None:
    """Raise `PairError` within seconds where the hub can't be reached, which its own client tries for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE or getproxies():  # the client knows at once, or goes another way
        return
    if not is_address(huggingface_hub.constants.ENDPOINT):
        msg = f"{name} is not a folder here, and HF_ENDPOINT is no address of a hub; mend it, or give a local folder"
        raise PairError(msg)
    hub = urlsplit(huggingface_hub.constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=_TIMEOUT_S).close()
    except OSError as error:
        folders = [str(each) for each in Path(name).parent.iterdir()] if Path(name).parent.is_dir() else []
        near = get_close_matches(name, folders, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        msg = f"{name} is not a folder here{hint}, and the hub can't be reached; give a local folder, or download it first"
        raise PairError(msg) from error


def require_own_attention(config: PreTrainedConfig, name: str) -> None:
    """Raise `PairError` for a configuration that names a kernel of the hub, which is code that would be fetched and run."""
    for key in ("_attn_implementation", "_experts_implementation"):
        if "/" in str(getattr(config, key, None) or ""):
            msg = f"config.json of {name} asks for code from the hub ({key} is {getattr(config, key)!r:.80}); take that key out"
            raise PairError(msg)
