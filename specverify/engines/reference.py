"""The reference decoder as an engine."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specverify.context import Row
from specverify.decoding import Decoder, autoregressive, speculative
from specverify.drafting import DraftModel, NoDraft
from specverify.engines import ALL_PARAMETERS, Capability
from specverify.engines.options import Options
from specverify.errors import PromptError
from specverify.models.loading import DTYPES, load_pair
from specverify.parallel import mapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specverify.engines import EngineSettings
    from specverify.parallel import Elsewhere
    from specverify.records import DecodeRequest, DecodeTrace

__all__ = ["ReferenceEngine", "opened"]

_WORTH_A_WORKER = 32
"""Rows below which a second batch side by side gains nothing."""
_LIKE_LENGTH = 32
"""Tokens by which prompts of one batch may differ beyond a factor of 2."""
_OPTIONS = Options(engine="reference", defaults={"dtype": "float32"}, choices={"dtype": tuple(DTYPES)})


@dataclass(frozen=True)
class ReferenceEngine:
    """Decodes requests in batches of up to `batch_size` rows of like length."""

    decoder: Decoder
    batch_size: int = 128
    workers: int = 1
    """Batches decoded side by side; changes no token."""
    name: str = "reference"
    elsewhere: Elsewhere | None = None
    """Processes that decode the batches; changes no token."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Everything but what a server tells of itself."""
        return frozenset({Capability.SEED, Capability.STEPS, Capability.SPECULATION_SWITCH, Capability.STOP_STRINGS})

    @property
    def parameters(self) -> frozenset[str]:
        """All of them."""
        return ALL_PARAMETERS

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodeTrace]:
        """Traces in the order of the requests and their samples."""
        for request in requests:
            self._refuse_unusable(request)
        rows = [Row(request, sample) for request in requests for sample in range(request.num_samples)]
        traces: dict[Row, list[DecodeTrace]] = defaultdict(list)  # a request may be asked twice in one batch
        batches = self._batches(rows)
        decoded = self.elsewhere.decode(batches) if self.elsewhere is not None else None
        for batch in decoded or mapped(self.decode_batch, batches, workers=self.workers):
            for trace in batch:
                traces[Row(trace.request, trace.sample)].append(trace)
        yield from (traces[row].pop() for row in rows)

    def decode_batch(self, batch: Sequence[Row]) -> list[DecodeTrace]:
        """The traces of rows that are decoded together."""
        algorithm = speculative if batch[0].request.speculation else autoregressive
        return list(algorithm(self.decoder, batch))

    def _batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows of one arm and of like length: a long prompt would pad all its neighbours."""
        batches: list[list[Row]] = []
        most = min(self.batch_size, max(_WORTH_A_WORKER, -(-len(rows) // self.workers)))
        for row in sorted(rows, key=lambda row: (row.request.speculation, len(row.request.prompt_ids))):
            first = batches[-1][0].request if batches else row.request
            like = len(row.request.prompt_ids) <= 2 * len(first.prompt_ids) + _LIKE_LENGTH
            if batches and like and len(batches[-1]) < most and first.speculation == row.request.speculation:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _refuse_unusable(self, request: DecodeRequest) -> None:
        target = self.decoder.target
        length = len(request.prompt_ids) + request.params.max_new_tokens
        if not request.prompt_ids:
            msg = f"prompt {request.prompt_id or request.id} is empty; begin it with the tokenizer's BOS or with some text"
            raise PromptError(msg)
        if length > target.max_length:
            msg = (
                f"prompt {request.prompt_id or request.id} has {len(request.prompt_ids)} tokens and asks for "
                f"{request.params.max_new_tokens} more, but {target.name} has {target.max_length} positions; shorten it"
            )
            raise PromptError(msg)
        if outside := [token for token in request.prompt_ids if not 0 <= token < target.vocab_size]:
            msg = f"prompt {request.prompt_id or request.id} holds id {outside[0]}, but {target.name} has {target.vocab_size} ids"
            raise PromptError(msg)


@contextlib.contextmanager
def opened(settings: EngineSettings) -> Iterator[ReferenceEngine]:
    """`EngineFactory`: the models of the two folders under chain rejection; the option `dtype` is float32 unless given."""
    options = _OPTIONS.read(settings.options)
    pair = load_pair(settings.target, settings.draft, device="cpu", dtype=options["dtype"])
    target, tokenizer = pair.target.model, pair.target.tokenizer
    drafter = NoDraft(target.vocab_size) if pair.draft is None else DraftModel(pair.draft.model, target.vocab_size)
    decoder = Decoder(
        target=target,
        drafter=drafter,
        num_speculative_tokens=settings.num_speculative_tokens,
        detokenize=lambda ids: str(tokenizer.decode(list(ids))),
    )
    yield ReferenceEngine(decoder)
