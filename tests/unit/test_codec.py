"""The file edge: what is written comes back, and what can't be read is one clear sentence."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specverify.codec import (
    check_plan,
    dump,
    load,
    load_as,
    read_plan,
    write_text_atomically,
)
from specverify.errors import InternalError, OutputError, PlanError, PromptError
from specverify.plan import BUDGETS, Plan
from specverify.prompt_file import read_prompts
from specverify.records import (
    SCHEMA_VERSION,
    Certificate,
    CheckResult,
    Environment,
    ErrorBudget,
    Message,
    ModelFingerprint,
    Plot,
    PlotKind,
    Prompt,
    SamplingParams,
    Series,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

RESULT = CheckResult(
    id="lossless",
    claim="c",
    verdict=Verdict.FAIL,
    summary="NaN",
    measurements={"inf": math.inf, "minus": -math.inf, "count": 3, "float": 3.0, "text": "Infinity", "deep": "\\NaN"},
    plots=(
        Plot(id="p", title="t", x_label="", y_label="", kind=PlotKind.BAR,
             series=(Series(label="s", x=("NaN", 2.0), y=(math.inf, 1.0)),)),
    ),
)  # fmt: skip
CERTIFICATE = Certificate(
    created="2026-03-02T09:41:07+00:00",
    command="specverify certify",
    verdict=Verdict.FAIL,
    headline="Do not roll this out.",
    target=ModelFingerprint(
        name="t", architecture="table", num_parameters=0, vocab_size=5, weights_sha256="", tokenizer_sha256="",
        template_sha256="", config_sha256="", files={"ü.json": "00"},
    ),
    draft=None,
    engine="reference",
    environment=Environment(
        specverify="0", python="3", torch="2", transformers="4", device="cpu", dtype="float32", num_threads=1,
        platform="x", cpu="y",
    ),
    plan={"only": ("a", "b"), "params": {"stop_strings": (), "banned": ((1, 2), (3,))}, "limit": math.inf, "seed": 1},
    plan_sha256="ab",
    seed=17,
    checks=(RESULT,),
    error_budget=ErrorBudget(
        false_fail_rate=1e-6, e_process_rate=5e-7, p_value_rate=5e-7, num_e_processes=1, num_p_values=2
    ),
    elapsed_s=1.5,
)  # fmt: skip


class TestRoundTrip:
    """What is written comes back as what it was."""

    def test_certificate(self) -> None:
        """A certificate equals itself after a round trip, tuples of the plan and infinities included."""
        assert load(dump(CERTIFICATE)) == CERTIFICATE

    def test_canonical(self) -> None:
        """The same certificate gives the same bytes, keys sorted, one newline at the end."""
        text = dump(CERTIFICATE)
        assert dump(load(text)) == text
        assert text.endswith("}\n")
        assert list(json.loads(text)) == sorted(json.loads(text))
        assert "ü.json" in text

    def test_strict_json(self) -> None:
        """No bare NaN or Infinity is written: other parsers refuse them."""

        def refuse(constant: str) -> None:
            pytest.fail(constant)

        assert json.loads(dump(CERTIFICATE), parse_constant=refuse)["plan"]["limit"] == "Infinity"

    def test_nan(self) -> None:
        """NaN comes back as a float, and the text "NaN" as a text."""
        result = replace(RESULT, measurements={"nan": math.nan, "text": "NaN", "escaped": "\\\\NaN"})
        back = load_as(CheckResult, dump(result)).measurements
        assert isinstance(back["nan"], float)
        assert math.isnan(back["nan"])
        assert back["text"] == "NaN"
        assert back["escaped"] == "\\\\NaN"

    def test_whole_numbers_of_floats(self) -> None:
        """An int where a float belongs is written as the float that it comes back as."""
        assert dump(replace(RESULT, elapsed_s=2)) == dump(replace(RESULT, elapsed_s=2.0))

    @settings(max_examples=40, deadline=None)
    @given(st.text(), st.one_of(st.text(), st.integers(), st.floats(allow_nan=False)))
    def test_any_text(self, summary: str, value: float | str) -> None:
        """Any text and number survives; a text that UTF-8 can't hold is mended."""
        result = replace(RESULT, summary=summary, measurements={"value": value})
        assert load_as(CheckResult, dump(result)) == result

    def test_lone_surrogate(self) -> None:
        """Half of a surrogate pair, as a byte-level token may decode to, doesn't spoil the file."""
        assert load_as(CheckResult, dump(replace(RESULT, summary="a\ud800"))).summary == "a\ufffd"

    def test_unwritable(self) -> None:
        """A value that JSON can't hold is our bug, not the user's."""
        with pytest.raises(InternalError, match="can't be written"):
            dump(replace(RESULT, measurements={"x": object()}))
        with pytest.raises(InternalError, match=r"measurements\.x"):
            dump(replace(RESULT, measurements={"x": (1, 2)}))


