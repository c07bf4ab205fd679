"""Layers of a model that differ: how many of each class stages have, by the layers before them.

Example: layers of classes 0 0 0 1 1. A stage of 2 layers after 2 others has one of each class. Some 3 layers in a row
from anywhere have at least 1 of class 0 and none of class 1; any 3 layers, in a row or not, have as few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.space.layer_classes import LayerClasses

Numbers = NDArray[np.float64]


@frozen(eq=False)
class LayerMix:
    """Numbers of layers by class."""

    passed: Numbers
    """layers of each class among the first ones: [class, number of first layers]"""
    least_in_a_row: Numbers
    """fewest layers of each class among some in a row: [class, number of layers in a row]"""
    goes_back: NDArray[np.bool_]
    """by class: True if its layers have a backward"""

    @classmethod
    def of(cls, classes: LayerClasses) -> LayerMix | None:
        """Return the mix of classes; None if all layers are alike."""
        if len(classes) == 1 and classes.all_go_back:
            return None
        return cls(classes.passed, classes.least_in_a_row, np.array(classes.goes_back))

    @property
    def counts(self) -> Numbers:
        """Layers of each class in the model."""
        return self.passed[:, -1]

    @property
    def all_go_back(self) -> bool:
        """True if every layer has a backward."""
        return bool(self.goes_back.all())

    def first(self, layers: Numbers) -> Numbers:
        """Return the layers of each class among the first ones: [class, ...]."""
        return self.passed[:, self._numbers(layers)]

    def between(self, before: Numbers, layers: Numbers) -> Numbers:
        """Return the layers of each class among `layers` that follow `before` others: [class, ...]."""
        return self.first(before + layers) - self.first(before)

    def anywhere(self, layers: Numbers, *, in_a_row: bool) -> Numbers:
        """Return the fewest layers of each class among some layers, in a row or not: [class, ...]."""
        if in_a_row:
            return self.least_in_a_row[:, self._numbers(layers)]
        counts = self.counts.reshape(-1, *(1,) * layers.ndim)
        least: Numbers = np.maximum(layers - (counts.sum() - counts), 0.0)
        return least

    def _numbers(self, layers: Numbers) -> NDArray[np.intp]:
        # stages of more layers than are left are not asked for, but stand in the arrays
        numbers: NDArray[np.intp] = np.minimum(layers, self.passed.shape[1] - 1).astype(np.intp)
        return numbers


@frozen(eq=False)
class Span:
    """Layers of stages by class."""

    before: Numbers
    """layers of earlier stages: [class, ...]; none if they are not known"""
    own: Numbers
    """layers of the stages: [class, ...]; the fewest if it is not known which they are"""
    exact: bool
    """True if it is known which layers the stages have"""
