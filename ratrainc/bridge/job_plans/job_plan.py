"""A plan in the making from a job: its keys so far, their places in the file, and what is told of it."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.text import Place, shown
from ratrain.ratrainc.bridge.jobs.job import Job, Origin, location_of
from ratrain.ratrainc.bridge.settings import Asked, Default, Left


@define
class JobPlan:
    """Keys of a plan from a job, and what is told of it. Errors collect in `report`."""

    job: Job
    title: str
    """the framework's name"""
    top: Place
    """the file as a whole"""
    asked: Asked
    report: Diagnostics = field(factory=Diagnostics)
    values: dict[str, Any] = field(factory=dict)
    places: dict[str, Place] = field(factory=dict)
    left: list[Left] = field(factory=list)
    passes: list[str] = field(factory=list)
    defaults: dict[str, Default] = field(factory=dict)
    """ways of the framework that decide keys of the plan and are no field of a job"""
    unsaid: list[str] = field(factory=list)
    """keys left out of the plan's file, since neither the file nor the framework determines them"""

    def key(self, name: str) -> str:
        """Return the file's own word for a field of the job; the field's name without one."""
        origin = self._origin(name)
        return name if origin is None or not origin.key else origin.key

    def place(self, name: str) -> Place:
        """Return the place of a field's setting; the file as a whole for a default, an option or an open field."""
        origin = self._origin(name)
        return self.top if origin is None or origin.default else self.place_of(origin.place)

    def _origin(self, name: str) -> Origin | None:
        """Return the origin of a field; of what an adapter has without one, that of the adapter."""
        return self.job.origins.get(name) or self.job.origins.get(name.partition(".")[0])

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of the plan; its place is that of the first of the job's fields `names` that the file says."""
        self.values[key] = value
        places = (self.place(name) for name in names)
        self.places[key] = next((each for each in places if each is not self.top), self.top)

    def wrong(self, name: str, message: str, way_out: str, *, code: str = "RT064") -> None:
        """Report an error at a field's setting."""
        place = self.place(name)
        self.report.error(code, message, place.location, help=way_out, source=place.source)

    def leave(self, name: str, value: Any, why: str, *, trains: bool = False) -> None:
        """List a field of the job that is not carried over, under the file's own word."""
        self.left.append(Left(self.key(name), value, why, trains))

    def place_of(self, text: str) -> Place:
        """Return the place that an origin or a note names as `file:line`."""
        location = location_of(text)
        return self.top if location is None else Place(location)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights of a stage; as many as context ranks before `dp` is put."""
        return int(self.values.get("dp", 1)) * self.job.cp

    def told(self, name: str, option: str, value: Any) -> Any:
        """Return a field of the training, or the option that fills it in; report a contradiction with the file."""
        said, origin = getattr(self.job.training, name), self.job.origins.get(name)
        if value is None:
            return said
        if said is not None and said != value and not (origin is not None and origin.default):
            text = f"{option} {shown(value)} contradicts {self.key(name)} {shown(said)}"
            self.wrong(name, text, "leave the option out, or change the file")
        return value