def changed(**changes: object) -> str:
    return json.dumps({**json.loads(dump(CERTIFICATE)), **changes})


class TestRefusal:
    """What isn't a certificate of ours is refused with a sentence."""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            pytest.param("", "not JSON", id="empty"),
            pytest.param("{", "not JSON", id="cut"),
            pytest.param("[" * 100_000, "nested more than 64 deep", id="deep"),
            pytest.param("9" * 5_000, "not JSON", id="long-integer"),
            pytest.param("[]", "not a Certificate", id="list"),
            pytest.param('{"seed": 1, "seed": 2}', "'seed' is there twice", id="repeated"),
            pytest.param(changed(verdit="PASS"), "unknown key 'verdit'", id="unknown"),
            pytest.param(changed(checks=[{"id": "a"}]), r"'claim' is missing in checks\[0\]", id="missing"),
            pytest.param(changed(seed="17"), "seed: input should be a valid integer", id="type"),
            pytest.param(changed(verdict="MAYBE"), "verdict: input should be 'PASS'", id="enum"),
            pytest.param(changed(schema_version=SCHEMA_VERSION + 1), "made by a newer specverify", id="newer"),
            pytest.param(changed(schema_version=0), "made by an older specverify", id="older"),
        ],
    )
    def test_text(self, text: str, said: str) -> None:
        """Each way of being wrong is named."""
        with pytest.raises(OutputError, match=said) as caught:
            load(text)
        assert "\n" not in str(caught.value)

    def test_nested_unknown_key(self) -> None:
        """An unknown key is refused at any depth."""
        raw = json.loads(dump(CERTIFICATE))
        raw["checks"][0]["plots"][0]["colour"] = "red"
        with pytest.raises(OutputError, match=r"unknown key 'colour' in checks\[0\]\.plots\[0\]"):
            load(json.dumps(raw))


