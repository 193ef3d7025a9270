"""The pages run: every Python block of README.md and docs/*.md, in order, in one namespace per page.

A block after a line ``<!-- no test -->`` is left out. Blocks that name MNIST need its files.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sklearn  # noqa: F401  # Digits imports it, and it sets environment variables when first imported

# torch.compile's own modules use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "<!-- no test -->\n"


class Block(NamedTuple):
    line: int
    code: str

    @property
    def needs_mnist(self) -> bool:
        return "MNIST(" in self.code


def blocks_of(text: str) -> list[Block]:
    return [
        Block(text.count("\n", 0, found.start(1)), found.group(1))
        for found in FENCE.finditer(text)
        if not text[: found.start()].endswith(MARK)
    ]


def run(page: Path, blocks: list[Block]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        # Leading newlines, so that a traceback has the page's own line numbers.
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


def cases(*, mnist: bool) -> list[Any]:
    found = ((page, blocks_of(page.read_text(encoding="utf-8"))) for page in PAGES)
    return [
        pytest.param(page, blocks if mnist else [b for b in blocks if not b.needs_mnist], id=page.name)
        for page, blocks in found
        if any(block.needs_mnist is mnist for block in blocks)
    ]


@pytest.mark.parametrize(("page", "blocks"), cases(mnist=False))
def test_page(page: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Without a compiler, `tune` leaves out what is compiled: that takes a minute, and leaves torch's threads behind.
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *how, **more: None if "++" in name else real(name, *how, **more))
    run(page, blocks)


@pytest.mark.parametrize(("page", "blocks"), cases(mnist=True))
def test_page_with_mnist(page: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = os.environ.get("HAPI_DATA_HOME")
    if not home or not any((Path(home) / "mnist").glob("train-images*")):
        pytest.skip("MNIST's files are not in $HAPI_DATA_HOME/mnist")
    monkeypatch.chdir(tmp_path)
    run(page, blocks)


def test_blocks_are_found_with_their_lines_and_marked_ones_left_out() -> None:
    text = (
        f"a\n```python\nx = 1\n```\n{MARK}```python\n1 / 0\n```\n```\nnot code\n```\n\n```python\ny = 2\nz = 3\n```\n"
    )
    assert blocks_of(text) == [Block(2, "x = 1\n"), Block(13, "y = 2\nz = 3\n")]


def test_a_failing_block_says_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(ZeroDivisionError) as caught:
        run(page, blocks_of("one\n\n```python\nx = 0\n1 / x\n```\n"))
    assert caught.traceback[-1].lineno + 1 == 5  # pytest counts from 0
    assert str(caught.traceback[-1].path) == str(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in anchors, f"{page.name} links {target}"
