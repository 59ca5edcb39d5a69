"""A run over a Ray cluster: the pieces of decoding and scoring go to actors that hold the models; everything else stays here.

Note [Cluster]: a batch of rows and a chunk of traces are cut by one process exactly as without a cluster, and a piece depends on
nothing but itself. So where it is computed, in which order, and how often after a worker was killed, changes nothing: the
evidence is merged in the order in which it was asked, and when to stop is decided here, once for all. The certificate is that
of one process bit for bit, as far as the processors round alike; what a clock measured differs (`created`, every `elapsed_s`, the
whole of `cost`). Workers of another release, device or number type are refused, and so are other weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from specverify.certify import environment, fingerprints
from specverify.engines.reference import ReferenceEngine
from specverify.errors import PlanError, UsageError
from specverify.scoring import score_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specverify.context import Row
    from specverify.plan import Plan
    from specverify.records import Certificate, DecodeTrace, ModelFingerprint
    from specverify.subject import Subject

__all__ = ["Pool", "Worker", "sharded", "without_clock"]

_MOST_LOST = 100  # workers in a run; more than that is a fault of the cluster, or a piece that kills whoever takes it
_MOST_LOST_BY_ONE = 3  # by one piece: it is the piece
_START_S = 900.0  # for a worker to come up with its models, when none other works


class Worker:
    """One process of the cluster with the models; what it is asked depends on nothing that it was asked before."""

    def __init__(self, make: Callable[[], Subject], plan: Plan, num_threads: int) -> None:
        """Load the models as the run's own process does."""
        self._subject = make()
        self._plan = plan
        torch.set_num_threads(num_threads)  # sums in another order are other bits

    def hello(self) -> dict[str, str]:
        """What has to be the same everywhere."""
        return _identity(self._subject, self._plan)

    def decode(self, batch: Sequence[Row]) -> list[DecodeTrace]:
        """One batch of the reference engine."""
        return _engine(self._subject).decode_batch(batch)

    def score(self, chunk: Sequence[DecodeTrace], sampled: bool, stages: bool) -> list[Any]:  # noqa: FBT001 - called by name of the method
        """One chunk of the scorer, on the CPU."""
        parts = score_chunk(self._subject.target, self._subject.draft, sampled, stages, chunk)
        return [tuple({name: values.cpu() for name, values in each.items()} for each in part) for part in parts]


