"""The pytest plugin as its users meet it: pytest runs inside of pytest, on real models and the real llama.cpp."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

import fitter
from fitter.api import Plan
from fitter.regression.lockfile import Lock, LockedFleet, LockedMember, dumps, read_lock, write_lock
from tests.support.cases import cases, named_cases
from tests.support.command import run_fitter, run_python
from tests.support.patience import is_running, until
from tools.models.tiny import TINY_DENSE, write_tiny

pytest_plugins = ["pytester"]

PLUGIN = "fitter.regression.pytest_plugin"
GPU = "rtx-4090"
N_CTX = 4096
LIMITED = f'gpu="{GPU}", limit="20GiB"'
PARALLEL = ("-p", "xdist.plugin", "-n", "2")


@pytest.fixture(autouse=True)
def only_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same whether this tree is installed or not, and whatever else is."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    """Fit the plan that the plugin has to make as well."""
    return fitter.fit(model, gpus=[GPU], n_ctx=N_CTX)


@pytest.fixture
def root(pytester: pytest.Pytester, model: Path) -> Path:
    """A project with the model in it."""
    (pytester.path / "tiny.gguf").symlink_to(model)
    pytester.makeini(
        "[pytest]\naddopts = --strict-markers --strict-config -p no:cacheprovider\nfitter_model = tiny.gguf\n"
    )
    return pytester.path


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", PLUGIN, "-rfExXsp", *args)


def outcomes(result: pytest.RunResult) -> dict[str, str]:
    """How every test ended, from the short summary, which names the test without its file."""
    found = re.findall(r"^(PASSED|FAILED|MEMORY|ERROR|XFAIL|SKIPPED) \S+?::(.+?)(?: - .*)?$", result.stdout.str(), re.M)
    return {name: word.lower() for word, name in found}


def said(result: pytest.RunResult) -> list[str]:
    """Return the sentence of each failed test: nothing else stands under its name."""
    lines = result.stdout.str().splitlines()
    lines = [line for line in lines if not re.match(r"\[gw\d+\] ", line)]
    titles = [index for index, line in enumerate(lines) if re.fullmatch(r"_+ .*test_.* _+", line)]
    return [lines[index + 1] for index in titles]


def configure(root: Path, settings: str) -> None:
    """Add settings to those of pytest."""
    with (root / "tox.ini").open("a") as file:
        file.write(f"\n{settings}\n")


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITTER_TRUST", "1")


def marked(*keywords: str, name: str = "test_it") -> str:
    marks = "".join(f"@pytest.mark.fits_memory({words})\n" for words in keywords)
    return f"import pytest\n\n\n{marks}def {name}():\n    pass\n"


# --- limits


def limits(plan: Plan) -> dict[str, tuple[str, str]]:
    """Keywords for a limit that is just kept, and for one that is just not, by name."""
    device, host = plan.devices[0].used, plan.host.used
    assert plan.estimate is not None
    generation = float(f"{plan.estimate.generation_tokens_per_second:.4g}")
    prompt = float(f"{plan.estimate.prompt_tokens_per_second:.4g}")
    free = device + plan.devices[0].margin
    # Neither has the host room for more, nor are there smaller buffers.
    elsewhere = f"limit='1GiB', host_memory={host + plan.host.margin}, n_ubatch={plan.params.n_ubatch}"
    return {
        "bytes": (f"limit={device}", f"limit={device - 1}"),
        "size": (f"limit='{device}B'", f"limit='{device - 1} B'"),
        "mapping": (f"limit={{'CUDA0': {device}}}", f"limit={{'cuda0': {device - 1}}}"),
        "host": (f"host_limit={host}", f"host_limit='{host - 1}B'"),
        "context": (f"min_ctx={N_CTX}", f"min_ctx={N_CTX + 1}"),
        "generation": (f"min_tokens_per_second={generation}", f"min_tokens_per_second={generation * 1.0001}"),
        "prompt": (f"min_prompt_tokens_per_second={prompt}", f"min_prompt_tokens_per_second={prompt * 1.0001}"),
        "free": (f"gpus='{free}B', {elsewhere}", f"gpus='{free - 1}B', {elsewhere}"),
    }


def test_both_sides_of_every_limit(pytester: pytest.Pytester, root: Path, plan: Plan) -> None:
    tests = []
    expected = {}
    for name, (kept, broken) in limits(plan).items():
        for suffix, words in (("kept", kept), ("broken", broken)):
            gpu = "" if "gpus" in words else f"gpu={GPU!r}, "
            tests.append(marked(f"{gpu}n_ctx={N_CTX}, {words}", name=f"test_{name}_{suffix}"))
            expected[f"test_{name}_{suffix}"] = "passed" if suffix == "kept" else "memory"
    pytester.makepyfile("\n\n".join(tests))
    result = run(pytester)
    assert outcomes(result) == expected
    result.assert_outcomes(passed=len(expected) // 2, failed=len(expected) // 2)
    # One sentence each, and no traceback.
    assert all(line.startswith("tiny.gguf") for line in said(result)), said(result)
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "During handling" not in result.stdout.str()


TOO_SMALL = "n_gpu_layers=-1, n_ubatch=512, gpu='1040MiB'"


@named_cases(
    ("limit", "limit={device} - 1", r": CUDA0 takes [\d.]+ MiB, 1 B more than its budget of [\d.]+ MiB"),
    ("several", "limit=0, host_limit=0", r": CUDA0 takes .* budget of 0 B; host takes .* budget of 0 B"),
    ("too small a device", TOO_SMALL, r" does not fit: CUDA0 lacks \d+ MiB: .* but 1040 MiB are free; .*"),
)
def test_a_failure_is_one_sentence_with_the_numbers(
    words: str, sentence: str, pytester: pytest.Pytester, root: Path, plan: Plan
) -> None:
    words = words.format(device=plan.devices[0].used, host=plan.host.used)
    pytester.makepyfile(marked(words if "gpu=" in words else f"gpu='{GPU}', n_ctx={N_CTX}, {words}"))
    result = run(pytester)
    (line,) = said(result)
    assert re.fullmatch(f"tiny.gguf{sentence}", line), line
    assert "MEMORY" in result.stdout.str()
    # The table of the plan is a section of the report.
    result.stdout.fnmatch_lines(["*- memory of tiny.gguf -*", "*CUDA0*", "  host*"])


def test_the_body_runs_only_where_it_fits(pytester: pytest.Pytester, root: Path) -> None:
    for name, limit in (("over", "1"), ("under", "'1GiB'")):
        text = marked(f"gpu={GPU!r}, n_ctx={N_CTX}, limit={limit}")
        (root / f"test_{name}.py").write_text(text.replace("pass", f"open({name!r}, 'w').close()"))
    run(pytester).assert_outcomes(passed=1, failed=1)
    assert [(root / name).exists() for name in ("over", "under")] == [False, True]


def test_where_markers_may_stand(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile(
        f"""
        import unittest
        import pytest

        fits = pytest.mark.fits_memory(gpu={GPU!r}, n_ctx={N_CTX}, limit="1GiB")
        over = pytest.mark.fits_memory(gpu={GPU!r}, n_ctx={N_CTX}, limit="1MiB")
        pytestmark = fits

        def test_module(): pass

        @fits
        @over
        def test_one_of_several(): pass

        @over
        class TestClass:
            def test_class(self): pass

        class TestUnit(unittest.TestCase):
            @over
            def test_unittest(self): pass

        @pytest.mark.xfail(strict=True)
        @over
        def test_expected(): pass

        @pytest.mark.skip
        @over
        def test_skipped(): pass

        @pytest.mark.parametrize("n", [1, pytest.param(2, marks=over)])
        def test_parameters(n): pass

        @pytest.fixture(params=["1GiB", "1MiB"])
        def limit(request):
            return request.param
        """
    )
    result = run(pytester)
    assert outcomes(result) == {
        "test_module": "passed",
        "test_one_of_several": "memory",
        "TestClass::test_class": "memory",
        "TestUnit::test_unittest": "memory",
        "test_expected": "xfail",
        "test_parameters[1]": "passed",
        "test_parameters[2]": "memory",
    }
    result.assert_outcomes(passed=2, failed=4, xfailed=1, skipped=1)


def test_markers_that_others_add(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makeconftest(
        f"""
        import pytest

        over = pytest.mark.fits_memory(gpu={GPU!r}, n_ctx={N_CTX}, limit="1MiB")

        def pytest_collection_modifyitems(items):
            for item in items:
                if "collected" in item.name:
                    item.add_marker(over)

        @pytest.fixture
        def added(request):
            request.node.add_marker(over)

        class Lines(pytest.File):
            def collect(self):
                item = Line.from_parent(self, name="test_line")
                item.add_marker(over)
                yield item

        class Line(pytest.Item):
            def runtest(self):
                pass

        def pytest_collect_file(file_path, parent):
            if file_path.suffix == ".lines":
                return Lines.from_parent(parent, path=file_path)
        """
    )
    (root / "test.lines").touch()
    pytester.makepyfile("def test_collected(): pass\n\n\ndef test_fixture(added): pass\n\n\ndef test_other(): pass\n")
    memory = dict.fromkeys(("test_line", "test_collected", "test_fixture"), "memory")
    assert outcomes(run(pytester)) == {**memory, "test_other": "passed"}


# --- bad arguments

WRONG = {
    "unknown keyword": (f"gpu={GPU!r}, n_ctxx=1", "unknown keyword 'n_ctxx': did you mean n_ctx?"),
    "no size": (f"gpu={GPU!r}, limit='many'", "limit: 'many' is not a size: write a number and a unit"),
    "below zero": (f"gpu={GPU!r}, host_limit=-1", "host_limit is -1: give a size"),
    "no device": (f"gpu={GPU!r}, limit={{'CUDA1': '1GiB'}}", "unknown device 'CUDA1'; the devices are: CUDA0"),
    "nothing to limit": ("limit='1GiB'", "limit applies to devices, and there are none"),
    "unknown GPU": ("gpu='rtx-4091'", "gpu: 'rtx-4091': unknown GPU; did you mean rtx-4090"),
    "two names of one": (f"gpu={GPU!r}, gpus=['24GiB']", "gpu and gpus are the same"),
    "no context": (f"gpu={GPU!r}, min_ctx=0", "min_ctx is 0: give a whole number, 1 to 2147483647"),
    "growth beside a limit": (f"gpu={GPU!r}, limit='1GiB', max_growth='1%'", "with limit there is none"),
    "no growth": (f"gpu={GPU!r}, max_growth='much'", "max_growth is 'much': give a percentage or a size"),
    "no keyword": (repr(GPU), "it takes keywords only"),
    "no such model": (f"gpu={GPU!r}, model='missing.gguf'", "missing.gguf: no such file"),
    "no model": (f"gpu={GPU!r}, model=7", "model is 7: give a path"),
    "several models": (f"gpu={GPU!r}, model='*.gguf'", "model '*.gguf' matches 2 files: name one, or parametrize"),
    "what llama.cpp refuses": (f"gpu={GPU!r}, type_v='q8_0', flash_attn='off'", ""),
    "another machine's devices": (f"gpu={GPU!r}, devices='CUDA7'", "unknown device 'CUDA7'; there are: CUDA0"),
}


def test_arguments_that_make_no_sense(pytester: pytest.Pytester, root: Path) -> None:
    (root / "other.gguf").write_bytes(b"")
    (root / "tests").mkdir()
    for index, (words, _) in enumerate(WRONG.values()):
        (root / f"tests/test_{index:02}.py").write_text(marked(words))
    result = run(pytester, "tests")
    result.assert_outcomes(failed=len(WRONG))
    lines = said(result)
    assert len(lines) == len(WRONG)
    for name, (_, sentence), line in zip(WRONG, WRONG.values(), lines, strict=True):
        assert line.startswith("fits_memory: "), name
        assert sentence in line, (name, line)
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "MEMORY" not in result.stdout.str()


@cases(
    ("--fitter-max-growth=much", "fitter_max_growth is 'much': give a percentage or a size"),
    ("--fitter-timeout=soon", "fitter_timeout is 'soon': give a number of seconds above 0"),
    ("--fitter-timeout=0", "fitter_timeout is '0': give a number of seconds above 0"),
)
def test_options_that_make_no_sense(option: str, sentence: str, pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile(marked(f"gpu={GPU!r}, limit='1GiB'"))
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.stderr.lines)
    assert sentence in line
    # Its ini twin is met by the first test that needs it.
    name, _, value = option.removeprefix("--").partition("=")
    twin = run(pytester, "-o", f"{name.replace('-', '_')}={value}")
    assert sentence in said(twin)[0]
    assert "Traceback" not in twin.stdout.str()


# --- what is stored

STORED = {
    "test_one.py": marked(f"gpu={GPU!r}, n_ctx={N_CTX}"),
    "test_two.py": f"""\
