"""Which targets can be laid over several processes by transformers' tensor parallel plan, and how the processes find each other."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from specverify import __version__
from specverify.errors import PairError, PlanError
from specverify.model_files import file_digests, folder_of, model_files, weight_files, weights_digest
from specverify.models.led import Processes, ProcessLost

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from specverify.models.loading import LoadedModel

__all__ = ["identity", "joined", "sharding"]

PASS_S = 600.0
"""The longest that a process waits for another one within a pass: a pass takes seconds, and its first one may compile."""
_THINKING = timedelta(days=30)
"""The longest that the others wait for what process 0 asks next; that it is gone shows at once."""


def joined(device: str) -> Processes:
    """This process, with the others that torchrun has started. Raises `PlanError` and `ProcessLost`.

    Messages and checksums go through gloo on the CPU, the model's own sums through the backend of its device.
    """
    kind = _accelerator()
    if torch.device(kind if device == "auto" else device) != torch.device(kind):
        msg = f"--tensor-parallel takes one {kind} device a process, and not --device {device}; leave --device out"
        raise PlanError(msg)
    if kind != "cpu":
        number, wanted = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if wanted > number:  # in all processes of this machine, so that the first one says it
            msg = f"there are {number} {kind} devices here, and torchrun started {wanted} processes; give it --nproc-per-node {number}"
            raise PlanError(msg)
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=PASS_S))
        waiting = dist.new_group(backend="gloo", timeout=_THINKING)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        msg = f"the processes that torchrun started don't find each other ({reason}); check --nnodes, --rdzv-endpoint and the network"
        raise ProcessLost(msg) from error
    return Processes(waiting)


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def sharding(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """What `from_pretrained` is given. Raises `PairError` for a model that can't be laid over this many processes."""
    number = dist.get_world_size()
    text = config.get_text_config(decoder=True)
    if importlib.util.find_spec("accelerate") is None:
        msg = "tensor parallelism needs the package accelerate (the extra device-map); install it"
        raise PairError(msg)
    if not getattr(text, "base_model_tp_plan", None):
        msg = f"transformers has no tensor parallel plan for {name} (model type {config.model_type}); use --device-map auto in one process"
        raise PairError(msg)
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    for what, held in (
        ("attention heads", heads),
        ("KV heads", int(getattr(text, "num_key_value_heads", None) or heads)),
    ):
        if held % number:
            msg = f"{name} has {held} {what}, which {number} processes can't share evenly; start a number of processes that divides {held}"
            raise PairError(msg)
    return {"distributed_config": DistributedConfig(tp_size=number, tp_plan="auto")}


def identity(loaded: LoadedModel) -> dict[str, str]:
    """What has to be the same in all processes for them to hold one model.

    The files of weights are read by the first process of each further machine (process 0 does it in any case).
    """
    device = loaded.model.device
    said = {
        "specverify": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": str(torch.get_num_threads()),
    }
    number, here = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    folder = folder_of(loaded.source)
    if 0 < here < number and os.environ.get("LOCAL_RANK") == "0" and folder is not None:
        names = [file.relative_to(folder).as_posix() for file in weight_files(folder)]
        said["weights"] = weights_digest(file_digests(folder, model_files(folder)), names)
    return said
