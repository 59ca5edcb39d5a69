"""`certify --tensor-parallel` under torchrun: process 0 is the command, the others hold their parts of its target until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from specverify.cli.exits import say
from specverify.errors import PlanError, SpecverifyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.cli.invocation import Invocation
    from specverify.models.led import Processes
    from specverify.plan import Plan

__all__ = ["followed", "led", "require_usable", "started"]

_USAGE = 2
_GRACE_S = 5.0
"""That process 0 is given to say what went wrong before the processes met."""


def started() -> int:
    """How many processes torchrun (or another launcher that sets its variables) has started; 1 without it."""
    number = os.environ.get("WORLD_SIZE", "1")
    return int(number) if number.isdecimal() and "RANK" in os.environ else 1


def require_usable(invocation: Invocation, *, others: str) -> None:
    """Raise `UsageError` where the processes that run don't fit what is asked; `others` is an option that excludes it."""
    number = started()
    if not invocation.tensor_parallel:
        if number > 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # others set the same variables for jobs of their own
            msg = (
                f"torchrun started {number} processes, and a certification is one; add --tensor-parallel for them to hold the target "
                "together, or start it without, with --device-map auto or --ray"
            )
            raise UsageError(msg)
        return
    if number < 2:
        msg = (
            "--tensor-parallel needs a process for each device; start it as "
            "`torchrun --nproc-per-node 2 -m specverify certify ... --tensor-parallel`"
        )
        raise UsageError(msg)
    excluded = [name for name in ("device_map", "engine") if getattr(invocation, name)]
    if others or excluded:
        option = others or "--" + excluded[0].replace("_", "-")
        msg = f"--tensor-parallel holds one target for the reference decoder, so {option} can't go with it; leave one of them out"
        raise PlanError(msg)


@contextlib.contextmanager
def led(invocation: Invocation, plan: Plan) -> Iterator[Processes | None]:
    """The processes that follow this one; they end with the context."""
    if not invocation.tensor_parallel:
        yield None
        return
    from specverify.models.sharded import joined

    processes = joined(plan.device)
    try:
        yield processes
    finally:
        processes.stop()


def followed(invocation: Invocation) -> int | None:
    """In every process but the first: hold a part of the target until that one ends, and give the exit code; None in the first.

    What all processes find is process 0's to say, and a follower that ends with an error at once would have torchrun end process 0
    before it has: so it ends with 0. Ctrl-C is for process 0, too: it ends in order, and this one with it.
    """
    if not invocation.tensor_parallel or started() < 2 or os.environ["RANK"] == "0":
        return None
    from torch import OutOfMemoryError

    from specverify.models.led import ProcessLost
    from specverify.models.loading import load_model
    from specverify.models.sharded import identity, joined

    interrupted = False

    def noted(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, noted)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun, when another one has ended
    processes = None
    try:
        sources, plan = invocation.sources(), invocation.plan()
        processes = joined(plan.device)
        load = partial(
            load_model, sources.target, device=plan.device, dtype=plan.dtype, trust_remote_code=invocation.trust_remote_code,
            sharded=True,
        )  # fmt: skip
        processes.follow(processes.loaded(load, identity).model)
    except ProcessLost as error:
        if not interrupted:
            say(f"error: {error}")
        return _USAGE
    except SpecverifyError as error:
        if processes is not None and not isinstance(error.__cause__, OutOfMemoryError):
            return 0  # process 0 has raised the same
        if processes is None:
            time.sleep(_GRACE_S)  # process 0 most likely says it, and torchrun then ends this one
        say(f"error: process {os.environ['RANK']}: {error}")
        return _USAGE
    except Exception as error:  # noqa: BLE001 - process 0 may wait in a pass, and can't know what happened here
        reason = " ".join(str(error).split())[:300]
        say(f"error: process {os.environ['RANK']} can't go on ({type(error).__name__}: {reason})")
        return _USAGE
    return 0
