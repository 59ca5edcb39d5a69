"""A sound engine for tests: the reference decoder on laws that are known, with log-probabilities and counters.

    with opened("fake", EngineSettings(target=Path())) as engine:
        qualify_engine(engine, ...)

Plant faults in it (`specverify.faults.engine`), or hold your own harness against it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from specverify.decoding import Decoder
from specverify.drafting import DraftModel, NoDraft
from specverify.engines import ALL_PARAMETERS, Capability, Told
from specverify.engines.options import Options
from specverify.engines.reference import ReferenceEngine
from specverify.engines.schemas import texts_of
from specverify.models.calibration import ALPHABET
from specverify.models.rolling import RollingModel, rolling_pair
from specverify.records import DecodeCounters, DecodeTrace, FinishReason, count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.engines import Engine, EngineSettings
    from specverify.records import DecodeRequest

__all__ = ["FakeEngine", "fake_engine", "letters", "opened"]

_OPTIONS = Options(
    engine="fake",
    defaults={"vocab_size": "24", "seed": "0", "opposed": "no"},
    choices={"opposed": ("yes", "no")},
    counts=frozenset({"vocab_size", "seed"}),
)
_NOTHING = count(())


def letters(token_ids: Sequence[int]) -> str:
    """The fake's tokenizer: one character an id, JSON's first; its EOS, 0, is the last of them."""
    return "".join(ALPHABET[(token - 1) % len(ALPHABET)] for token in token_ids)


@dataclass
class FakeEngine:
    """Every capability, every parameter, and no fault."""

    target: RollingModel
    draft: RollingModel | None
    inner: ReferenceEngine
    name: str = "fake"
    _counted: DecodeCounters = field(default=_NOTHING)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """All of them."""
        return frozenset(Capability)

    @property
    def parameters(self) -> frozenset[str]:
        """All of them."""
        return ALL_PARAMETERS

    def counters(self) -> DecodeCounters:
        """Since it was opened."""
        return self._counted

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """The reference decoder's traces with the log-probability of each token under the target's raw law."""
        asked = [one if one.seeded else replace(one, seed=secrets.randbits(63)) for one in requests]
        traces = list(self.inner.decode(asked))
        self._counted += count(traces)
        rows = (request for request in requests for _ in range(request.num_samples))
        answers = [replace(trace, request=row) for row, trace in zip(rows, traces, strict=True)]
        yield from _with_logprobs(self.target, answers)

    def prompt_logprobs(self, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
        """Of the target's own law."""
        return laws_of(self.target, traces, top=top)

    def tell(self, request: DecodeRequest, *, stream: bool = False, schema: str = "") -> Told:
        """A piece a step, or a character where a schema is obeyed."""
        if schema:
            texts = texts_of(json.loads(schema))
            ids = obeying(self.target, request, texts)
            if self.draft is not None and request.speculation:
                self._counted += _forced(letters(ids[:-1]), texts)
            return told(request, ids, FinishReason.EOS, [1] * len(ids) if stream else ())
        (trace,) = self.decode([replace(request, num_samples=1)])
        lengths = [step.num_emitted_tokens for step in trace.steps] or [1] * len(trace.token_ids)
        return told(request, trace.token_ids, trace.finish, lengths if stream else ())


def laws_of(target: RollingModel, traces: Sequence[DecodeTrace], *, top: int) -> Iterator[list[dict[int, float]]]:
    """What `Rescoring` asks, from a law that is known."""
    for trace in traces:
        start = len(trace.request.prompt_ids) - 1
        rows = target.logits([trace.request.prompt_ids + trace.token_ids])[0].log_softmax(-1)[start:-1]
        likeliest = rows.topk(min(top, rows.shape[-1]), -1)
        yield [
            dict(zip(ids, values, strict=True)) | {token: float(row[token])}
            for row, ids, values, token in zip(
                rows, likeliest.indices.tolist(), likeliest.values.tolist(), trace.token_ids, strict=True
            )
        ]


