"""Hooks of MkDocs that build the site from Markdown that also reads well in the repository.

- CONTRIBUTING.md and CHANGELOG.md, which are outside of `docs`, become pages of the site.
- Links lead to files of the repository. A link to a file that has a page is changed to a link to this page. A link to
  another file is changed to a link to the source repository, if `repo_url` is set, and otherwise to its plain text.
- Lists may be nested by the width of their markers, as in CommonMark. Python-Markdown expects four spaces.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Files outside of docs, and the pages of the site that show them.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The README says the same as the start page.
STAND_INS = {"README.md": "index.md"}

FENCE = re.compile(r" *(```|~~~)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
MARKER = re.compile(r" *(?:[-*+]|\d+[.)]) +(?=\S)")


def on_files(files, config):
    """Add the pages for files that are outside of docs."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the Markdown of a page with links of the site and with the indentation that Python-Markdown expects."""
    shown = page.file.src_uri
    source = {page: source for source, page in PAGES.items()}.get(shown, f"docs/{shown}")
    lines = []
    for line, is_code in with_code(indented(markdown.splitlines())):
        lines.append(line if is_code else relinked(line, source, shown, config.repo_url))
    return "\n".join(lines) + "\n"


def relinked(line, source, shown, repository):
    """Change the links of a line.

    Args:
        line: a line of Markdown.
        source: the path of the file that has the line, relative to the root of the repository.
        shown: the path of the file's page, relative to docs.
        repository: the URL of the source repository, or None.
    """

    def change(match):
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if not target or ":" in target:
            return match.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if os.path.isdir(ROOT / path) and (ROOT / path / "README.md").exists():
            path += "/README.md"
        found = {**PAGES, **STAND_INS}.get(path)
        if path.startswith("docs/"):
            found = path.removeprefix("docs/")
        if found is not None:
            return f"[{text}]({posixpath.relpath(found, posixpath.dirname(shown) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match.group(0)  # the strict build reports the broken link
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path})" if repository else text

    return LINK.sub(change, line)


def with_code(lines):
    """Return (line, whether it belongs to a fenced block) for each line."""
    fence, marked = None, []
    for line in lines:
        found = FENCE.match(line)
        marked.append((line, fence is not None or found is not None))
        if found and fence is None:
            fence = found.group(1)
        elif found and fence == found.group(1):
            fence = None
    return marked


def indented(lines):
    """Indent the content of list items by four spaces for each level, instead of by the width of their markers."""
    columns, result = [], []
    for line, is_code in with_code(lines):
        indent = len(line) - len(line.lstrip(" "))
        if line.strip() and not (is_code and columns and indent >= columns[-1]):
            while columns and indent < columns[-1]:
                columns.pop()
        result.append(" " * 4 * len(columns) + line[columns[-1] if columns else 0 :])
        marker = None if is_code else MARKER.match(line)
        if marker and (columns or indent < 4):
            columns.append(len(marker.group(0)))
    return result
