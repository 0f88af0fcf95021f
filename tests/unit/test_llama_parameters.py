"""Parameters in structs of other layouts than the pinned llama.cpp's."""

from __future__ import annotations

import pytest

from fitter.errors import UsageError
from fitter.llama.build import layouts, library
from fitter.llama.load.structs import write
from fitter.llama.types import Params
from tests.support.cases import cases

KNOWN = layouts.layouts()


@pytest.mark.parametrize("name", KNOWN)
def test_values_are_written_where_each_layout_has_them(name: str) -> None:
    structs = layouts.structs_of(KNOWN[name])
    model, context = structs["llama_model_params"](), structs["llama_context_params"]()
    params = Params(n_gpu_layers=7, split_mode="row", main_gpu=2, n_ctx=4096, n_rs_seq=3, swa_full=True, type_v="q8_0")
    write("model", params, model)
    write("context", params, context)
    assert (model.n_gpu_layers, model.split_mode, model.main_gpu) == (7, 2, 2)
    assert (context.n_ctx, context.n_rs_seq, context.swa_full, context.type_v) == (4096, 3, True, 8)


@cases(("0.3.25", False), ("0.3.30", False), ("0.3.35", True), ("0.3.36", True))
def test_a_parameter_that_a_layout_lacks(name: str, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "llama_cpp_version", lambda: "b9842")
    model = layouts.structs_of(KNOWN[name])["llama_model_params"]()
    write("model", Params(load_mtp=False), model)
    if has_it:
        write("model", Params(load_mtp=True), model)
        assert model.load_mtp
    else:
        with pytest.raises(UsageError, match=r"^load_mtp is not a parameter of llama\.cpp b9842: leave it out"):
            write("model", Params(load_mtp=True), model)
