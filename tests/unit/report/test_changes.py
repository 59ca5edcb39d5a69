"""What is different from the last certificate, in the page and in the summary."""

from __future__ import annotations

from dataclasses import asdict, replace

from specverify.plan import CHECK_IDS, Plan
from specverify.records import Certificate, SamplingParams, Verdict
from specverify.report.changes import Change, changes, comparable
from specverify.report.html import render_html
from specverify.report.markdown import render_markdown
from specverify.statement import load_certificate, render_statement
from tests.unit.certificates import MEASURED, certificate_of, result_of

LAST = certificate_of(created="2026-01-01T00:00:00+00:00")


def now() -> Certificate:
    """Faster, on another release, with another tokenizer, and undecided in one check."""
    results = [result_of(name) for name in CHECK_IDS[:-2]]
    results += [
        result_of("acceptance", Verdict.INCONCLUSIVE),
        result_of("cost", measurements=MEASURED["cost"] | {"measured_speedup": 1.4}),
    ]
    made = certificate_of(*results)
    files = {**made.target.files, "tokenizer.json": "0" * 64}
    return replace(
        made, target=replace(made.target, files=files), environment=replace(made.environment, torch="2.14.0")
    )


def test_each_difference_is_a_row() -> None:
    """And what is the same is none."""
    found = {each.what: (each.before, each.now) for each in changes(LAST, now())}
    assert found["verdict"] == ("PASS", "INCONCLUSIVE")
    assert found["acceptance: verdict"] == ("PASS", "INCONCLUSIVE")
    assert found["measured_speedup"] == ("1.3 [1.1, 1.5]", "1.4 [1.1, 1.5]")
    assert found["target/tokenizer.json"][1] == "0" * 12
    assert found["torch"] == ("2.13.0+cpu", "2.14.0")
    assert set(found) == {"verdict", "acceptance: verdict", "measured_speedup", "target/tokenizer.json", "torch"}
    assert not changes(LAST, LAST)
    plan = Plan()
    other = replace(plan, only=("greedy", "lossless"), params=replace(plan.params, max_new_tokens=33))
    found = {each.what: (each.before, each.now) for each in changes(LAST, certificate_of(plan=other))}
    assert found["plan: only"] == ("—", "greedy, lossless")
    assert found["plan: params.max_new_tokens"] == ("32", "33")


def test_a_certificate_that_was_read_back_has_the_same_plan() -> None:
    """Its file has keys in another order and lists for tuples; each parameter is compared by its own name."""
    made = replace(LAST, plan=asdict(Plan(only=("greedy",))))
    read = load_certificate(render_statement(made), source="last")
    assert not changes(read, made)
    other = asdict(Plan(only=("greedy",), params=SamplingParams(stop_token_ids=(7,))))
    assert changes(read, replace(made, plan=other)) == [Change(what="plan: params.stop_token_ids", before="—", now="7")]


def test_only_the_same_pair_is_compared() -> None:
    """Neither another model nor a demonstration."""
    assert comparable(LAST, now())
    assert not comparable(None, now())
    assert not comparable(replace(LAST, fault="always-accept"), now())
    assert not comparable(replace(LAST, target=replace(LAST.target, name="another")), now())
    assert "Since the last" not in render_html(now(), replace(LAST, draft=None))


def test_page_and_summary_say_it() -> None:
    """With the date of the last one; a name with markup in it stays a text."""
    page, summary = render_html(now(), LAST), render_markdown(now(), LAST)
    for said in (page, summary):
        assert "2026-01-01" in said
        assert "1.4 [1.1, 1.5]" in said.replace("\\", "")
    assert "Nothing is different" in render_html(LAST, LAST)
    hostile = replace(LAST, plan={**LAST.plan, "<script>": "|x"})
    assert "<script>" not in render_html(now(), hostile) + render_markdown(now(), hostile)
    assert len(render_markdown(now(), replace(LAST, plan={f"key{n}": "y" * 500 for n in range(5_000)}))) < 65_000
