"""Two real processes over gloo: the second does what the first asks, and whatever parts them ends the run with one sentence."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from specverify.errors import InternalError, NonFiniteLogits, PairError
from specverify.models.led import Diverged, LedModel, Processes, ProcessLost
from specverify.models.loading import LoadedModel
from specverify.models.transformers import TransformersModel
from tests.unit.models.checkpoints import random_module
from tests.unit.models.histories import worst_difference

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="starts processes by fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python's, about a fork of a process with threads
]

WAIT_S = 1.0
"""That one process waits for another in a pass."""


def together(folder: Path, *programs: Callable[[Processes], Any]) -> list[Any]:
    """What each program returns or raises, each in a process of its own."""
    fork = multiprocessing.get_context("fork")
    started = []
    for rank, program in enumerate(programs):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_run, args=(rank, len(programs), folder / "meeting", program, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    found = []
    for process, ours in started:
        try:
            found.append(ours.recv() if ours.poll(60) else "hangs")
        except EOFError:
            found.append("died")
        process.kill()
        process.join()
    return found


def _run(rank: int, number: int, place: Path, program: Callable[[Processes], Any], answer: Connection) -> None:
    limit = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=number, timeout=limit)
    processes = Processes(dist.new_group(backend="gloo", timeout=timedelta(seconds=50)))
    try:
        answer.send(program(processes))
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        answer.send(error)
    os._exit(0)


def whole() -> TransformersModel:
    """A copy of the same small model in each process: the guard doesn't care how the logits came to be the same."""
    return TransformersModel(random_module("llama"), "llama")


def led(processes: Processes) -> LedModel:
    """The copy that the others follow."""
    return LedModel(random_module("llama"), "llama", processes=processes)


def follow(processes: Processes) -> str:
    """As every process but the first does."""
    processes.follow(whole())
    return "ended in order"


def test_a_history_means_the_same_as_in_one_process(tmp_path: Path) -> None:
    """Appends, rollbacks and selections of ragged batches; and a message longer than its first part."""

    def lead(processes: Processes) -> tuple[float, bool]:
        model, alone = led(processes), whole()
        worst = max(worst_difference(model, seed=seed, steps=8) for seed in range(2))
        rows = [[(7 * row + place) % alone.vocab_size for place in range(40)] for row in range(40)]
        same = torch.equal(model.logits(rows), alone.logits(rows))
        processes.stop()
        return worst, same

    (worst, same), ended = together(tmp_path, lead, follow)
    assert worst < 1e-5
    assert same
    assert ended == "ended in order"


def test_a_tree_is_followed(tmp_path: Path) -> None:
    """With the path that is kept of it, and the error of whoever asks for more than there is."""

    def lead(processes: Processes) -> tuple[bool, bool]:
        logits = []
        for model in (led(processes), whole()):
            session = model.open([[3, 4], [5]])
            block = torch.tensor([[6, 7, 8], [9, 10, 11]])
            tree = session.append(block, torch.tensor([3, 3]), torch.tensor([[-1, 0, 0], [-1, 0, 1]]))
            session.keep(torch.tensor([[0, 2], [0, -1]]), torch.tensor([2, 1]))
            logits += [tree, session.append(torch.tensor([[12], [13]]), torch.tensor([1, 1]))]
            with pytest.raises(InternalError):
                session.rollback(torch.tensor([99, 99]))
        processes.stop()
        return torch.equal(logits[0], logits[2]), torch.equal(logits[1], logits[3])

    assert together(tmp_path, lead, follow) == [(True, True), "ended in order"]


def test_sessions_that_are_gone_here_go_there(tmp_path: Path) -> None:
    """A run opens thousands."""

    def lead(processes: Processes) -> None:
        model = led(processes)
        for _ in range(5):
            model.open([[3, 4]])
        model.logits([[3]])
        processes.stop()

    def counted(processes: Processes) -> int:
        import specverify.models.led as module

        most, done = 0, module._done

        def watched(*arguments: Any) -> Any:
            nonlocal most
            most = max(most, len(arguments[-1]))
            return done(*arguments)

        module._done = watched
        processes.follow(whole())
        return most

    assert together(tmp_path, lead, counted)[1] <= 2


def test_nan_is_raised_as_in_one_process_and_parts_nobody(tmp_path: Path) -> None:
    """It is about the model; the processes stay in step."""

    def broken(processes: Processes) -> str:
        module = random_module("llama")
        with torch.no_grad():
            module.get_input_embeddings().weight[7] = float("nan")
        if processes.rank:
            processes.follow(TransformersModel(module, "llama"))
            return "ended in order"
        model = LedModel(module, "llama", processes=processes)
        with pytest.raises(NonFiniteLogits):
            model.logits([[3, 7]])
        model.logits([[3, 4]])
        processes.stop()
        return "went on"

    assert together(tmp_path, broken, broken) == ["went on", "ended in order"]


