"""mkdocs: the pages beside docs/ (README, CONTRIBUTING, CHANGELOG) become pages of the site, and links follow them.

On disk and on a code host every link is relative to its file. A link to a file that is no page of the site (a module, a
recipe) becomes its name as code; whether the file is there is checked here, since `--strict` cannot.
"""

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
log = logging.getLogger("mkdocs.hooks.links")
LINK = re.compile(
    r'(?P<head>\]\(|(?:src|href)=")(?P<to>[^)"\s#]+)(?P<anchor>#[^)"\s]*)?(?P<tail>[)"])'
)
NAMED = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<to>[^)\s#]+)(?:#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """README and its siblings, from beside docs/."""
    for source, name in PAGES.items():
        files.append(
            File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them."""
    uri = page.file.src_uri
    back = {name: source for source, name in PAGES.items()}
    here = PurePosixPath(back.get(uri, f"docs/{uri}"))  # in the repository

    def site(to: str) -> str | None:
        """A path of the repository as the site has it; None: it is no page and no picture of the site."""
        if to in PAGES:
            return PAGES[to]
        inside = to.removeprefix("docs/") if to.startswith("docs/") else None
        return inside if inside and files.get_file_from_path(inside) else None

    def target(to: str) -> str:
        return normpath(str(here.parent / to))

    def as_code(match: re.Match[str]) -> str:
        to = match["to"]
        if re.match(r"[a-z]+:", to) or site(target(to)):
            return match[0]
        if not (ROOT / target(to)).exists():
            log.warning(f"{here}: link to {to}, which is not there")
        text = match["text"]
        return text if text.startswith("`") else f"`{text}`"

    def moved(match: re.Match[str]) -> str:
        to = match["to"]
        if re.match(r"[a-z]+:", to):
            return match[0]
        place = site(target(to))
        if place is None:
            return match[0]
        path = relpath(place, str(PurePosixPath(uri).parent))
        return f"{match['head']}{path}{match['anchor'] or ''}{match['tail']}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        p if p.startswith("```") else LINK.sub(moved, NAMED.sub(as_code, p)) for p in parts
    )
