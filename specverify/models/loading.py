"""A model, its tokenizer and its configurations from a folder or from the hub; every failure is one sentence.

Weights come from safetensors. A pickle can run code while it is read, so it is refused unless `allow_pickle=True`; code
that a model brings along is refused unless `trust_remote_code=True`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specverify.errors import PairError, UsageError
from specverify.model_files import folder_of, read_json_object, weight_files
from specverify.models.hub import require_hub, require_own_attention
from specverify.models.sharded import identity, sharding
from specverify.models.transformers import TransformersModel, require_working_rollback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from specverify.models.led import Processes

__all__ = [
    "DTYPES",
    "LoadedModel",
    "Pair",
    "folder_of",
    "load_model",
    "load_pair",
    "require_model",
    "resolve_device",
    "weight_files",
]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What `--dtype` names; whatever the files hold is converted."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
)
"""Any of these makes a tokenizer."""

_NO_MODEL = "{name} can't be loaded ({reason}); try it with AutoModelForCausalLM"
_NO_TOKENIZER = "the tokenizer of {name} can't be read ({reason}); copy or download its files again"
_DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class LoadedModel:
    """A model with everything that belongs to it."""

    model: TransformersModel
    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    generation_config: GenerationConfig | None
    source: str
    """Folder or hub name, as the user gave it."""


@dataclass(frozen=True)
class Pair:
    """What is rolled out together."""

    target: LoadedModel
    draft: LoadedModel | None


# ------------------------------------------------------------------------------------------------ the two entrances


def load_pair(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "float32",
    device_map: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    processes: Processes | None = None,
) -> Pair:
    """Load a target and, where there is one, a draft, in the same way; raises what `load_model` raises.

    The target lies over all `processes`, where there are some, and the draft is in the first alone.
    """

    def load(source: str | Path, *, sharded: bool = False) -> LoadedModel:
        return load_model(
            source,
            device=device,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            sharded=sharded,
        )

    whole = load(target) if processes is None else processes.loaded(partial(load, target, sharded=True), identity)
    return Pair(whole, None if draft is None else load(draft))


def load_model(
    source: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    device_map: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    sharded: bool = False,
) -> LoadedModel:
    """Load a folder or a hub name, in evaluation mode and without a word on the terminal.

    `sharded` loads this process's part alone, which `Processes.loaded` puts together with the others.

    Raises `PairError` for what is wrong with the files, `UnsupportedModel` for a model that can't be driven, and
    `UsageError` for a device or dtype that isn't there.

        loaded = load_model("models/target", dtype="bfloat16")
    """
    name = str(source)
    place = resolve_device(device)
    if dtype not in DTYPES:
        msg = f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}"
        raise UsageError(msg)
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        msg = "a device map needs the package accelerate (the extra device-map); install it, or load on one device"
        raise UsageError(msg)
    folder = _local_folder(source)
    if folder is not None:
        _require_files(folder, allow_pickle=allow_pickle)
    elif folder_of(name) is None:  # nor in the hub's cache
        require_hub(name)
    where = str(folder or source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with _quiet(), _one_sentence(name):
        config = AutoConfig.from_pretrained(where, **options)
        _require_causal(config, name, trust_remote_code=trust_remote_code)
        require_own_attention(config, name)
        with _one_sentence(name, _NO_TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
        module, info = cast("Any", AutoModelForCausalLM).from_pretrained(
            where,
            **options,
            config=config,
            dtype=DTYPES[dtype],
            **(sharding(config, name) if sharded else {"device_map": device_map}),
            use_safetensors=not allow_pickle or None,
            ignore_mismatched_sizes=True,  # they are refused with their names
            output_loading_info=True,
        )
        _require_all_weights(info, name)
        module = module if sharded or device_map is not None else module.to(place)
        return _assembled(module, tokenizer, name, whole=not sharded)


def require_model(source: str | Path) -> None:
    """Raise `PairError` for a folder that can't be a model, by its files alone; of a hub name nothing is known yet."""
    folder = _local_folder(source)
    if folder is not None:
        _require_files(folder, allow_pickle=False)


def _assembled(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *, whole: bool) -> LoadedModel:
    model = TransformersModel(module, name)
    if whole:
        require_working_rollback(model)
    return LoadedModel(model, tokenizer, module.config, getattr(module, "generation_config", None), name)


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one; raises `UsageError` for a device that isn't there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        msg = f"device {device!r} is unknown; use auto, cpu, cuda, or cuda:N"
        raise UsageError(msg) from error
    if place.type not in _DEVICES or (place.type == "cpu" and place.index):
        msg = f"device {device!r} can't be used here; use auto, cpu, cuda, or cuda:N"
        raise UsageError(msg)
    if place.type != "cpu" and not getattr(torch, place.type).is_available():
        msg = f"device {device!r} was asked for, but torch sees none; use --device cpu, or another torch build"
        raise UsageError(msg)
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        msg = f"device {device!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices, from 0 on"
        raise UsageError(msg)
    return place


# ------------------------------------------------------------------------------------------------ files


def _local_folder(source: str | Path) -> Path | None:
    """The folder that `source` names; None if it is a hub name."""
    if not str(source):
        msg = "the model's name is empty; give a folder or a hub name"
        raise PairError(msg)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        msg = f"{source} is a file; give the folder that holds config.json, the weights and the tokenizer"
        raise PairError(msg)
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
        msg = f"the model folder {str(source)!r} does not exist; check the path"
        raise PairError(msg)
    return None