class TestAtomicWrite:
    """All of a file, or what was there before."""

    def test_writes(self, tmp_path: Path) -> None:
        """The text is written as it is, into folders that are made, with the usual permissions."""
        path = tmp_path / "new" / "folder" / "r.txt"
        write_text_atomically(path, "a\r\nü\n")
        assert path.read_bytes() == "a\r\nü\n".encode()
        assert os.listdir(path.parent) == ["r.txt"]  # noqa: PTH208 - names, not paths
        other = tmp_path / "other"
        other.touch()
        assert path.stat().st_mode == other.stat().st_mode

    @pytest.mark.parametrize("broken", ["fsync", "replace"])
    def test_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
        """A full disk leaves the old file and nothing else."""
        path = tmp_path / "r.txt"
        path.write_text("old")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, broken, full)
        monkeypatch.setattr(type(path), broken, full, raising=False)
        with pytest.raises(OutputError, match=r"can't write .*r\.txt: no space left on device"):
            write_text_atomically(path, "new")
        assert path.read_text() == "old"
        assert [each.name for each in tmp_path.iterdir()] == ["r.txt"]

    def test_interrupted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C leaves nothing behind."""

        def interrupt(_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_text_atomically(tmp_path / "r.txt", "new")
        assert not list(tmp_path.iterdir())

    def test_folder_in_the_way(self, tmp_path: Path) -> None:
        """A folder can't be replaced by a file, and a file holds no folder."""
        (tmp_path / "file").touch()
        for path in (tmp_path, tmp_path / "file" / "r.txt"):
            with pytest.raises(OutputError, match="can't write"):
                write_text_atomically(path, "new")

    def test_link_and_device(self, tmp_path: Path) -> None:
        """A link stays a link, and a device is written to."""
        (tmp_path / "real").touch()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        write_text_atomically(tmp_path / "link", "new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_text() == "new"
        write_text_atomically(os.devnull, "new")


class TestPrompts:
    """Prompts as JSON lines."""

    def test_reads(self, tmp_path: Path) -> None:
        """Ids and domains have defaults; a byte order mark, CRLF, empty lines and U+2028 do no harm."""
        path = tmp_path / "p.jsonl"
        path.write_text(
            '\ufeff{"text": "NaN\u2028b"}\r\n\n{"id": "x", "domain": "code", "text": "\\u0000 <s>"}\n', encoding="utf-8"
        )
        assert read_prompts(path) == (
            Prompt(id="prompt-0001", domain="default", text="NaN\u2028b"),
            Prompt(id="x", domain="code", text="\x00 <s>"),
        )

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            pytest.param(b"", "holds no prompt", id="empty"),
            pytest.param(b"\n \n", "holds no prompt", id="blank"),
            pytest.param(b'{"text": "\xff"}', "not UTF-8: byte 11 is 0xff", id="bytes"),
            pytest.param(b'{"text": "a"}\nhello', "line 2 of .* is not JSON", id="json"),
            pytest.param(b'"hello"', "line 1 of .* is not an object", id="object"),
            pytest.param(b'{"txt": "a"}', "unknown key 'txt'; did you mean 'text'", id="near"),
            pytest.param(b'{"zzz": "a"}', "unknown key 'zzz'; known: id, domain, text", id="far"),
            pytest.param(b'{"id": "a"}', "has no text", id="no-text"),
            pytest.param(b'{"text": "  "}', "the text is empty", id="empty-text"),
            pytest.param(b'{"text": 3}', "the text is not a string", id="type"),
            pytest.param(b'{"id": "", "text": "a"}', "the id is empty", id="empty-id"),
            pytest.param(b'{"text": "\\ud800"}', "surrogate", id="surrogate"),
            pytest.param(b'{"text": "a", "text": "b"}', "'text' is there twice", id="repeated"),
            pytest.param(b'{"id": "a", "text": "b"}\n' * 2, "line 2 .* id 'a', which line 1 has", id="duplicate"),
            pytest.param(b'{"text": "a", "messages": []}', "both text and messages", id="both"),
            pytest.param(b'{"messages": []}', "messages is not a list of", id="no-message"),
            pytest.param(b'{"messages": [{"role": "user"}]}', "message 1 does not have just", id="no-content"),
            pytest.param(b'{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot'; known: system", id="role"),
            pytest.param(
                b'{"messages": [{"role": "user", "content": ""}]}', "content of message 1 is empty", id="said"
            ),
            pytest.param(b'{"text": ' + b"[" * 100_000, "nested more than 64 deep", id="deep"),
            pytest.param(b'{"text": "' + b"a" * 4_000_001 + b'"}', "longer than 4,000,000", id="long"),
        ],
    )
    def test_refuses(self, tmp_path: Path, content: bytes, said: str) -> None:
        """Each mistake is named with its line, in one short sentence."""
        path = tmp_path / "p.jsonl"
        path.write_bytes(content)
        with pytest.raises(PromptError, match=said) as caught:
            read_prompts(path)
        assert len(str(caught.value)) < 300 + len(str(path))

    def test_reads_conversations(self, tmp_path: Path) -> None:
        """In place of the text; the template is the target's business."""
        path = tmp_path / "p.jsonl"
        path.write_text('{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}')
        assert read_prompts(path)[0].messages == (Message("system", "a"), Message("user", "b"))

    def test_missing(self, tmp_path: Path) -> None:
        """A file that isn't there is the user's mistake."""
        with pytest.raises(PromptError, match="no such file"):
            read_prompts(tmp_path / "none.jsonl")


