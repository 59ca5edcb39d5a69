"""A target that lies over several processes: the first one leads, the others do on their part what it does on its own.

Note [Followers]: only process 0 runs the certification: it decides, draws, times, writes and talks. Whatever it asks of the target
(open, append, roll back, ...) is sent to the others before it is done, so that all of them are in the same pass of the same
session, and the sums between their parts come out of the model's own plan. So a clock, a random number or a hash order of one
process can't make them differ.

Note [The guard]: what every process has a copy of must be the same bit for bit, or together they are no model. After each pass all
compare a checksum of the last hidden states and of the logits. The logits alone would show little: each process computes those of
its own ids, from its own hidden states, and all get the same collection of them. A sum that was lost or went wrong in one process
ends the run with one sentence, and not with a certificate. A part that computes something wrong before the sum is in
every copy of it alike: that is another model for all of them, and no comparison among them can show it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from specverify.errors import PairError, SpecverifyError
from specverify.models.message import PASSES, Operation, flat, receive, send, sequences
from specverify.models.transformers import TransformersModel, require_working_rollback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jaxtyping import Float, Int
    from numpy import ndarray
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

    from specverify.models import Session
    from specverify.models.loading import LoadedModel

__all__ = ["Diverged", "LedModel", "ProcessLost", "Processes"]

Result = TypeVar("Result")

_LARGE = 2**61 - 1
"""Of checksums: its negative is a number too."""
_TEXT_BYTES = 4096
"""Of what a process says of itself."""


class Diverged(PairError):
    """The processes have other hidden states or logits after the same pass."""


class ProcessLost(PairError):
    """Another process is gone, or doesn't answer."""


