"""Sphinx reads this to make the site: `make docs`."""

import re
import sys
from pathlib import Path
from typing import Any

import graphgen

sys.path.insert(0, str(Path(__file__).parent))
from reference import expand

ROOT = Path(__file__).resolve().parents[2]

project = "graphgen"
version = release = graphgen.__version__
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["site"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # of signatures, which name types of other libraries
suppress_warnings = ["misc.highlighting_failure"]  # blocks of commands and of shortened JSON

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "force"
nb_execution_raise_on_error = True
copybutton_prompt_text = "$ "
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "graphgen"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

# Pages of the repository's root, by the page of the site that holds each.
FROM_ROOT = {
    "index": "README.md",
    "project/changes": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
}


def read(app: Any, page: str, text: list[str]) -> None:
    """Fill in the reference, and the text of pages of the root; mend links across `docs/`."""
    if page == "tour":
        return
    text[0] = re.sub(r"\s+On\s+the\s+site\s+that\s+`make\s+docs`[^.]*\.", "", text[0])
    found = expand(text[0])
    if page in FROM_ROOT:
        root = (ROOT / FROM_ROOT[page]).read_text()
        up = "../" * page.count("/")
        root = re.sub(r"\]\((?!\w+:|#|docs/)", rf"]({up}../", root).replace("](docs/", f"]({up}")
        found = found.replace("<!-- text -->", root)
    for name, file in FROM_ROOT.items():
        up = "../" * page.count("/")
        found = found.replace(f"]({up}../{file}", f"]({up}{name}.md")
    text[0] = found


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.connect("source-read", read)
