"""llama.cpp's own HTTP server, started here through `xllamacpp`: one with speculation and, where it is asked for, one without.

Modes: `greedy-draft` draws each token from the target and accepts a draft that equals it; `probabilistic` accepts with
min(1, p/q) and draws from the residual; `ngram` drafts from the text itself; `synthetic` accepts so many drafts whatever
the target says, which is wrong on purpose: a positive control that somebody else made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specverify.engines.dialect import DIALECTS
from specverify.engines.http_engine import Endpoint, HttpEngine, make_client
from specverify.engines.llamacpp_server import NGRAMS, ServerSettings
from specverify.engines.options import Options, json_object
from specverify.engines.server import LOOPBACK, free_port, log_folder, serving, starts_of
from specverify.errors import PairError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from specverify.engines import EngineSettings
    from specverify.engines.server import Server

__all__ = ["MODES", "opened"]

MODES = ("greedy-draft", "probabilistic", "synthetic", "ngram")
_OPTIONS = Options(
    engine="llamacpp",
    defaults={
        "mode": "probabilistic",
        "ngram": "simple",
        "synthetic_length": "2",
        "target_gguf": "",
        "draft_gguf": "",
        "threads": "1",
        "kv_cache": "f32",
        "slots": "",
        "timeout_s": "120",
        "start_timeout_s": "120",
        "logprobs": "yes",
        "extra": "",
        "log_dir": "",
    },
    choices={"mode": MODES, "ngram": tuple(NGRAMS), "kv_cache": ("f32", "f16"), "logprobs": ("yes", "no")},
    counts=frozenset({"threads", "slots"}),
    numbers=frozenset({"timeout_s", "start_timeout_s", "synthetic_length"}),
)
"""`slots` is how many requests the server takes at a time, `max_batch_size` unless fewer should wait; `extra` is a JSON object
that goes into every call, as `{"cache_prompt": false}`."""


@contextlib.contextmanager
def opened(settings: EngineSettings, *, say: Callable[[str], None] = lambda _: None) -> Iterator[HttpEngine]:
    """Start both servers; a request's `speculation` chooses between them.

    The weights are `target.gguf` and `draft.gguf` beside or inside the folders of the settings, or the options `target_gguf` and
    `draft_gguf`. Raises `PlanError` for an option that isn't one, `PairError` for a missing file.

        with opened(EngineSettings(target=pair.target, draft=pair.draft, options=(("mode", "synthetic"),))) as engine: ...
    """
    options = _OPTIONS.read(settings.options)
    extra = json_object(options["extra"], "extra")
    if importlib.util.find_spec("xllamacpp") is None:
        msg = "the engine llamacpp needs the package xllamacpp; install specverify-decoding[llamacpp]"
        raise UsageError(msg)
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(log_folder(options["log_dir"]))
        arms = {}
        for arm in ("on", "off"):
            server = _server_settings(settings, options, free_port(), speculate=arm == "on")
            arms[arm] = stack.enter_context(_endpoint(server, options, logs, arm, say))
        yield HttpEngine(
            dialect=DIALECTS["llamacpp"],
            on=arms["on"],
            off=arms["off"],
            name=f"llama.cpp, {options['mode']}",
            model_eos_ids=frozenset(settings.eos_token_ids),
            concurrency=settings.max_batch_size,
            logprobs=options["logprobs"] == "yes",
            extra=extra,
        )


@contextlib.contextmanager
def _endpoint(
    server: ServerSettings, options: Mapping[str, str], logs: Path, arm: str, say: Callable[[str], None]
) -> Iterator[Endpoint]:
    url = f"http://{LOOPBACK}:{server.port}"
    # -P: this package, not one of the folder that we stand in
    command = [sys.executable, "-P", "-m", "specverify.engines.llamacpp_server", server.write()]

    def serve(number: int) -> contextlib.AbstractContextManager[Server]:
        return serving(
            command, port=server.port, health_url=f"{url}/health", say=say, name=f"llama.cpp ({arm})",
            log_path=logs / f"llamacpp-{arm}{f'-{number}' if number > 1 else ''}.log",
            timeout_s=float(options["start_timeout_s"]), environment={"PYTHONPATH": _import_path()},
        )  # fmt: skip

    with contextlib.ExitStack() as stack:
        start = starts_of(stack, serve)
        process = start()
        client = stack.enter_context(make_client(url, timeout_s=float(options["timeout_s"])))
        yield Endpoint(client=client, url=url, server=process, start_again=start)


def _import_path() -> str:
    """Where the child finds this package, which needn't be installed, before whatever we were given."""
    ours = Path(__file__).parents[2]
    return os.pathsep.join(filter(None, (str(ours), os.environ.get("PYTHONPATH", ""))))


def _server_settings(
    settings: EngineSettings, options: Mapping[str, str], port: int, *, speculate: bool
) -> ServerSettings:
    mode = options["mode"]
    drafts = speculate and mode != "ngram"
    return ServerSettings(
        port=port,
        target=_gguf(options["target_gguf"], settings.target, "target"),
        draft=_gguf(options["draft_gguf"], settings.draft, "draft") if drafts else "",
        num_speculative_tokens=settings.num_speculative_tokens if speculate else 0,
        probabilistic=mode == "probabilistic",
        synthetic_length=float(options["synthetic_length"]) if mode == "synthetic" else 0.0,
        ngram=options["ngram"] if speculate and mode == "ngram" else "",
        slots=int(options["slots"] or settings.max_batch_size),
        slot_length=settings.max_length,
        threads=int(options["threads"]),
        kv_cache=options["kv_cache"],
    )


def _gguf(option: str, folder: Path | None, role: str) -> str:
    """The file of an option, or the one beside a folder, or the only one in it."""
    if option:
        candidates = [Path(option)]
    elif folder is None:
        msg = f"llama.cpp needs a {role}: give its folder, or the option {role}_gguf"
        raise PairError(msg)
    else:
        candidates = [folder] if folder.suffix == ".gguf" else [folder.with_name(f"{folder.name}.gguf")]
        inside = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        candidates += inside if len(inside) == 1 else []
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        msg = f"llama.cpp needs the {role} as GGUF, and {candidates[0]} isn't there; give the option {role}_gguf"
        raise PairError(msg)
    return str(found)
