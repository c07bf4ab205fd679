"""Routings as users give them: by a name, or as a JSON file of shares.

A file is {"layers": [0.5, 0.25, 0.125, 0.125]} for all layers, or has a list for each:
{"layers": [[0.5, 0.25, ...], [0.25, 0.5, ...]]}.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import Location, fail, nearest
from ratrain.ratrain_ir.support.files import read_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.targets.machine.routing import HOT_RANK, ROUTINGS, Routing, Shares, named_routing

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

_OFF = 1e-6
"""Most by which a sum of shares may differ from 1, and a share exceed the most that there is."""
_LAYERS = "layers"


def routing_of(given: str, model: ModelConfig, plan: Plan) -> Routing:
    """Return the routing of a name, or of a JSON file, for the experts of a model.

    Raises `DiagnosticError` RT064 if the model has no experts, or the plan no ranks that share experts out where
    `hot-rank` asks for one; RT004 for an unknown name; RT002 or RT005 for a file that is wrong.
    """
    if model.experts is None or model.experts_per_token is None:
        text = f"the routing '{given}' is of experts, which {model.name} has not"
        fail("RT064", text, help="leave --routing out")
    if given in ROUTINGS:
        if given == HOT_RANK and plan.ep == 1:
            text = f"the routing '{HOT_RANK}' sends all rows to one rank's experts: no replicas share them out (ep = 1)"
            fail("RT064", text, help="use one-hot, or a plan with ep = 2 or more")
        return named_routing(given, model.experts, model.experts_per_token, plan.ep)
    if not given.endswith(".json"):
        known = f"known are {', '.join(ROUTINGS)}, and files that end with .json"
        fail("RT004", f"'{given}' is not a routing", help=nearest(given, ROUTINGS) or known)
    return _loaded(given, model, model.experts, model.experts_per_token)


def _loaded(path: str, model: ModelConfig, experts: int, per_token: int) -> Routing:
    top = Location(path, 1)
    try:
        data = json.loads(read_text(path, "routing"))
    except json.JSONDecodeError as error:
        fail("RT002", f"the routing is not JSON: {error.msg}", Location(path, error.lineno, error.colno))
    except (ValueError, RecursionError) as error:
        fail("RT002", f"the routing is not usable JSON: {error}"[:200], top)
    form = f'{{"{_LAYERS}": [[share of each of {experts} experts], ...]}}, or one list for all layers'
    if not isinstance(data, dict) or data.keys() != {_LAYERS} or not isinstance(data[_LAYERS], list):
        fail("RT005", "this is not a routing", top, help=f"write {form}")
    lists = data[_LAYERS]
    if not any(isinstance(each, list) for each in lists):
        lists = [lists]
    elif len(lists) != model.layers:
        text = f"'{_LAYERS}' has lists for {number_of(len(lists), 'layer')}, and {model.name} has {model.layers}"
        fail("RT005", text, top, help=f"write {form}")
    return Routing(
        Path(path).name, tuple(_checked(each, layer, experts, per_token, top) for layer, each in enumerate(lists))
    )


def _checked(given: Any, layer: int, experts: int, per_token: int, top: Location) -> Shares:
    """Return the shares of a list; raise RT005 where they are none that a router can give."""

    def wrong(text: str, way_out: str | None = None) -> None:
        fail("RT005", f"list {layer} of '{_LAYERS}': {text}", top, help=way_out)

    if not isinstance(given, list) or len(given) != experts:
        found = number_of(len(given), "share") if isinstance(given, list) else shown(given)
        wrong(f"a share of each of {experts} experts is expected, not {found}")
    for at, share in enumerate(given):
        if isinstance(share, bool) or not isinstance(share, int | float) or not isfinite(share) or share < 0:
            wrong(f"the share of expert {at} is {shown(share)}, not a number from 0 to 1")
        if share > 1 / per_token + _OFF:
            text = f"expert {at} has the share {share:g}, and a token goes to {per_token} distinct experts"
            wrong(text, f"no share is above 1 / {per_token}")
    if abs(sum(given) - 1) > _OFF:
        wrong(f"the shares add up to {sum(given):.9g}, not 1", "divide each by their sum")
    return tuple(float(share) for share in given)
