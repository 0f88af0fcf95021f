"""Models without a file: the catalogue, what a config.json makes, and what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st

import fitter
from fitter.errors import ModelError, UsageError
from fitter.llama.header.gguf_writer import Longs, Tensor, data_bytes, header_of, write
from fitter.model import location
from fitter.model.shapes import shape_files
from fitter.model.shapes.catalogue import (
    Wanted,
    as_converted,
    beside,
    named,
    note,
    published_shape,
    shape_names,
    wanted,
)
from fitter.model.shapes.mapping import KNOWN
from fitter.model.shapes.mapping import header_of as mapped
from fitter.storage import parse_toml
from tests.support.cases import cases, named_cases, stored
from tests.support.converted import digest, trunk

ROOT = Path(__file__).resolve().parents[2]
CONVERTED: dict[str, Any] = parse_toml((ROOT / "tests" / "data" / "shapes" / "converted.toml").read_text("utf-8"))


# --- addresses

WANTED = [
    ("shape://llama-3.1-8b", Wanted("shape", "llama-3.1-8b", "")),
    ("shape://llama-3.1-8b:q6_k", Wanted("shape", "llama-3.1-8b", "Q6_K")),
    ("shape:/llama-3.1-8b:Q6_K", Wanted("shape", "llama-3.1-8b", "Q6_K")),
    ("SHAPE://Llama-3.1-8B ", Wanted("shape", "llama-3.1-8b", "")),
    ("shape://x:nonsense", Wanted("shape", "x", "NONSENSE")),
    ("config://a/config.json", Wanted("config", "a/config.json", "")),
    ("config:///a/config.json:BF16", Wanted("config", "/a/config.json", "BF16")),
    ("config://hf://org/repo:IQ2_XS", Wanted("config", "hf://org/repo", "IQ2_XS")),
    ("config://https://host:8080/config.json", Wanted("config", "https://host:8080/config.json", "")),
    ("model.gguf", None),
    ("hf://org/repo/model.gguf", None),
    ("shapes://x", None),
]


@pytest.mark.parametrize(("text", "expected"), WANTED, ids=[text for text, _ in WANTED])
def test_what_an_address_asks_for(text: str, expected: Wanted | None) -> None:
    assert wanted(text) == expected
    if expected is not None:
        assert wanted(expected.address) == expected
        assert location.is_address(text)


def test_names_of_files_come_from_the_directory_of_a_config() -> None:
    names = {
        "shape://qwen3-8b:Q6_K": "qwen3-8b-Q6_K.gguf",
        "config:///m/Llama 3 8B/config.json:Q8_0": "Llama-3-8B-Q8_0.gguf",
        "config://hf://org/Repo-7B:Q8_0": "Repo-7B-Q8_0.gguf",
        "config://own.json": "own.gguf",
        "config://https://host/a/config.json?token=secret": "a.gguf",
    }
    assert {text: location.name_of(text) for text in names} == names


def test_secrets_of_an_address_are_not_shown() -> None:
    address = "config://https://user:word@host/a/config.json?token=secret:Q8_0"
    assert location.called(address) == "config://https://host/a/config.json:Q8_0"
    with pytest.raises(ModelError) as error:
        location.check_is_here(address)
    assert "secret" not in str(error.value) and "word" not in str(error.value)


def test_a_config_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    assert beside("config://b/a.json:Q8_0", tmp_path) == f"config://{tmp_path}/b/a.json:Q8_0"
    # what the directory is called is not the model's name: a lock of it would change with every checkout
    names = {"config://config.json": "model.gguf", "config://a.json": "a.gguf", "config://b/config.json": "b.gguf"}
    assert {each: location.name_of(beside(each, tmp_path)) for each in names} == names
    same = ("config:///a.json", "config://hf://org/repo", "shape://qwen3-8b", "hf://org/repo/model.gguf")
    assert [beside(each, tmp_path) for each in same] == list(same)


def test_an_option_takes_an_address_too() -> None:
    assert named("shape", "x:Q8_0") == named("shape", "shape://x:Q8_0") == "shape://x:Q8_0"
    assert named("config", "config://c.json") == "config://c.json"
    assert named("config", "hf://org/repo") == "config://hf://org/repo"
    # a path that begins so
    assert named("config", "shape://x") == "config://shape://x"


def test_what_is_quantized_is_the_model_as_it_is_converted() -> None:
    assert as_converted("shape://qwen3-8b:Q4_K_M") == "shape://qwen3-8b:converted"
    assert as_converted("model.gguf") == "model.gguf"


def test_a_note_says_that_there_is_no_file() -> None:
    assert note("model.gguf") == ()
    assert note("shape://qwen3-8b:Q4_K_M") == (
        "shape://qwen3-8b:Q4_K_M is the shape of a model, not a file: its tensors follow from the hyperparameters as "
        "published, Q4_K_M with the types that llama-quantize chooses without an importance matrix",
    )
    assert note("config://c.json:BF16")[0].endswith("in that config.json, BF16 as it is converted")


# --- the file


def test_a_header_is_what_gguf_reads(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "a.u": 7,
        "a.i": -7,
        "a.f": 0.5,
        "a.b": True,
        "a.l": [1, 2],
        "a.t": [True],
        "a.w": ["yes", "no"],
        "a.n": Longs((1, 2)),
    }
    tensors = [
        Tensor("x.weight", (32, 3), "bf16"),
        Tensor("y", (5,), "f32"),
        Tensor("z", (64, 2), "mxfp4"),
        Tensor("i", (2, 3), "i32"),
    ]
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        write(file, metadata, tensors)
    found = GGUFReader(path)
    read_back = {key: field.contents() for key, field in found.fields.items() if not key.startswith("GGUF.")}
    assert read_back == metadata | {"a.n": [1, 2]}
    assert found.fields["a.n"].types[-1] == GGUFValueType.UINT64
    read = [(e.name, tuple(map(int, e.shape)), e.tensor_type.name.lower(), e.n_bytes) for e in found.tensors]
    assert read == [(each.name, each.shape, each.type, each.bytes) for each in tensors]
    assert path.stat().st_size == len(header_of(metadata, tensors)) + data_bytes(tensors)
    assert len(header_of(metadata, tensors)) % 32 == 0


# --- the catalogue


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_has_a_source_and_a_header(name: str) -> None:
    published = published_shape(name)
    made = mapped(published.config, name)
    assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert published.title and len(published.source) > 40
    assert made.number("block_count") > 0 and made.number("context_length") > 0 and made.number("vocab_size") > 0
    assert len({each.name for each in made.tensors}) == len(made.tensors)


@pytest.mark.parametrize("name", CONVERTED)
def test_tensors_are_those_that_the_converter_writes(name: str) -> None:
    made = trunk(mapped(published_shape(name).config, name))
    # transformers makes no tensors that are packed
    plain = [each if each.type != shape_files.PACKED else Tensor(each.name, each.shape, "bf16") for each in made]
    assert {"tensors": len(plain), "digest": digest(plain)} == CONVERTED[name]


def test_enough_is_compared_with_the_converter() -> None:
    assert len(shape_names()) >= 120 and len(CONVERTED) >= 110


PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "nemotron-3-super-120b-a12b": 123_611_012_096,
}
"""What the repositories' safetensors have, as their pages on the hub say it. Not counted are what the converter adds,
the factors of rope, and what is counted apart there, the biases by which experts are chosen.
"""


@pytest.mark.parametrize("name", PARAMETERS)
def test_there_are_as_many_weights_as_are_published(name: str) -> None:
    made = mapped(published_shape(name).config, name)
    others = [each for each in made.tensors if each.name.startswith("rope_") or "exp_probs_b" in each.name]
    assert made.parameters - sum(math.prod(each.shape) for each in others) == PARAMETERS[name]


NEWEST = {
    "deepseek-v4": (1894, 1_572_999_528_803),
    "deepseek-v4-flash": (1328, 284_334_567_511),
    "kimi-k3": (2573, 2_779_483_135_584),
    "ling-3.0-tiny": (526, 7_893_392_800),
    "minimax-m3": (1176, 426_174_572_928),
    "qwen3.8-flash-next": (1224, 176_943_899_520),
}
"""Tensors and weights. Of Qwen3.8-Flash-Next a test of a public project has the number of tensors of a real file, and a
log of llama.cpp (issue 27680) says 284.33 B for DeepSeek V4 Flash. Those of Ling 3.0 Tiny are what the converter makes
of the 9,283 tensors of its files, which a check of the public project mllm lists; those of DeepSeek V4 and MiniMax M3
what it makes of transformers' tensors under the names of the published files, and those of Kimi K3 of the names that it
reads, in FP8 and MXFP4 where they are published so (each with fewer layers and experts, compared by hand).
"""


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_have_as_many_tensors_and_weights(name: str) -> None:
    made = mapped(published_shape(name).config, name)
    assert (len(made.tensors), made.parameters) == NEWEST[name]


def test_types_that_are_published_stay() -> None:
    """Experts in MXFP4, matrices in FP8 as Q8_0, and a table of numbers of experts, whatever the others become."""
    made = mapped(published_shape("deepseek-v4-flash").config, "x").of_type("f16")
    types = {each.name: each.type for each in made.tensors if each.name.startswith("blk.2.")}
    assert {name.split(".")[2]: kind for name, kind in types.items() if kind not in ("f16", "f32")} == {
        "attn_q_a": "q8_0",
        "attn_q_b": "q8_0",
        "attn_kv": "q8_0",
        "attn_output_a": "q8_0",
        "attn_output_b": "q8_0",
        "indexer": "q8_0",
        "ffn_gate_tid2eid": "i32",
        "ffn_gate_exps": "mxfp4",
        "ffn_up_exps": "mxfp4",
        "ffn_down_exps": "mxfp4",
        "ffn_gate_shexp": "q8_0",
        "ffn_up_shexp": "q8_0",
        "ffn_down_shexp": "q8_0",
    }
    config = published_shape("kimi-k3").config
    plain = mapped({key: value for key, value in config.items() if key != "quantization_config"}, "x")
    kinds = {each.type for each in plain.tensors if "_exps" in each.name}
    assert kinds == {"bf16"}


def test_a_table_of_ngrams_has_prime_numbers_of_rows() -> None:
    made = mapped(published_shape("qwen3.8-flash-next").config, "x")
    rows, starts = (made.metadata[f"qwen4exp.ple.head_{name}"] for name in ("vocab_sizes", "offsets"))
    assert isinstance(rows, Longs) and isinstance(starts, Longs)
    assert (rows[0], rows[-1], starts[-1] + rows[-1]) == (20_000_003, 20_000_171, 320_001_446)
    (table,) = (each for each in made.tensors if each.name == "per_layer_token_embd.weight")
    # 128 parts of 2,500,012 rows in the published files
    assert table.shape == (160, 128 * 2_500_012)


def test_a_reranker_has_a_head() -> None:
    config = published_shape("qwen3-reranker-0.6b").config
    made, plain = mapped(config, "x"), mapped({**config, "_name_or_path": "Qwen/Qwen3-0.6B"}, "x")
    head = Tensor("cls.output.weight", (1024, 2), "bf16")
    assert made.tensors == [*plain.tensors, head]
    assert made.metadata == plain.metadata | {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}
    # the converter knows it by the name of its folder, too
    assert mapped({**config, "_name_or_path": "x"}, "Qwen3-Reranker-4B/config.json").tensors == made.tensors
    config = published_shape("bge-reranker-v2-m3").config
    many = mapped({**config, "id2label": {"0": "a", "1": "b", "2": "c"}}, "x")
    shapes = {each.name: each.shape for each in many.tensors if each.name.startswith("cls")}
    assert shapes == {
        "cls.weight": (1024, 1024),
        "cls.bias": (1024,),
        "cls.output.weight": (1024, 3),
        "cls.output.bias": (3,),
    }
    for labels, message in (({}, "has no id2label: add it"), ({"0": "a", "1": "b"}, "has two labels in id2label")):
        with pytest.raises(ModelError, match=message):
            mapped({**config, "id2label": labels}, "x")


def test_a_shape_is_found_by_its_name_or_by_words() -> None:
    assert [each.name for each in fitter.shapes("qwen3-8b")] == ["qwen3-8b"]
    assert {each.name for each in fitter.shapes("Gemma", "4")} >= {"gemma-4-31b", "gemma-3-4b"}
    assert len(fitter.shapes()) == len(shape_names())
    one = fitter.shapes("llama-3.1-8b")[0]
    assert (one.model, one.architecture, one.n_layer, one.n_ctx_train) == ("shape://llama-3.1-8b", "llama", 32, 131072)


@cases(
    (
        ("llama-3.1-9b",),
        "there is no shape 'llama-3.1-9b': did you mean llama-3.1-8b or llama-3.1-70b or llama-3.1-405b? "
        "'fitter shapes' lists them",
    ),
    (("xyzzy",), "there is no shape 'xyzzy': 'fitter shapes' lists them"),
    (("qwen3", 3), "words are ('qwen3', 3): give texts, such as fitter.shapes('qwen3', 'moe')"),
    (("qwen3", "xyzzy"), "no shape has all of 'qwen3 xyzzy' in its name: 'fitter shapes' lists all"),
)
def test_an_unknown_shape_is_said(words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as error:
        fitter.shapes(*words)
    assert str(error.value) == message


# --- a config.json


def test_what_is_left_out_is_transformers_default() -> None:
    made = mapped({"architectures": ["MistralForCausalLM"]}, "x")
    assert made.number("embedding_length") == 4096 and made.number("attention.head_count_kv") == 8
    assert made.metadata["llama.rope.freq_base"] == 10000.0
    assert mapped({"architectures": ["Starcoder2ForCausalLM"]}, "x").tensors[0].name == "token_embd.weight"
    assert not any(e.name == "output.weight" for e in mapped({"architectures": ["Starcoder2ForCausalLM"]}, "x").tensors)


def test_null_is_not_the_default() -> None:
    """A query has as many heads as the keys where their number is null, whatever the class has by default."""
    made = mapped({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "x")
    assert made.number("attention.head_count_kv") == 32


CONFIGS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/data/configs/classes.json").read_text("utf-8"))
"""Hyperparameters as published, of models that are not in the catalogue, by class."""


def config_of(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The hyperparameters of a class or of a shape in the catalogue, or of none, with others in place of some."""
    known = CONFIGS.get(name) or published_shape(name).config if name else {}
    return dict(known) | dict(changes or {})


