"""Reader of settings of the Hugging Face family: a run is said in several files, which become one set of settings.

Settings of a further file stand under a prefix while they are read: `deepspeed.zero_optimization.stage` is a setting of
the file that `deepspeed` names, or of a table inside; `accelerate.num_processes` is one of an accelerate file of the
same run. The job's origins have them in their own file's words again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.support.files import is_there
from ratrain.ratrain_ir.support.text import Source, read_text, shown
from ratrain.ratrainc.bridge.hjson_text import hjson_settings
from ratrain.ratrainc.bridge.jobs.job import Job, Note, Origin
from ratrain.ratrainc.bridge.jobs.job_common import ON_THE_COMMAND_LINE
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings
from ratrain.ratrainc.bridge.settings import Setting, flat

T = TypeVar("T")
ACCELERATE, DEEPSPEED = "accelerate.", "deepspeed."

_TRUE, _FALSE = ("yes", "y", "t", "on", "1"), ("no", "n", "f", "off", "0")
"""Further words for true and false: transformers src/transformers/hf_argparser.py, string_to_bool; pydantic's bool;
accelerate src/accelerate/utils/environment.py, str_to_bool."""


@frozen
class Said:
    """A value with its origin: the setting `key`, or a default or rule of the framework that `source` names."""

    value: Any
    key: str
    source: str = ""


def settings_of(path: Path, text: str, what: str) -> dict[str, Setting]:
    """Read a file's settings: Hjson (which JSON is) if it begins as an object does, YAML otherwise."""
    source = Source(str(path), text)
    return (hjson_settings if text.lstrip().startswith(("{", "//", "/*")) else yaml_settings)(source, what)


@define
class HfReader(JobReader):
    """Settings of one run of the family."""

    path: Path = field(kw_only=True)
    asked: Asked = field(kw_only=True)
    prefixes: list[str] = field(factory=list)
    """prefixes of the settings that come from further files"""
    called: dict[str, str] = field(factory=dict)
    """the file's own words for a setting that is read under another name"""
    engine: bool = False
    """true if DeepSpeed's engine trains"""

    def take(self, name: str, kind: type[T]) -> T | None:
        """Take a setting as `JobReader.take` does, a truth value also as yes, no, on, off, 1 or 0."""
        said = self.settings[name].value if name in self.settings else None
        if kind is bool and said is not None and str(said).lower() in (*_TRUE, *_FALSE):
            self.taken.add(name)
            return str(said).lower() in _TRUE  # type: ignore[return-value]
        return JobReader.take(self, name, kind)

    def truth(self, name: str) -> bool:
        """Take a truth value; return False without one."""
        return bool(self.take(name, bool))

    def first(self, *names: str) -> str:
        """Return the first of the names that the file has with a value; the first name if it has none of them."""
        return next((name for name in names if self.has(name)), names[0])

    def under(self, prefix: str) -> Iterator[str]:
        """List the settings whose names begin with a prefix."""
        return (name for name in list(self.settings) if name.startswith(prefix))

    def lay(self, name: str, said: Said) -> None:
        """Set a field of the job from a value with its origin; nothing happens if the value is None."""
        if said.source and said.value is not None:
            self.assume(name, said.value, said.key, said.source)
        else:
            self.put(name, said.value, said.key)

    def said(self, key: str, kind: type[T], default: T | None, source: str) -> Said:
        """Take a setting, or the framework's default without it."""
        value = self.take(key, kind)
        return Said(default, key, source) if value is None else Said(value, key)

    def settle(self, name: str, key: str, option: str, default: int | None = None, source: str = "") -> int | None:
        """Set a size of the job from the setting, from the command's option, or to the framework's default.

        Report an option that contradicts the setting. `option` is empty where the command has none.
        """
        said, asked = self.size(key), getattr(self.asked, name) if option else None
        if asked is not None and said is not None and asked != said:
            self.wrong(
                key, f"{option} {asked} contradicts {key} {said}", way_out="leave the option out, or the setting"
            )
        if said is not None or asked is None:
            self.lay(name, Said(said, key) if said is not None else Said(default, key, source))
            return default if said is None else said
        self.assume(name, asked, option, ON_THE_COMMAND_LINE)
        self.origins[name] = Origin(option, ON_THE_COMMAND_LINE)
        return int(asked)

    def open(self, key: str, what: str) -> bool:
        """Bring the settings of a table under `key.`: they stand there, in a text that is JSON, or in the named file.

        Return False without the setting, and after the error that the file is not there.
        """
        self.taken.add(key)
        if any(True for _ in self.under(f"{key}.")):
            return True
        if not self.has(key):
            return False
        said, place = self.settings[key].value, self.settings[key].place
        if isinstance(said, dict):
            self.settings |= {f"{key}.{name}": Setting(value, place) for name, value in flat(said)}
        elif isinstance(said, str) and said.lstrip().startswith("{"):
            table = hjson_settings(Source(str(self.path), said), what)
            self.settings |= {f"{key}.{name}": Setting(each.value, place) for name, each in table.items()}
        elif isinstance(said, str):
            if (path := self.find(key, said)) is None:
                return False
            self.bring(f"{key}.", settings_of(path, read_text(path, "RT063", what), what))
        else:
            self.wrong(key, f"{key} is {shown(said)}: a table or the name of a file is expected")
            return False
        return True

    def bring(self, prefix: str, settings: Mapping[str, Setting]) -> None:
        """Add the settings of a further file under a prefix."""
        self.prefixes.append(prefix)
        self.settings |= {f"{prefix}{name}": each for name, each in settings.items()}

    def find(self, key: str, name: str) -> Path | None:
        """Find the file that a setting names: from the folder of its own file upwards, or one given with the run.

        Report a file that is nowhere, with the setting that names it, and return None.
        """
        location = self.settings[key].place.location
        folder = Path(location.file if location else self.path).parent.resolve()
        given = [path for path in self.asked.beside if path.name == Path(name).name]
        for path in [*(each / name for each in (folder, *folder.parents)), *given]:
            if is_there(path):
                return path
        words = self.called.get(key, self.own(key))
        text = f"{words} names {shown(name)}, which is neither in {folder} nor in a folder above"
        self.wrong(key, text, code="RT002", way_out="put it there, or name it with --beside FILE")
        return None

    def finish(self, inert: Mapping[str, str], **fields: Any) -> Job:
        """Make the job as `JobReader.finish` does; settings of further files have their own files' names again."""
        self.values.setdefault("device_bytes", self.asked.device_bytes)
        job = JobReader.finish(self, inert, **fields)
        return evolve(
            job,
            origins={name: evolve(each, key=self.own(each.key)) for name, each in job.origins.items()},
            not_understood=self._own_notes(job.not_understood),
            ignored=self._own_notes(job.ignored),
        )

    def own(self, key: str) -> str:
        """Return a setting's name as its own file has it."""
        return next((key.removeprefix(each) for each in self.prefixes if key.startswith(each)), key)

    def _own_notes(self, notes: tuple[Note, ...]) -> tuple[Note, ...]:
        return tuple(evolve(each, key=self.own(each.key)) for each in notes)