class TestPlan:
    """Plans as TOML."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the plan is."""
        return tmp_path / "plan.toml"

    def test_reads(self, path: Path) -> None:
        """What the file sets is set, the rest stays as it was."""
        path.write_text(
            'num_speculative_tokens = 5\nfalse_fail_rate = 1e-4\nminimum_speedup = 1\nonly = ["lossless"]\n'
            '[params]\ntemperature = 0.5\nbanned_token_ids = [[1, 2]]\nstop_strings = ["x"]\n'
        )
        base = Plan(seed=3, params=SamplingParams(top_k=7))
        assert read_plan(path, base) == replace(
            base,
            num_speculative_tokens=5,
            false_fail_rate=1e-4,
            minimum_speedup=1.0,
            only=("lossless",),
            params=SamplingParams(top_k=7, temperature=0.5, banned_token_ids=((1, 2),), stop_strings=("x",)),
        )

    def test_budget(self, path: Path) -> None:
        """A budget brings its numbers; other keys change them; going back to standard resets them."""
        path.write_text('budget = "deep"\ngreedy_prompts = 5\n')
        deep = read_plan(path, Plan())
        assert deep.lossless_tokens == BUDGETS["deep"]["lossless_tokens"]
        assert deep.greedy_prompts == 5
        path.write_text('budget = "standard"\n')
        assert read_plan(path, deep) == Plan()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            pytest.param("a b", "is not TOML", id="toml"),
            pytest.param("sead = 1", "unknown key 'sead'; did you mean 'seed'", id="near"),
            pytest.param("[params]\ntemprature = 1", "'params.temprature'; did you mean 'temperature'", id="nested"),
            pytest.param('seed = "x"', "seed to 'x', which is not an integer", id="type"),
            pytest.param("seed = true", "seed to True, which is not an integer", id="bool"),
            pytest.param('false_fail_rate = "x"', "not a number", id="float"),
            pytest.param("only = [1]", r"only to \[1\], which is not a list that fits", id="list"),
            pytest.param("params = 1", "params to 1, which is not a table", id="table"),
            pytest.param("batch_size = 0", "batch_size to 0; it must be at least 1", id="count"),
            pytest.param("lossless_tokens = -5", "must be at least 1", id="negative"),
            pytest.param("false_fail_rate = 1.0", "must be above 1e-300 and below 1", id="rate"),
            pytest.param("false_fail_rate = 5e-324", "must be above 1e-300 and below 1", id="tiny"),
            pytest.param("false_pass_rate = nan", "must be above 1e-300 and below 1", id="nan"),
            pytest.param("minimum_speedup = inf", "must be at least 0", id="inf"),
            pytest.param("params.top_p = 0.0", "params.top_p to 0.0; it must be above 0 and at most 1", id="top_p"),
            pytest.param('budget = "dep"', "budget to 'dep'; did you mean 'deep'", id="budget"),
        ],
    )
    def test_refuses(self, path: Path, content: str, said: str) -> None:
        """Each mistake names the key and what it may be."""
        path.write_text(content)
        with pytest.raises(PlanError, match=said) as caught:
            read_plan(path, Plan())
        assert "\n" not in str(caught.value)

    def test_missing(self, path: Path) -> None:
        """A file that isn't there, and one that isn't text."""
        with pytest.raises(PlanError, match="no such file"):
            read_plan(path, Plan())
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(PlanError, match="not UTF-8"):
            read_plan(path, Plan())

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_own_plans_are_good(self, budget: str) -> None:
        """Every plan that we offer is one that we accept."""
        plan = replace(Plan(), budget=budget, **BUDGETS[budget])
        assert check_plan(plan) is plan
