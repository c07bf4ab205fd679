"""Reader of YAML as PyYAML reads it, which the frameworks use: settings by dotted names, with their places.

PyYAML follows YAML 1.1: `no` is false, `1e-4` without a dot is a text, `012` is octal. A framework that converts texts
to numbers afterwards (argparse, OmegaConf, pydantic) has a reader that does so too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.bridge.settings import Setting

if TYPE_CHECKING:
    from yaml import Node

    from ratrain.ratrain_ir.support.text import Place, Source

_MOST_NODES = 100_000
"""Most values that are read: aliases of aliases grow without bound in a few lines."""


def yaml_settings(source: Source, what: str) -> dict[str, Setting]:
    """Read the settings of a YAML mapping, by dotted names; a list is one setting, with what it holds.

    Raises `DiagnosticError` RT063 if the text is not YAML, no mapping or has a tag of its own, and RT064 if a mapping
    has a key twice.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(source.text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            fail("RT063", f"{what} is a mapping: key: value, a line each", source.top().location)
        reader = _Reader(source, loader)
        reader.take(node, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = source.top() if mark is None else source.at(mark.line + 1, mark.column + 1)
        fail("RT063", f"the file is not usable YAML: {error.problem}", place.location, source=place.source)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # control characters, dates, nesting
        reason = str(error).splitlines()[0]
        fail("RT063", f"the file is not usable YAML: {reason}", source.top().location)
    return reader.found


class _Reader:
    """The settings found so far in one text."""

    def __init__(self, source: Source, loader: Any) -> None:
        self.source, self.loader = source, loader
        self.found: dict[str, Setting] = {}
        self.nodes = 0

    def take(self, node: Any, within: str) -> None:
        """Add the settings of a mapping; mappings in it add their names to `within`."""
        import yaml

        self.refuse_repeated(node, within)
        self.loader.flatten_mapping(node)  # puts what `<<: *anchor` merges before the mapping's own keys, which win
        for key_node, value_node in node.value:
            name = self.name(key_node, within)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.take(value_node, f"{name}.")
            else:
                self.found[name] = Setting(self.plain(value_node), self.place(key_node, value_node))

    def refuse_repeated(self, node: Any, within: str) -> None:
        """Raise RT064 if the mapping itself, without what it merges, has a key twice: PyYAML keeps the last, unsaid."""
        first: set[str] = set()
        for key_node, value_node in node.value:
            if (name := self.name(key_node, within)) in first:
                place = self.place(key_node, value_node)
                fail("RT064", f"{name} is said twice", place.location, source=place.source, help="leave one of them")
            first.add(name)

    def name(self, key_node: Any, within: str) -> str:
        """Return the dotted name of a key; a key that itself has a dot is quoted in it."""
        key = str(self.plain(key_node)) if key_node.tag != "tag:yaml.org,2002:merge" else "<<"
        return f"{within}{key if '.' not in key else repr(key)}"

    def plain(self, node: Node) -> Any:
        """Return a node's value: texts, numbers, truth values, None, lists and dictionaries of these."""
        import yaml

        self.nodes += 1
        if self.nodes > _MOST_NODES:
            fail("RT063", f"the file has more than {_MOST_NODES} values", self.source.top().location)
        if isinstance(node, yaml.ScalarNode):
            value = self.loader.construct_object(node)
            return value if value is None or isinstance(value, bool | int | float | str) else node.value  # dates: text
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(each) for each in node.value]
        self.loader.flatten_mapping(node)
        return {str(self.plain(key)): self.plain(value) for key, value in node.value}

    def place(self, key: Node, value: Node) -> Place:
        """Return the place of a key and its value, cut at the end of the first line."""
        end = value.end_mark if value.start_mark.line == key.start_mark.line else key.end_mark
        return self.source.span(key.start_mark.index, max(end.index, key.end_mark.index))
