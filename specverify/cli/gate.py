"""`specverify gate` says whether what is about to be served is what was certified, and certified well enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specverify.gate import Refusal
    from specverify.policy import Policy
    from specverify.records import Certificate
    from specverify.watch import Watch

__all__ = ["gate"]

CertificateFile = Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="certificate.json, as certify wrote it.")]


def gate(
    certificate: CertificateFile,
    target: options.Target = None,
    draft: options.Draft = None,
    *,
    pair: options.PairName = None,
    policy: options.PolicyFile = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Judge the certificate's evidence again, hash TARGET and DRAFT, check the policy; 0 lets them out, 1 does not.

    No model is loaded. DRAFT is left out where prompt lookup was certified.
    """
    from rich.console import Console

    from specverify.cli.progress import watching
    from specverify.errors import UsageError
    from specverify.gate import about_an_engine
    from specverify.policy import Policy
    from specverify.policy_file import read_policy
    from specverify.statement import contradictions, open_statement

    wanted = read_policy(policy) if policy is not None else Policy()
    statement = open_statement(certificate)
    if about_an_engine(statement.certificate):
        msg = f"{certificate} is about an engine (specverify qualify), not about a pair; give the certificate of specverify certify"
        raise UsageError(msg)
    folders = _folders(target, draft, pair)
    watch = watching(Console(stderr=True), quiet=quiet or as_json, as_json=as_json)
    try:
        digests = _digests(folders, watch)
    finally:
        watch.close()
    refusals = _refusals(statement.certificate, contradictions(statement), wanted, digests)
    _show(statement.certificate, refusals, digests, as_json=as_json, quiet=quiet)
    return 1 if refusals else 0


def _folders(target: str | None, draft: str | None, pair: str | None) -> dict[str, Path]:
    """Where the files lie; raises `UsageError` for arguments that don't go together, `PairError` for no folder."""
    from specverify.errors import PairError, UsageError
    from specverify.model_files import folder_of
    from specverify.pairs import embedded

    if pair is not None:
        if target is not None:
            msg = f"give either TARGET and DRAFT, or --pair {pair}, not both"
            raise UsageError(msg)
        shipped = embedded(pair)
        return {"target": shipped.target, "draft": shipped.draft}
    if target is None:
        msg = "say what is about to be served: give TARGET and DRAFT after CERTIFICATE, or --pair embedded"
        raise UsageError(msg)
    found = {}
    for role, source in (("target", target), ("draft", draft)):
        if source is None:
            continue
        folder = folder_of(source) if source else None
        if folder is None:
            msg = f"the {role} {source!r:.200} is neither a folder here nor in the hub's local cache; check the path"
            raise PairError(msg)
        found[role] = folder
    return found


def _digests(folders: Mapping[str, Path], watch: Watch) -> dict[str, dict[str, str]]:
    from specverify.model_files import file_digests, model_files

    return {
        role: file_digests(
            folder,
            [file for file in model_files(folder) if file.is_file()],  # a pipe or device would never end
            watch=watch,
            stage=f"hashing the {role}, in MiB",
        )
        for role, folder in folders.items()
    }


def _refusals(
    certificate: Certificate, contradicted: Sequence[str], policy: Policy, digests: Mapping[str, Mapping[str, str]]
) -> list[Refusal]:
    from specverify.gate import Reason, Refusal, differing_files, disagreements, unmet

    tampered = [*contradicted, *disagreements(certificate)]
    refusals = [Refusal(reason=Reason.TAMPERED, text=text) for text in tampered]
    refusals += [Refusal(reason=Reason.FILES, text=text) for text in differing_files(certificate, digests)]
    return [*refusals, *unmet(certificate, policy)]


def _show(
    certificate: Certificate,
    refusals: Sequence[Refusal],
    digests: Mapping[str, Mapping[str, str]],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from specverify.report.text import at_most, clean, versus

    number = sum(map(len, digests.values()))
    if as_json:
        listed = [{"reason": each.reason, "text": each.text} for each in refusals]
        typer.echo(json.dumps({"open": not refusals, "num_files": number, "refusals": listed}))
        return
    if not refusals:
        typer.echo(
            f"OPEN  {versus(certificate)}: the evidence holds, and {number} files are the ones that were certified."
        )
        return
    typer.echo(f"CLOSED  {versus(certificate)}: {len(refusals)} reason{'s' * (len(refusals) > 1)}.")
    if not quiet:
        for each in refusals:
            typer.echo(f"  {each.reason:<10}{clean(at_most(each.text, 400))}")
