"""Hooks of MkDocs that build the site from Markdown that also reads well in the repository.

- CONTRIBUTING.md and CHANGELOG.md, which are outside of `docs`, become pages of the site.
- Links lead to files of the repository. A link to a file that has a page is changed to a link to this page, and a label
  that is the file's name, such as "compress.md", to the page's title. A link to another file is changed to a link to the
  source repository, if `repo_url` is set, and otherwise to its plain text.
- Docstrings name pages by their paths, as in `docs/guides/meter.md`. In the API reference these paths become links.
- Public names in backticks, such as `fewbit.plan`, become links to the API reference.
- Lists may be nested by the width of their markers, as in CommonMark. Python-Markdown expects four spaces.
"""

import html
import os
import posixpath
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Files outside of docs, and the pages of the site that show them.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# The README says the same as the start page.
STAND_INS = {"README.md": "index.md"}

FENCE = re.compile(r" *(```|~~~)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FILE_NAME = re.compile(r"[\w/.-]+\.md")
PAGE_IN_DOCSTRING = re.compile(r"\bdocs/([\w/]+\.md|decisions/\d{4})\b")
# A name in backticks, outside of headings and of links.
PUBLIC_NAME = re.compile(
    r"(?P<kept><(?P<tag>h[1-6]|a)\b.*?</(?P=tag)>)|<code>(?P<name>fewbit\.[\w.]+)</code>", re.DOTALL
)
MARKER = re.compile(r" *(?:[-*+]|\d+[.)]) +(?=\S)")


def on_files(files, config):
    """Add the pages for files that are outside of docs."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the Markdown of a page with links of the site and with the indentation that Python-Markdown expects."""
    shown = page.file.src_uri
    source = {page: source for source, page in PAGES.items()}.get(shown, f"docs/{shown}")
    text = ""
    for is_code, lines in groupby(with_code(indented(markdown.splitlines())), lambda pair: pair[1]):
        part = "".join(f"{line}\n" for line, _ in lines)
        text += part if is_code else relinked(part, source, shown, config.repo_url)
    return text


def on_page_content(content, page, config, files):
    """Return the HTML of a page with links from public names and, in the API reference, from paths of pages."""
    content = PUBLIC_NAME.sub(name_link, content)
    if not page.file.src_uri.startswith("reference/api/"):
        return content

    def page_link(match):
        start = match.group(1)
        for file in files.documentation_pages():
            if file.src_uri == start or file.src_uri.startswith(f"{start}-"):
                title = html.escape(heading(Path(config.docs_dir, file.src_uri)))
                return f'<a href="{file.url_relative_to(page.file)}">{title}</a>'
        return match.group(0)

    return PAGE_IN_DOCSTRING.sub(page_link, content)


def name_link(match):
    """Return the HTML of a public name as a reference, which mkdocs-autorefs resolves if the reference has the name."""
    if match.group("kept"):
        return match.group(0)
    name = match.group("name")
    return f'<autoref identifier="{name}" optional><code>{name}</code></autoref>'


def relinked(text, source, shown, repository):
    """Return Markdown, which has no fenced blocks, with links of the site.

    Args:
        text: the Markdown.
        source: the path of the file that has the text, relative to the root of the repository.
        shown: the path of the file's page, relative to docs.
        repository: the URL of the source repository, or None.
    """

    def change(match):
        label, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if not target or ":" in target:
            return match.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if os.path.isdir(ROOT / path) and (ROOT / path / "README.md").exists():
            path += "/README.md"
        found = {**PAGES, **STAND_INS}.get(path)
        if path.startswith("docs/"):
            found = path.removeprefix("docs/")
        if found is not None:
            if FILE_NAME.fullmatch(label) and (ROOT / path).is_file():
                label = heading(ROOT / path)
            return f"[{label}]({posixpath.relpath(found, posixpath.dirname(shown) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return match.group(0)  # the strict build reports the broken link
        return f"[{label}]({repository.rstrip('/')}/blob/main/{path})" if repository else label

    return LINK.sub(change, text)


def heading(path):
    """Return the first line of a page, without the mark of a heading."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


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
    """Indent the content of list items by four spaces for each level, instead of by the width of their markers.

    Python-Markdown does not notice an item that directly follows a second paragraph or a table of an item. Such an item
    gets an empty line before it.
    """
    # For each open item: the column in which its content begins, and whether it has an empty line.
    items, result = [], []
    for line, is_code in with_code(lines):
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            items = [(column, True) for column, _ in items]
        # The item before this line at the same level, or else the item that contains this line.
        before = items[-1:]
        while line.strip() and items and indent < items[-1][0]:
            before = [items.pop()]
        marker = None if is_code else MARKER.match(line)
        if marker and before and before[0][1] and result[-1].strip():
            result.append("")
        result.append(" " * 4 * len(items) + line[items[-1][0] if items else 0 :])
        if marker and (items or indent < 4):
            items.append((len(marker.group(0)), False))
    return result
