"""The console's modules by TypeScript: names, members and arguments as their comments say them."""

import json
import subprocess
from pathlib import Path

from gateway.console.mount import STATIC

OPTIONS = {
    "allowJs": True,
    "checkJs": True,
    "noEmit": True,
    "target": "es2024",
    "module": "esnext",
    "moduleResolution": "bundler",
    "lib": ["es2024", "dom", "dom.iterable", "dom.asynciterable"],
}


def check(node_modules: Path, folder: Path, source: Path) -> list[str]:
    """Errors of the compiler in the modules of a folder, those of vendored ones apart."""
    config = folder / "tsconfig.json"
    config.write_text(
        json.dumps({"compilerOptions": OPTIONS, "include": [str(source / "**/*.js")]})
    )
    command = [str(node_modules / ".bin/tsc"), "--pretty", "false", "-p", str(config)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return [line for line in lines if ": error TS" in line and "/vendor/" not in line]


def test_the_modules_have_no_type_errors(node_modules: Path, tmp_path: Path) -> None:
    assert check(node_modules, tmp_path, STATIC) == []


def test_a_wrong_name_would_be_found(node_modules: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "wrong.js").write_text("export const length = [1].lenght;\n")
    (error,) = check(node_modules, tmp_path, source)
    assert "lenght" in error
