"""The run file: one TOML document that every process of a run reads."""

from sao.config.load import ConfigError, load_run_config
from sao.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_run_config"]
