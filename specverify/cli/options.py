"""The options of the commands, each with its help; typer reads them from the annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

AsJson = Annotated[bool, Option("--json", help="One JSON object on standard output, and nothing else there.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="The answer alone, in one line.")]

Target = Annotated[str | None, Argument(metavar="TARGET", help="Folder or hub name of the target.", show_default=False)]
Draft = Annotated[str | None, Argument(metavar="DRAFT", help="Folder or hub name of the draft.", show_default=False)]
PairName = Annotated[
    str | None,
    Option(
        "--pair", metavar="NAME", help="An embedded pair: embedded (the default), embedded-marginal, embedded-poor."
    ),
]
Drafter = Annotated[
    str,
    Option(
        metavar="NAME", help="Where drafts come from: model, prompt-lookup; with another tokenizer: shared-ids, text."
    ),
]
RuleName = Annotated[str, Option("--rule", metavar="NAME", help="Acceptance rule; an unknown name lists them.")]
Branching = Annotated[
    str | None,
    Option(metavar="N,N,…", help="Children of each node by depth, for a rule over trees.  [default: 3,2,1]"),
]
NumSpeculativeTokens = Annotated[
    int | None, Option("--num-speculative-tokens", metavar="N", help="Most tokens drafted a step.  [default: 3]")
]
FaultName = Annotated[
    str,
    Option("--fault", metavar="NAME", help="Plant a known fault, to see the harness fail; see `specverify faults`."),
]
EngineName = Annotated[
    str,
    Option(
        "--engine",
        metavar="NAME",
        help="Decode with this engine: a built-in name, or module:callable.  [default: ours]",
    ),
]
Url = Annotated[str, Option(metavar="U", help="Of the engine's server, where one runs already.")]
Model = Annotated[str, Option(metavar="M", help="The server's name for the model.")]
Serve = Annotated[
    str, Option(metavar="CMD", help="Starts the server; {port}, {target} and {draft} are filled in. It is ended, too.")
]
EngineOption = Annotated[
    list[str] | None, Option("--option", metavar="K=V", help="A setting of the engine, by its own name; repeat it.")
]
OffEngine = Annotated[
    str, Option("--off", metavar="ENGINE", help="The engine without speculation, where it can't be switched off.")
]
ScoreBy = Annotated[
    str,
    Option(
        "--score-by",
        metavar="WHO",
        help="target; engine (its prompt_logprobs), where the target does not fit here; texts, where there are none either.",
    ),
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run code that a model brings along. Off unless asked: read it first.")
]

Prompts = Annotated[
    Path | None,
    Option("--prompts", metavar="FILE.jsonl", help='One {"text": …} a line, with an optional "id" and "domain".'),
]
PlanFile = Annotated[
    Path | None, Option("--plan", metavar="FILE.toml", help="Any field of the plan; the options here go before it.")
]
PolicyFile = Annotated[
    Path | None,
    Option("--policy", metavar="FILE.toml", help="What the gate will want beyond PASS; see `specverify init`."),
]
Budget = Annotated[str | None, Option(metavar="NAME", help="Samples: quick, standard, deep.  [default: standard]")]
Only = Annotated[
    list[str] | None, Option("--only", metavar="CHECK", help="Run these checks alone; repeat it, or use commas.")
]
Seed = Annotated[int | None, Option(metavar="S", help="Of all randomness.  [default: 17]")]

Device = Annotated[
    str | None, Option(metavar="D", help="auto, cpu, cuda, cuda:N.  [default: auto: CUDA where there is one]")
]
Dtype = Annotated[str | None, Option(metavar="T", help="float32, bfloat16, float16 or float64.  [default: float32]")]
DeviceMap = Annotated[str | None, Option("--device-map", metavar="M", help="Handed to transformers, such as auto.")]
TensorParallel = Annotated[
    bool, Option("--tensor-parallel", help="The target lies over the processes that torchrun started.")
]
Out = Annotated[Path | None, Option(metavar="DIR", help="Where the certificate goes.  [default: specverify-out/PAIR]")]
Resume = Annotated[bool, Option(help="Go on where an interrupted run of the same command stopped.")]
Ray = Annotated[
    str | None,
    Option(
        "--ray", metavar="ADDRESS", help="Decode and score on this Ray cluster: host:port, auto, or local; same result."
    ),
]
RayWorkers = Annotated[
    int | None,
    Option("--ray-workers", metavar="N", min=1, help="Actors that hold the models.  [default: all that fit]"),
]
RayGpus = Annotated[
    float | None,
    Option("--ray-gpus", metavar="F", min=0, help="GPUs of each, such as 0.5.  [default: 1 on CUDA, else 0]"),
]
MatrixFile = Annotated[
    Path | None,
    Option(
        "--matrix", metavar="FILE.toml", help="Certify every combination of targets, drafts, parameters and tokens."
    ),
]