def told(request: DecodeRequest, ids: Sequence[int], finish: FinishReason, lengths: Sequence[int]) -> Told:
    """The text of some ids without their EOS, and pieces of so many tokens each."""
    said = ids[:-1] if ids and ids[-1] in request.params.eos_token_ids else ids
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    pieces = tuple(letters(said[at : at + length]) for at, length in zip(starts, lengths, strict=True))
    return Told(text="".join(pieces) if lengths else letters(said), token_ids=tuple(ids), finish=finish, pieces=pieces)


def obeying(model: RollingModel, request: DecodeRequest, texts: Sequence[str]) -> tuple[int, ...]:
    """Ids of one of these texts and the EOS, each drawn from the model's law among those that some text goes on with."""
    random = torch.Generator().manual_seed(request.seed)
    ids: list[int] = []
    eos = request.params.eos_token_ids[0]
    while eos not in ids:
        said = letters(ids)
        allowed = [token for token in range(model.vocab_size) if _goes_on(said + letters([token]), texts)]
        allowed += [eos] * (said in texts)
        logits = model.logits([(*request.prompt_ids, *ids)])[0, -1, allowed]
        law = torch.softmax(logits / (request.params.temperature or 1e-6), -1)
        ids.append(allowed[int(torch.multinomial(law, 1, generator=random))])
    return tuple(ids)


def _forced(text: str, texts: Sequence[str]) -> DecodeCounters:
    """A character that nothing else could stand for is drafted by the grammar, and accepted."""
    follows = [{each[at] for each in texts if each[:at] == text[:at]} for at in range(len(text))]
    number = sum(len(each) == 1 for each in follows)
    return DecodeCounters(
        num_drafts=number, num_draft_tokens=number, num_accepted_tokens=number, num_accepted_tokens_per_pos=(number,)
    )


def _goes_on(text: str, texts: Sequence[str]) -> bool:
    return any(each.startswith(text) for each in texts)


def _with_logprobs(target: RollingModel, traces: Sequence[DecodeTrace]) -> Iterator[DecodeTrace]:
    told = [trace for trace in traces if trace.token_ids]
    sequences = [trace.request.prompt_ids + trace.token_ids for trace in told]
    laws = target.logits(sequences).log_softmax(-1).unbind(0) if told else ()
    by_trace = dict(zip(map(id, told), laws, strict=True))
    for trace in traces:
        if id(trace) not in by_trace:
            yield trace
            continue
        start = len(trace.request.prompt_ids) - 1
        rows = by_trace[id(trace)][start : start + len(trace.token_ids)]
        found = rows.gather(1, torch.tensor(trace.token_ids)[:, None])[:, 0]
        yield DecodeTrace(
            request=trace.request, sample=trace.sample, token_ids=trace.token_ids, finish=trace.finish,
            steps=trace.steps, logprobs=tuple(found.tolist()),
        )  # fmt: skip


def fake_engine(
    *,
    vocab_size: int = 24,
    seed: int = 0,
    opposed: bool = False,
    num_speculative_tokens: int = 3,
    max_length: int = 128,
    speculation: bool = True,
    batch_size: int = 1024,
) -> FakeEngine:
    """A fake on two laws that follow from the seed."""
    target, draft = rolling_pair(vocab_size=vocab_size, seed=seed, max_length=max_length, opposed=opposed)
    decoder = Decoder(
        target=target,
        drafter=DraftModel(draft, vocab_size) if speculation else NoDraft(vocab_size),
        num_speculative_tokens=num_speculative_tokens,
        detokenize=letters,
    )
    return FakeEngine(target, draft if speculation else None, ReferenceEngine(decoder, batch_size=batch_size))


@contextlib.contextmanager
def opened(settings: EngineSettings) -> Iterator[Engine]:
    """`EngineFactory`: the folders are left alone, the options are `vocab_size`, `seed` and `opposed`."""
    options = _OPTIONS.read(settings.options)
    yield fake_engine(
        vocab_size=int(options["vocab_size"]),
        seed=int(options["seed"]),
        opposed=options["opposed"] == "yes",
        num_speculative_tokens=settings.num_speculative_tokens,
        max_length=min(settings.max_length, 128),
    )
