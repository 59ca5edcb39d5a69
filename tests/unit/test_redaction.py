"""What is a secret is not written, and what is none stays as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specverify.cli.output import render
from specverify.codec import dump
from specverify.records import Finding
from specverify.redaction import is_address, redacted, without_secrets
from tests.unit.certificates import certificate_of, result_of

SECRET = "hunter2hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@host:8000/v1/completions",
        f"http://{SECRET}@host",
        f"http://me:with@{SECRET}@host/v1",
        f"http://me:with/{SECRET}@host/v1",
        f"me:{SECRET}@host:8000/v1",
        f"http://me:{'x' * 600}{SECRET}@host/v1",
        f"https://host/v1?pass={SECRET}",
        f"https://host/v1#accessToken={SECRET}",
        f"specverify qualify openai --option api_key={SECRET}",
        f"specverify qualify openai --option 'api_key={SECRET}'",
        f"HF_TOKEN={SECRET} specverify certify",
        f"ghs_{SECRET}",
        f"xai-{SECRET}",
        f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{SECRET}",
        "Authorization: Bearer " + SECRET[:7] + f" https://me:{SECRET}@host",
        f"https://host/v1?api_key={SECRET}&n=1",
        f"https://host/v1?n=1&X-Amz-Signature={SECRET}#a",
        f"Authorization: Bearer {SECRET}",
        f"{{'authorization': '{SECRET}'}}",
        f"x-api-key: {SECRET}",
        f"specverify certify --api-key {SECRET} --seed 3",
        f"specverify certify --token={SECRET}",
        f"hf_{SECRET} in a text",
    ],
)
def test_secrets_go(text: str) -> None:
    """The rest of the text stays, so that one sees what it was."""
    assert SECRET not in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "12 tokens = 3 drafts; token=5 was emitted", "me@example.com", "https://host/v1?n=1", "specverify certify --num-speculative-tokens 5 --plan a.toml",
        "the target's basic tokenizer", "models/hf_small", "p = 0.05, key takeaways", "cuda: NVIDIA H200",
        "http://127.0.0.1:8000/users/me@example.com", "write to me@example.com/x", "eos_token='</s>', pad_token: 0", "module:callable, os:getcwd",
        "at 10:30 me@example.com", "specverify qualify transformers --option early_exit=2",
    ],
)  # fmt: skip
def test_nothing_else_goes(text: str) -> None:
    """The words of reports are full of tokens and keys."""
    assert redacted(text) == text


def test_what_is_no_address_is_given_to_no_client() -> None:
    """A client's error repeats what it takes for a port, and that is a part of the password."""
    assert is_address("http://me:pw@127.0.0.1:8000/v1?n=1")
    assert is_address("https://[::1]:80/")
    assert not any(
        map(
            is_address, (f"http://me:{SECRET}/x@h:80/", "http://h:0x1f/", "http://[::1/", "http://", "ftp://h/", "h:80")
        )
    )


def test_no_file_of_a_run_holds_a_secret() -> None:
    """Whichever field it came in by: names, command, engine, findings, measurements."""
    url = f"https://me:{SECRET}@host/v1"
    result = result_of(
        "lossless", findings=(Finding(text=f"{url} hung up", place=url),), summary=url, measurements={"url": url}
    )
    made = certificate_of(result, command=f"specverify certify {url}", engine=url)
    made = replace(made, target=replace(made.target, name=url), plan={**made.plan, "device": url})
    for name, text in render(made).items():
        assert SECRET not in text, name
    once = without_secrets(made)
    assert dump(once) == dump(without_secrets(once))
    assert without_secrets(certificate_of(created="x")) == certificate_of(created="x")
