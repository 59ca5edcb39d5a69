"""What each process of torchrun runs in these tests: `specverify`, with a fault planted in the second process where one is named.

torchrun --nproc-per-node 2 certified.py FAULT certify ...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch.distributed as dist

from specverify.cli import main
from specverify.models import sharded

FAULTS = ("none", "drop", "perturb", "kill", "hang")
_AT = 200
"""The sum between the processes that the fault is planted in: some passes after loading."""


def plant(fault: str) -> None:
    """Into the sums of this process's part of the model, and into no other."""
    original, calls = dist.all_reduce, 0

    def all_reduce(tensor: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if tensor.ndim < 2:  # the guard's own
            return original(tensor, *arguments, **named)
        calls += 1
        if calls == _AT and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == _AT and fault == "hang":
            time.sleep(600)
        if calls == _AT and fault == "drop":
            return None
        work = original(tensor, *arguments, **named)
        if calls == _AT and fault == "perturb":
            tensor[..., 0] += 1e-3
        return work

    dist.all_reduce = all_reduce


if __name__ == "__main__":
    fault, *rest = sys.argv[1:]
    assert fault in FAULTS
    sharded.PASS_S = float(os.environ.get("SPECVERIFY_TEST_PASS_S", sharded.PASS_S))
    if os.environ["RANK"] == "1" and fault != "none":
        plant(fault)
    sys.argv = ["specverify", *rest]
    sys.exit(main())
