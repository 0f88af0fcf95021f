"""``[fleet]`` of ``fitter.toml``: what it takes, and what it says about what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fitter.errors import UsageError
from fitter.planning.fleet.residency import Member
from fitter.regression.fleets import read_fleet, requests_in
from tests.support.cases import cases, stored

CASES = """
[cases.chat]
model = "chat.gguf"
[cases.embed]
model = "embed.gguf"
[cases.coder]
model = "coder.gguf"
"""


def written(tmp_path: Path, text: str, cases: str = CASES) -> Path:
    path = tmp_path / "fitter.toml"
    path.write_text(cases + text)
    return path


def test_what_is_not_said_has_defaults(tmp_path: Path) -> None:
    fleet = read_fleet(written(tmp_path, "[fleet]\n"))
    assert [member.name for member in fleet.members] == ["chat", "coder", "embed"]
    assert [member.share for member in fleet.members] == pytest.approx([1 / 3] * 3)
    assert not any(member.stays for member in fleet.members)
    assert (fleet.goal, fleet.disk) == ("time", None)


def test_each_model_has_its_needs(tmp_path: Path) -> None:
    text = """
[fleet]
goal = "resident"
cases = ["embed", "chat"]
disk_bandwidth = "2GB/s"
[fleet.models.embed]
share = 3
resident = true
[fleet.models.chat]
evict = false
never_with = ["embed"]
"""
    fleet = read_fleet(written(tmp_path, text))
    embed, chat = fleet.members
    assert (embed.name, embed.share, embed.is_resident, embed.may_be_evicted) == ("embed", 0.75, True, True)
    assert (chat.name, chat.share, chat.is_resident, chat.may_be_evicted) == ("chat", 0.25, False, False)
    assert chat.never_with == {"embed"}
    assert (fleet.goal, fleet.disk) == ("resident", 2e9)


def test_a_table_with_a_pattern_stands_for_its_matches(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        (tmp_path / "models" / f"{name}.gguf").touch()
    cases = '[cases.all]\nmodel = "models/*.gguf"\n[cases.embed]\nmodel = "embed.gguf"\n'
    fleet = read_fleet(written(tmp_path, '[fleet.models.all]\nshare = 2\nnever_with = ["all"]\n', cases))
    assert {member.name: member.share for member in fleet.members} == {"all/a": 0.4, "all/b": 0.4, "embed": 0.2}
    assert {member.name: member.never_with for member in fleet.members} == {
        "all/a": {"all/b"},
        "all/b": {"all/a"},
        "embed": frozenset(),
    }


def test_a_log_gives_the_order(tmp_path: Path) -> None:
    line = "srv  proxy_reques: proxying request to model {} on port 40001\n"
    (tmp_path / "router.log").write_text((line.format("chat") * 30 + line.format("embed") * 10) * 50)
    fleet = read_fleet(written(tmp_path, '[fleet]\nlog = "router.log"\n'))
    assert fleet.log == tmp_path / "router.log"
    assert requests_in(fleet.log, fleet.members) == (("chat",) * 30 + ("embed",) * 10) * 50


def test_a_preset_has_some_names_in_another_form(tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text("srv  proxy_reques: proxying request to model all-a on port 40001\n")
    members = (Member("all/a", 0.5), Member("embed", 0.5))
    assert requests_in(tmp_path / "router.log", members) == ("all/a",)


@cases(stored("regression_fleets", "wrong"))
def test_what_is_wrong_is_said_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, "", text + CASES) if text.startswith("fleet =") else written(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_fleet(path)
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


def test_all_models_are_on_one_machine(tmp_path: Path) -> None:
    cases = '[cases.a]\nmodel = "a.gguf"\ngpu = ["rtx-4090"]\n[cases.b]\nmodel = "b.gguf"\ngpu = ["rtx-3090"]\n'
    with pytest.raises(UsageError) as error:
        read_fleet(written(tmp_path, "[fleet]\n", cases))
    assert str(error.value).endswith(
        "a fleet is on one machine, but 'a' and 'b' differ in gpu: write it once, in [defaults]"
    )


def test_a_file_with_a_fleet_is_still_one_of_cases(tmp_path: Path) -> None:
    from fitter.regression.cases import read_cases

    assert [case.name for case in read_cases(written(tmp_path, "[fleet]\n"))] == ["chat", "coder", "embed"]
