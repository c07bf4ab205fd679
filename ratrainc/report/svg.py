"""A still picture: SVG that needs no script, as a file or in a notebook."""

from __future__ import annotations

from attrs import field, frozen

from ratrain.ratrain_ir.support.files import replacing
from ratrain.ratrainc.console.pictures import DRAWN, check_ending


@frozen
class Picture:
    """An SVG picture, which a notebook shows."""

    svg: str = field(repr=False)

    def save(self, path: str) -> int:
        """Write the picture; return its bytes.

        Raises `DiagnosticError` RT002 if the file cannot be written, or its ending is of another kind.
        """
        check_ending(path, "picture", DRAWN)
        with replacing(path) as stream:
            return stream.write(self.svg.encode())

    def _repr_svg_(self) -> str:
        return self.svg
