"""mkdocs: README, CONTRIBUTING and CHANGELOG become pages of the site, and links follow them.

On disk and on a code host every link is relative to its file. A link to a file that is no page of
the site (a module, a recipe) becomes its name as code; whether the file is there is checked here,
since `--strict` cannot.
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
    """Add README and its siblings, which lie beside docs/."""
    for source, name in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a page into those that the site has."""
    uri = page.file.src_uri
    sources = {name: source for source, name in PAGES.items()}
    here = PurePosixPath(sources.get(uri, f"docs/{uri}"))  # in the repository

    def site(to: str) -> str | None:
        """Return a path of the repository as the site has it.

        None: it is neither a page nor a picture of the site.
        """
        if to in PAGES:
            return PAGES[to]
        if not to.startswith("docs/"):
            return None
        inside = to.removeprefix("docs/")
        return inside if files.get_file_from_path(inside) else None

    def target(to: str) -> str:
        """Return what a link of this page leads to, as a path of the repository."""
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

    parts = []
    for part in re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL):
        if not part.startswith("```"):  # code stays as it is
            part = NAMED.sub(as_code, part)
            part = LINK.sub(moved, part)
        parts.append(part)
    return "".join(parts)
