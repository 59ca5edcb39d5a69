"""Planted faults of an engine's answers as text: what is streamed, and what a JSON schema holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from specverify.engines.fake import letters, obeying, told
from specverify.engines.schemas import texts_of
from specverify.faults.engine_fault import fault, sound, tells
from specverify.records import FinishReason

if TYPE_CHECKING:
    from specverify.engines import Told
    from specverify.faults.engine_fault import Faulty
    from specverify.records import DecodeRequest

__all__ = ["TEXT_FAULTS"]


def _last_of_a_delta_lost(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as a fault takes it
    answer = tells(engine, request, stream, schema)
    return replace(answer, pieces=tuple(piece[:-1] if len(piece) > 1 else piece for piece in answer.pieces))


def _past_the_stop(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as above
    if not stream or not request.params.stop_strings:
        return tells(engine, request, stream, schema)
    (more,) = engine.inner.decode([replace(request, params=replace(request.params, stop_strings=()))])
    answer = tells(engine, request, stream, schema)
    return replace(answer, pieces=(*answer.pieces, letters(more.token_ids[len(answer.token_ids) :][:1])))


def _end_unlike(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as above
    answer = tells(engine, request, stream, schema)
    return replace(answer, finish=FinishReason.LENGTH) if stream else answer


def _schema_ignored(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as above
    del schema
    return tells(engine, request, stream, "")


def _mask_lost_on_bonus(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as above
    """The fourth character is the target's own choice of all."""
    if not schema:
        return tells(engine, request, stream, schema)
    ids = obeying(engine.inner.target, request, texts_of(json.loads(schema)))
    free = int(engine.inner.target.logits([(*request.prompt_ids, *ids[:3])])[0, -1].argmax())
    changed = (*ids[:3], free, *ids[4:])
    return told(request, changed, FinishReason.EOS, [1] * len(changed) if stream else ())


def _draft_under_schema(engine: Faulty, request: DecodeRequest, stream: bool, schema: str) -> Told:  # noqa: FBT001 - as above
    if not schema or request.params.greedy:
        return tells(engine, request, stream, schema)
    assert engine.inner.draft is not None
    ids = obeying(engine.inner.draft, request, texts_of(json.loads(schema)))
    return told(request, ids, FinishReason.EOS, [1] * len(ids) if stream else ())


TEXT_FAULTS = (
    fault("stream-loses-tokens", "streams", sound, "a parser of streams takes one token a delta", say=_last_of_a_delta_lost),
    fault("stream-past-the-stop", "streams", sound, "a stream goes on past its stop string", say=_past_the_stop),
    fault("stream-end-unlike", "streams", sound, "a stream says another end than the whole answer", say=_end_unlike),
    fault("schema-ignored", "schema", sound, "a schema is dropped without a word", say=_schema_ignored),
    fault("mask-lost-on-bonus", "schema", sound, "the grammar's mask is lost on the bonus row", say=_mask_lost_on_bonus),
    fault("draft-under-schema", "schema", sound, "under a grammar every draft that it allows is accepted", say=_draft_under_schema),
)  # fmt: skip
"""What can be wrong with streams and schemas."""
