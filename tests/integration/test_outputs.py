"""How much llama.cpp keeps of the outputs of a batch, against the buffers that it really allocates for them."""

from __future__ import annotations

import json
from pathlib import Path

from examples.tiny_moe import TOKENS
from fitter.programs.later import output_bytes
from tests.support.cases import named_cases
from tests.support.command import json_of_python
from tools.models.tiny import TINY_DENSE

MODEL = TINY_DENSE

N_VOCAB = len(TOKENS)
N_BATCH = 64

ALLOCATED = """
import ctypes, json, sys
from fitter.llama.build import library as native
from fitter.llama.processes import interpreter
interpreter.become_worker()
from fitter.llama.load.breakdown import breakdown_of
from fitter.llama.build.functions import Batch
native.prepare()
library = native.libraries()
llama, backend = library.llama, native.open_backend()
path, settings = sys.argv[1], json.loads(sys.argv[2])

def decode(n_outputs):
    n = settings["n_batch"]
    sequence = ctypes.pointer(ctypes.c_int32(0))
    asked = (ctypes.c_int8 * n)(*[1] * n_outputs + [0] * (n - n_outputs))
    batch = Batch(n, (ctypes.c_int32 * n)(*range(n)), None, None, (ctypes.c_int32 * n)(*[1] * n),
                  (ctypes.POINTER(ctypes.c_int32) * n)(*[sequence] * n), ctypes.cast(asked, ctypes.c_void_p))
    assert llama.llama_decode(context, batch) == 0
    llama.llama_synchronize(context)

model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
params = llama.llama_context_default_params()
params.n_ctx = params.n_batch = params.n_ubatch = 4 * settings["n_batch"]
params.n_seq_max, params.n_outputs_max = settings["n_seq_max"], settings["n_outputs"]
params.embeddings, params.n_threads = settings["embeddings"], 1
context = llama.llama_init_from_model(model, params)
if settings["warm"]:
    decode(1)
if settings["has_samplers"]:
    raw = llama.library
    raw.llama_sampler_chain_init.restype = raw.llama_sampler_init_top_k.restype = ctypes.c_void_p
    chain = raw.llama_sampler_chain_init(ctypes.c_bool(False))
    raw.llama_sampler_chain_add(ctypes.c_void_p(chain), ctypes.c_void_p(raw.llama_sampler_init_top_k(10)))
    assert raw.llama_set_sampler(ctypes.c_void_p(context), 0, ctypes.c_void_p(chain))
assert backend.fitter_allocations_begin(True)
decode(settings["n_outputs"])
rows = library.ffi.new("fitter_row_t[]", 16)
count = backend.fitter_allocations_rows(rows, 16)
print(json.dumps([sum(int(row.model) for row in rows[0:count]), breakdown_of(context).host.compute]))
"""


def allocated(path: Path, **settings: object) -> tuple[int, int]:
    """Bytes of the buffers that computing with a batch made llama.cpp allocate, and of those that it computes in.

    ``warm``: after it had computed with one output; with ``has_samplers`` it gets a sampler after that.
    """
    settings = {
        "n_batch": N_BATCH,
        "n_seq_max": 1,
        "embeddings": False,
        "has_samplers": False,
        "warm": True,
        **settings,
    }
    taken, compute = json_of_python(ALLOCATED, path, json.dumps(settings))
    return int(taken), int(compute)


@named_cases(
    ("all of a batch", {"n_outputs": N_BATCH}, output_bytes(N_BATCH, N_VOCAB)),
    ("some of a batch", {"n_outputs": 5}, output_bytes(5, N_VOCAB)),
    ("as many as sequences", {"n_outputs": 4, "n_seq_max": 4}, 0),
    (
        "embeddings",
        {"n_outputs": N_BATCH, "embeddings": True, "warm": False},
        output_bytes(N_BATCH, N_VOCAB, n_embd=TINY_DENSE.n_embd),
    ),
)
def test_outputs_have_a_buffer_of_their_own(settings: dict[str, int], expected: int, model: Path) -> None:
    assert allocated(model, **settings)[0] == expected


def test_a_sampler_on_the_device_has_its_rows_on_the_host(model: Path) -> None:
    taken, compute = allocated(model, n_outputs=1, has_samplers=True)
    # with a sampler the graphs are reserved again, in larger buffers
    assert taken == compute + output_bytes(1, N_VOCAB, has_samplers=True)
