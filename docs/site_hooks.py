"""What the site has beside the pages in docs/: the reference, and the files of the repository that pages link to."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
HIDDEN = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file and folder outside of docs/ that a page links to."""
    linked = {
        target
        for file in files.documentation_pages()
        for found in LINK.finditer(file.content_string)
        if (target := outside(file.src_uri, found[1]))
    }
    for target in sorted(linked):
        if (ROOT / target).suffix in (".png", ".svg"):
            files.append(File.generated(config, f"source/{target}", content=(ROOT / target).read_bytes()))
        else:
            files.append(File.generated(config, f"source/{target}.md", content=shown(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside of docs/ to their pages."""
    here = PurePosixPath(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        target = outside(page.file.src_uri, found[1])
        if not target:
            return found[0]
        picture = Path(target).suffix in (".png", ".svg")
        return "../" * (len(here.parts) - 1) + f"source/{target}" + ("" if picture else ".md")

    if page.file.src_uri.startswith("source/"):
        return markdown
    # GitHub wants bars in a table's code escaped, and the site shows the backslash.
    bars = re.sub(
        r"^\|.*", lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown, flags=re.M
    )
    return LINK.sub(lead, bars)


@event_priority(-100)  # the search writes its index before
def on_post_build(config: MkDocsConfig) -> None:
    """Write the index of the search as a script too: a page that was opened as a file may read no JSON."""
    search = Path(config.site_dir, "search")
    (search / "search_index.js").write_text(f"var __index = {(search / 'search_index.json').read_text()}")


def outside(page: str, link: str) -> str:
    """The path from the repository's root of what a page links to; nothing if it is in docs/, or is not there."""
    path = (ROOT / "docs" / page).parent.joinpath(link).resolve()
    if not path.exists() or path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT):
        return ""
    return path.relative_to(ROOT).as_posix()


def shown(path: Path) -> str:
    """A page that shows a file, or the list of a folder."""
    title = f"{HIDDEN}# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith(("_", ".")))
        return title + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text()
    if path.suffix == ".md":  # its links lead from another folder
        return HIDDEN + LINK.sub("#", text)
    return f"{title}`````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n`````\n"
