"""The weights layer, captured: a digest of each tensor of the files, a sketch of its values, and the configuration.

Files, not the loaded model: so dtype, device and library change nothing here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from specverify.golden.records import TensorFacts, WeightsFacts
from specverify.models.fingerprint import fingerprint
from specverify.models.loading import folder_of, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float, Shaped
    from numpy import ndarray
    from torch import Tensor

    from specverify.models.loading import LoadedModel
    from specverify.records import ModelFingerprint

__all__ = ["IGNORED_KEYS", "SKETCH", "sketch", "stored_tensors", "weights_facts"]

SKETCH = 32
"""Values of each tensor that are kept, evenly spread: enough to say how far it moved, and to find a permutation."""

IGNORED_KEYS = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "use_cache", "dtype", "torch_dtype"}
)
"""Keys of config.json that say where a file came from, how it is stored, or which library wrote it."""


def weights_facts(loaded: LoadedModel) -> tuple[WeightsFacts, dict[str, Shaped[ndarray, ...]]]:
    """The facts, and as arrays `sketch` (a row a tensor, in their order) and `rows` (a digest of each embedding row)."""
    tensors, sketches, rows = [], [], np.zeros(0, np.int32)
    embedding = _embedding_name(loaded)
    for name, tensor in stored_tensors(loaded):
        tensors.append(
            TensorFacts(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                sha256=_sha(tensor),
            )
        )
        sketches.append(sketch(tensor))
        if name == embedding:
            rows = _row_digests(tensor)
    facts = WeightsFacts(
        fingerprint=_named(fingerprint(loaded)), config=_config(loaded), tensors=tuple(tensors), embedding=embedding
    )
    return facts, {"sketch": np.array(sketches, dtype=np.float32).reshape(-1, SKETCH), "rows": rows}


def stored_tensors(loaded: LoadedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and values of each tensor in the files, by name; of the loaded model where there are no safetensors."""
    folder = folder_of(loaded.source)
    files = weight_files(folder) if folder is not None else []
    if not files or any(file.suffix != ".safetensors" for file in files):
        yield from sorted((name, value.detach().cpu()) for name, value in loaded.model.module.state_dict().items())
        return
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        for name, number in sorted((name, place) for place, file in enumerate(opened) for name in file.keys()):  # noqa: SIM118 - no mapping
            yield name, opened[number].get_tensor(name)


def _named(known: ModelFingerprint) -> ModelFingerprint:
    """A folder goes by its own name: where it lies is of one machine, and a golden is of all."""
    folder = Path(known.name).expanduser()
    return dataclasses.replace(known, name=folder.name) if folder.is_dir() else known


def _embedding_name(loaded: LoadedModel) -> str:
    """Of the input embedding's tensor, as the module calls it; the files call it so, too."""
    wanted = loaded.model.module.get_input_embeddings()
    names = (name for name, module in loaded.model.module.named_modules() if module is wanted)
    return f"{next(names, 'embedding')}.weight"


def sketch(tensor: Tensor) -> Float[ndarray, " kept"]:
    """`SKETCH` values, evenly spread."""
    flat = tensor.detach().flatten()
    if not len(flat):
        return np.zeros(SKETCH, np.float32)
    places = torch.linspace(0, len(flat) - 1, SKETCH, dtype=torch.float64).round().long()
    kept: Float[ndarray, " kept"] = flat[places].float().cpu().numpy()
    return kept


def _bytes(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return data


def _sha(tensor: Tensor) -> str:
    """Of the values: a checkpoint that was only stored again in a wider type is the same."""
    values = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    return hashlib.sha256(_bytes(values)).hexdigest()[:16] if tensor.numel() else ""


def _row_digests(tensor: Tensor) -> Shaped[ndarray, ...]:
    """32 bits a row: which row moved where, not proof of anything."""
    digests = [int.from_bytes(hashlib.sha256(_bytes(row.float())).digest()[:4], "big", signed=True) for row in tensor]
    return np.array(digests, dtype=np.int32)


def _config(loaded: LoadedModel) -> dict[str, str]:
    folder = folder_of(loaded.source)
    file = None if folder is None else folder / "config.json"
    known: dict[str, Any] = (
        json.loads(file.read_text("utf-8")) if file is not None and file.is_file() else loaded.config.to_diff_dict()
    )
    return {
        key: json.dumps(value, sort_keys=True, default=str)
        for key, value in sorted(known.items())
        if key not in IGNORED_KEYS and not key.endswith("token_id")
    }
