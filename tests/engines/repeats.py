"""How often a sound engine is failed: `python -m tests.engines.repeats ENGINE --runs 20`, and what each run said.

Each run has a seed of its own, so other laws, prompts and draws. Cells that are known to fail on an engine, with their
reproductions in docs/engines.md, are named with `--known`, and are no alarm.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from specverify.conformance import CELLS, EngineRun, engine_plan, run_engine
from specverify.engines import EngineSettings
from specverify.records import Verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--budget", default="quick")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--known", default="", help="cells that fail by a fault of the engine, by commas")
    parser.add_argument("--without", default="", help="cells that are not held, by commas")
    parser.add_argument("--max-batch-size", type=int, default=16)
    given = parser.parse_args()
    pairs = tuple((option.partition("=")[0], option.partition("=")[2]) for option in given.option)
    settings = EngineSettings(target=Path(), options=pairs, max_batch_size=given.max_batch_size)
    without = set(filter(None, given.without.split(",")))
    only = tuple(cell.id for cell in CELLS if cell.id not in without) if without else ()
    alarms: list[str] = []
    held = 0
    for seed in range(given.first_seed, given.first_seed + given.runs):
        started, used = time.perf_counter(), time.process_time()
        plan = engine_plan(given.budget, seed=seed, only=only)
        certificate = run_engine(EngineRun(name=given.engine, settings=settings), plan)
        held += sum(one.verdict in {Verdict.PASS, Verdict.FAIL} for one in certificate.checks)
        failed = {one.id: one.summary for one in certificate.checks if one.verdict is Verdict.FAIL}
        new = {name: said for name, said in failed.items() if name.partition(",")[0] not in given.known.split(",")}
        alarms += new
        thin = [one.id for one in certificate.checks if one.verdict is Verdict.INCONCLUSIVE]
        took = f"{time.perf_counter() - started:.0f} s ({time.process_time() - used:.0f} s of CPU here)"
        say(f"seed {seed}: {len(certificate.checks)} cells, {len(new)} alarms, not decided {thin}, {took}")
        for name, said in new.items():
            say(f"  {name}: {said}")
    say(f"{given.runs} runs, {held} cells held, {len(alarms)} alarms")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
