"""Turns on a clock that moves only when work is done."""

from __future__ import annotations

import torch

from specverify.timing import in_turns


class Work:
    """Takes `takes` seconds of a shared clock, and remembers the order."""

    def __init__(self, name, takes, clock):
        self.name, self.takes, self.clock = name, takes, clock

    def __call__(self):
        self.clock["now"] += self.takes
        self.clock["order"].append(self.name)


def test_turns_have_other_orders_and_the_first_is_thrown_away():
    """So a slow start, and whoever comes after whom, weigh on nobody."""
    clock = {"now": 0.0, "order": []}
    contenders = {name: Work(name, takes, clock) for name, takes in (("a", 1.0), ("b", 2.0))}
    taken = in_turns(contenders, device=torch.device("cpu"), repeats=9, clock=lambda: clock["now"])
    assert taken == {"a": [1.0] * 9, "b": [2.0] * 9}
    turns = ["".join(clock["order"][place : place + 2]) for place in range(0, 20, 2)]
    assert set(turns) == {"ab", "ba"}
