"""How the embedded pair was made: seeded, from pinned corpora. CI never retrains; `python -m specverify.pairs.recipe --help`."""
