"""`sao status` shows what people copy from it, however narrow the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sao.cli.status import process_table
from sao.supervisor.folder import ProcessState, RunFolder


def test_addresses_are_never_cut(tmp_path: Path) -> None:
    address = "http://127.0.0.1:31141 (gRPC 127.0.0.1:27553)"
    folder = RunFolder(tmp_path)
    folder.write_processes([ProcessState(name="ingest", state="ready", pid=4_000_000, starts=1, address=address)])
    for width in (60, 80, 200):
        console = Console(width=width)
        with console.capture() as shown:
            console.print(process_table(folder))
        text = shown.get()
        assert "…" not in text
        assert all(part in text for part in address.split())
        assert " dead " in text, "nobody has this process id"
