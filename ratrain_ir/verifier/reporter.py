"""Reports about ops and tensors: at their place in the source text or, without a source, with their printed text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import define, field

from ratrain.ratrain_ir.analysis.columns import FoundError, StageColumns, stage_columns
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, Note
from ratrain.ratrain_ir.text.printer import declaration_text, op_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor

MAX_REPORTS = 200
"""Most errors that are reported; more help nobody."""


@define
class Reporter:
    """Converter of findings about a module into diagnostics."""

    module: Module
    diagnostics: Diagnostics
    _columns: dict[int, StageColumns] = field(factory=dict, init=False)

    def columns(self, stage: Stage) -> StageColumns:
        """Return the columns of a stage; they are made once for all layers."""
        found = self._columns.get(stage.index)
        if found is None:
            found = self._columns[stage.index] = stage_columns(self.module, stage)
        return found

    def know(self, stage: Stage, columns: StageColumns) -> None:
        """Use these columns for a stage whose ops were not made."""
        self._columns[stage.index] = columns

    def at_op(
        self,
        code: str,
        message: str,
        stage: Stage,
        op: Op,
        tensor: Tensor | None = None,
        *,
        notes: Sequence[Note] = (),
        help: str | None = None,  # noqa: A002
    ) -> None:
        """Report a finding about an op; point at one of its operands if `tensor` is given."""
        if len(self.diagnostics.items) >= MAX_REPORTS:
            return
        source = self.module.source
        location = source.locate(op.line, f"%{tensor.name}" if tensor else None) if source else None
        if location is None or source is None:
            text = op_text(op)
            start = text.find(f"%{tensor.name}") if tensor else -1
            place = Location(
                f"@{stage.index}",
                1 + stage.ops.index(op),
                max(0, start) + 1,
                len(text) if start < 0 else len(f"%{tensor.name}") if tensor else 1,
            )
            message = f"{message} (stage @{stage.index}, op {place.line})"
            self.diagnostics.error(code, message, place, notes=notes, help=help, source=text)
            return
        self.diagnostics.error(code, message, location, notes=notes, help=help, source=source.line(op.line))

    def at_tensor(self, code: str, message: str, tensor: Tensor, *, notes: Sequence[Note] = ()) -> None:
        """Report a finding about a tensor, at its declaration."""
        if len(self.diagnostics.items) >= MAX_REPORTS:
            return
        source = self.module.source
        location = source.locate(tensor.line, f"%{tensor.name}") if source else None
        text = source.line(tensor.line) if source and location else declaration_text(tensor)
        self.diagnostics.error(code, message, location, notes=notes, source=text if location else None)

    def at_stage(self, code: str, message: str, stage: Stage) -> None:
        """Report a finding about a stage as a whole."""
        source = self.module.source
        location = source.locate(stage.line, "stage") if source else None
        line = source.line(stage.line) if source and location else None
        self.diagnostics.error(code, message, location, source=line)

    def at_header(self, code: str, message: str, word: str, *, help: str | None = None) -> None:  # noqa: A002
        """Report a finding about the first line that starts with `word`: `module`, `plan`, `target`, ..."""
        source = self.module.source
        lines = () if source is None else source.lines
        number = next((n for n, line in enumerate(lines, 1) if line.split()[:1] == [word]), 0)
        location = source.locate(number, word) if source else None
        line = source.line(number) if source and location else None
        self.diagnostics.error(code, message, location, help=help, source=line)

    def note(self, message: str, op: Op) -> Note:
        """Return a note that points at another op."""
        source = self.module.source
        return Note(f"{message}: {op_text(op)[:120]}", source.locate(op.line, op.keyword) if source else None)


class Refuser(Reporter):
    """Reporter that raises `FoundError` at the first finding."""

    def at_op(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `FoundError`."""
        raise FoundError

    at_tensor = at_stage = at_header = note = at_op


def refuser(module: Module) -> Refuser:
    """Return a reporter for callers that only ask whether anything is found."""
    return Refuser(module, Diagnostics())
