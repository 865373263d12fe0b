"""Generate sao/v1 from proto/sao/v1: `python tools/proto.py [--check]`.

The generator lives in an environment of its own, build/venv-proto: grpcio-tools 1.71.2 writes stubs that import on
protobuf 5.26 and everything newer, while those of a current one refuse the older protobuf inside SGLang's and
DeepSpeed's images.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("grpcio-tools==1.71.2", "mypy-protobuf==3.6.0", "setuptools==80.9.0")
ENVIRONMENT = ROOT / "build" / "venv-proto"


def generator() -> Path:
    """The interpreter that has the generator, built when it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "tools.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(TOOLS):
        venv.create(ENVIRONMENT, with_pip=True, clear=True, symlinks=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)  # noqa: S603
        stamp.write_text("\n".join(TOOLS))
    return python


def generate(into: Path) -> None:
    """Write the stubs below `into`."""
    python = generator()
    plugins = [
        f"--plugin=protoc-gen-{name}={ENVIRONMENT / 'bin' / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python")]
    typed = [f"--{kind}_out=quiet:{into}" for kind in ("mypy", "mypy_grpc")]
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto/sao/v1").glob("*.proto"))
    subprocess.run(  # noqa: S603
        [python, "-m", "grpc_tools.protoc", "-Iproto", *plugins, *outputs, *typed, *files], check=True, cwd=ROOT
    )


def main() -> int:
    """Generate, or compare with what is committed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a stub differs")
    if not parser.parse_args().check:
        generate(ROOT)
        (ROOT / "sao/v1/__init__.py").touch()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted(Path(folder, "sao/v1").glob("*"))
        stale = [path.name for path in fresh if _read(ROOT / "sao/v1" / path.name) != path.read_bytes()]
    if stale:
        sys.stderr.write(f"sao/v1 is not what proto/sao/v1 gives: {', '.join(stale)}; run `make proto`\n")
    return 1 if stale else 0


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
