"""The least score that may be emitted, against a sort of the whole row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specverify.records import SamplingParams
from specverify.verification.fused.cutoff import cut_off, cuts, least_kept


def sorted_out(scores: np.ndarray, params: SamplingParams) -> float:
    """Top-k, then top-p of what is left, then min-p; one row, the whole of it sorted."""
    kept = np.sort(scores)[::-1]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        mass = np.cumsum(np.exp(kept - np.logaddexp.reduce(kept)))
        kept = kept[: int(np.searchsorted(mass, params.top_p)) + 1]
    least = kept[-1] if params.top_k or params.top_p < 1 else -math.inf
    return max(least, scores.max() + math.log(params.min_p)) if params.min_p else float(least)


@pytest.mark.parametrize("top_k", [0, 1, 2, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_every_row_has_the_border_of_a_sort(top_k: int, top_p: float, min_p: float):
    """Rows of one tensor, each with its own border."""
    scores = torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    scores[1] *= 0.1
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = [sorted_out(row, params) for row in scores.view(6, 60).numpy()]
    if not cuts(params):
        wanted = [-math.inf] * 6
    assert least_kept(scores, params).flatten().tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("vocab_size", [255, 256, 257, 2_048, 2_049, 5_000])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97, 0.9999])
def test_a_flat_row_takes_more_candidates_and_keeps_its_border(vocab_size: int, top_p: float):
    """Few candidates decide a sharp row; a flat one asks for more of them, up to all."""
    generator = torch.Generator().manual_seed(2)
    sharp, flat = (torch.randn(vocab_size, generator=generator, dtype=torch.float64) * scale for scale in (8, 0.01))
    params = SamplingParams(top_p=top_p)
    wanted = [sorted_out(row.numpy(), params) for row in (sharp, flat)]
    assert least_kept(torch.stack((sharp, flat)), params).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("vocab_size", [4, 300])
def test_a_mass_that_rounding_keeps_from_being_reached_is_that_of_all_ids(vocab_size: int):
    """The largest float below 1: the sum of the row's masses may stay below it."""
    scores = -torch.arange(vocab_size, dtype=torch.float32) / 64
    kept = least_kept(scores.expand(2, -1) + torch.tensor([[0.0], [7.3]]), SamplingParams(top_p=1 - 2.0**-53))
    masses = scores.double().exp()
    left_out = [float(masses[scores + shift < least].sum()) for shift, least in zip((0.0, 7.3), kept, strict=True)]
    assert max(left_out) < 1e-6 * float(masses.sum())


def test_as_many_ids_as_there_are_cut_nothing():
    """A top-k of the vocabulary's size or beyond is none."""
    scores = torch.arange(5.0)
    assert least_kept(scores, SamplingParams(top_k=5)) == least_kept(scores, SamplingParams(top_k=9)) == -math.inf


def test_what_is_cut_off_is_impossible_and_what_ties_with_the_border_stays():
    """Scores themselves come back where nothing is cut."""
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    out = torch.empty(5)
    left = cut_off(scores, SamplingParams(top_k=2), out=out)
    assert left.data_ptr() == out.data_ptr()
    assert left.tolist() == [-math.inf, 3.0, 2.0, 2.0, -math.inf]
    assert cut_off(scores, SamplingParams(), out=torch.empty(5)) is scores
