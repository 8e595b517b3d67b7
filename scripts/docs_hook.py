"""Brings pages and files that lie outside docs/ into the documentation, and turns links to them into links there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "examples/*.py"]
OUTSIDE += ["k8s/README.md", "k8s/values/*.yaml", "k8s/slurm/*", "k8s/hotswap/values.yaml"]
OPENAPI = ROOT / "build" / "openapi"  # scripts/openapi.py
_LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds them."""
    for path in (path for pattern in OUTSIDE for path in sorted(ROOT.glob(pattern))):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted(OPENAPI.glob("*.json")):
        files.append(File.generated(config, f"reference/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files into links between pages: docs/ is the root here, and k8s/ lies below it."""
    here = Path(page.file.abs_src_path or "").parent
    folder = Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / match[1]))
        base = Path(config.docs_dir) if target.is_relative_to(config.docs_dir) else ROOT
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        return os.path.relpath(target.relative_to(base), folder)

    return _LINK.sub(link, markdown)
