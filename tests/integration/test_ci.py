"""The GitHub Action, the pre-commit hooks, and the guide's snippets for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

from tests.support.cases import cases, stored
from tools.models.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: dict[str, dict[str, Any]] = {step["id"]: step for step in ACTION["runs"]["steps"]}
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
CASE = '[cases.chat]\nmodel = "tiny.gguf"\ngpu = "rtx-4090"\nn_ctx = {}\n'
FITTER = f"#!/bin/sh\nexec '{sys.executable}' -m fitter \"$@\"\n"
GH = """\
#!/bin/sh
for word; do printf '%s\\n' "$word" >>"$RUNNER_TEMP/gh"; last=$word; done
case "$*" in
  *viewer*) echo '{"data": {"viewer": {"login": "github-actions[bot]"}}}' | jq -r "$last";;
  *--paginate*) jq -r "$last" "$RUNNER_TEMP/comments";;
esac
"""
"""Answers as GitHub does; the last word says with --jq what is wanted of it."""
ME = "github-actions[bot]"
NEEDS_JQ = pytest.mark.skipif(shutil.which("jq") is None, reason="no jq, which stands for the one in gh")


def execute(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **env}
    return subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=120, check=False)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Runner:
    """A stand-in for GitHub's runner: it gives a step its environment, and reads its outputs."""

    def __init__(self, directory: Path) -> None:
        self.temp, self.work = directory / "temp", directory / "work"
        self.temp.mkdir()
        self.work.mkdir()
        program(self.temp / "fitter/bin/fitter", FITTER)
        program(self.temp / "bin/gh", GH)
        self.summary, self._output = self.temp / "summary.md", self.temp / "output"
        self.summary.touch()

    def run(self, step: str, action: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
        self._output.write_text("")
        (self.temp / "step.sh").write_text(STEPS[step]["run"])
        shell = ("bash", "--noprofile", "--norc", "-eo", "pipefail", self.temp / "step.sh")
        return execute(
            *shell,
            cwd=self.work,
            **{
                "PATH": f"{self.temp / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "GITHUB_ACTIONS": "true",
                "GITHUB_ACTION_PATH": str(action),
                "GITHUB_OUTPUT": str(self._output),
                "GITHUB_STEP_SUMMARY": str(self.summary),
                "RUNNER_OS": "Linux",
                "RUNNER_TEMP": str(self.temp),
                **env,
            },
        )

    def ask(self, step: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run the step ``check`` or ``history`` with these inputs of the Action."""
        inputs = {"cases": "fitter.toml", "select": "", "arguments": "", **inputs}
        return self.run(step, **{name.upper(): value for name, value in inputs.items()})

    @property
    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._output.read_text().splitlines())

    def lock(self) -> None:
        write_tiny(self.work / "tiny.gguf")
        (self.work / "fitter.toml").write_text(CASE.format(4096))
        done = execute(self.temp / "fitter/bin/fitter", "lock", cwd=self.work)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def schema(name: str, path: Path) -> None:
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}", path)
    done = execute(*command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the action


def test_the_action_is_one_by_githubs_schema() -> None:
    schema("github-actions", ROOT / "action.yml")


def test_the_action_passes_where_nothing_moved(runner: Runner) -> None:
    runner.lock()
    done = runner.ask("check")
    assert done.returncode == 0, done.stderr
    assert runner.outputs == {"status": "0", "report": str(runner.temp / "fitter-check.md")}
    assert runner.summary.read_text() == (runner.temp / "fitter-check.md").read_text()
    assert "1 case" in runner.summary.read_text()
    assert "::error" not in done.stdout + done.stderr


def test_the_action_fails_where_it_takes_more(runner: Runner) -> None:
    runner.lock()
    (runner.work / "fitter.toml").write_text(CASE.format(8192))
    runner.summary.write_text("# of another step\n")
    done = runner.ask("check")
    assert done.returncode == 4
    assert runner.outputs["status"] == "4"
    # Beside what is there already.
    summary = runner.summary.read_text()
    assert summary.startswith("# of another step\n")
    assert "CUDA0" in summary
    assert "4096 → 8192" in summary
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if line.startswith("::error"))
    assert "CUDA0" in line


@cases(stored("ci", "inputs_of_the_action"))
def test_inputs_of_the_action(step: str, inputs: dict[str, str], status: int, message: str, runner: Runner) -> None:
    runner.lock()
    done = runner.ask(step, **inputs)
    assert (done.returncode, runner.outputs["status"]) == (status, str(status)), done.stderr
    assert message in runner.summary.read_text()
    assert (f"::error title=fitter {step}::" in done.stdout) is (status != 0)
    assert not (runner.work / "ran").exists()
    assert "Traceback" not in done.stderr


def test_a_history_in_which_nothing_grew(runner: Runner) -> None:
    runner.lock()
    done = runner.ask("history", builds="python  python", arguments="--jobs 1", select="chat or x")
    assert done.returncode == 0, done.stderr
    directory = runner.temp / "fitter-history"
    report = runner.temp / "fitter-history.md"
    assert runner.outputs == {"status": "0", "report": str(report), "directory": str(directory)}
    assert {path.name for path in directory.iterdir()} == {"history.csv", "history.svg", "badge.json"}
    assert runner.summary.read_text() == report.read_text()
    assert report.read_text().startswith("### ✅ llama.cpp — 1 case: 1 takes the same\n")
    assert "::" not in done.stdout


def test_growth_in_a_history_is_a_warning(runner: Runner) -> None:
    runner.lock()
    program(runner.temp / "fitter/bin/fitter", "#!/bin/sh\necho '### 📈 llama.cpp — 1 case: 100% more'\nexit 4\n")
    done = runner.ask("history", builds="old new")
    assert (done.returncode, runner.outputs["status"]) == (0, "4")
    assert done.stdout.splitlines() == ["::warning title=fitter history::📈 llama.cpp — 1 case: 100%25 more"]


def comment(number: int, author: str | None, body: str) -> dict[str, Any]:
    return {"id": number, "user": None if author is None else {"login": author}, "body": body}


MARK = "<!-- fitter check -->"
OTHERS = [
    comment(1, "eve", f"{MARK}\n0 failed"),
    comment(2, None, f"{MARK}\nwhose author is gone"),
    comment(3, ME, f"quoted: {MARK}"),
    comment(4, ME, "<!-- fitter history -->\n"),
    comment(5, "github-actions", f"{MARK}\na user of that name"),
]
NEW = ["api", "--silent", "repos/owner/name/issues/7/comments"]


@NEEDS_JQ
def test_the_comment_is_written_once_and_then_changed(runner: Runner) -> None:
    report = runner.temp / "report.md"
    report.write_text("moved: `$(touch ran)`\n")
    env = {"GH_TOKEN": "none", "REPORT": str(report), "REPOSITORY": "owner/name", "PULL_REQUEST": "7"}
    env |= {"KIND": "check", "STATUS": "4"}
    body = runner.temp / "fitter-comment.md"
    for comments, command in (
        ([], NEW),
        (OTHERS, NEW),
        (
            [*OTHERS, comment(12, ME, f"{MARK}\n"), comment(34, ME, f"{MARK}\n")],
            ["api", "--silent", "--method", "PATCH", "repos/owner/name/issues/comments/12"],
        ),
    ):
        (runner.temp / "comments").write_text(json.dumps(comments))
        (runner.temp / "gh").unlink(missing_ok=True)
        done = runner.run("comment", **env)
        assert done.returncode == 0, done.stderr
        words = (runner.temp / "gh").read_text().splitlines()
        assert words[-len(command) - 2 :] == [*command, "--field", f"body=@{body}"]
        assert body.read_text() == "<!-- fitter check -->\n" + report.read_text()


def test_what_is_built_is_known_by_its_sources(runner: Runner, tmp_path: Path) -> None:
    def digest(action: Path) -> str:
        done = runner.run("key", action)
        assert done.returncode == 0, done.stderr
        return runner.outputs["digest"]

    copy = tmp_path / "copy"
    for name in (
        "pyproject.toml",
        "CMakeLists.txt",
        "bindings/fitter.h",
        "fitter/api/fits/fit_model.py",
        "vendor/llama.cpp/pin.toml",
        "packaging/pins/action.txt",
    ):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    first = digest(copy)
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert digest(copy) == first
    for name in ("pyproject.toml", "bindings/fitter.h", "fitter/api/fits/fit_model.py", "vendor/llama.cpp/pin.toml"):
        before = (copy / name).read_text()
        (copy / name).write_text(before + "\n")
        assert digest(copy) != first
        (copy / name).write_text(before)
    elsewhere = runner.run("key", RUNNER_OS="macOS")
    assert elsewhere.returncode == 2
    assert elsewhere.stdout.startswith("::error title=fitter::fitter runs on Linux")


@cases("true", "false", "")
def test_what_is_in_the_cache_is_not_built_again(is_built: str, runner: Runner) -> None:
    python = runner.temp / "python"
    program(python, f'#!/bin/sh\nmkdir -p "$4/bin"\ncp "{runner.temp}/pip" "$4/bin/python"\n')
    program(
        runner.temp / "pip", f'#!/bin/sh\necho "$5 $6" >>"{runner.temp}/calls"\necho "$@" >>"{runner.temp}/words"\n'
    )
    done = runner.run("install", PYTHON=str(python), WHEELS="wheels", IS_BUILT=is_built)
    assert done.returncode == 0, done.stderr
    calls = [line.split()[-1] for line in (runner.temp / "calls").read_text().splitlines()]
    assert calls == (["install"] if is_built == "true" else ["install", "wheel", "wheel", "install"])
    for line in (runner.temp / "words").read_text().splitlines()[:-1]:
        assert ("--require-hashes" in line) is not line.endswith(f"--no-deps {ROOT}")
        assert "install" in line or "--no-build-isolation" in line
    last = (runner.temp / "words").read_text().splitlines()[-1]
    assert last.endswith("install --no-index --find-links wheels llama-fitter[python]")


def test_no_python_of_the_checkout_is_run(runner: Runner) -> None:
    """The Action installs in the checkout, whose files may be called as the modules that it uses."""
    for name in ("venv", "pip", "ensurepip", "subprocess"):
        (runner.work / f"{name}.py").write_text(f"open({str(runner.temp / 'ran')!r}, 'w')\n")
    # No wheel is there, so that nothing is installed: what is asked is whose modules run.
    done = runner.run("install", PYTHON=sys.executable, WHEELS=str(runner.temp), IS_BUILT="true", PYTHONPATH="")
    assert done.returncode != 0
    assert "llama-fitter" in done.stderr
    assert (runner.temp / "fitter/bin/pip").exists()
    assert not (runner.temp / "ran").exists()


def test_the_action_trusts_nothing_by_itself(runner: Runner) -> None:
    assert "trust" not in (ROOT / "action.yml").read_text().lower()
    runner.lock()
    (runner.work / "evil").mkdir()
    with (runner.work / "fitter.toml").open("a") as file:
        file.write('llama_cpp = "evil"\n')
    done = runner.ask("check")
    assert (done.returncode, runner.outputs["status"]) == (2, "2")
    said = "fitter: error: fitter.toml: in the case 'chat' llama_cpp is 'evil', which is native code: "
    assert f"::error title=fitter check::{said}" in done.stdout


# --- pre-commit


def test_the_manifest_is_one_by_pre_commit(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "pre_commit", "validate-manifest", ROOT / ".pre-commit-hooks.yaml")
    done = execute(*command, cwd=ROOT, PRE_COMMIT_HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_hook_with_an_environment_of_its_own_brings_a_llama_cpp() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    (hook,) = (hook for hook in HOOKS if hook["language"] == "python")
    assert hook["additional_dependencies"] == project["optional-dependencies"]["python"]


def test_a_commit_that_takes_more_is_refused(runner: Runner, tmp_path: Path) -> None:
    """By the hook that uses what is installed; the other one has the same entry, and an environment of its own."""
    runner.lock()
    (hook,) = (hook for hook in HOOKS if hook["id"] == "fitter-check-system")
    assert [other["entry"] for other in HOOKS] == [hook["entry"]] * len(HOOKS)
    config = {"repos": [{"repo": "local", "hooks": [hook]}]}
    (runner.work / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    env = {
        "PATH": f"{runner.temp / 'fitter/bin'}{os.pathsep}{os.environ['PATH']}",
        "PRE_COMMIT_HOME": str(tmp_path / "pre-commit"),
        "HOME": str(tmp_path),
    }

    def commit(*names: str) -> subprocess.CompletedProcess[str]:
        for words in (("init", "-q"), ("add", "--force", *names)):
            assert execute("git", *words, cwd=runner.work, **env).returncode == 0
        return execute(sys.executable, "-m", "pre_commit", "run", cwd=runner.work, **env)

    passed = commit(".pre-commit-config.yaml", "fitter.toml", "fitter.lock")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "fitter check" in passed.stdout
    (runner.work / "fitter.toml").write_text(CASE.format(8192))
    failed = commit("fitter.toml")
    assert failed.returncode == 1
    assert "exit code: 4" in failed.stdout
    assert "n_ctx 4096 → 8192" in failed.stdout


# --- the guide


def snippets(language: str) -> list[str]:
    guide = (ROOT / "docs" / "guides" / "ci-systems.md").read_text()
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)


def test_the_snippets_of_the_guide(tmp_path: Path) -> None:
    seen = set()
    for index, text in enumerate(snippets("yaml")):
        path = tmp_path / f"{index}.yaml"
        path.write_text(text)
        document = yaml.safe_load(text)
        if "repos" in document:
            seen.add("pre-commit")
            command = (sys.executable, "-m", "pre_commit", "validate-config", path)
            done = execute(*command, cwd=ROOT, PRE_COMMIT_HOME=str(tmp_path / "home"))
            assert done.returncode == 0, done.stdout + done.stderr
            used = {hook["id"] for repo in document["repos"] for hook in repo["hooks"]}
            assert used <= {hook["id"] for hook in HOOKS}
        elif "jobs" in document:
            seen.add("github")
            schema("github-workflows", path)
            (step,) = (
                step for job in document["jobs"].values() for step in job["steps"] if "fitter" in step.get("uses", "")
            )
            assert step.get("with", {}).keys() <= ACTION["inputs"].keys()
        else:
            seen.add("gitlab")
            schema("gitlab-ci", path)
    assert seen == {"pre-commit", "github", "gitlab"}
