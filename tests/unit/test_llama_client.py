"""What the client says of the worker's commands. No process is started here."""

from __future__ import annotations

import inspect

from fitter.llama import client
from fitter.llama.worker import Session


def test_every_command_has_plain_words_for_the_time_limit() -> None:
    commands = {name for name, _ in inspect.getmembers(Session, inspect.isfunction) if not name.startswith("_")}
    assert client._DOING.keys() == commands
    assert str(client._late("header")) == (
        "no plan was found within the time limit, which ended while reading the header of a model: raise --time-limit"
    )
