"""`specverify certify` says whether a pair may go out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from specverify.cli import options  # noqa: TC001 - typer reads the annotations
from specverify.cli.exits import EXIT_CODES, crash_kept_in, say
from specverify.cli.invocation import Invocation
from specverify.cli.run import nothing_stale, run, unmet_by
from specverify.cli.tensor_parallel import followed, require_usable, started
from specverify.records import Verdict
from specverify.report.text import clean

if TYPE_CHECKING:
    from pathlib import Path

    from specverify.records import Certificate

__all__ = ["certify"]


def certify(
    target: options.Target = None,
    draft: options.Draft = None,
    *,
    pair: options.PairName = None,
    prompts: options.Prompts = None,
    plan: options.PlanFile = None,
    policy: options.PolicyFile = None,
    budget: options.Budget = None,
    only: options.Only = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    rule: options.RuleName = "chain",
    branching: options.Branching = None,
    drafter: options.Drafter = "model",
    fault: options.FaultName = "",
    engine: options.EngineName = "",
    url: options.Url = "",
    model: options.Model = "",
    serve: options.Serve = "",
    option: options.EngineOption = None,
    off: options.OffEngine = "",
    score_by: options.ScoreBy = "target",
    device: options.Device = None,
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    tensor_parallel: options.TensorParallel = False,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = None,
    out: options.Out = None,
    resume: options.Resume = True,
    matrix: options.MatrixFile = None,
    ray: options.Ray = None,
    ray_workers: options.RayWorkers = None,
    ray_gpus: options.RayGpus = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> int:
    """Say whether speculative decoding changes what TARGET says, and whether TARGET and DRAFT may go out together.

    Without TARGET and DRAFT, the embedded pair is certified: offline, in about a minute on two idle CPU cores.
    """
    named = tuple(name.strip() for given in only or () for name in given.split(","))
    invocation = Invocation(
        target=target, draft=draft, pair=pair, drafter=drafter, rule=rule, fault=fault, prompts=prompts, plan_file=plan, policy=policy,
        num_speculative_tokens=num_speculative_tokens, budget=budget, only=named, seed=seed, out=out, device=device,
        dtype=dtype, device_map=device_map, tensor_parallel=started() if tensor_parallel else 0, branching=branching, trust_remote_code=trust_remote_code,
        engine=engine, url=url, model=model, serve=serve, option=tuple(option or ()), off=off, score_by=score_by,
    )  # fmt: skip
    cluster = None if ray is None else {"address": ray, "num_workers": ray_workers, "num_gpus": ray_gpus}
    if (code := followed(invocation)) is not None:
        return code
    if matrix is not None:
        require_usable(invocation, others="--matrix")
        from specverify.cli.matrix import certify_matrix

        return certify_matrix(matrix, invocation, cluster=cluster, resume=resume, quiet=quiet, as_json=as_json)
    with nothing_stale(out):
        sources, asked = invocation.sources(), invocation.plan()
    folder = invocation.folder(sources, asked)
    with crash_kept_in(folder):
        certificate = run(
            invocation, sources, asked, folder, cluster=cluster, resume=resume, quiet=quiet, as_json=as_json
        )
        _show(certificate, folder, quiet=quiet, as_json=as_json)
    code = EXIT_CODES[certificate.verdict]
    if policy is None:
        return code
    refusals = unmet_by(certificate, invocation)
    tell = typer.echo if not (quiet or as_json) else say
    tell(f"policy {policy}: {'met' if not refusals else 'not met'}")
    for refusal in refusals:
        tell(f"  {refusal}")
    return (code or EXIT_CODES[Verdict.FAIL]) if refusals else EXIT_CODES[Verdict.PASS]


def _show(certificate: Certificate, folder: Path, *, quiet: bool, as_json: bool) -> None:
    from specverify.cli.output import CERTIFICATE

    if as_json:
        typer.echo((folder / CERTIFICATE).read_text(encoding="utf-8"), nl=False)
    elif quiet:
        typer.echo(f"{certificate.verdict}  {clean(certificate.headline)}")
    else:
        from rich.console import Console

        from specverify.report.terminal import print_certificate

        print_certificate(certificate, Console(), path=folder / CERTIFICATE)
        typer.echo(f"report: {folder / 'report.html'}")
