"""What only follows is not blamed, what nothing explains is, and what can't be compared is said."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specverify.faults import find_fault
from specverify.golden.attribution import attribute
from specverify.golden.decoder import engine_of
from specverify.golden.decoder_difference import decoder_verdict
from specverify.golden.job import check, extended, record
from specverify.golden.records import Change, Layer, Recording
from specverify.models.loading import load_pair
from specverify.records import Prompt, Verdict
from specverify.subject import EncodedPrompt, Subject
from tests.unit.golden.conftest import PROMPTS, now
from tests.unit.golden.upgrades import UPGRADES, copy_of

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.engines import Engine
    from specverify.golden.records import GoldenReport, LayerVerdict
    from specverify.models.loading import Pair
    from tests.unit.golden.conftest import Recorded


def of(report: GoldenReport, layer: Layer) -> LayerVerdict:
    return next(each for each in report.layers if each.layer is layer)


def upgrade(name: str, folder: Path) -> Path:
    next(each for each in UPGRADES if each.name == name).apply(folder)
    return folder


def planted(pair: Pair, fault: str) -> Engine:
    """The reference decoder with a fault."""
    engine = engine_of(pair, 3)
    prompts = (EncodedPrompt(id="a", domain="", token_ids=(5, 6, 7)),)
    subject = Subject(
        engine=engine, target=pair.target.model, draft=pair.draft.model if pair.draft else None, prompts=prompts,
        decoder=engine.decoder, pair=pair, rule="chain",
    )  # fmt: skip
    return find_fault(fault).plant(subject).engine


@pytest.mark.parametrize("fault", ["always-accept", "seed-ignored", "cache-never-rolled-back"])
def test_a_broken_decoder_is_blamed_on_the_decoder(recorded: Recorded, fault: str) -> None:
    """Models, numbers and parameters are the same, so nothing else can be the cause."""
    report = recorded.check(engine=planted(recorded.pair, fault))
    assert report.causes == (Layer.DECODER,)
    assert of(report, Layer.DECODER).findings


def test_rounding_parts_some_texts_and_not_all(recorded: Recorded) -> None:
    """With laws of another machine, as many texts may part as the measured noise explains; where that is all, nobody judges."""
    golden = recorded.recording.golden
    other = dataclasses.replace(now(), environment=dataclasses.replace(now().environment, torch="2.0"))
    prompts = tuple(
        dataclasses.replace(
            each,
            decoded=dataclasses.replace(
                each.decoded,
                sampled=tuple(
                    dataclasses.replace(one, token_ids=(*one.token_ids[:-1], 9)) for one in each.decoded.sampled
                ),
            ),
        )
        for each in golden.prompts
    )
    for sd, change in ((1e-6, Change.CAUSE), (0.02, Change.CAUSE), (0.5, Change.NOT_COMPARED)):
        noise = dataclasses.replace(golden.noise, margin_sd=sd)
        new = dataclasses.replace(golden, prompts=prompts, noise=noise, provenances=(other,))
        parted = decoder_verdict(
            recorded.recording, Recording(golden=new, arrays=recorded.recording.arrays), explained=""
        )
        assert parted.change is change


def test_a_library_that_computes_otherwise_is_blamed_on_numerics(recorded: Recorded) -> None:
    """The files are the same, the logits are not; the decoder's other texts follow from it."""
    pair = load_pair(recorded.folder / "target", recorded.folder / "draft")
    pair.target.model.module.model.norm.variance_epsilon = 0.5
    report = check(pair, recorded.recording, provenance=now())
    assert report.causes == (Layer.NUMERICS,)
    assert of(report, Layer.DECODER).change is Change.CONSEQUENCE


def test_rounding_is_no_cause(recorded: Recorded) -> None:
    """A model in double precision differs by rounding alone, and is within the noise that the recording allows."""
    pair = load_pair(recorded.folder / "target", recorded.folder / "draft")
    pair.target.model.module.double()
    report = check(pair, recorded.recording, provenance=now())
    assert of(report, Layer.NUMERICS).measurements["largest_difference_nats"] > 0
    assert report.verdict is Verdict.PASS


def test_a_flip_at_a_wide_margin_is_a_cause_whatever_the_largest_difference(recorded: Recorded) -> None:
    """Noise explains another most probable token only where two were close."""
    arrays = {name: value.copy() for name, value in recorded.recording.arrays.items()}
    row = int(arrays["laws.margin"].argmax())
    arrays["laws.best"][row] += 1
    new = Recording(golden=recorded.recording.golden, arrays=arrays)
    numerics = of(attribute(recorded.recording, new), Layer.NUMERICS)
    assert numerics.change is Change.CAUSE
    assert "margin" in numerics.findings[-1].text


def test_another_dtype_is_not_held_against_the_numbers(recorded: Recorded, tmp_path: Path) -> None:
    """Only what may be compared is, and the headline says what was not."""
    report = recorded.check(copy_of(recorded.folder, tmp_path / "pair"), dtype="bfloat16")
    assert report.verdict is Verdict.PASS
    assert of(report, Layer.NUMERICS).change is of(report, Layer.DECODER).change is Change.NOT_COMPARED
    assert "not compared: numerics, decoder" in report.headline
    assert "recorded with dtype float32, checked with dtype bfloat16" in report.notes


def test_an_upgrade_shows_in_another_dtype_too(recorded: Recorded, tmp_path: Path) -> None:
    """Files are compared whatever the dtype is."""
    pair = upgrade("fine-tuned target", copy_of(recorded.folder, tmp_path / "pair"))
    assert recorded.check(pair, dtype="bfloat16").causes == (Layer.WEIGHTS,)


