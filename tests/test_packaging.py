"""What a build packs, and what the package says of itself on an index."""

import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import graphgen as gg

pytest.importorskip("hatchling", reason="hatchling is missing: install the extra [test]")

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)]*)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> Callable[..., str]:
    return runpy.run_path(str(ROOT / "hatch_build.py"))["page"]


def test_links_of_the_page_on_an_index_lead_to_the_tag(page: Callable[..., str]) -> None:
    text = page(README, "https://example.org/graphgen/", "1.2")
    assert FENCED.findall(text) == FENCED.findall(README)
    links = LINK.findall(FENCED.sub("", text))
    assert len(links) == len(LINK.findall(FENCED.sub("", README)))
    base = "https://example.org/graphgen"
    assert f"{base}/raw/v1.2/docs/page.png" in links
    assert f"{base}/blob/v1.2/docs/coming-from.md#onnxscript" in links
    assert all("://" in link for link in links)


def test_without_an_address_no_link_of_the_page_is_broken(page: Callable[..., str]) -> None:
    text = page(README + "[a](https://example.org)", None, "1.2")
    assert FENCED.findall(text) == FENCED.findall(README)
    assert LINK.findall(FENCED.sub("", text)) == ["https://example.org"]
    assert "how to read a remark, why is my graph not fused?" in " ".join(text.split())


def test_the_metadata_has_the_page_and_one_version() -> None:
    metadata = WheelBuilder(str(ROOT)).metadata
    assert metadata.version == gg.__version__
    assert metadata.core.readme_content_type == "text/markdown"
    assert metadata.core.readme.startswith("# graphgen\n")
    assert metadata.core.authors_data["name"] == ["The graphgen contributors"]
    cited = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert cited["version"] == gg.__version__
    assert cited["license"] == metadata.core.license_expression
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## ([\d.]+)", changes, re.MULTILINE)[1] == gg.__version__  # type: ignore[index]


def test_the_sdist_is_whole() -> None:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this tree is no clone of git")
    links = {"graphgen/ops", "graphgen/export"}  # what they lead to is packed
    wanted = {line for line in done.stdout.splitlines() if (ROOT / line).exists()} - links
    packed = {each.distribution_path for each in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert packed == wanted
