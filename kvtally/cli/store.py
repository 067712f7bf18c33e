"""`kvtally store`: the daemon, in the foreground."""

from __future__ import annotations

import logging

import typer

from kvtally.cli.options import ConfigOption, LogFormatOption, VerboseOption, section, taking
from kvtally.config import Flags, StoreConfig, load
from kvtally.config.units import human_size
from kvtally.log import LogFormat, configure

logger = logging.getLogger(__name__)


@taking(section("store"))
def store(
    flags: Flags,
    config: ConfigOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    verbose: VerboseOption = False,
) -> None:
    """Hold KV cache for every engine on this node. Runs until SIGTERM or Ctrl-C.

    Every option can also be set in a settings file or in the environment; kvtally config show says which one wins.
    """
    store_config = load(file=config, flags=flags).store()
    configure(log_format, verbose=verbose)

    from kvtally.store.server import run

    raise typer.Exit(run(store_config, on_ready=lambda: _say_ready(store_config)))


def _say_ready(config: StoreConfig) -> None:
    disk = f"{human_size(config.disk_bytes)} in {config.disk}" if config.disk else "none"
    fields = {"socket": config.socket, "memory": human_size(config.memory_bytes), "disk": disk}
    logger.info("the store is ready", extra=fields)