class Processes:
    """The processes that hold a target together, seen from one of them."""

    def __init__(self, waiting: dist.ProcessGroup) -> None:
        """`waiting` is a group on the CPU that others may wait in for as long as the first one thinks."""
        self.rank, self.number = dist.get_rank(), dist.get_world_size()
        self._waiting = waiting
        self._lock = threading.RLock()
        self._usable = True
        self._num_passes = 0
        self._num_sessions = 0
        self._seen = 0
        self._forgotten: list[int] = []

    # -------------------------------------------------------------------------------------------- before the first pass

    def loaded(
        self, load: Callable[[], LoadedModel], identity: Callable[[LoadedModel], Mapping[str, str]]
    ) -> LoadedModel:
        """What `load` gives, once it has worked everywhere; process 0 gets a model that the others follow.

        Raises in every process what it raised in one, and `PairError` where `identity` is not the same everywhere.
        """
        found, error = None, ""
        said: Mapping[str, str] = {}
        try:
            found = load()
            said = identity(found)
        except SpecverifyError as raised:
            error = str(raised)
        told = self._told(json.dumps({"error": error[:800], "identity": dict(said)}, ensure_ascii=False))
        for rank, each in enumerate(told):
            if each["error"]:
                raise PairError(each["error"] if rank in (0, self.rank) else f"process {rank}: {each['error']}")
        for rank, each in enumerate(told):
            for name, value in each["identity"].items():
                here = told[0]["identity"].get(name, value)
                if value != here:
                    msg = (
                        f"process {rank} has {name} {value}, process 0 {here}; they must be the same to hold one model"
                    )
                    raise PairError(msg)
        assert found is not None  # or some error was told
        if self.rank:
            return found
        model = LedModel(found.model.module, found.model.name, processes=self)
        self._probe(model)
        return replace(found, model=model)

    def _probe(self, model: LedModel) -> None:
        """The rollback of the whole, which is also the first pass of all: a plan that doesn't fit the model shows here."""
        try:
            require_working_rollback(model)
        except SpecverifyError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            msg = (
                f"{model.name} can't be run over {self.number} processes ({type(error).__name__}: {reason}); "
                "use --device-map auto in one process"
            )
            raise PairError(msg) from error

    def _told(self, text: str) -> list[Any]:
        """What every process says, in order."""
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        encoded = text.encode()[:_TEXT_BYTES]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        every = [torch.zeros_like(mine) for _ in range(self.number)]
        with self._connected():
            dist.all_gather(every, mine, group=self._waiting)
        return [json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in every]

    def watch(self, module: PreTrainedModel) -> None:
        """Take a checksum of the last hidden states of each pass; see Note [The guard]."""

        def noted(base: Module, given: object, outcome: Any) -> None:  # noqa: ANN401 - every architecture has its own class
            del base, given
            self._seen += _checksum(outcome[0])

        module.base_model.register_forward_hook(noted)

    # -------------------------------------------------------------------------------------------- the first process

    def lead(
        self, operation: Operation, session: int, arrays: Sequence[Int[ndarray, "..."]], run: Callable[[], Result]
    ) -> Result:
        """`run` here, while the others do the same on their parts.

        Raises what `run` raises, `Diverged`, and `ProcessLost`.
        """
        with self._lock:
            if not self._usable:
                msg = "the processes that hold the target are not in step any more; run the command again"
                raise ProcessLost(msg)
            self._usable = False  # unless this comes to its end
            with self._connected():
                if self._forgotten:
                    forgotten = [self._forgotten.pop() for _ in range(len(self._forgotten))]
                    send(self._waiting, Operation.FORGET, 0, [np.array(forgotten)])
                send(self._waiting, operation, session, arrays)
                result, error = self._agreed(operation, run)
            self._usable = True
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # there is one where there is no error

    def opened(self) -> int:
        """The number of a new session."""
        with self._lock:
            self._num_sessions += 1
            return self._num_sessions

    def forget(self, session: int) -> None:
        """A session is gone here, and with the next message at the others."""
        self._forgotten.append(session)

    def stop(self) -> None:
        """Let the others end, if they are in step; otherwise they notice that this process is gone."""
        if self._usable and not self.rank:
            self._usable = False
            with contextlib.suppress(ProcessLost), self._connected():
                send(self._waiting, Operation.STOP)

    # -------------------------------------------------------------------------------------------- the others

    def follow(self, model: TransformersModel) -> None:
        """Do what process 0 does until it stops. Raises `Diverged` and `ProcessLost`."""
        sessions: dict[int, Session] = {}
        self.watch(model.module)
        with self._connected():
            while True:
                operation, session, arrays = receive(self._waiting)
                if operation == Operation.STOP:
                    return
                if operation == Operation.FORGET:
                    for number in arrays[0].tolist():
                        sessions.pop(number, None)
                    continue
                self._agreed(operation, partial(_done, operation, session, arrays, model, sessions))

    # -------------------------------------------------------------------------------------------- all of them

    def _agreed(self, operation: Operation, run: Callable[[], Result]) -> tuple[Result | None, SpecverifyError | None]:
        """What `run` gave or raised, which is the same in all processes."""
        result: Result | None = None
        error: SpecverifyError | None = None
        self._seen = 0
        try:
            result = run()
        except SpecverifyError as raised:
            if isinstance(raised.__cause__, torch.OutOfMemoryError):  # this process alone: the others wait in the pass
                raise
            error = raised
        if operation in PASSES:
            self._num_passes += 1
            ended = _checksum(result) if error is None else len(type(error).__name__)
            self._require_same((self._seen + 31 * ended) % _LARGE)
        return result, error

    def _require_same(self, checksum: int) -> None:
        """Raise `Diverged` unless all have this checksum: two numbers, whatever the number of processes."""
        ends = torch.tensor([checksum, -checksum])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if int(ends[0]) != -int(ends[1]):
            msg = (
                f"the {self.number} processes that hold the target don't agree on the same pass (pass {self._num_passes}), so together they are no "
                "model; check the devices and the network between them, and that all have the same weights and releases"
            )
            raise Diverged(msg)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Say in one sentence that another process is gone, or hangs."""
        try:
            yield
        except (SpecverifyError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            if not isinstance(error, dist.DistError) and "gloo" not in reason.lower():
                raise
            late = "timed out" in reason.lower() or "timeout" in reason.lower()
            what = "does not answer" if late else "has gone"
            msg = (
                f"process {self.rank} ends, because another of the {self.number} processes that hold the target {what} "
                f"(at pass {self._num_passes}); its own words, if any, say why"
            )
            raise ProcessLost(msg) from error


def _done(
    operation: Operation,
    session: int,
    arrays: list[Int[ndarray, "..."]],
    model: TransformersModel,
    sessions: dict[int, Session],
) -> Tensor | None:
    """One operation of a follower."""
    if operation in (Operation.OPEN, Operation.LOGITS):
        rows = sequences(*arrays)
        if operation == Operation.LOGITS:
            return model.logits(rows)
        sessions[session] = model.open(rows)
        return None
    asked = sessions[session]
    tensors = [torch.from_numpy(array.copy()).to(model.device) for array in arrays]
    if operation == Operation.APPEND:
        return asked.append(*tensors)
    getattr(asked, operation.name.lower())(*tensors)
    return None


def _checksum(copy: object) -> int:
    """Of the bits of a tensor; 0 of anything else."""
    if not isinstance(copy, torch.Tensor):
        return 0
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[copy.element_size()]
    return int(copy.contiguous().view(kind).sum(dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class LedModel(TransformersModel):
    """The part of process 0, which the others follow; see Note [Followers]."""

    processes: Processes = field(kw_only=True)

    def __post_init__(self) -> None:
        """Refuse what can't be driven, and watch what all processes have a copy of."""
        super().__post_init__()
        self.processes.watch(self.module)

    @property
    def num_processes(self) -> int:
        """All of them."""
        return self.processes.number

    def recorded(self, *, record: bool = True) -> TransformersModel:
        """Itself: sums between processes are in no recording."""
        del record
        return self

    def open(self, prompts: Sequence[Sequence[int]]) -> LedSession:  # type: ignore[override]  # the same protocol, led
        """A session, opened in all processes."""
        number = self.processes.opened()
        asked = partial(TransformersModel.open, self, prompts)
        return LedSession(self.processes, number, self.processes.lead(Operation.OPEN, number, flat(prompts), asked))

    def logits(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "batch length vocab"]:
        """One pass without a cache, in all processes."""
        asked = partial(TransformersModel.logits, self, sequences)
        return self.processes.lead(Operation.LOGITS, 0, flat(sequences), asked)


