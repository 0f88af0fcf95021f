"""Files with hostile names in every format that a program here can read: the program gets the same name.

What no program reads here is read by the rules that its source states: ``tests/unit/test_output_formats.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fitter.errors import PlanError
from fitter.llama.types import Params
from fitter.output.formats import render, render_fleet
from fitter.planning.plan.plan import Plan
from fitter.programs.later import Later
from tests.formats import upstream as server
from tests.support.cases import cases
from tests.support.fleets import make_fleet
from tests.support.plans import make_plan, shared_use
from tests.unit.test_fleet_formats import units
from tests.unit.test_output_formats import from_kubernetes, from_llmkube

NAMES = (
    *("it's.gguf", '"quoted".gguf', '"""three""".gguf', "'$(touch made)'.gguf"),
    *("`touch made`.gguf", "$HOME $$ ${HOME} $(HOME) $$(HOME) $.gguf", "${PORT} ${env.HOME}.gguf"),
    *("%h %% %n %.gguf", "back\\slash \\n \\x41 \\.gguf", "end\\", "a,b, c.gguf"),
    *("#comment ; comment # x.gguf", " # begin.gguf", "a: b.gguf", "- item.gguf"),
    *("? key : value.gguf", "&a *b !c |d >e @f.gguf", "{a} [b] (c) <d>.gguf", "*.gguf"),
    *("[section].gguf", "key = value == x.gguf", "-m.gguf", "--host 0.0.0.0.gguf", "~.gguf"),
    *("null", "true", "1e3", "...gguf", "--- .gguf", "é 模型 🦙.gguf", " begin.gguf", "end "),
    *("two  spaces.gguf", "a|b&c;d>e.gguf", "!history!!.gguf", "a^b~c+d@e.gguf", "new\nline.gguf"),
    *("carriage\rreturn.gguf", "tab\tab.gguf", "escape\x1b[31m.gguf", "next\x85line.gguf"),
    *("line\u2028separator.gguf", "right\u202eto left.gguf", "mark\ufeff.gguf", "no\xa0break.gguf"),
    "bytes\udcff.gguf",
)
INI = re.compile(r"[;#]|^\s|\s$")


def plan_of(model: str, draft: str | None = None) -> Plan:
    plan = make_plan(Params(n_ctx=4096, n_gpu_layers=33), devices=("CUDA0",))
    plan = replace(plan, program="llama-server", later=(Later("logits", 4, 4, 1),))
    shared = () if draft is None else (shared_use("draft", ("-md", draft)),)
    return replace(plan, model=replace(plan.model, path=model), shared=shared)


def written(name: str, model: str, draft: str | None = None) -> str | None:
    """The plan in a format; ``None`` where it says in one line that it cannot have a name."""
    try:
        return render(plan_of(model, draft), name)
    except PlanError as error:
        said = str(error)
        assert said.isprintable() or "\n" not in re.sub("'.*'", "", said, flags=re.DOTALL)
        assert any(way in said for way in ("rename", "control characters", "without spaces")), said
        return None


def shell(program: str, script: str, text: str, directory: Path) -> list[str]:
    """What a shell puts out, each part ended by NUL, with ``text`` in the file ``$1``."""
    (directory / "text").write_text(text + "\n")
    done = subprocess.run([program, "-c", script, "sh", "text"], cwd=directory, capture_output=True, env={}, check=True)
    assert done.stderr == b"" and os.listdir(directory) == ["text"], "something of a name was run"
    return os.fsdecode(done.stdout).split("\0")[:-1]


SHELLS = [each for each in ("bash", "dash", "zsh") if shutil.which(each)]


@pytest.mark.parametrize("program", SHELLS)
def test_a_shell_reads_the_arguments(program: str, tmp_path: Path) -> None:
    for name in NAMES:
        text = written("shell", "/m/model.gguf", f"/m/{name}")
        assert (text is None) != name.isprintable(), name
        if text is not None:
            words = shell(program, 'eval "set -- $(cat "$1")"; printf "%s\\0" "$@"', text, tmp_path)
            assert words == plan_of("/m/model.gguf", f"/m/{name}").arguments()


@pytest.mark.parametrize("program", SHELLS)
def test_a_shell_reads_the_environment(program: str, tmp_path: Path, reader: Path) -> None:
    for name in NAMES:
        text = written("env", f"/m/{name}", f"/d/{name}")
        assert (text is None) != name.isprintable(), name
        if text is None:
            continue
        lines = shell(program, 'set -a; . "./$1"; env -0', text, tmp_path)
        variables = {key: value for key, value in (line.split("=", 1) for line in lines) if key.startswith("LLAMA_")}
        assert variables["LLAMA_ARG_MODEL"] == f"/m/{name}"
        assert variables["LLAMA_ARG_SPEC_DRAFT_MODEL"] == f"/d/{name}"
        if program == SHELLS[0]:
            # and llama-server reads the variables
            variables = {key: value for key, value in variables.items() if "DRAFT" not in key}
            assert server.read(reader, (), variables=variables).model == f"/m/{name}"


def test_llama_server_reads_a_preset(tmp_path: Path, reader: Path) -> None:
    file = tmp_path / "models.ini"
    for name in NAMES:
        text = written("ini", f"/m/{name}", f"/d/{name}")
        assert (text is None) == (not name.isprintable() or bool(INI.search(f"/{name}"))), name
        if text is not None:
            file.write_text(text + "\n")
            _, words = server.preset(reader, file)
            assert words[words.index("--model") + 1] == f"/m/{name}"
            assert f"/d/{name}" in words


def test_llama_server_reads_the_preset_of_a_fleet(tmp_path: Path, reader: Path) -> None:
    names = [name for name in NAMES if name.isprintable() and not INI.search(name)]
    file = tmp_path / "models.ini"
    for begin in range(0, len(names), 8):
        paths = {f"model{number}": f"/m/{name}" for number, name in enumerate(names[begin : begin + 8])}
        plans = {name: plan_of(path) for name, path in paths.items()}
        file.write_text(render_fleet(make_fleet(dict.fromkeys(paths, 1), 8, plans=plans), "ini") + "\n")
        found = server.presets(reader, file)
        assert {name: words[words.index("--model") + 1] for name, words in found.items()} == paths


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@cases(("kubernetes", from_kubernetes), ("llmkube", from_llmkube))
def test_kubectl_reads_the_objects(form: str, read: Callable[[str], list[str]], tmp_path: Path) -> None:
    count = 0
    for name in NAMES:
        draft = None if form == "llmkube" else f"/d/{name}"
        text = written(form, f"/m/{name}", draft)
        cannot = ":" in name or (form == "llmkube" and re.search(r"\s", name))
        assert (text is None) == (not name.isprintable() or bool(cannot)), name
        if text is None:
            continue
        count += 1
        (tmp_path / "objects.yaml").write_text(text + "\n")
        (tmp_path / "kustomization.yaml").write_text("resources: [objects.yaml]\n")
        done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # kustomize orders the objects by their kinds
        objects = sorted(done.stdout.split("\n---\n"), key=lambda each: "kind: Service\n" in each or "Infer" in each)
        words = read("\n---\n".join(objects))
        assert words[words.index("-m") + 1] == f"/m/{name}"
        assert draft is None or words[words.index("-md") + 1] == draft
    assert count > 10


def command(unit: Path) -> list[str]:
    """The command of a unit as systemd has it in memory; it replaces ``$`` when it starts it."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = (line for line in done.stdout.split("\n") if line.lstrip().startswith("Command Line: "))
    words = re.findall(r'"((?:\\.|[^"\\])*)"|(\S+)', line.partition(": ")[2])
    return [re.sub(r'\\(["\\`$])', r"\1", quoted or plain).replace("$$", "$") for quoted, plain in words]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_units_of_a_fleet(tmp_path: Path) -> None:
    for name in NAMES:
        plan = plan_of(f"/m/{name}", f"/d/{name}")
        fleet = make_fleet({"a": 1}, 1, plans={"a": plan})
        if not name.isprintable():
            with pytest.raises(PlanError, match="rename the file"):
                render_fleet(fleet, "systemd")
            continue
        found: Mapping[str, str] = units(render_fleet(fleet, "systemd"))
        (text,) = found.values()
        assert not re.search(r"\$[^$]", re.sub(r"\$\$", "", text)), "systemd would replace a variable"
        unit = tmp_path / "llama-a.service"
        unit.write_text(text.replace("ExecStart=llama-server", "ExecStart=/bin/true"))
        assert command(unit) == ["/bin/true", "-m", f"/m/{name}", *plan.arguments(), "--port", "8080"]
