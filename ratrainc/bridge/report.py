"""What `import-plan --json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.importing import Imported


def imported_json(made: Imported, output: str | None) -> dict[str, Any]:
    """The plan by its keys, and what it does not say."""
    fields = {key: value for key, value in made.plan.to_fields().items() if key not in made.unsaid}
    return {
        "from": made.framework.title,
        "plan": {**fields, "cuts": "auto"} if made.auto_cuts else fields,
        "passes": list(made.passes),
        "defaults": {name: each.value for name, each in made.defaults.items()},
        "unset": made.unset,
        "not_carried": [{"key": each.key, "value": shown(each.value), "why": each.why} for each in made.left],
        "output": output,
    }
