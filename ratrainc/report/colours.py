"""Colours of state kinds, in the charts of the page and in still pictures alike.

Every kind has a colour of its own: grey stands for none of them, so that no bytes of a plan look like "the rest".
Families are of one hue: masters and moments violet-blue, views blue, gradients red, boundaries and activations magenta,
what is kept for a backward green and amber. Any two colours, and each and grey, are at least 20 apart in CIELAB,
where 2.3 is the least that is seen side by side.
"""

from __future__ import annotations

from ratrain.ratrain_ir.config.types import StateKind

KIND_COLOURS = {
    StateKind.MASTER: "#6a5fd8",
    StateKind.MOMENT: "#a9a3f2",
    StateKind.VIEW: "#2a7bd0",
    StateKind.FROZEN: "#1c4f8f",
    StateKind.VIEW_SHARD: "#79c8f2",
    StateKind.GRAD: "#d1394f",
    StateKind.GRAD_SHARD: "#f0a0a0",
    StateKind.BOUNDARY: "#b8389c",
    StateKind.ACTIVATION: "#e3a0dc",
    StateKind.CHECKPOINT: "#128a74",
    StateKind.SAVED: "#e3a21a",
    StateKind.PARTIAL: "#ef7434",
    StateKind.REMOTE: "#6fd0b0",
    StateKind.INPUT: "#9a6340",
    StateKind.WORKSPACE: "#bab53e",
    StateKind.SCALAR: "#6f8f2f",
}
"""Colours by kind; they are seen on a white and on a dark page."""


def kind_styles() -> str:
    """Return the style sheet's line that gives the page the colours, as `--kind-master` and so on."""
    return ":root { " + " ".join(f"--kind-{kind.value}: {colour};" for kind, colour in KIND_COLOURS.items()) + " }\n"
