"""`kvtally route`: the router, in the foreground."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvtally.cli.options import ConfigOption, SocketOption, setting_option
from kvtally.config import RouterConfig, load
from kvtally.config.table import SETTINGS
from kvtally.errors import ConfigError
from kvtally.log import LogFormat, configure

logger = logging.getLogger(__name__)

_INSTANCE = "URL[,store=ADDRESS]"


def route(
    prefill: Annotated[list[str] | None, setting_option("router.prefill", _INSTANCE)] = None,
    decode: Annotated[list[str] | None, setting_option("router.decode", _INSTANCE)] = None,
    flavour: Annotated[str | None, setting_option("router.flavour", "NAME")] = None,
    listen: Annotated[str | None, setting_option("router.listen", "HOST:PORT")] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict/--no-strict", help=SETTINGS["router.strict"].help, show_default=False)
    ] = None,
    prefill_from: Annotated[str | None, setting_option("router.prefill_from", "TOKENS")] = None,
    receipt_wait: Annotated[str | None, setting_option("router.receipt_wait", "MS")] = None,
    timeout: Annotated[str | None, setting_option("router.timeout", "SECONDS")] = None,
    max_body: Annotated[str | None, setting_option("router.max_body", "SIZE")] = None,
    tenant_header: Annotated[str | None, setting_option("router.tenant_header", "NAME")] = None,
    salt_file: Annotated[str | None, setting_option("router.salt_file", "FILE")] = None,
    token_file: Annotated[str | None, setting_option("store.token_file", "FILE")] = None,
    store_ca: Annotated[str | None, setting_option("router.store_ca", "FILE")] = None,
    socket: SocketOption = None,
    config: ConfigOption = None,
    log_format: Annotated[LogFormat, typer.Option(help="How log lines look.")] = LogFormat.TEXT,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve an OpenAI-compatible API from prefill and decode engines, with a receipt for every request.

    One line of JSON for each request goes to standard output, everything else to standard error. Runs until SIGTERM or
    Ctrl-C. Every option can also stand in a settings file or in the environment.
    """
    flags: dict[str, str | bool | None] = {
        "router.prefill": " ".join(prefill) if prefill else None,
        "router.decode": " ".join(decode) if decode else None,
        "router.flavour": flavour,
        "router.listen": listen,
        "router.strict": strict,
        "router.prefill_from": prefill_from,
        "router.receipt_wait": receipt_wait,
        "router.timeout": timeout,
        "router.max_body": max_body,
        "router.tenant_header": tenant_header,
        "router.salt_file": salt_file,
        "router.store_ca": store_ca,
        "store.token_file": token_file,
        "store.socket": socket,
    }
    router_config = load(file=config, flags=flags).router()
    if not router_config.decode:
        raise ConfigError("there is no instance to send requests to", remedy="Name one: --decode http://HOST:PORT.")
    configure(log_format, verbose=verbose)

    from kvtally.router.app import run

    raise typer.Exit(run(router_config, on_ready=lambda: _say_ready(router_config)))


def _say_ready(config: RouterConfig) -> None:
    fields = {
        "listen": config.listen,
        "flavour": config.flavour,
        "prefill": ",".join(instance.name for instance in config.prefill) or "none",
        "decode": ",".join(instance.name for instance in config.decode),
        "strict": config.strict,
    }
    logger.info("the router is ready", extra=fields)
