"""`kvtally route`: the router, in the foreground."""

from __future__ import annotations

import logging

import typer

from kvtally.cli.options import ConfigOption, LogFormatOption, VerboseOption, section, taking
from kvtally.config import Flags, RouterConfig, load
from kvtally.errors import ConfigError
from kvtally.log import LogFormat, configure

logger = logging.getLogger(__name__)


@taking([*section("router"), "store.token_file", "store.socket"])
def route(
    flags: Flags,
    config: ConfigOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    verbose: VerboseOption = False,
) -> None:
    """Serve an OpenAI-compatible API from prefill and decode engines, with a receipt for every request.

    One line of JSON for each request goes to standard output, everything else to standard error. Runs until SIGTERM or
    Ctrl-C. Every option can also be set in a settings file or in the environment.
    """
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