WEIGHTS: dict[str, tuple[Any, ...]] = stored("shapes", "weights")


@cases(WEIGHTS)
def test_a_config_has_the_known_weights(of: str, changes: dict[str, Any], architecture: str, parameters: int) -> None:
    made = mapped(config_of(of, changes), "x")
    assert (made.architecture, made.parameters) == (architecture, parameters)


def test_metadata_beyond_the_dimensions() -> None:
    """What llama.cpp reads of no other model."""
    assert mapped(CONFIGS["APERTUS"], "x").metadata["xielu.beta"] == [0.5] * 32
    assert mapped(CONFIGS["QWEN_VL"], "x").metadata["qwen2vl.rope.dimension_sections"] == [16, 24, 24, 0]
    made = mapped(CONFIGS["DEVSTRAL"], "x").metadata
    assert made["mistral3.attention.temperature_scale"] == 0.0 and made["mistral3.rope.scaling.factor"] == 64.0
    made = mapped(CONFIGS["HUNYUAN_MOE"], "x").metadata
    names = ("count", "used_count", "shared_count", "feed_forward_length", "shared_feed_forward_length")
    assert [made[f"hunyuan-moe.expert_{name}"] for name in names] == [64, 8, 1, 3072, 3072]


def test_hunyuan_stretches_rope_by_its_base() -> None:
    """10000 * 1000 ** (128 / 126), and the context that the converter writes for it."""
    made = mapped(config_of("HUNYUAN", {"max_position_embeddings": 32768}), "x")
    assert made.metadata["hunyuan-dense.rope.freq_base"] == pytest.approx(11158839.9251)
    assert made.number("context_length") == 262144
    assert made.metadata["hunyuan-dense.rope.scaling.type"] == "none"


