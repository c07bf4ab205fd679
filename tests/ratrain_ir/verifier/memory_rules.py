"""Broken texts for what is in other memories: stored activations, and frozen parameters."""

from __future__ import annotations

from tests.end_to_end.edited_texts import Broken, change, insert

MEMORIES = [
    Broken(
        "RT034",
        "computed on where it is stored",
        "stored",
        (change("%dx.mlp.0.m0, %g.mlp.0 = backward", "%back.x.mlp.0.m0", "%host.x.mlp.0.m0"),),
        "%dx.mlp.0.m0, %g.mlp.0 = backward",
        "works in DDR, and %host.x.mlp.0.m0 is in the memory 'host'",
        underlined="%host.x.mlp.0.m0",
    ),
    Broken(
        "RT034",
        "moved to where it is",
        "stored",
        (change("activation %host.x.mlp.0.m0 :", " in host", ""),),
        "%host.s.mlp.0.m0.*, %host.x.mlp.0.m0 = store",
        "moves %host.x.mlp.0.m0, which is in DDR, to where it is",
        underlined="%host.x.mlp.0.m0",
    ),
    Broken(
        "RT034",
        "stored in two memories at once",
        "stored",
        (change("activation %host.x.mlp.0.m0 :", " in host", " in file"),),
        "%host.s.mlp.0.m0.*, %host.x.mlp.0.m0 = store",
        "is of one memory, and %host.x.mlp.0.m0 is in 'file'",
        underlined="%host.x.mlp.0.m0",
    ),
    Broken(
        "RT034",
        "fetched as something of another micro-batch",
        "stored",
        (change("%back.s.mlp.0.m0.*, %back.x.mlp.0.m0 = fetch", "mlp.0 m0 (", "mlp.0 m1 ("),),
        "%back.s.mlp.0.m0.*, %back.x.mlp.0.m0 = fetch",
        "copies %host.x.mlp.0.m0, which holds the input of mlp.0 m0, and nothing of mlp.0 m1",
        underlined="%host.x.mlp.0.m0",
    ),
    Broken(
        "RT034",
        "frozen, and computed with where it is",
        "fetched",
        (change("%x.attention.1.m0, %s.mlp.0.m0.* = forward", "%back.f.mlp.0.m0.forward", "%f.mlp.0"),),
        "%x.attention.1.m0, %s.mlp.0.m0.* = forward",
        "works in DDR, and %f.mlp.0 is in the memory 'host'",
        underlined="%f.mlp.0",
    ),
    Broken(
        "RT025",
        "frozen, and stored back",
        "fetched",
        (insert("%f.mlp.0 = store mlp.0 m0 (%back.f.mlp.0.m0.forward)", after="%back.f.mlp.0.m0.forward = fetch"),),
        "%f.mlp.0 = store",
        "copies %back.f.mlp.0.m0.forward, which is frozen, and frozen parameters never change",
        underlined="%back.f.mlp.0.m0.forward",
    ),
    Broken(
        "RT025",
        "frozen, and fetched for no pass",
        "fetched",
        (change("%back.f.mlp.0.m0.forward = fetch", "m0 forward (", "m0 ("),),
        "%back.f.mlp.0.m0.forward = fetch",
        "copies %f.mlp.0, which is frozen, and is fetched for a pass: write 'forward' or 'backward'",
        underlined="%f.mlp.0",
    ),
    Broken(
        "RT025",
        "fetched for a pass where all trains",
        "fetched",
        (change("%back.f.mlp.0.m0.forward = fetch", "fetch mlp.0", "fetch attention.0"),),
        "%back.f.mlp.0.m0.forward = fetch",
        "no parameter of attention.0 is frozen: there is nothing to fetch for a pass",
    ),
    Broken(
        "RT030",
        "fetched for a backward, and used by a forward",
        "fetched",
        (change("%back.f.mlp.0.m0.forward = fetch", "m0 forward (", "m0 backward ("),),
        "%x.attention.1.m0, %s.mlp.0.m0.* = forward",
        "takes %back.f.mlp.0.m0.forward from a fetch, which is for the backward",
        underlined="%back.f.mlp.0.m0.forward",
    ),
]