class LedSession:
    """A session of which each process holds a part."""

    def __init__(self, processes: Processes, number: int, session: Session) -> None:
        self._processes, self._number, self._session = processes, number, session
        weakref.finalize(self, processes.forget, number)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Tokens that each row holds."""
        return self._session.lengths

    def append(
        self,
        token_ids: Int[Tensor, "batch block"],
        num_tokens: Int[Tensor, " batch"],
        parents: Int[Tensor, "batch block"] | None = None,
    ) -> Float[Tensor, "batch block vocab"]:
        """Append everywhere; see `Session`."""
        given = (token_ids, num_tokens) if parents is None else (token_ids, num_tokens, parents)
        return self._lead(Operation.APPEND, *given, run=partial(self._session.append, *given))

    def keep(self, places: Int[Tensor, "batch depth"], num_kept: Int[Tensor, " batch"]) -> None:
        """Close the tree everywhere; see `Session`."""
        self._lead(Operation.KEEP, places, num_kept, run=partial(self._session.keep, places, num_kept))

    def rollback(self, lengths: Int[Tensor, " batch"]) -> None:
        """Roll back everywhere; see `Session`."""
        self._lead(Operation.ROLLBACK, lengths, run=partial(self._session.rollback, lengths))

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Select everywhere; see `Session`."""
        self._lead(Operation.SELECT, rows, run=partial(self._session.select, rows))

    def _lead(self, operation: Operation, *tensors: Int[Tensor, "..."], run: Callable[[], Result]) -> Result:
        arrays = [tensor.cpu().numpy() for tensor in tensors]
        return self._processes.lead(operation, self._number, arrays, run)
