"""The files of a model folder, and their digests. Knows no torch: the gate runs where models are served, not loaded.

Names are relative to the folder and never leave it: an index or a link that points outside is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from specverify.errors import PairError
from specverify.watch import Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from specverify.watch import Watch

__all__ = ["file_digests", "folder_of", "model_files", "read_json_object", "weight_files", "within"]

_OTHER_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".py"})
_DECIDING_SUFFIXES = frozenset({".jinja", ".py"})
_TEMPLATES = "additional_chat_templates"
"""The one folder inside a model's of which every file decides what it says."""
_MOST_JSON_BYTES = 64 * 1024 * 1024  # the largest index or tokenizer of a known model has about a third of it
_BLOCK_BYTES = 4 * 1024 * 1024
_UNIT_BYTES = 1024 * 1024  # of progress
_THREADS = 4  # hashing lets go of the interpreter; more readers only make a disk seek


def folder_of(source: str) -> Path | None:
    """Where the files of a model lie: the folder itself, or the hub's snapshot in the local cache."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    with contextlib.suppress(Exception):  # whatever is wrong with the cache, the model itself is loaded
        from transformers.utils import cached_file  # noqa: PLC0415 - slow, and only a hub name needs it

        config = cached_file(source, "config.json", local_files_only=True)
        return Path(config).parent if config else None
    return None


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights are read from, sorted by name: safetensors if there are any, otherwise pickles.

    Raises `PairError` for an index that names a file outside the folder.
    """
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            shards = read_json_object(folder / index).get("weight_map", {})
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                msg = f"{folder / index} has no weight_map from tensors to files; copy or download it again"
                raise PairError(msg)
            return [within(folder, shard, source=str(folder / index)) for shard in sorted(set(shards.values()))]
    return []


def within(folder: Path, name: str, *, source: str) -> Path:
    """The file of that name in the folder; raises `PairError` where the name leads out of it."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\x00" in name or ":" in parts[0]:
        msg = f"{source} names the file {name!r:.80}, which is not inside its folder; do not use it"
        raise PairError(msg)
    return folder / name


def model_files(folder: Path) -> list[Path]:
    """Weights, the small files beside them, and further templates; weights in another format are not what is loaded."""
    try:
        others = [file for file in folder.iterdir() if file.is_file() and file.suffix in _OTHER_SUFFIXES]
        others += [file for inner in _inner_folders(folder) for file in _deciding(inner)]
    except OSError as error:
        msg = f"the model folder {folder} can't be read: {(error.strerror or str(error)).lower()}"
        raise PairError(msg) from error
    return sorted({*weight_files(folder), *others})


def _inner_folders(folder: Path) -> Iterator[Path]:
    """Those of a model's folder, and theirs, but for links and for what a tool hides there."""
    left = [folder]
    while left:  # no recursion: they may lie a thousand deep
        for each in left.pop().iterdir():
            if each.is_dir() and not each.is_symlink() and not each.name.startswith((".", "__")):
                yield each
                left.append(each)


def _deciding(inner: Path) -> list[Path]:
    """Code that a model brings along (`custom_generate/generate.py`), and templates; what else lies there isn't loaded."""
    whole = inner.name == _TEMPLATES
    return [file for file in inner.iterdir() if file.is_file() and (whole or file.suffix in _DECIDING_SUFFIXES)]


def file_digests(
    folder: Path, files: Iterable[Path], *, watch: Watch | None = None, stage: str = "hashing"
) -> dict[str, str]:
    """File name to sha-256, each file read once in blocks, some side by side. Progress is in MiB.

    Raises `PairError` for a file that can't be read.
    """
    watch = Silent() if watch is None else watch
    files = list(files)
    sizes = {file: file.stat().st_size for file in files if file.is_file()}
    watch.stage(stage, sum(size // _UNIT_BYTES for size in sizes.values()))
    pool = ThreadPoolExecutor(_THREADS)
    try:
        futures = {file: pool.submit(_sha256, file, watch) for file in sorted(files, key=lambda f: -sizes.get(f, 0))}
        digests = {file.relative_to(folder).as_posix(): futures[file].result() for file in files}
    except BaseException as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()
    return digests


def _sha256(file: Path, watch: Watch) -> str:
    digest, read, told = hashlib.sha256(), 0, 0
    try:
        with file.open("rb", buffering=0) as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
                read += len(block)
                if (units := read // _UNIT_BYTES) > told:
                    watch.advance(units - told)
                    told = units
    except OSError as error:
        msg = (
            f"the model file {file} can't be read: {(error.strerror or str(error)).lower()}; copy or download it again"
        )
        raise PairError(msg) from error
    return digest.hexdigest()


def read_json_object(file: Path) -> dict[str, Any]:
    """A small JSON file of a model folder; raises `PairError` for anything else, however large or deep."""
    try:
        if file.stat().st_size > _MOST_JSON_BYTES:
            msg = f"{file} is larger than {_MOST_JSON_BYTES // 2**20} MiB, which no configuration is; download it again"
            raise PairError(msg)
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0].rstrip(".")
        msg = f"{file} is not valid JSON ({reason}); copy or download it again"
        raise PairError(msg) from error
    except OSError as error:
        msg = f"{file} can't be read: {(error.strerror or str(error)).lower()}; copy or download it again"
        raise PairError(msg) from error
    if not isinstance(value, dict):
        msg = f"{file} does not hold a JSON object; copy or download it again"
        raise PairError(msg)
    return value


def weights_digest(digests: Mapping[str, str], names: Iterable[str]) -> str:
    """One digest of all weight files, by name and content."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {digests[name]}\n".encode())
    return digest.hexdigest()