import pytest

pytestmark = pytest.mark.fits_memory(gpu="8GiB", n_ctx={N_CTX})


@pytest.mark.parametrize("word", ["a", "b c"])
class TestClass:
    def test_it(self, word):
        pass

    @pytest.mark.fits_memory(gpu="12GiB", n_ctx={N_CTX})
    def test_twice(self, word):
        pass
""",
}
NAMES = [
    "test_one.py::test_it",
    "test_two.py::TestClass::test_it[a]",
    "test_two.py::TestClass::test_it[b c]",
    "test_two.py::TestClass::test_twice[a]",
    "test_two.py::TestClass::test_twice[a]#2",
    "test_two.py::TestClass::test_twice[b c]",
    "test_two.py::TestClass::test_twice[b c]#2",
]


def write_stored(root: Path) -> None:
    for name, text in STORED.items():
        (root / name).write_text(text)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_is_stored_is_compared(pytester: pytest.Pytester, root: Path) -> None:
    write_stored(root)
    lock = root / "fitter.lock"
    first = run(pytester)
    first.assert_outcomes(failed=5)
    assert said(first)[0] == (
        "fits_memory: fitter.lock has no entry for test_one.py::test_it: run pytest --fitter-update, and commit it"
    )
    assert not lock.exists()

    update = run(pytester, "--fitter-update")
    update.assert_outcomes(passed=5)
    update.stdout.fnmatch_lines(["fitter: stored the memory of 7 markers in fitter.lock"])
    assert sorted(read_lock(lock).cases) == NAMES
    written = lock.read_bytes()
    # However it is made, it is the same to the byte.
    run(pytester, "-o", "fitter_update=true", "test_two.py").assert_outcomes(passed=4)
    assert lock.read_bytes() == written
    lock.unlink()
    run(pytester, *PARALLEL, "--fitter-update").assert_outcomes(passed=5)
    assert lock.read_bytes() == written
    run(pytester).assert_outcomes(passed=5)

    edit(root / "test_two.py", f'"12GiB", n_ctx={N_CTX}', f'"12GiB", n_ctx={2 * N_CTX}')
    changed = run(pytester, *PARALLEL)
    changed.assert_outcomes(passed=3, failed=2)
    lines = [line for line in changed.stdout.lines if line.startswith("tiny.gguf: ")]
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"tiny.gguf: CUDA0 takes [\d.]+ MiB instead of [\d.]+ MiB \(\+[\d.]+ MiB, \+[\d.]+ %\); "
            r"host takes .* instead of .*\(setting: n_ctx 4096 → 8192\)",
            line,
        ), line
    assert lock.read_bytes() == written

    # Of one test alone, and the rest stays.
    before = read_lock(lock).cases
    run(pytester, "--fitter-update", "test_two.py::TestClass::test_twice[b c]").assert_outcomes(passed=1)
    after = read_lock(lock).cases
    assert [name for name in NAMES if before[name] != after[name]] == ["test_two.py::TestClass::test_twice[b c]#2"]
    run(pytester).assert_outcomes(passed=4, failed=1)


def test_both_sides_of_growth(pytester: pytest.Pytester, root: Path, model: Path) -> None:
    before, after = (fitter.fit(model, gpus=[GPU], n_ctx=n_ctx) for n_ctx in (N_CTX, N_CTX + 256))
    growth = max(after.devices[0].used - before.devices[0].used, after.host.used - before.host.used)
    pytester.makepyfile(marked(f"gpu={GPU!r}, n_ctx={N_CTX}, max_slowdown='90%'"))
    path = root / "test_both_sides_of_growth.py"
    run(pytester, "--fitter-update").assert_outcomes(passed=1)
    edit(path, str(N_CTX), str(N_CTX + 256))
    for option in ("--fitter-max-growth={}B", "-ofitter_max_growth={} B"):
        run(pytester, option.format(growth)).assert_outcomes(passed=1)
        result = run(pytester, option.format(growth - 1))
        result.assert_outcomes(failed=1)
        assert "it may grow by" in said(result)[0]
    # The marker's own word is the last.
    edit(path, "max_slowdown", f"max_growth={growth - 1}, max_slowdown")
    run(pytester, f"--fitter-max-growth={growth}B").assert_outcomes(failed=1)
    edit(path, f"max_growth={growth - 1}", f"max_growth={growth}")
    run(pytester).assert_outcomes(passed=1)


def test_a_plan_that_does_not_fit_is_not_stored(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile(marked(TOO_SMALL, f"gpu={GPU!r}"))
    result = run(pytester, "--fitter-update")
    result.assert_outcomes(failed=1)
    assert said(result)[0].startswith("tiny.gguf does not fit: CUDA0 lacks ")
    assert list(read_lock(root / "fitter.lock").cases) == ["test_a_plan_that_does_not_fit_is_not_stored.py::test_it#2"]


NEWER = "fitter.lock has schema 2, but this fitter reads schema 1: install a newer fitter"


@named_cases(
    ("merge conflict", "<<<<<<< ours\nschema = 1\n", "fitter.lock has a merge conflict in line 1"),
    ("newer", "schema = 2\n", NEWER),
)
def test_a_lock_that_cannot_be_read(text: str, sentence: str, pytester: pytest.Pytester, root: Path) -> None:
    (root / "test_it.py").write_text(marked(f"gpu={GPU!r}, n_ctx={N_CTX}"))
    (root / "fitter.lock").write_text(text)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    assert sentence in said(result)[0]
    assert "Traceback" not in result.stdout.str()
    # It is never replaced by what knows nothing of what is in it.
    update = run(pytester, "--fitter-update")
    assert update.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, update.stderr.lines)
    assert sentence in line
    assert (root / "fitter.lock").read_text() == text


def test_a_lock_that_cannot_be_written(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile(marked(f"gpu={GPU!r}, n_ctx={N_CTX}"))
    result = run(pytester, "--fitter-update", "--fitter-lock", "nowhere/fitter.lock")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["fitter: error: *nowhere/fitter.lock cannot be written: No such file or directory"])
    result.assert_outcomes(passed=1)


def command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = run_fitter(*words, cwd=root)
    assert "Traceback" not in done.stderr
    return done


def test_budgets_need_no_lock_where_only_tests_have_one(pytester: pytest.Pytester, root: Path) -> None:
    (root / "test_it.py").write_text(marked(f"gpu={GPU!r}, n_ctx={N_CTX}"))
    run(pytester, "--fitter-update").assert_outcomes(passed=1)
    case = f'model = "tiny.gguf"\ngpu = "{GPU}"\nbudget = {{cuda0 = "1GiB"}}\n'
    (root / "fitter.toml").write_text("[cases.chat]\n" + case)
    assert command(root, "check").returncode == 0
    # A test is none of its cases.
    (root / "fitter.toml").write_text('[cases."test_it.py::test_it"]\n' + case)
    done = command(root, "check")
    assert done.returncode == 2
    assert "names with '::' are for pytest tests" in done.stderr


def test_fitter_check_and_pytest_share_a_lock(pytester: pytest.Pytester, root: Path) -> None:
    write_stored(root)
    (root / "fitter.toml").write_text(f'[cases.chat]\nmodel = "tiny.gguf"\ngpu = "{GPU}"\nn_ctx = {N_CTX}\n')

    lock = root / "fitter.lock"
    assert command(root, "lock").returncode == 0
    alone = read_lock(lock)
    assert list(alone.cases) == ["chat"]
    run(pytester, "--fitter-update").assert_outcomes(passed=5)
    both = lock.read_bytes()
    assert sorted(read_lock(lock).cases) == ["chat", *NAMES]
    assert command(root, "check").returncode == 0
    assert command(root, "lock").returncode == 0
    assert command(root, "lock", "--update", "chat").returncode == 0
    assert lock.read_bytes() == both
    run(pytester).assert_outcomes(passed=5)
    # One format: what both measured of the same is the same.
    cases = read_lock(lock).cases
    assert cases["chat"] == cases["test_one.py::test_it"]
    assert both.decode().startswith(dumps(alone))


# --- which model, and its plan


FIXTURE = "import pytest\n@pytest.fixture(scope='session')\ndef fitter_model(): return '{}.gguf'\n"


@named_cases(
    ("marker before fixture", FIXTURE.format("tiny"), "model='other.gguf'", (), "other.gguf"),
    ("fixture before option", FIXTURE.format("other"), "", ("--fitter-model=tiny.gguf",), "other.gguf"),
    ("option before ini", "", "", ("--fitter-model=other.gguf",), "other.gguf"),
    ("ini", "", "", (), "tiny.gguf"),
)
def test_where_the_model_is_said(
    fixture: str, words: str, options: Sequence[str], name: str, pytester: pytest.Pytester, root: Path
) -> None:
    write_tiny(root / "other.gguf", TINY_DENSE)
    pytester.makeconftest(fixture)
    test = marked(f"{LIMITED}, n_ctx={N_CTX}, {words}").replace("()", "(fitter_plan)")
    pytester.makepyfile(test.replace("pass", f"assert fitter_plan.model.path.endswith({f'/{name}'!r})"))
    # From anywhere: a path of the ini file or a marker is not one from where pytest was called.
    run(pytester, *options).assert_outcomes(passed=1)


def test_without_a_model(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(marked(f"gpu={GPU!r}, limit='1GiB'"))
    where = "give model=, a fixture called fitter_model, --fitter-model, or fitter_model in pytest's settings"
    assert said(run(pytester)) == [f"fits_memory: no model: {where}"]


def test_paths_do_not_depend_on_where_pytest_is_called(
    pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stored(root)
    (root / "sub").mkdir()
    monkeypatch.chdir(root / "sub")
    words = ("--rootdir", str(root), "-c", str(root / "tox.ini"), "--fitter-update", str(root))
    run(pytester, *words).assert_outcomes(passed=5)
    assert sorted(read_lock(root / "fitter.lock").cases) == NAMES
    # What is said on the command line is from where it is said.
    (root / "tiny.gguf").rename(root / "sub/other.gguf")
    run(pytester, *words, "--fitter-model=other.gguf", "--fitter-lock=other.lock").assert_outcomes(passed=5)
    assert sorted(read_lock(root / "sub/other.lock").cases) == NAMES


@named_cases(
    ("a marker's, and the ini file's", f'{LIMITED}, llama_cpp="builds/old"', (), "new", "builds/old"),
    ("the ini file's", LIMITED, (), "builds/new", "builds/new"),
    ("the command line's", f'{LIMITED}, llama_cpp="a"', ("--fitter-llama-cpp", "./mine"), "builds/new", "./mine"),
)
def test_which_llama_cpp(
    words: str, options: tuple[str, ...], ini: str, expected: str, pytester: pytest.Pytester, root: Path, trusting: None
) -> None:
    configure(root, f"fitter_llama_cpp = {ini}")
    pytester.makepyfile(marked(words))
    (sentence,) = said(run(pytester, *options))
    assert sentence.startswith(f"fits_memory: llama_cpp '{root}/{expected}' is not there: ")


@cases("builds", "~/new")
def test_native_code_of_an_ini_file(
    ini: str, pytester: pytest.Pytester, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "builds").mkdir()
    configure(root, f"fitter_llama_cpp = {ini}")
    pytester.makepyfile(marked(LIMITED))
    sentence = (
        f"fitter_llama_cpp in the settings of pytest is '{ini}', which is native code: if you trust whoever wrote "
        "them, set FITTER_TRUST=1, or name it with --fitter-llama-cpp"
    )
    assert said(run(pytester)) == [sentence]
    result = run(pytester, "--fitter-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    run(pytester, "--fitter-llama-cpp=python").assert_outcomes(passed=1)
    monkeypatch.setenv("FITTER_TRUST", "1")
    assert sentence not in said(run(pytester))


def test_nothing_is_done_until_it_is_asked(pytester: pytest.Pytester, root: Path) -> None:
    """Every pytest run in the environment loads the plugin, in whatever checkout it is."""
    configure(root, "fitter_llama_cpp = ./evil\nfitter_lock = /dev/zero\nfitter_timeout = never")
    (root / "fitter.toml").write_text("[[[")
    pytester.makepyfile(
        """
        import sys

        import psutil

        def test_it():
            late = ("fitter.llama", "fitter.api", "fitter.regression.marks")
            assert not [name for name in sys.modules if name.startswith(late)]
            assert not psutil.Process().children()
        """
    )
    pytester.runpytest_subprocess("-p", PLUGIN).assert_outcomes(passed=1)


def test_what_others_stored_meanwhile_stays(pytester: pytest.Pytester, root: Path, model: Path) -> None:
    pytester.makepyfile(marked(f"gpu={GPU!r}, n_ctx={N_CTX}", name="test_other"))
    run(pytester, "--fitter-update").assert_outcomes(passed=1)
    (other,) = read_lock(root / "fitter.lock").cases
    (root / "fitter.lock").rename(root / "other.lock")
    body = "    import shutil\n    shutil.copy('other.lock', 'fitter.lock')\n"
    pytester.makepyfile(test_own=marked(f"gpu={GPU!r}, n_ctx=512").replace("    pass\n", body))
    run(pytester, "--fitter-update", "test_own.py").assert_outcomes(passed=1)
    assert sorted(read_lock(root / "fitter.lock").cases) == sorted([other, "test_own.py::test_it"])


@named_cases(("one process", ()), ("xdist", PARALLEL))
def test_the_plan(options: tuple[str, ...], pytester: pytest.Pytester, root: Path, plan: Plan) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        plans = []

        @pytest.mark.fits_memory(gpu="24GiB", n_ctx=512, limit="1GiB")
        class TestPlan:
            @pytest.mark.xdist_group("one")
            @pytest.mark.parametrize("n", range(3))
            @pytest.mark.fits_memory(gpu={GPU!r}, n_ctx={N_CTX}, limit="1GiB")
            def test_closest(self, fitter_plan, n):
                assert fitter_plan.fits
                assert fitter_plan.devices[0].used == {plan.devices[0].used}
                assert fitter_plan.arguments() == {plan.arguments()!r}
                # Fitted once in each process.
                plans.append(fitter_plan)
                assert all(plan is fitter_plan for plan in plans)

            def test_class(self, fitter_plan):
                assert fitter_plan.params.n_ctx == 512

        def test_none(fitter_plan):
            pass

        @pytest.mark.fits_memory(gpu="rtx-4091", limit="1GiB")
        def test_wrong(fitter_plan):
            pass
        """
    )
    more = ("--dist", "loadgroup") if options else ()
    result = run(pytester, *options, *more)
    result.assert_outcomes(passed=4, errors=2)
    assert "fitter_plan needs a marker, and test_none has none" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