class Pool:
    """Workers side by side; one that dies is replaced, and its piece is done again by whoever is free."""

    def __init__(
        self, start: Callable[[], Any], number: int, expected: dict[str, str], say: Callable[[str], None]
    ) -> None:
        """Ask for `number` workers; work begins with the first that is up."""
        self._start, self._expected, self._say = start, expected, say
        self._idle: list[Any] = []
        self._greeting: dict[Any, Any] = {}
        self._lost = 0
        for _ in range(number):
            self._add()

    def decode(self, batches: Sequence[Sequence[Row]]) -> list[list[DecodeTrace]]:
        """The traces of each batch, in order."""
        return self._computed("decode", [(batch,) for batch in batches])

    def score(self, chunks: Sequence[Sequence[DecodeTrace]], *, sampled: bool, stages: bool) -> list[Any]:
        """The columns of each chunk, in order."""
        return self._computed("score", [(chunk, sampled, stages) for chunk in chunks])

    def close(self) -> None:
        """End every worker."""
        import ray

        for worker in (*self._idle, *self._greeting.values()):
            with contextlib.suppress(Exception):
                ray.kill(worker)
        self._idle, self._greeting = [], {}

    def _add(self) -> None:
        worker = self._start()
        self._greeting[worker.hello.remote()] = worker

    def _computed(self, method: str, pieces: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each piece's result in its place, whoever computed it and however often it was begun."""
        import ray

        results: dict[int, Any] = {}
        waiting, running = deque(range(len(pieces))), {}
        begun = dict.fromkeys(waiting, 0)
        try:
            while len(results) < len(pieces):
                while waiting and self._idle:
                    index, worker = waiting.popleft(), self._idle.pop()
                    running[getattr(worker, method).remote(*pieces[index])] = index, worker
                done, _ = ray.wait([*running, *self._greeting], num_returns=1, timeout=None if running else _START_S)
                if not done:
                    msg = f"no worker of the cluster came up in {_START_S:.0f} s; check `ray status` for free CPUs and GPUs"
                    raise UsageError(msg)
                for reference in done:
                    if reference in self._greeting:
                        self._welcome(reference)
                        continue
                    index, worker = running.pop(reference)
                    try:
                        results[index] = _got(reference)
                        self._idle.append(worker)
                    except ray.exceptions.RayActorError as error:
                        begun[index] += 1
                        self._replace(error, hopeless=begun[index] >= _MOST_LOST_BY_ONE)
                        waiting.appendleft(index)
        finally:
            self._idle += [worker for _, worker in running.values()]
        return [results[index] for index in range(len(pieces))]

    def _welcome(self, reference: Any) -> None:  # noqa: ANN401 - Ray's references have no type of their own
        """A worker is up: it works if it is like this process."""
        import ray

        worker = self._greeting.pop(reference)
        try:
            found = _got(reference)
        except ray.exceptions.RayActorError as error:
            self._replace(error, hopeless=False)
            return
        differing = [name for name, value in self._expected.items() if found.get(name) != value]
        if differing:
            name = differing[0]
            msg = (
                f"a worker of the cluster has {name} {found.get(name)}, this process {self._expected[name]}; they must be the same "
                "for one certificate to be about both"
            )
            raise UsageError(msg)
        self._idle.append(worker)

    def _replace(self, error: Exception, *, hopeless: bool) -> None:
        self._lost += 1
        if hopeless or self._lost > _MOST_LOST:
            msg = f"workers of the cluster die ({self._lost} so far: {' '.join(str(error).split())[:160]}); look at Ray's logs"
            raise UsageError(msg)
        self._say("a worker of the cluster died; what it was doing is done again elsewhere")
        self._add()


@contextlib.contextmanager
def sharded(
    subject: Subject,
    plan: Plan,
    make: Callable[[], Subject],
    *,
    address: str,
    num_workers: int | None = None,
    num_gpus: float | None = None,
    digests: tuple[ModelFingerprint, ModelFingerprint | None] | None = None,
    say: Callable[[str], None],
) -> Iterator[Subject]:
    """The same subject, decoded and scored by a Ray cluster; `make` builds it again on a worker.

    `address` is a cluster's, `auto`, or `local` for one on this machine. Raises `UsageError` where Ray or the cluster isn't there.
    """
    ray = _connected(address)
    device = subject.target.device
    gpus = num_gpus if num_gpus is not None else float(device.type == "cuda")
    resources = ray.cluster_resources()
    most = int(resources.get("GPU", 0) / gpus) if gpus else int(resources.get("CPU", 1))
    number = num_workers if num_workers is not None else max(1, most)
    if number > max(most, 1):
        have = f"{resources.get('GPU', 0):g} GPUs and {resources.get('CPU', 0):g} CPUs"
        msg = f"{number} workers with {gpus:g} GPUs each were asked for, and the cluster has {have}; ask for at most {most}"
        raise UsageError(msg)
    _engine(subject)
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    actor = ray.remote(Worker).options(**options)
    pool = Pool(
        lambda: actor.remote(make, plan, torch.get_num_threads()), number, _identity(subject, plan, digests), say
    )
    try:
        engine = dataclasses.replace(_engine(subject), elsewhere=pool)
        yield dataclasses.replace(subject, engine=engine, elsewhere=pool)
    finally:
        pool.close()
        ray.shutdown()


def _connected(address: str) -> Any:  # noqa: ANN401 - Ray is a module, imported only here
    try:
        import ray
    except ModuleNotFoundError as error:
        msg = "--ray needs the package ray; install specverify-decoding[ray]"
        raise UsageError(msg) from error
    where = {} if address == "local" else {"address": address}
    listens = False
    try:
        listens = _knock(address)
        ray.init(**where, log_to_driver=False, configure_logging=False, include_dashboard=False if not where else None)
    except Exception as error:  # Ray raises bare ones, such as for a node that doesn't start
        reason = " ".join(str(error).split())[:160]
        msg = f"there is no Ray cluster at {address} ({reason}); start one with `ray start --head`"
        if listens:
            msg = (
                f"the Ray cluster at {address} does not let this process in ({reason}); if it was started with a token, as Ray "
                "does where ~/.ray/auth_token is, set RAY_AUTH_MODE=token"
            )
        if address == "local":
            msg = f"Ray can't start a cluster on this machine ({reason}); its logs are in /tmp/ray/session_latest/logs"
        raise UsageError(msg) from error
    return ray


def _knock(address: str) -> bool:
    """Whether somebody is known to listen; raises `OSError` at once where nobody does: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()
        return True
    return False


def _engine(subject: Subject) -> ReferenceEngine:
    if not isinstance(subject.engine, ReferenceEngine):
        msg = f"--ray shards the reference decoder, and what is under test is {subject.engine.name}; leave --ray out"
        raise PlanError(msg)
    return subject.engine


def _identity(
    subject: Subject, plan: Plan, digests: tuple[ModelFingerprint, ModelFingerprint | None] | None = None
) -> dict[str, str]:
    """Releases, device and digests: what the bits of a piece depend on."""
    here = environment(subject.target.device, plan.dtype)
    names = ("specverify", "python", "torch", "transformers", "device", "dtype")
    told = {name: str(getattr(here, name)) for name in names}
    for role, model in zip(("target", "draft"), digests or fingerprints(subject), strict=True):
        told[f"weights of the {role}"] = model.weights_sha256 if model is not None else ""
    return told


def without_clock(certificate: Certificate) -> Certificate:
    """The certificate without what a clock measured: all that may differ between one process and a cluster."""
    checks = tuple(dataclasses.replace(check, elapsed_s=0.0) for check in certificate.checks if check.id != "cost")
    return dataclasses.replace(certificate, created="", elapsed_s=0.0, checks=checks)


def _got(reference: Any) -> Any:  # noqa: ANN401 - whatever the worker answered
    """The answer; what the worker raised is raised as it was, so that a user's mistake stays one sentence."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from error
