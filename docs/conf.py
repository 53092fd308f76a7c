"""The site of the documentation, made by Sphinx: `nox -s site`.

The pages are plain Markdown, readable on GitHub too. Added here are the sidebar, made of the
headings and links of `index.md`, and the addresses of files outside of `docs/`. Docstrings, which
are in Google's style with Markdown's backticks, become reStructuredText.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import jaxprtool  # noqa: E402  (found by the line above)

project = "jaxprtool"
author = "the authors of jaxprtool"
copyright = author
release = jaxprtool.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
nitpicky = True
smartquotes = False  # `--args` is two hyphens
suppress_warnings = ["ref.python"]  # `bytes` is a type, and a field of several classes
#: Types of others, type variables, and types below the public face: these have no entry.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|os|typing|types|pathlib|numpy|jax|jaxlib|rich)\..*"),
    ("py:.*", r"(enum|traceback|FrameSummary|Number|MemoryNote|Observer|StructuredRule)\b.*"),
    ("py:.*", r"(By|InsertedCopy)"),  # in a class whose types are imported by type checkers only
    ("py:.*", r"(jaxprtool\..*\.)?[A-Z]"),
    ("py:.*", r"jaxprtool\.(ir|jaxcompat|render|formats|loading|execute|passes\.mapping)\..*"),
    ("py:.*", r"jaxprtool\.commands\.lint\.graph\.(Enclosing|LintedKernel|SourceReader)"),
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = False
exclude_patterns = ["_build"]

myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"jaxprtool {release}"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

#: `owner/name` on GitHub. Actions set it; without it, names of files are not links.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")


def sidebar(index: str) -> str:
    """Return the sidebar: for each section of `index.md`, the pages that it links to."""
    trees = []
    for section in re.split(r"^##+ ", index, flags=re.MULTILINE)[1:]:
        caption = section.partition("\n")[0]
        pages = dict.fromkeys(re.findall(r"\]\(([\w/]+)\.(?:md|rst)\)", section))
        if pages:
            names = "\n".join(pages)
            trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "\n".join(trees)


def outside(docname: str, text: str) -> str:
    """Return a page whose links to files outside of `docs/` lead to the repository on GitHub."""

    def replaced(link: re.Match[str]) -> str:
        path = (DOCS / docname).parent.joinpath(link[2]).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        if REPOSITORY is None:
            return link[1]
        kind = "tree" if path.is_dir() else "blob"
        place = path.relative_to(DOCS.parent)
        return f"[{link[1]}](https://github.com/{REPOSITORY}/{kind}/main/{place})"

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", replaced, text)


def markup(docstring: str) -> str:
    """Return a docstring in reStructuredText: names and code in backticks, examples indented."""
    text = re.sub(r":(\n\n {4,}\S)", r"::\1", docstring)  # an example
    text = re.sub(r"\.(\n\n {4,}[@\w])", r". ::\1", text)
    parts = re.split(r"(?<![`:])`([^`]+)`(?!`)", text)
    for i in range(0, len(parts), 2):  # the stars of `*args` and `2 * x`, but not those of lists
        parts[i] = re.sub(r"\*(?! {3})(?!\*?\w+:)|(?<=\w)_(?=\W)", r"\\\g<0>", parts[i])
        parts[i] = re.sub(r"^(?=\w)", r"\\ ", parts[i]) if i else parts[i]  # `Array`s
    for i in range(1, len(parts), 2):
        public = parts[i] in jaxprtool.__all__
        parts[i] = f":py:obj:`~jaxprtool.{parts[i]}`" if public else f"``{parts[i]}``"
    return "".join(parts)


def prepare_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Change a docstring before Napoleon reads its sections."""
    text = markup("\n".join(lines))
    if what in ("attribute", "property"):  # Napoleon takes what is before a colon for a type
        text = text.replace(": ", ":\n", 1)
    lines[:] = text.splitlines()


def prepare_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, args: str | None, result: str
) -> tuple[str, str] | None:
    """Return a signature without defaults that are no expressions, such as `<factory>`."""
    return (re.sub(r"=\s*<.*?>(?=,|\)$)", "= ...", args), result) if args else None


def resolve_error(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: Element
) -> Element | None:
    """Resolve the name of an error, which docstrings give without its module."""
    if node.get("reftype") != "exc":
        return None
    domain = environment.get_domain("py")
    ending = f".{node['reftarget']}"
    for name in domain.objects:
        if name.endswith(ending):
            return domain.resolve_xref(
                environment, node["refdoc"], app.builder, "exc", name, node, content
            )
    return None


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    source[0] = outside(docname, source[0])
    if docname == "index":
        source[0] += "\n\n" + sidebar(source[0])


def setup(app: Sphinx) -> None:
    """Register the changes."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Fields"
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)
    app.connect("autodoc-process-signature", prepare_signature)
    app.connect("missing-reference", resolve_error)
