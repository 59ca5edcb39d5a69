"""llama.cpp's own HTTP server in a process of its own: `python -m specverify.engines.llamacpp_server SETTINGS`.

`SETTINGS` is one JSON object, see `ServerSettings`. It serves until its standard input closes or it is told to end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["NGRAMS", "ServerSettings", "main"]

NGRAMS = {"simple": "NGRAM_SIMPLE", "map-k": "NGRAM_MAP_K", "map-k4v": "NGRAM_MAP_K4V", "cache": "NGRAM_CACHE"}
"""llama.cpp's kinds of drafting from the text itself, by the names of the option `ngram`."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server is made from; everything else is llama.cpp's default."""

    port: int
    target: str
    draft: str = ""
    num_speculative_tokens: int = 0
    """0 serves the target alone."""
    probabilistic: bool = False
    """Accept with min(1, p/q) and draw from the residual; otherwise draw from the target, and accept if it is the draft."""
    synthetic_length: float = 0.0
    """Mean number of tokens that a step is made to accept, whatever the target says; 0 doesn't."""
    ngram: str = ""
    """One of `NGRAMS`: drafts from the text itself."""
    slots: int = 4
    slot_length: int = 256
    threads: int = 1
    kv_cache: str = "f32"
    """`f32` without flash attention, which computes in half precision: logits agree with float64 to 3e-6. `f16` is
    llama.cpp's default: 5e-3."""

    @classmethod
    def read(cls, text: str) -> ServerSettings:
        """From what `write` wrote."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self))


def main(text: str) -> None:
    """Serve until standard input closes."""
    import xllamacpp as llama  # noqa: PLC0415 - an optional extra, in a process of its own

    settings = ServerSettings.read(text)
    server = llama.Server(_parameters(llama, settings))
    sys.stdout.write(f"llama.cpp listens on {server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # its threads have no other end


def _parameters(llama: Any, settings: ServerSettings) -> Any:  # noqa: ANN401 - xllamacpp is untyped
    kinds = llama.ggml_type
    cache = {"f32": kinds.GGML_TYPE_F32, "f16": kinds.GGML_TYPE_F16}[settings.kv_cache]
    params = llama.CommonParams()
    params.hostnames = ["127.0.0.1"]
    params.port = settings.port
    params.model.path = settings.target
    params.n_parallel = settings.slots
    params.n_ctx = settings.slots * settings.slot_length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.cache_type_k = params.cache_type_v = cache
    if settings.kv_cache == "f32":
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_ram_mib = 0
    params.endpoint_metrics = True
    params.fit_params = False
    if settings.num_speculative_tokens:
        _speculate(llama, params.speculative, settings)
        draft = params.speculative.draft
        draft.cache_type_k = draft.cache_type_v = cache
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings.threads
    return params


def _speculate(llama: Any, speculative: Any, settings: ServerSettings) -> None:  # noqa: ANN401 - as above
    kind = NGRAMS[settings.ngram] if settings.ngram else "DRAFT_SIMPLE"
    speculative.types = [getattr(llama.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    speculative.draft.n_max = settings.num_speculative_tokens
    speculative.draft.probabilistic = settings.probabilistic
    if settings.synthetic_length:
        speculative.synth_len = settings.synthetic_length
    if settings.ngram:
        for part in (speculative.ngram_simple, speculative.ngram_map_k, speculative.ngram_map_k4v):
            part.size_n, part.size_m, part.min_hits = 1, settings.num_speculative_tokens, 1
    else:
        speculative.draft.mparams.path = settings.draft


if __name__ == "__main__":
    main(sys.argv[1])