def _require_files(folder: Path, *, allow_pickle: bool) -> None:
    if not (folder / "config.json").is_file():
        msg = f"{folder} has no config.json; give the folder that save_pretrained() wrote"
        raise PairError(msg)
    read_json_object(folder / "config.json")
    weights = weight_files(folder)
    if not weights:
        msg = f"{folder} has no weights (model.safetensors); copy them there, or download the model again"
        raise PairError(msg)
    for file in weights:
        if not file.is_file():
            msg = f"{folder} lacks the weight file {file.name} that its index names; download the model again"
            raise PairError(msg)
        if file.suffix == ".safetensors":
            _require_readable(file)
        elif not allow_pickle:
            msg = (
                f"{folder} has pickled weights only ({file.name}), which can run code when read; convert them with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) in a place that you trust"
            )
            raise PairError(msg)
    if not any((folder / name).is_file() for name in (*TOKENIZER_FILES, "tokenizer_config.json")):
        msg = f"{folder} has no tokenizer (tokenizer.json); save the tokenizer beside the weights"
        raise PairError(msg)


def _require_readable(file: Path) -> None:
    """The header of a safetensors file states its length, so a truncated file shows at once."""
    try:
        with safe_open(file, framework="pt"):
            return
    except (SafetensorError, OSError) as error:
        with file.open("rb") as opened:
            pointer = opened.read(40).startswith(b"version https://git-lfs")
        advice = "it is a Git LFS pointer: run git lfs pull" if pointer else "copy or download it again"
        msg = f"the weight file {file} is truncated or corrupt ({_first_line(error)}); {advice}"
        raise PairError(msg) from error


# ------------------------------------------------------------------------------------------------ what can go wrong


def _require_causal(config: PreTrainedConfig, name: str, *, trust_remote_code: bool) -> None:
    if type(config) in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - transformers has no public question for it
        return
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        if trust_remote_code:
            return
        msg = f"{name} brings its own code; read it, then pass --trust-remote-code (trust_remote_code=True) to run it"
        raise PairError(msg)
    kind = "an encoder-decoder" if config.is_encoder_decoder else "not a causal language model"
    msg = f"{name} is {kind} (model type {config.model_type}); give a decoder-only model such as Llama, Qwen3 or GPT-2"
    raise PairError(msg)


def _require_all_weights(info: Mapping[str, Any], name: str) -> None:
    """Transformers fills what a checkpoint lacks with random numbers; no certificate should be about those."""
    missing = sorted(info["missing_keys"])
    if missing:
        msg = f"{name} lacks {len(missing)} of its weights (the first is {missing[0]}); give a complete checkpoint"
        raise PairError(msg)
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    if mismatched:
        msg = f"{name} has weights of another shape than config.json says ({mismatched[0]}); give files that match"
        raise PairError(msg)


@contextlib.contextmanager
def _one_sentence(name: str, otherwise: str = _NO_MODEL) -> Iterator[None]:
    """Turn whatever transformers raises while it loads `name` into one sentence that says what to do."""
    try:
        yield
    except UsageError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        msg = f"{name} does not fit into memory; use --dtype bfloat16, another device, or a device map"
        raise PairError(msg) from error
    except Exception as error:
        raise PairError(_sentence(name, error, otherwise)) from error


def _sentence(name: str, error: Exception, otherwise: str) -> str:
    for holds, sentence in _CAUSES:
        if holds(str(error), type(error).__name__):
            return sentence.format(name=name, reason=_first_line(error))
    return otherwise.format(name=name, reason=f"{type(error).__name__}: {_first_line(error)}")


def _says(*words: str) -> Callable[[str, str], bool]:
    return lambda text, kind: any(word in text or word in kind for word in words)


_CAUSES: tuple[tuple[Callable[[str, str], bool], str], ...] = (
    (
        _says("trust_remote_code", "trust-remote-code"),
        "{name} brings its own code; read it, then pass --trust-remote-code (trust_remote_code=True) to run it",
    ),
    (
        _says("can't allocate memory", "not enough memory"),
        "{name} does not fit into memory; use --dtype bfloat16, or another device",
    ),
    (
        _says("does not recognize this architecture", "Should have a `model_type` key", "Unrecognized model"),
        "{name} has an architecture that transformers does not know; upgrade transformers, or check config.json",
    ),
    (
        _says("gated repo", "GatedRepo", "401 Client"),
        "{name} is gated on the hub; log in with `hf auth login` after you were granted access",
    ),
    (
        _says("is not a valid model identifier", "RepositoryNotFound", "Repo id must", "HFValidationError"),
        "{name} is neither a folder here nor a model on the hub; check the name",
    ),
    (
        _says(
            "couldn't connect",
            "offline mode",
            "LocalEntryNotFound",
            "ConnectionError",
            "ConnectError",
            "outgoing traffic",
        ),
        "{name} is not a folder here, and the hub can't be reached; give a local folder, or download it first",
    ),
    (
        _says("does not appear to have a file named model.safetensors", "no file named model.safetensors"),
        "{name} has no safetensors weights; convert them with save_pretrained() in a place that you trust",
    ),
    (
        _says("SafetensorError"),
        "the weights of {name} are truncated or corrupt ({reason}); copy or download them again",
    ),
    (
        _says("ImportError", "ModuleNotFoundError"),
        "{name} needs a package that is not installed ({reason}); install it",
    ),
)
"""What transformers says, and what the user should do; the first that fits."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings while a model is loaded; the user's settings come back afterwards."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")  # announces every retry
    level = hub.level
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
