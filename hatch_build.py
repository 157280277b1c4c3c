"""The package's page on an index: README.md, with addresses in place of its relative links.

They lead to this version's tag below `Source` of [project.urls]. Without it the repository has no
public address yet: links become their words, and pictures are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"^```.*?^```$|(!?)\[([^\]]*)\]\((?!\w+:)([^)]*)\)", re.MULTILINE | re.DOTALL)


def page(readme: str, source: str | None, version: str) -> str:
    """The text for the index; `source` is the address of the repository."""

    def absolute(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        if path is None:  # a block of code
            return found[0]
        if source is None:
            return "" if mark else words
        place = "raw" if mark else "blob"
        return f"{mark}[{words}]({source.rstrip('/')}/{place}/v{version}/{path})"

    return LINK.sub(absolute, readme)


class Readme(MetadataHookInterface):
    """Hatchling's hook for the dynamic field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the page into the metadata of the project."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        version = re.search(
            r'"(.+)"$', (root / "graphgen" / "version.py").read_text(), re.MULTILINE
        )
        assert version
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": page(text, source, version[1]),
        }