def test_one_process_stores_and_a_group_of_xdist_is_no_part_of_a_name(pytester: pytest.Pytester, root: Path) -> None:
    """The latter with a pytest whose node ids xdist can add to; those of 9.2 it cannot."""
    pytester.makeconftest(
        """
        import pathlib

        def pytest_sessionstart(session):
            if session.config.pluginmanager.has_plugin("fitter-writer"):
                name = "worker" if hasattr(session.config, "workerinput") else "controller"
                pathlib.Path(f"{name}.writes").touch()
        """
    )
    grouped = marked(f"gpu={GPU!r}, n_ctx={N_CTX}").replace("\ndef", "\n@pytest.mark.xdist_group('g')\ndef")
    (root / "test_it.py").write_text(grouped)
    run(pytester, *PARALLEL, "--dist", "loadgroup", "--fitter-update").assert_outcomes(passed=1)
    assert list(read_lock(root / "fitter.lock").cases) == ["test_it.py::test_it"]
    assert [path.name for path in root.glob("*.writes")] == ["controller.writes"]


def test_a_model_that_changes_is_fitted_again(pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        from tools.models.tiny import TINY_DENSE, TINY_MOE, write_tiny

        architectures = []

        @pytest.fixture(params=[TINY_MOE, TINY_DENSE], ids=["moe", "dense"])
        def fitter_model(request, tmp_path_factory):
            return write_tiny(tmp_path_factory.getbasetemp() / "same.gguf", request.param)

        @pytest.mark.fits_memory(gpu={GPU!r}, n_ctx={N_CTX}, limit="1GiB")
        def test_it(fitter_model, fitter_plan):
            architectures.append(fitter_plan.model.architecture)

        def test_both():
            assert architectures == ["qwen3moe", "qwen3"]
        """
    )
    run(pytester).assert_outcomes(passed=3)


# --- no trouble for others

UNRELATED = "import sys\n\n\ndef test_it():\n    pass\n"
PRINTED = """
def pytest_unconfigure():
    import json, sys
    sys.stderr.write("MODULES" + json.dumps(sorted(sys.modules)))
"""


def modules(*options: str) -> set[str]:
    """Run pytest here, and return the modules that are imported at its end."""
    done = run_python(f"import pytest; raise SystemExit(pytest.main({[*options]!r}))")
    assert done.returncode == 0, done.stdout + done.stderr
    return set(json.loads(done.stderr.partition("MODULES")[2]))


def test_nothing_is_imported_for_other_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(UNRELATED)
    pytester.makeconftest(PRINTED)
    without = modules()
    found = modules("-p", PLUGIN, "-o", "fitter_model=x.gguf")
    own = {"fitter", "fitter.errors", "fitter.text", "fitter.version", "fitter.regression", PLUGIN}
    assert found - without == own


def group(number: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == number and is_running(process):
                found.append(process)
    return found


@named_cases(("one process", ()), ("xdist", PARALLEL))
def test_no_process_is_left(options: tuple[str, ...], pytester: pytest.Pytester, root: Path) -> None:
    pytester.makepyfile("\n\n".join(marked(f"gpu={GPU!r}, limit=1", name=f"test_{n}") for n in range(2)))
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, *options]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, start_new_session=True
    ) as session:
        out, _ = session.communicate(timeout=120)
    assert session.returncode == pytest.ExitCode.TESTS_FAILED, out
    # those of pytest-xdist end a little later
    until(lambda: not group(session.pid), "a process is left")


def test_every_option_has_its_twin(pytester: pytest.Pytester) -> None:
    text = run(pytester, "--help").stdout.str()
    options = set(re.findall(r"^  --(fitter-[a-z-]+)", text, re.M))
    names = ("update", "model", "lock", "max-growth", "llama-cpp", "timeout")
    assert {f"fitter-{name}" for name in names} == options
    assert {option.replace("-", "_") for option in options} == set(re.findall(r"^  (fitter_[a-z_]+) \(", text, re.M))


def test_a_fleet_stays_in_the_lock_of_tests(pytester: pytest.Pytester, root: Path) -> None:
    write_stored(root)
    fleet = LockedFleet((("a",),), {"a": LockedMember({"n_ctx": 4096}, {"host": 5})})
    run(pytester, "--fitter-update")
    write_lock(root / "fitter.lock", Lock(read_lock(root / "fitter.lock").cases, fleet))
    run(pytester, "--fitter-update")
    assert read_lock(root / "fitter.lock").fleet == fleet
