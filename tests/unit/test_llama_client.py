"""What the client says of the worker's commands. No process is started here."""

from __future__ import annotations

import inspect

from fitter.llama import client
from fitter.llama.worker.worker import Commands


def test_every_command_has_plain_words_for_the_time_limit() -> None:
    commands = {name for name, _ in inspect.getmembers(Commands, inspect.isfunction) if not name.startswith("_")}
    assert client.DOING.keys() == commands
