"""Interface of the follower of a script's statements, as commands of the script use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tree_sitter import Node

    from ratrain.ratrainc.bridge.shell.assigning import Assigning
    from ratrain.ratrainc.bridge.shell.text import Script, Text
    from ratrain.ratrainc.bridge.shell.words import Expander
    from ratrain.ratrainc.bridge.shell.world import World


class Follower(Protocol):
    """Follows statements, in every way that they may go."""

    assigning: Assigning
    read: Callable[[str, Script], Script | None]
    """a script by its path, from another"""
    depth: int
    """of scripts and functions that run within one another"""
    outer: tuple[Text, ...]
    """the words that a shell is started with which runs a script, as `srun` with its options"""

    def script(self, script: Script, world: World) -> list[World]:
        """Follow a script; the worlds after it."""

    def run(self, nodes: Iterable[Node], script: Script, worlds: list[World]) -> list[World]:
        """Follow statements; the worlds after them."""

    def inside(self, world: World, run: Callable[[World], list[World]]) -> list[World]:
        """Follow what a process of its own does; the worlds after it, with variables as before."""

    def expander(self, script: Script, world: World) -> Expander:
        """Expands words of a script in a world."""
