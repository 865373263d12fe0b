"""The run file: one TOML document that every process of a run reads."""

from sao.config.dump import dump_run_config, secret_environment
from sao.config.errors import ConfigError
from sao.config.load import load_run_config
from sao.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "dump_run_config", "load_run_config", "secret_environment"]
