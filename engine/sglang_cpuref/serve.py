"""Start the real SGLang server on a CPU: `python -m sglang_cpuref.serve --model DIR --port P`.

The flags that an RL rollout needs are set here once, with the reasons; arguments after `--` go to SGLang as they are.
Keys may come from SAO_ENGINE_API_KEY and SAO_ENGINE_ADMIN_KEY, so that they are not in the process list.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_cpuref import torchvision_shim

# SGLang spawns its scheduler and detokenizer; a spawned process imports the parent's main module first, so the shim
# acts there too, before anything can import torchvision.
torchvision_shim.install_if_cpu()

ENVIRONMENT = {
    "SGLANG_PLATFORM": "cpuref",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m sglang_cpuref.serve", description=__doc__)
    result.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint directory (untied head)")
    result.add_argument("--host", default="127.0.0.1")
    result.add_argument("--port", type=int, required=True)
    result.add_argument(
        "--seed", type=int, help="default: one drawn at each start; a repeated seed repeats the samples"
    )
    result.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    result.add_argument("--max-running-requests", type=int, default=32)
    result.add_argument("--max-total-tokens", type=int, default=8192, help="tokens of KV cache")
    result.add_argument("--weight-version", default="initial", help="reported until the first weight update")
    result.add_argument("--api-key", default=os.environ.get("SAO_ENGINE_API_KEY"))
    result.add_argument("--admin-api-key", default=os.environ.get("SAO_ENGINE_ADMIN_KEY"))
    result.add_argument("more", nargs="*", help="after `--`: further SGLang arguments")
    return result


def server_arguments(asked: argparse.Namespace) -> list[str]:
    """SGLang's command line for what was asked."""
    # Two engines, or two starts of one, that share a seed sample alike.
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    arguments = {
        "--model-path": str(asked.model),
        "--host": asked.host,
        "--port": str(asked.port),
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--dtype": asked.dtype,  # `auto` turns a float32 checkpoint into float16
        "--mem-fraction-static": "0.5",
        "--max-total-tokens": str(asked.max_total_tokens),
        "--max-running-requests": str(asked.max_running_requests),
        "--random-seed": str(seed),
        "--weight-version": asked.weight_version,
    }
    if asked.api_key:
        arguments["--api-key"] = asked.api_key
    if asked.admin_api_key:
        arguments["--admin-api-key"] = asked.admin_api_key
    flags = [
        "--skip-server-warmup",
        "--sleep-on-idle",  # without it an idle scheduler spins a core
        "--enable-metrics",
        "--enable-cache-report",  # the canary proves freshness by cached_tokens
    ]
    return [part for pair in arguments.items() for part in pair] + flags + list(asked.more)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until the process is told to end."""
    asked = parser().parse_args(argv)
    if not (asked.model / "config.json").is_file():
        parser().error(f"--model {asked.model}: expected a Hugging Face checkpoint directory, there is no config.json")
    os.environ.update(ENVIRONMENT)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(server_arguments(asked)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
