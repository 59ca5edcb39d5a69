"""The measured noise is that of whole texts at their own positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from specverify.checks.noise import measured_noise
from specverify.models.hashed import HashedModel

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

TEXTS = [tuple(range(1, length)) for length in (5, 12, 20, 30)]


@dataclass(frozen=True, eq=False)
class FarOut(HashedModel):
    """Its shapes differ from the 24th token on only, as rotary positions in low precision do."""

    def rounded(self, prefix: tuple[int, ...], shape: int) -> Float[Tensor, " vocab"]:
        return super().rounded(prefix, shape) if len(prefix) > 24 else self.row(prefix)


def test_equal_shapes_have_no_noise() -> None:
    assert measured_noise(HashedModel(), TEXTS, chunk=4).largest == 0


@pytest.mark.parametrize("size", [1e-3, 1e-2])
def test_it_is_as_large_as_the_disturbance(size: float) -> None:
    """Two shapes differ by sqrt(2) normals of that size, the largest of some thousand by several."""
    noise = measured_noise(HashedModel(rounding=size), TEXTS, chunk=4)
    assert 2 * size < noise.largest < 10 * size
    assert noise.allowed_gap == 2 * noise.largest


def test_positions_are_those_of_the_text() -> None:
    """Noise that begins far out is seen, because a text is not moved to the front before it is measured."""
    assert measured_noise(FarOut(rounding=1e-2), TEXTS, chunk=4).largest > 1e-2
    assert measured_noise(FarOut(rounding=1e-2), TEXTS[:2], chunk=4).largest == 0


def test_texts_too_short_to_measure_give_none() -> None:
    assert measured_noise(HashedModel(rounding=1.0), [(1,)], chunk=4).num_positions == 0


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory):
    """Settings of the near calibration pair, and its target's laws."""
    from specverify.conformance import laws_of_folders
    from specverify.engines import EngineSettings
    from specverify.models.calibration import write_calibration_pair

    pair = write_calibration_pair(tmp_path_factory.mktemp("pair") / "near", opposed=False)
    laws = laws_of_folders(pair.target, None, eos_token_ids=(31,), max_length=128, seed=3)
    return EngineSettings(target=pair.target, eos_token_ids=(31,)), laws


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-4), ("bfloat16", 1e-3, 0.5)])
def test_an_engines_own_numerics_are_seen_without_speculation(near, dtype, least, most):
    """In half precision greedy texts leave the target's first choice at near ties; in single precision they don't."""
    from dataclasses import replace

    from specverify.checks.noise import noise_of_engine
    from specverify.conformance.cells import engine_plan
    from specverify.conformance.laws import off_subject
    from specverify.engines.registry import opened

    settings, laws = near
    with opened("transformers", replace(settings, options=(("dtype", dtype),))) as engine:
        subject = off_subject(engine, laws, command="")
        prompts = tuple(
            replace(prompt, id=f"{prompt.id}/{number}", token_ids=(*prompt.token_ids, number))
            for prompt in subject.prompts
            for number in range(4)
        )
        seen = max(
            noise_of_engine(subject.engine, replace(subject, prompts=prompts[start : start + 8]), engine_plan())
            for start in range(0, 40, 8)
        )
    assert least <= seen <= most


def test_what_an_engine_is_allowed_is_never_less_than_what_is_measured_here(near):
    """And no more than what was seen of it."""
    _, laws = near
    texts = [(*prompt.token_ids, 5, 6, 7, 8) for prompt in laws.prompts]
    here = measured_noise(laws.target, texts, chunk=4)
    assert measured_noise(laws.target, texts, chunk=4, engine_noise=here.largest / 2) == here
    wider = measured_noise(laws.target, texts, chunk=4, engine_noise=0.25)
    assert (wider.allowed_gap, wider.suspicious_gap >= here.suspicious_gap) == (0.5, True)


def test_a_log_probability_that_is_no_number_allows_for_nothing(near):
    """The check of log-probabilities says so; a greedy token isn't forgiven for it."""
    from dataclasses import replace

    from specverify.checks.noise import noise_of_engine
    from specverify.conformance.cells import engine_plan
    from specverify.conformance.laws import on_subject
    from specverify.engines.reference import ReferenceEngine

    _, laws = near
    subject = on_subject(_Silly(), None, laws, command="")
    assert isinstance(subject.engine.off.inner, ReferenceEngine)
    silly = _Silly(subject.engine.off)
    assert noise_of_engine(silly, replace(subject, prompts=subject.prompts[:4]), engine_plan()) < 1e-4


class _Silly:
    """Right greedy tokens, and log-probabilities that are none."""

    name, capabilities, parameters = "silly", frozenset(), frozenset()

    def __init__(self, inner=None):
        self.inner = inner

    def decode(self, requests):
        from dataclasses import replace

        for trace in self.inner.decode(requests):
            bad = [float("nan"), float("-inf")] * len(trace.token_ids)
            yield replace(trace, logprobs=tuple(bad[: len(trace.token_ids)]))
