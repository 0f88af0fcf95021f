"""``fitter serve``: plan in the browser."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import click

from fitter.cli import options
from fitter.errors import EXIT_FITS, LibraryError
from fitter.installation import install_command

_EPILOG = """\
Examples:
  fitter serve                                 plan well-known models and those of addresses
  fitter serve --root ~/models                 and those of a directory
  fitter serve --port 0 --open                 at any port that is free, and open the page in the browser

It answers this machine only, unless --host says otherwise. Ctrl-C and SIGTERM
end it within 8 seconds, with all that it has begun.

Exit status: 0 it was ended, 2 usage error, or nothing can listen there, 3 a package or a llama.cpp is missing.
"""
_SECTION = "Server"


@click.command(cls=options.Command, epilog=_EPILOG)
@options.grid_option(
    _SECTION,
    "root",
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Offer the models in this directory and below it. [default: none]",
)
@options.grid_option(_SECTION, "host", "--host", metavar="ADDRESS", help="Listen at this address. [default: 127.0.0.1]")
@options.grid_option(
    _SECTION,
    "port",
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Listen at this port; 0 is any that is free. [default: 8080]",
)
@options.grid_option(
    _SECTION,
    "workers",
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Plans that are made at the same time; each has up to two processes of llama.cpp. [default: 4]",
)
@options.grid_option(
    _SECTION,
    "allow_private_addresses",
    "--allow-private-addresses",
    is_flag=True,
    help="Also fetch headers from hosts of private networks and of this machine, and through proxies.",
)
@options.grid_option(
    _SECTION,
    "open_browser",
    "--open",
    is_flag=True,
    help="Open the page in the default browser once the server listens.",
)
@options.llama_cpp_option
def serve(allow_private_addresses: bool | None, open_browser: bool | None, **given: Any) -> int:
    """Plan in the browser: pick a model and cards, move context, KV cache and margins, and see the plan change.

    A model is a file below --root, an address (https://, hf://) or a shape. Cards are described, or those of this
    machine, unless --host lets others ask. The page compares two machines or two quantizations, and its address holds
    everything that was chosen. /api describes the JSON API for other front ends.
    """
    try:
        from fitter.web.server import serve as run
    except ImportError as error:
        raise LibraryError(
            f"fitter serve needs the package {error.name}, which is missing: {install_command('web')}"
        ) from None
    # __main__ turns collection off for short commands
    gc.enable()
    run(
        **options.given(given),
        allow_private_addresses=bool(allow_private_addresses),
        open_browser=bool(open_browser),
        say=lambda text: click.echo(f"fitter: {text}", err=True),
    )
    return EXIT_FITS
