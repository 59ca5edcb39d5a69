"""sha-256 digests of everything that decides what a model says, each for one question: what changed?

Digests are taken from files where there are files, so that they stay the same when only a library was upgraded. Names
of folders, and keys that record a path or a version, don't take part: a copied folder has the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from specverify.model_files import file_digests, folder_of, model_files, read_json_object, weight_files, weights_digest
from specverify.models.loading import TOKENIZER_FILES
from specverify.records import ModelFingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from specverify.models.loading import LoadedModel

__all__ = ["fingerprint"]

_IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "is_local",
        "local_files_only",
        "use_cache",
    }
)
"""Keys that record where a file came from or which library wrote it, not what the model says."""

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def fingerprint(loaded: LoadedModel) -> ModelFingerprint:
    """The digests of a loaded model; reads each file once, in blocks.

    fingerprint(load_model("models/target")).weights_sha256
    """
    folder = folder_of(loaded.source)
    weights = weight_files(folder) if folder is not None else []
    files = file_digests(folder, model_files(folder)) if folder is not None else {}
    model, module = loaded.model, getattr(loaded.model, "module", None)
    if folder is not None and weights:
        weights_sha256 = weights_digest(files, [file.relative_to(folder).as_posix() for file in weights])
    else:  # a model that is not here has no digest
        weights_sha256 = _tensors_sha256(module.state_dict()) if module is not None else ""
    return ModelFingerprint(
        name=loaded.source,
        architecture=type(module).__name__ if module is not None else (loaded.config.architectures or ["unknown"])[0],
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        weights_sha256=weights_sha256,
        tokenizer_sha256=_tokenizer_sha256(loaded, folder),
        template_sha256=_json_sha256(getattr(loaded.tokenizer, "chat_template", None)),
        config_sha256=_config_sha256(loaded, folder),
        files=files,
    )


def _tokenizer_sha256(loaded: LoadedModel, folder: Path | None) -> str:
    """Over the tokenizer's files; over the backend's own serialisation if there are none."""
    names = [name for name in TOKENIZER_FILES if folder is not None and (folder / name).is_file()]
    if folder is not None and names:
        present = [name for name in (*names, *_TOKENIZER_SETTINGS) if (folder / name).is_file()]
        return _json_sha256({name: _tokenizer_file(folder / name) for name in present})
    backend = getattr(loaded.tokenizer, "backend_tokenizer", None)
    serialised: object = json.loads(backend.to_str()) if backend is not None else loaded.tokenizer.get_vocab()
    return _json_sha256(
        [_without_state(serialised), {key: str(v) for key, v in loaded.tokenizer.special_tokens_map.items()}]
    )


def _tokenizer_file(file: Path) -> object:
    if file.suffix != ".json":
        return _file_sha256(file)
    return _without_state(read_json_object(file))


def _without_state(value: object) -> object:
    """Padding and truncation are set by whoever called the tokenizer last; the template has its own digest."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key not in {"padding", "truncation", "chat_template"}}


def _config_sha256(loaded: LoadedModel, folder: Path | None) -> str:
    """Over config.json and generation_config.json; over the objects if there are none."""
    if folder is not None:
        names = ("config.json", "generation_config.json")
        return _json_sha256({n: read_json_object(folder / n) for n in names if (folder / n).is_file()})
    generation = loaded.generation_config
    return _json_sha256([loaded.config.to_diff_dict(), None if generation is None else generation.to_diff_dict()])


def _json_sha256(value: object) -> str:
    canonical = json.dumps(_stripped(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return _sha256([canonical.encode()])


def _stripped(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {str(key): _stripped(item) for key, item in value.items() if key not in _IGNORED_KEYS}
    return [_stripped(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Over name, dtype, shape and bytes of each tensor, sorted by name."""

    def parts() -> Iterable[bytes | memoryview]:
        for name, tensor in sorted(tensors.items()):
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()
            yield tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data

    return _sha256(parts())


def _file_sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sha256(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
