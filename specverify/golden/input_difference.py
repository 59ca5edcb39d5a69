"""Weights, sampling and draft, compared: what goes into a decode, each a cause by itself."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from specverify.golden.records import Change, Layer, LayerVerdict
from specverify.golden.sampling import PROCESSOR_CELLS
from specverify.records import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jaxtyping import Shaped
    from numpy import ndarray

    from specverify.golden.records import Golden, Recording, WeightsFacts

__all__ = ["draft_verdict", "sampling_verdict", "weights_verdict"]

_MOST_NAMED = 5
_PROCESSORS_ALLOWED = 1e-6
"""Difference of a probability between processors of two releases on the same logits; they compute in float32."""


def _verdict(layer: Layer, parts: list[str], findings: list[Finding], unchanged: str, advice: str) -> LayerVerdict:
    if not parts:
        notes = tuple(each for each in findings if each.severity is Verdict.PASS)
        return LayerVerdict(
            layer=layer, change=Change.UNCHANGED, verdict=Verdict.PASS, summary=unchanged, findings=notes
        )
    return LayerVerdict(
        layer=layer,
        change=Change.CAUSE,
        verdict=Verdict.FAIL,
        summary=f"changed: {', '.join(parts[:_MOST_NAMED])}{f' and {len(parts) - _MOST_NAMED} more' if len(parts) > _MOST_NAMED else ''}",
        parts=tuple(parts),
        findings=tuple(findings),
        advice=advice,
    )


# ------------------------------------------------------------------------------------------------ weights and draft


def weights_verdict(old: Recording, new: Recording) -> LayerVerdict:
    """Which tensors of the target moved, how far, and which keys of its configuration changed."""
    parts, findings = _model(old.golden.weights, new.golden.weights, old.arrays, new.arrays, "target")
    return _verdict(
        Layer.WEIGHTS,
        parts,
        findings,
        f"{len(old.golden.weights.tensors):,} tensors and the configuration are the same",
        "if the target was meant to change, certify the new pair and record again with --update; otherwise restore the files",
    )


def draft_verdict(old: Recording, new: Recording) -> LayerVerdict:
    """The same of the draft. A draft changes steps and speed, and with a lossless rule never what is said."""
    then, now = old.golden.draft, new.golden.draft
    advice = "a draft changes speed, not texts: compare acceptance and speed, then record again with --update"
    if then is None or now is None:
        parts = [] if then is now else ["draft model"]
        text = "the golden was recorded without a draft model" if then is None else "there is no draft model any more"
        return _verdict(
            Layer.DRAFT, parts, [Finding(text=text, place="draft")] if parts else [], "there is no draft model", advice
        )
    parts, findings = _model(then, now, old.arrays, new.arrays, "draft")
    tokenizers = [(each.draft.fingerprint.tokenizer_sha256, each.tokenizer.files_sha256)
                  for each in (old.golden, new.golden) if each.draft is not None]  # fmt: skip
    (draft_then, target_then), (draft_now, target_now) = tokenizers
    together = draft_then == target_then and draft_now == target_now
    if draft_then != draft_now and not together:
        parts.append("tokenizer of the draft")
        findings.append(Finding(text="the draft's tokenizer files changed, apart from the target's", place="draft"))
    return _verdict(Layer.DRAFT, parts, findings, f"{len(then.tensors):,} tensors of the draft are the same", advice)


def _model(
    old: WeightsFacts,
    new: WeightsFacts,
    then: Mapping[str, Shaped[ndarray, ...]],
    now: Mapping[str, Shaped[ndarray, ...]],
    role: str,
) -> tuple[list[str], list[Finding]]:
    """Names of what changed in a model, configuration first, and what shows it."""
    findings = list(_keys(old.config, new.config, f"config.json of the {role}"))
    parts = _changed_keys(old.config, new.config)
    before, after = ({each.name: each for each in facts.tensors} for facts in (old, new))
    gone, come = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    moved = [name for name in before if name in after and before[name].sha256 != after[name].sha256]
    if old.fingerprint.architecture != new.fingerprint.architecture:
        parts.append("architecture")
    if gone or come:
        text = f"{len(gone)} tensors gone{_some(gone)}; {len(come)} new{_some(come)}"
        findings.append(Finding(text=text, place=f"tensors of the {role}"))
    permuted = old.embedding in moved and _permuted(then[f"{role}.rows"], now[f"{role}.rows"])
    if permuted:
        findings.append(_permutation(old.embedding, then[f"{role}.rows"], now[f"{role}.rows"]))
        parts.append(f"rows of {old.embedding}")
    rest = [name for name in moved if not (permuted and name == old.embedding)]
    if rest:
        findings.append(_moved(rest, old, new, then[f"{role}.sketch"], now[f"{role}.sketch"], role))
    parts += [*rest, *gone, *come]
    stored = {
        (before[name].dtype, after[name].dtype)
        for name in before
        if name in after and before[name].dtype != after[name].dtype
    }
    findings += [
        Finding(
            text=f"tensors of the {role} stored as {one} are stored as {other}", severity=Verdict.PASS, place="dtype"
        )
        for one, other in sorted(stored)
    ]
    return parts, findings


def _changed_keys(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]


def _keys(old: Mapping[str, str], new: Mapping[str, str], place: str) -> Iterator[Finding]:
    for key in _changed_keys(old, new):
        yield Finding(text=f"{key}: was {old.get(key, 'not set')}, is {new.get(key, 'not set')}", place=place)


def _permuted(old: Shaped[ndarray, " rows"], new: Shaped[ndarray, " rows"]) -> bool:
    return old.shape == new.shape and len(old) > 0 and bool((np.sort(old) == np.sort(new)).all())


def _permutation(name: str, old: Shaped[ndarray, " rows"], new: Shaped[ndarray, " rows"]) -> Finding:
    places = np.flatnonzero(old != new)
    first = int(places[0])
    source = int(np.flatnonzero(old == new[first])[0])
    text = (
        f"{len(places):,} of {len(old):,} rows of {name} are the same rows in another order: row {first} holds what row "
        f"{source} held, so id {first} means what id {source} meant"
    )
    return Finding(text=text, place=name)


def _moved(
    names: list[str],
    old: WeightsFacts,
    new: WeightsFacts,
    then: Shaped[ndarray, "tensors kept"],
    now: Shaped[ndarray, "tensors kept"],
    role: str,
) -> Finding:
    """How many moved and the one that moved most, as far as the kept values show."""
    rows = [{each.name: number for number, each in enumerate(facts.tensors)} for facts in (old, new)]
    shares = {}
    for name in names:
        one, other = then[rows[0][name]].astype(np.float64), now[rows[1][name]].astype(np.float64)
        scale = math.sqrt(float((one**2).mean())) or 1.0
        shares[name] = (float(np.abs(other - one).max()), math.sqrt(float(((other - one) ** 2).mean())) / scale)
    name = max(shares, key=lambda each: shares[each][1])
    largest, relative = shares[name]
    text = (
        f"{len(names)} of {len(old.tensors)} tensors of the {role} moved{_some(names)}; most of all {name}, by {relative:.2%} of its "
        f"size and at most {largest:.3g} (over {then.shape[1]} of its values)"
    )
    return Finding(text=text, place=name)


def _some(names: list[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f" ({', '.join(names[:_MOST_NAMED])}{rest})"


# ------------------------------------------------------------------------------------------------ sampling


def sampling_verdict(old: Recording, new: Recording) -> LayerVerdict:
    """Parameters that the files state, that the library makes of them, and what the processors do."""
    then, now = old.golden.generation, new.golden.generation
    parts = _changed_keys(then.stated, now.stated)
    findings = list(_keys(then.stated, now.stated, "generation_config.json"))
    read = [key for key in _changed_keys(then.effective, now.effective) if key not in parts]
    for key in read:
        text = f"{key}: was {then.effective.get(key, 'not set')}, is {now.effective.get(key, 'not set')}"
        findings.append(Finding(text=f"{text}, though the files say the same: a library's default", place=key))
    parts += read
    if then.eos_token_ids != now.eos_token_ids:
        findings.append(_endings(old.golden, then.eos_token_ids, now.eos_token_ids))
        parts += [] if "eos_token_id" in parts else ["EOS ids"]
    parts += _processors(old, new, findings)
    return _verdict(
        Layer.SAMPLING,
        parts,
        findings,
        f"generation parameters, EOS ids and processors ({len(PROCESSOR_CELLS)} settings) are the same",
        "restore the parameters, or, if they were meant to change, record again with --update",
    )


def _endings(old: Golden, then: tuple[int, ...], now: tuple[int, ...]) -> Finding:
    """How many recorded texts would end elsewhere."""
    texts = [sample.token_ids for prompt in old.prompts for sample in prompt.decoded.sampled]
    elsewhere = sum(
        any(token in now and token not in then for token in ids) or bool(ids and ids[-1] in then and ids[-1] not in now)
        for ids in texts
    )
    text = f"a text ended at {_ids(then)}, now at {_ids(now)}: {elsewhere} of {len(texts)} recorded texts would end elsewhere"
    return Finding(text=text, place="EOS ids")


def _ids(ids: tuple[int, ...]) -> str:
    return f"id {', '.join(map(str, ids))}" if ids else "its limit only"


def _processors(old: Recording, new: Recording, findings: list[Finding]) -> list[str]:
    laws = [recording.arrays["processors"] for recording in (old, new)]
    if laws[0].shape != laws[1].shape:
        return []
    parts = []
    for (name, _), one, other in zip(PROCESSOR_CELLS, *laws, strict=True):
        difference = float(np.abs(one - other).max())
        if difference > _PROCESSORS_ALLOWED:
            text = f"the same logits under {json.dumps(name)} give probabilities that differ by up to {difference:.3g}"
            findings.append(Finding(text=text, place="logits processors"))
            parts.append(f"processor {name}")
    return parts