@cases(stored("shapes", "published_too"))
def test_what_changes_nothing_is_taken(name: str, too: dict[str, Any]) -> None:
    made, other = mapped(config_of(name), name), mapped(config_of(name, too), name)
    assert (other.tensors, other.metadata) == (made.tensors, made.metadata)


UNKNOWN = "which fitter cannot tell the tensors of: give a GGUF file of the model instead"


@cases(stored("shapes", "refused"))
def test_what_is_wrong_or_not_known_is_said(of: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        mapped(config_of(of, changes), "config.json")
    assert str(error.value) == f"config.json {message}"


@named_cases(
    ("no object", "[1]", "has no object: give the config.json of a model"),
    ("no JSON", "{", "is not JSON: give the config.json of a model"),
    ("deep", "[" * 100_000, "is not JSON: give the config.json of a model"),
    ("images", config_of("QWEN_VL", {"rope_scaling": None}), "has no mrope_section in its rope_scaling: add it"),
    (
        "a number among numbers",
        config_of("lfm2-1.2b", {"full_attn_idxs": [10**400]}),
        f"has full_attn_idxs [1{'0' * 57}…: give a list of numbers",
    ),
    (
        "no letter",
        config_of("exaone-4.0-32b", {"layer_types": None, "sliding_window_pattern": ""}),
        f"has a sliding_window without layer_types, {UNKNOWN}",
    ),
    (
        "a window in the last layer",
        config_of("gemma-4-31b", {"layer_types": ["sliding_attention"] * 60}),
        f"has a window in its last layer, {UNKNOWN}",
    ),
    (
        "experts that differ between layers",
        config_of("HUNYUAN_MOE", {"moe_topk": [8] * 31 + [4]}),
        f"has a moe_topk that differs between layers, {UNKNOWN}",
    ),
    (
        "objects in objects",
        json.dumps(config_of("LLAMA"))[:-1] + f', "rope_scaling": {"[" * 101}{"]" * 101}}}',
        "has objects in more than 100 others: give the config.json of a model",
    ),
)
def test_what_is_wrong_or_not_known_is_one_line(document: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(ModelError) as error:
        shape_files.header(Wanted("config", str(path), ""))
    assert str(error.value) == f"{path} {message}"


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "not-text.json").write_bytes(b'{"architectures": ["\xff"]}')
    for name, message in {
        "/none/config.json": "/none/config.json: no such file; check the path of the config.json",
        str(tmp_path): f"{tmp_path}/config.json: no such file; check the path of the config.json",
        "~nobody-here/config.json": "~nobody-here/config.json: no such user; check the path of the config.json",
        f"{tmp_path}/fifo": f"{tmp_path}/fifo is not a regular file: give the config.json of a model",
        "/dev/zero": "/dev/zero is not a regular file: give the config.json of a model",
        f"{tmp_path}/not-text.json": f"{tmp_path}/not-text.json is not JSON: give the config.json of a model",
        f"{tmp_path}/not-text.json/x": f"{tmp_path}/not-text.json/x cannot be read: Not a directory",
    }.items():
        with pytest.raises(ModelError) as error:
            shape_files.header(Wanted("config", name, ""))
        assert str(error.value) == message
    with pytest.raises(UsageError, match=r"^no config\.json is named: give its path or its address"):
        shape_files.header(Wanted("config", "", ""))


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="is larger than 1 MiB: give the config"):
        shape_files.header(Wanted("config", str(path), ""))


