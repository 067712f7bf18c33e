"""`kvtally store`: the daemon, in the foreground."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvtally.cli.options import ConfigOption, SocketOption, setting_option
from kvtally.config import StoreConfig, load
from kvtally.config.table import SETTINGS
from kvtally.config.units import human_size
from kvtally.log import LogFormat, configure

logger = logging.getLogger(__name__)


def store(
    socket: SocketOption = None,
    memory: Annotated[str | None, setting_option("store.memory", "SIZE")] = None,
    disk: Annotated[str | None, setting_option("store.disk", "DIR")] = None,
    disk_size: Annotated[str | None, setting_option("store.disk_size", "SIZE")] = None,
    disk_read_limit: Annotated[str | None, setting_option("store.disk_read_limit", "SIZE")] = None,
    verify_reads: Annotated[
        bool | None,
        typer.Option("--verify-reads/--no-verify-reads", help=SETTINGS["store.verify_reads"].help, show_default=False),
    ] = None,
    tcp: Annotated[str | None, setting_option("store.tcp", "HOST:PORT")] = None,
    token_file: Annotated[str | None, setting_option("store.token_file", "FILE")] = None,
    tls_cert: Annotated[str | None, setting_option("store.tls_cert", "FILE")] = None,
    tls_key: Annotated[str | None, setting_option("store.tls_key", "FILE")] = None,
    admin: Annotated[str | None, setting_option("store.admin", "HOST:PORT")] = None,
    config: ConfigOption = None,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines look.")] = LogFormat.TEXT,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Hold KV cache for every engine on this node. Runs until SIGTERM or Ctrl-C.

    Every option can also stand in a settings file or in the environment; kvtally config show says which one wins.
    """
    flags: dict[str, str | bool | None] = {
        "store.socket": socket,
        "store.memory": memory,
        "store.disk": disk,
        "store.disk_size": disk_size,
        "store.disk_read_limit": disk_read_limit,
        "store.verify_reads": verify_reads,
        "store.tcp": tcp,
        "store.token_file": token_file,
        "store.tls_cert": tls_cert,
        "store.tls_key": tls_key,
        "store.admin": admin,
    }
    store_config = load(file=config, flags=flags).store()
    configure(log_format, verbose=verbose)

    from kvtally.store.server import run

    raise typer.Exit(run(store_config, on_ready=lambda: _say_ready(store_config)))


def _say_ready(config: StoreConfig) -> None:
    disk = f"{human_size(config.disk_bytes)} in {config.disk}" if config.disk else "none"
    fields = {"socket": config.socket, "memory": human_size(config.memory_bytes), "disk": disk}
    logger.info("the store is ready", extra=fields)
