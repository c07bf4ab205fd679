"""The number of this process in a torchrun job, from its environment. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@frozen
class TorchrunPlace:
    """Settings that torchrun gives a process in its environment."""

    number: int
    count: int
    host: str
    port: int
    attempt: str
    """number of restarts of the job by its launcher"""
    launcher_has_store: bool
    local_number: int = 0
    """number among the processes of its machine"""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> TorchrunPlace:
        """Read the place from variables. Raises `DiagnosticError` RT093 if they are missing or make no sense."""
        missing = [name for name in _VARIABLES if not environment.get(name)]
        if missing:
            fail(
                "RT093",
                f"--engine torch runs one of the ranks that torchrun starts, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set",
                help=f"start it as: {start_command('N')}, or: ratrainc launch -n N --engine torch FILE ...",
            )
        numbers = {}
        most_of = {"RANK": None, "WORLD_SIZE": None, "MASTER_PORT": (1 << 16) - 1, "LOCAL_RANK": None}
        for name, most in most_of.items():
            text = environment.get(name) or "0"
            if not text.isdecimal() or not text.isascii() or (most is not None and int(text) > most):
                fail("RT093", f"{name}={text} is not a number that torchrun sets", help="unset it, and use torchrun")
            numbers[name] = int(text)
        if numbers["RANK"] >= numbers["WORLD_SIZE"]:
            text = f"RANK={numbers['RANK']} is not one of WORLD_SIZE={numbers['WORLD_SIZE']} processes"
            fail("RT093", text, help="ranks are counted from 0")
        return cls(
            numbers["RANK"],
            numbers["WORLD_SIZE"],
            environment["MASTER_ADDR"],
            numbers["MASTER_PORT"],
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            numbers["LOCAL_RANK"],
        )


def start_command(processes: str) -> str:
    """Return the command line that starts `processes` processes, for messages."""
    # After the two dashes torchrun takes no option for an abbreviation of its own: it has some that begin with --log.
    return f"torchrun --nproc-per-node {processes} -m -- ratrain run ... --engine torch"