ODD: list[Any] = [None, -1, 0, 1, 3, 2**31 - 1, 2**63, 10**400, 1e308, 0.5, "", "auto", "x" * 1000, True, False]
ODD += [
    [],
    [1],
    ["a"],
    [-1],
    [1e300],
    [10**400],
    {},
    {"rope_type": "yarn"},
    {"factor": []},
    {"mrope_section": [-1]},
    [[]],
]
MORE = ["text_config", "num_hidden_layers", "hidden_size", "rope_scaling", "layer_types", "num_nextn_predict_layers"]
MORE += ["mtp_num_hidden_layers", "attn_type_list", "sliding_window_pattern", "q_lora_rank", "quantization_config"]
EXAMPLES = [dict(published_shape(name).config) for name in shape_names()]


@settings(max_examples=500, deadline=1000)
@given(config=st.sampled_from(EXAMPLES), data=st.data())
def test_a_damaged_config_is_refused_or_makes_a_header(config: dict[str, Any], data: st.DataObject) -> None:
    damaged = dict(config)
    names = st.sampled_from([*config, *MORE])
    for name in data.draw(st.lists(names, min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            damaged.pop(name, None)
        else:
            damaged[name] = data.draw(st.sampled_from(ODD))
    try:
        made = mapped(damaged, "config.json")
        header = header_of(made.metadata, made.tensors)
    except ModelError as error:
        assert str(error).startswith("config.json ") and "\n" not in str(error) and len(str(error)) < 400
    else:
        assert len(header) < 1 << 21
        assert struct.unpack_from("<Q", header, 8) == (len(made.tensors),)
        assert min(min(tensor.shape) for tensor in made.tensors) > 0


def test_every_class_is_in_the_catalogue_or_has_defaults() -> None:
    """A class whose header nothing makes would not be noticed; these say nothing that can be left out."""
    named = {published_shape(name).config["architectures"][0] for name in shape_names()}
    made = set()
    for name in KNOWN:
        try:
            made.add(mapped({"architectures": [name]}, "x") and name)
        except ModelError:
            continue
    assert set(KNOWN) - named - made <= {
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "Gemma4ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3NextForCausalLM",
    }
