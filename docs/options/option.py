"""An option of a command and what it changes, a command and how it is called; the options that several commands have."""

from __future__ import annotations

from attrs import field, frozen

SETTINGS = "ratrain.ratrainc.running.training:run_training"


@frozen
class Option:
    """What an option changes, how it is given, and beside what."""

    changes: str
    words: str
    beside: str | None = None
    """the command's words where they are not the usual ones"""
    reaches: str | None = None
    """what is called with it, where nothing that is printed or written may show it, as it changes the pace, the order or a refusal"""
    idle: tuple[str, ...] = ()
    """the command's words with which it would change nothing: it is refused there"""


@frozen
class Command:
    """A command as it is usually called, and its options."""

    words: str
    options: dict[str, Option] = field(factory=dict)
    wall: bool = False
    """whether it prints seconds of this machine"""


JSON = Option("one JSON object on stdout", "--json")
PROCESSES = Option("processes side by side", "--jobs 77", reaches="ratrain.ratrain_ir.process_pool:processes")
