"""docs/page.png: the page of a report on a small BERT, as Chromium shows it.

`python tests/laboratory/picture_of_page.py` measures it anew. With a folder as argument, it leaves
pictures of the whole page there instead, on a screen and on a phone, light and dark.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from chromium import chromium

from graphgen.commands import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
BUILD = "build encoder --primitives --layers 2 --features 128 --vocabulary 2000"
COMPARE = "--dim batch=1 --dim seq=128 --threads 1 --seconds 6 --kinds cumulative"
STEP = "go(stages.findIndex((stage) => stage.name === 'fuse_attention'))"


def pictures(folder: Path | None) -> None:
    with TemporaryDirectory(ignore_cleanup_errors=True) as made:
        model, html = Path(made, "bert.onnx"), Path(made, "bert.html")
        assert main([*BUILD.split(), "--output", str(model)]) == 0
        assert main(["compare", str(model), *COMPARE.split(), "--html", str(html)]) == 0
        html.write_text(html.read_text("utf-8").replace(str(model), model.name), "utf-8")
        with chromium(Path(made)) as tab:
            tab("Emulation.setScrollbarsHidden", hidden=True)  # a picture has none
            for width in (1280, 400):
                for dark in (False, True) if folder else (False,):
                    tab.open(html, width, 900, dark=dark)
                    tab.tell(STEP)
                    if folder:
                        name = f"{width}_{'dark' if dark else 'light'}.png"
                        (folder / name).write_bytes(tab.picture("header", "main"))
                    elif width == 1280:
                        (DOCS / "page.png").write_bytes(tab.picture("#graphs-title", "#times"))
            assert not tab.complaints, tab.complaints


if __name__ == "__main__":
    pictures(Path(sys.argv[1]) if sys.argv[1:] else None)
