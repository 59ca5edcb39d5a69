"""Two recordings to a report: which layer changed first, what only follows from it, and whether it matters. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specverify.golden.decoder_difference import decoder_verdict
from specverify.golden.input_difference import draft_verdict, sampling_verdict, weights_verdict
from specverify.golden.output_difference import behaviour_verdict, numerics_verdict
from specverify.golden.records import Change, GoldenReport, Layer, LayerVerdict
from specverify.golden.tokenizer_difference import encoded_otherwise, tokenizer_verdict
from specverify.records import Verdict, worst

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specverify.golden.records import Recording

__all__ = ["attribute"]


def attribute(
    old: Recording, new: Recording, *, missing: tuple[str, ...] = (), unused: tuple[str, ...] = ()
) -> GoldenReport:
    """Compare layer by layer. What went in is a cause by itself; what came out is one only where nothing explains it.

    `missing` are prompts that have no golden yet, `unused` recorded ones that nobody asks for any more: both fail.
    """
    layers = _layers(old, new)
    causes = tuple(each.layer for each in layers if each.change is Change.CAUSE)
    verdict = worst([Verdict.PASS, *(each.verdict for each in layers if each.change is not Change.CONSEQUENCE)])
    verdict = Verdict.FAIL if causes or missing or unused else verdict
    return GoldenReport(
        name=old.golden.name,
        verdict=verdict,
        headline=_headline(layers, causes, missing, unused),
        causes=causes,
        layers=tuple(layers),
        notes=tuple(_notes(old, new)),
        missing=missing,
        unused=unused,
        recorded=old.golden.provenances,
        environment=new.golden.provenances[-1].environment,
    )


def _layers(old: Recording, new: Recording) -> list[LayerVerdict]:
    tokenizer = tokenizer_verdict(old.golden, new.golden)
    weights = weights_verdict(old, new)
    sampling, draft = sampling_verdict(old, new), draft_verdict(old, new)
    numerics = numerics_verdict(old, new, explained=_names(weights))
    processors = [] if not any(part.startswith("processor ") for part in sampling.parts) else [sampling]
    decoder = decoder_verdict(old, new, explained=_names(weights, numerics, *processors, draft))
    behaviour = behaviour_verdict(
        old,
        new,
        explained=_names(tokenizer, weights, numerics, sampling),
        prompts_otherwise=encoded_otherwise(old.golden, new.golden),
    )
    return [tokenizer, weights, numerics, sampling, draft, decoder, behaviour]


def _names(*layers: LayerVerdict) -> str:
    """The layers that changed by themselves, as a sentence says them."""
    return " and ".join(each.layer.value for each in layers if each.change is Change.CAUSE)


def _headline(
    layers: list[LayerVerdict], causes: tuple[Layer, ...], missing: tuple[str, ...], unused: tuple[str, ...]
) -> str:
    by_layer = {each.layer: each for each in layers}
    if causes:
        first = by_layer[causes[0]]
        also = f"; so did {', '.join(causes[1:])}" if len(causes) > 1 else ""
        return f"the {causes[0]} changed first ({first.summary.removeprefix('changed: ')}){also}; {_matters(by_layer)}"
    if missing:
        return f"{len(missing)} prompts have no golden yet, the first is {missing[0]!r}"
    if unused:
        return f"{len(unused)} recorded prompts are asked for no more, the first is {unused[0]!r}"
    left_out = [each.layer.value for each in layers if each.change is Change.NOT_COMPARED]
    limits = f", as far as it can be compared (not compared: {', '.join(left_out)})" if left_out else ""
    return f"nothing changed{limits}"


def _matters(by_layer: dict[Layer, LayerVerdict]) -> str:
    behaviour = by_layer[Layer.BEHAVIOUR]
    if behaviour.verdict is Verdict.FAIL:
        return f"it matters: {behaviour.summary}"
    if behaviour.verdict is Verdict.INCONCLUSIVE:
        return f"whether it matters is open: {behaviour.summary}"
    return f"no sign that it changes what is said: {behaviour.summary}"


def _notes(old: Recording, new: Recording) -> Iterator[str]:
    then, now = (each.golden.provenances[-1].environment for each in (old, new))
    for name in ("device", "dtype", "torch", "transformers"):
        one, other = getattr(then, name), getattr(now, name)
        if one != other:
            yield f"recorded with {name} {one}, checked with {name} {other}"