def test_another_weight_in_one_process_is_seen_after_the_first_pass(tmp_path: Path) -> None:
    """Fault: one number of one process is off by a thousandth."""

    def lead(processes: Processes) -> None:
        led(processes).logits([[3, 4, 5]])

    def astray(processes: Processes) -> None:
        model = whole()
        with torch.no_grad():
            model.module.get_output_embeddings().weight[0, 0] += 1e-3
        processes.follow(model)

    first, second = together(tmp_path, lead, astray)
    assert isinstance(first, Diverged)
    assert isinstance(second, Diverged)
    assert "the 2 processes that hold the target don't agree on the same pass (pass 1)" in str(first)


def test_other_hidden_states_are_seen_where_the_logits_are_the_same(tmp_path: Path) -> None:
    """Fault: one process's own copy of the residual stream is off; the logits, which all collect from all, are equal."""

    def headless() -> TransformersModel:
        model = whole()
        with torch.no_grad():
            model.module.get_output_embeddings().weight.zero_()
        return model

    def lead(processes: Processes) -> None:
        model = LedModel(headless().module, "llama", processes=processes)
        assert not model.logits([[3, 4, 5]]).any()

    def astray(processes: Processes) -> None:
        model = headless()
        with torch.no_grad():
            model.module.base_model.norm.weight[0] += 1e-3
        processes.follow(model)

    first, second = together(tmp_path, lead, astray)
    assert isinstance(first, Diverged)
    assert isinstance(second, Diverged)


@pytest.mark.parametrize(("fault", "what"), [("dies", "has gone"), ("hangs", "does not answer")])
def test_a_process_that_dies_or_hangs_ends_the_others(tmp_path: Path, fault: str, what: str) -> None:
    """Fault: the second process doesn't come out of its second pass. In bounded time, and in one sentence."""

    def lead(processes: Processes) -> None:
        model = led(processes)
        model.logits([[3]])
        started = time.monotonic()
        try:
            model.logits([[4]])
        finally:
            assert time.monotonic() - started < 10 * WAIT_S
            with pytest.raises(ProcessLost, match="not in step any more"):  # whatever asks next doesn't hang
                model.logits([[5]])
            processes.stop()

    def lost(processes: Processes) -> None:
        model = whole()
        module, passes = model.module.forward, []

        def forward(**arguments: Any) -> Any:
            passes.append(1)
            if len(passes) == 2:
                os._exit(1) if fault == "dies" else time.sleep(2 * WAIT_S)
            return module(**arguments)

        model.module.forward = forward
        processes.follow(model)

    first = together(tmp_path, lead, lost)[0]
    assert isinstance(first, ProcessLost)
    assert f"another of the 2 processes that hold the target {what} (at pass 2)" in str(first)


def test_the_first_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    """They wait for it as long as it thinks, and not longer."""

    def lead(processes: Processes) -> None:
        led(processes).logits([[3]])
        os._exit(1)

    first, second = together(tmp_path, lead, follow)
    assert first == "died"
    assert isinstance(second, ProcessLost)


def _entry(failing: int | None, releases: tuple[str, str]) -> Callable[[Processes], Any]:
    def enter(processes: Processes) -> str:
        def load() -> LoadedModel:
            if processes.rank == failing:
                msg = "model.safetensors is truncated; copy it again"
                raise PairError(msg)
            return LoadedModel(whole(), None, None, None, "llama")  # type: ignore[arg-type]  # nobody looks at these

        found = processes.loaded(load, lambda _: {"torch": releases[processes.rank]})
        if processes.rank:
            processes.follow(found.model)
        processes.stop()
        return type(found.model).__name__

    return enter


def test_what_one_process_fails_to_load_is_said_by_the_first(tmp_path: Path) -> None:
    """And no other waits for it."""
    enter = _entry(1, ("2.13", "2.13"))
    first, second = together(tmp_path, enter, enter)
    assert str(first) == "process 1: model.safetensors is truncated; copy it again"
    assert str(second) == "model.safetensors is truncated; copy it again"


def test_another_release_in_one_process_is_refused(tmp_path: Path) -> None:
    """Before anything is asked."""
    enter = _entry(None, ("2.13", "2.11"))
    first, second = together(tmp_path, enter, enter)
    assert str(first) == str(second)
    assert "process 1 has torch 2.11, process 0 2.13" in str(first)


def test_all_that_load_are_probed_and_led(tmp_path: Path) -> None:
    """The rollback of the whole is tried, with all processes in it."""
    enter = _entry(None, ("2.13", "2.13"))
    assert together(tmp_path, enter, enter) == ["LedModel", "TransformersModel"]
