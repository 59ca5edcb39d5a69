"""Policies come back as what they say; the schema and the commented file know every key."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from typing import TYPE_CHECKING

from specverify.policy import DomainPolicy, Policy
from specverify.policy_file import commented_policy, policy_schema, read_policy

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [each.name for each in fields(Policy)]


def test_every_key_is_read(tmp_path: Path) -> None:
    """The examples of the commented policy, all taken up."""
    path = tmp_path / "p.toml"
    path.write_text("\n".join(line.removeprefix("# ") for line in commented_policy().splitlines() if " = " in line))
    policy = read_policy(path)
    assert policy.domains == {"code": DomainPolicy(minimum_acceptance=0.5)}
    assert policy.minimum_samples["lossless"] == 7_000
    assert [name for name in KEYS if getattr(policy, name) == getattr(Policy(), name)] == ["allow_remote_code"]


def test_an_empty_policy_is_the_usual_one(tmp_path: Path) -> None:
    """Every key may be left out, and what `init` writes holds as it is."""
    path = tmp_path / "p.toml"
    path.write_text("")
    assert read_policy(path) == Policy()
    path.write_text(commented_policy())
    assert list(tomllib.loads(commented_policy())) == ["required_checks"]
    assert read_policy(path).required_checks == ("compatibility", "greedy", "lossless")


def test_schema_describes_every_key() -> None:
    """With the sentence that stands beside it in the record."""
    properties = policy_schema()["properties"]
    assert list(properties) == KEYS
    assert all(each["description"].endswith(".") for each in properties.values())
