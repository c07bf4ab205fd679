"""Broken texts for what is stored in other memories (RT034)."""

from __future__ import annotations

from tests.end_to_end.edited_texts import Broken, change

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
]