def test_weights_stored_in_a_wider_type_are_the_same(recorded: Recorded, tmp_path: Path) -> None:
    """A checkpoint that was only saved again in fp32 changes nothing."""
    pair = copy_of(recorded.folder, tmp_path / "pair")
    loaded = load_pair(pair / "target").target.model.module
    kept = (pair / "target" / "generation_config.json").read_text(encoding="utf-8")
    loaded.save_pretrained(pair / "target")
    (pair / "target" / "generation_config.json").write_text(kept, encoding="utf-8")
    report = recorded.check(pair)
    assert report.verdict is Verdict.PASS
    assert "stored as float16" in of(report, Layer.WEIGHTS).findings[0].text


def test_a_changed_target_says_how_much_it_matters(recorded: Recorded, tmp_path: Path) -> None:
    """Numbers, texts and behaviour follow from the weights, and the distance of the laws is told."""
    report = recorded.check(upgrade("fine-tuned target", copy_of(recorded.folder, tmp_path / "pair")))
    behaviour = of(report, Layer.BEHAVIOUR)
    assert behaviour.change is Change.CONSEQUENCE
    assert behaviour.measurements["tv"] > 0.01
    assert of(report, Layer.NUMERICS).change is Change.CONSEQUENCE


def test_tokens_that_a_new_top_k_forbids_prove_another_behaviour(recorded: Recorded, tmp_path: Path) -> None:
    """Recorded texts hold tokens that can't be sampled any more."""
    report = recorded.check(upgrade("changed default top_k", copy_of(recorded.folder, tmp_path / "pair")))
    behaviour = of(report, Layer.BEHAVIOUR)
    assert behaviour.verdict is Verdict.FAIL
    assert behaviour.measurements["impossible_tokens"] > 0
    assert "it matters: TV of the law before sampling parameters, which changed, 0 [0, 0]" in report.headline
    assert of(report, Layer.DECODER).change is Change.UNCHANGED


def test_other_parameters_that_so_few_tokens_cant_tell_apart_leave_open_whether_it_matters(
    recorded: Recorded, tmp_path: Path
) -> None:
    """The TV distance is of the laws before parameters, so a distance of 0 is no sign that nothing changed."""
    pair = copy_of(recorded.folder, tmp_path / "pair")
    file = pair / "target" / "generation_config.json"
    stated = json.loads(file.read_text(encoding="utf-8")) | {"temperature": 0.999}
    file.write_text(json.dumps(stated), encoding="utf-8")
    report = recorded.check(pair)
    assert report.causes == (Layer.SAMPLING,)
    assert of(report, Layer.BEHAVIOUR).verdict is Verdict.INCONCLUSIVE
    assert "whether it matters is open" in report.headline


def test_one_removed_merge_is_named_with_a_text(recorded: Recorded, tmp_path: Path) -> None:
    """The merge, and the first text that shows it with both lists of ids."""
    report = recorded.check(upgrade("one merge removed", copy_of(recorded.folder, tmp_path / "pair")))
    texts = " ".join(each.text for each in of(report, Layer.TOKENIZER).findings)
    assert "1 gone" in texts
    assert "first difference at token" in texts


def test_permuted_rows_are_told_from_trained_ones(recorded: Recorded, tmp_path: Path) -> None:
    """The same rows in another order: ids mean other tokens."""
    report = recorded.check(upgrade("permuted rows", copy_of(recorded.folder, tmp_path / "pair")))
    assert "40 of 2,048 rows" in of(report, Layer.WEIGHTS).findings[0].text


def test_a_smaller_vocabulary_is_reported_rather_than_crashed_on(recorded: Recorded) -> None:
    """Recorded ids that the new target can't read leave nothing to compare below the weights."""
    golden = recorded.recording.golden
    beyond = tuple(
        dataclasses.replace(each, encoding=dataclasses.replace(each.encoding, ids=(*each.encoding.ids[:-1], 5000)))
        for each in golden.prompts
    )
    old = dataclasses.replace(recorded.recording, golden=dataclasses.replace(golden, prompts=beyond))
    report = check(recorded.pair, old, provenance=now())
    assert report.verdict is Verdict.FAIL


def test_prompts_without_a_golden_and_goldens_without_a_prompt_fail(recorded: Recorded) -> None:
    """A set of prompts that moved on is not silently passed."""
    new = Prompt(id="new", domain="text", text="A new one")
    report = recorded.check(prompts=(*PROMPTS[:2], new))
    assert (report.missing, report.unused) == (("new",), ("chat",))
    assert report.verdict is Verdict.FAIL


def test_an_extended_golden_holds_for_old_and_new_prompts(recorded: Recorded) -> None:
    """New prompts carry the provenance of their own recording."""
    new = Prompt(id="new", domain="text", text="A new one")
    more = record(recorded.pair, (new,), name="tiny", provenance=now(), max_new_tokens=12)
    longer = extended(recorded.recording, more)
    assert [each.recording for each in longer.golden.prompts] == [0, 0, 0, 1]
    report = check(recorded.pair, longer, (*PROMPTS, new), provenance=now())
    assert report.verdict is Verdict.PASS


def test_no_draft_is_recorded_with_prompt_lookup(recorded: Recorded, tmp_path: Path) -> None:
    """And a draft that comes or goes is a change of the draft."""
    alone = load_pair(recorded.folder / "target")
    golden = record(alone, PROMPTS, name="alone", provenance=now(), max_new_tokens=6)
    assert check(alone, golden, provenance=now()).verdict is Verdict.PASS
    assert check(recorded.pair, golden, provenance=now()).causes == (Layer.DRAFT,)
    assert np.isnan(golden.golden.expected_acceptance)
