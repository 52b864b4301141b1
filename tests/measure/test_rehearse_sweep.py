"""The estimate against rehearsals of 88 layouts: states and bytes sent exactly, activations to 3 %, FLOPs to 0.5 %.

Where it misses today stands in rehearse_known.json, in bytes (or FLOPs) by which the estimate is off. A miss that is not
there, or is larger than there, fails; so does one that is there and no longer is one: whoever mends a term takes it out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from rehearse_layouts import FAST, KNOWN_FILE, SLOW, held, named, within

KNOWN: dict[str, int] = json.loads(KNOWN_FILE.read_text(encoding="utf-8"))
LAYOUTS = FAST + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW]


@pytest.mark.parametrize(("model", "fields"), LAYOUTS, ids=[named(*one) for one in FAST + SLOW])
def test_estimate_is_what_a_rank_holds_and_does(model: str, fields: dict[str, Any]) -> None:
    seen = 0
    for name, term in held(model, fields):
        seen += 1
        off, known = term.predicted - term.rehearsed, KNOWN.get(name)
        if known is None:
            assert within(term), f"{name}: predicted {term.predicted:,.0f}, rehearsed {term.rehearsed:,.0f}"
        else:
            assert not within(term), f"{name} is right now: take it out of {KNOWN_FILE.name}"
            assert abs(off) <= 1.02 * abs(known) + 1, f"{name} is off by {off:,.0f}, more than the {known:,} that are known"
    assert seen >= 7


def test_every_known_miss_is_of_a_layout_that_is_held() -> None:
    names = {named(*one) for one in FAST + SLOW}
    assert {name.partition(", stage ")[0] for name in KNOWN} <= names
    assert len(names) == len(FAST + SLOW) >= 60


def test_states_miss_nowhere_but_where_a_v_holds_both_ends_of_a_tied_model() -> None:
    states = {name for name in KNOWN if name.endswith((": parameters", ": master", ": gradients", ": optimizer"))}
    assert all(name.startswith("tied pp=2 gas=4 schedule=zb-v virtual_stages=2, stage 0") for name in states)
