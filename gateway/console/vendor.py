"""Vendored files of the console, each with its origin: `python -m gateway.console.vendor`.

The command (`make vendor`) takes them from npm's tarballs and writes the list beside them. What is
in git is what runs: no build step, and nothing is fetched by a browser or by `pip install`.
"""

import hashlib
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static" / "vendor"
LIST = FOLDER / "VENDOR.md"


@dataclass(frozen=True)
class VendoredFile:
    """A file of an npm package: `path` in its tarball, `name` here, and changes of its text.

    `sha256` is that of the file as it is here.
    """

    package: str
    version: str
    licence: str
    path: str
    name: str
    sha256: str
    changes: tuple[tuple[str, str], ...] = ()


# A browser resolves no bare names without an import map, which the policy does not allow inline.
_OWN_PREACT = (('"preact"', '"./preact.module.js"'),)
# Names of files that are not here.
_NO_SOURCE_MAP = tuple(
    (f"\n//# sourceMappingURL={name}.map\n", "\n")
    for name in ("preact.module.js", "hooks.module.js")
)

FILES = (
    VendoredFile(
        "preact",
        "10.29.8",
        "MIT",
        "dist/preact.module.js",
        "preact.module.js",
        "25a5df7e9f628a587743c4641a368737a3b218f28ef738ba0376a2d5bdfc948c",
        _NO_SOURCE_MAP,
    ),
    VendoredFile(
        "preact",
        "10.29.8",
        "MIT",
        "hooks/dist/hooks.module.js",
        "hooks.module.js",
        "9e7eff58e0ae604583461eba1344da69a6894eab575eb591c635cc0d3f9ec57d",
        (*_OWN_PREACT, *_NO_SOURCE_MAP),
    ),
    VendoredFile(
        "preact",
        "10.29.8",
        "MIT",
        "LICENSE",
        "preact.LICENSE",
        "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    ),
    VendoredFile(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "dist/htm.module.js",
        "htm.module.js",
        "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    ),
    VendoredFile(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "LICENSE",
        "htm.LICENSE",
        "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    ),
    VendoredFile(
        "uplot",
        "1.6.32",
        "MIT",
        "dist/uPlot.esm.js",
        "uPlot.esm.js",
        "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    ),
    VendoredFile(
        "uplot",
        "1.6.32",
        "MIT",
        "dist/uPlot.min.css",
        "uPlot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    VendoredFile(
        "uplot",
        "1.6.32",
        "MIT",
        "LICENSE",
        "uPlot.LICENSE",
        "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    ),
)


def build_list() -> str:
    """Build the list of the vendored files."""
    rows = [
        f"| `{file.name}` | {file.package} {file.version} | `{file.path}` | {file.licence} | "
        f"{'names of imports, source maps' if file.changes else 'no'} | `{file.sha256}` |"
        for file in FILES
    ]
    head = (
        "# Vendored files",
        "",
        "Written by `make vendor` from `gateway/console/vendor.py`, out of npm's tarballs.",
        "",
        "| file | package | file of the package | licence | changed | sha256 of the file here |",
        "| --- | --- | --- | --- | --- | --- |",
    )
    return "\n".join((*head, *rows, ""))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Fetch the packages, write their files and the list. Raises SystemExit for another hash."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for package in sorted({f"{file.package}@{file.version}" for file in FILES}):
            subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
        for file in FILES:
            archive = Path(folder) / f"{file.package}-{file.version}.tgz"
            (FOLDER / file.name).write_bytes(_extract(archive, file))
    LIST.write_text(build_list(), encoding="utf-8")
    wrong = [
        f"{file.name} has sha256 {found}: review it, then write that into gateway/console/vendor.py"
        for file in FILES
        if (found := hash_file(FOLDER / file.name)) != file.sha256
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


def _extract(archive: Path, file: VendoredFile) -> bytes:
    with tarfile.open(archive) as tarball:
        member = tarball.extractfile(f"package/{file.path}")
        assert member is not None, f"{file.path} of {file.package} is no plain file"
        content = member.read()
    for old, new in file.changes:
        content = content.replace(old.encode(), new.encode())
    return content


if __name__ == "__main__":
    main()
