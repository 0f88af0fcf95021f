"""Find llama.cpp's architecture of a published model, and make its header."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from fitter.errors import ModelError
from fitter.model.shapes import deepseek, gemma, hybrid, llama, moe, states, variants
from fitter.model.shapes.common import ShapeHeader
from fitter.model.shapes.config import LARGEST, Config, listed
from fitter.storage import read_data
from fitter.text import printable

_Make = Callable[[Config], ShapeHeader]

KNOWN: dict[str, tuple[str, _Make]] = {
    "ApertusForCausalLM": ("apertus", variants.apertus),
    "ArceeForCausalLM": ("arcee", variants.arcee),
    "BailingMoeV3ForCausalLM": ("bailing_hybrid", deepseek.bailing_moe3),
    "BertModel": ("bert", variants.bert),
    "Cohere2ForCausalLM": ("cohere2", llama.cohere2),
    "CohereForCausalLM": ("cohere", llama.command_r),
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek.deepseek2),
    "DeepseekV32ForCausalLM": ("deepseek_v32", deepseek.deepseek32),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek.deepseek2),
    "DeepseekV4ForCausalLM": ("deepseek_v4", deepseek.deepseek4),
    "Ernie4_5ForCausalLM": ("ernie4_5", llama.ernie),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", moe.ernie_moe),
    "Exaone4ForCausalLM": ("exaone4", llama.exaone4),
    "FalconH1ForCausalLM": ("falcon_h1", hybrid.falcon_h1),
    "FalconMambaForCausalLM": ("falcon_mamba", states.mamba),
    "Gemma2ForCausalLM": ("gemma2", gemma.gemma2),
    "Gemma3ForCausalLM": ("gemma3_text", gemma.gemma3),
    "Gemma3ForConditionalGeneration": ("gemma3_text", gemma.gemma3),
    "Gemma3nForCausalLM": ("gemma3n_text", gemma.gemma3n),
    "Gemma3nForConditionalGeneration": ("gemma3n_text", gemma.gemma3n),
    "Gemma4ForCausalLM": ("gemma4_text", gemma.gemma4),
    "Gemma4ForConditionalGeneration": ("gemma4_text", gemma.gemma4),
    "GemmaForCausalLM": ("gemma", gemma.gemma),
    "Glm4ForCausalLM": ("glm4", llama.glm4),
    "Glm4MoeForCausalLM": ("glm4_moe", moe.glm4moe),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", deepseek.glm_lite),
    "Glm5NextForConditionalGeneration": ("glm5_next_text", deepseek.glm5_next),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", deepseek.glm_dsa),
    "GptOssForCausalLM": ("gpt_oss", moe.gpt_oss),
    "GraniteForCausalLM": ("granite", llama.granite),
    "GraniteMoeForCausalLM": ("granitemoe", moe.granite_moe),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", hybrid.granite_hybrid),
    "GraniteMoeSharedForCausalLM": ("granitemoeshared", moe.granite_moe),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", variants.hunyuan),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", variants.hunyuan_moe),
    "InternLM2ForCausalLM": ("internlm2", llama.internlm2),
    "JambaForCausalLM": ("jamba", states.jamba),
    "KimiK25ForConditionalGeneration": ("deepseek_v3", deepseek.deepseek2),
    "KimiK3ForConditionalGeneration": ("kimi_linear", deepseek.kimi_k3),
    "Lfm2ForCausalLM": ("lfm2", hybrid.lfm2),
    "Lfm2MoeForCausalLM": ("lfm2_moe", hybrid.lfm2moe),
    "Llama4ForCausalLM": ("llama4_text", moe.llama4),
    "Llama4ForConditionalGeneration": ("llama4_text", moe.llama4),
    "LlamaForCausalLM": ("llama", llama.llama),
    "Mamba2ForCausalLM": ("mamba2", states.mamba2),
    "MambaForCausalLM": ("mamba", states.mamba),
    "MiniMaxM2ForCausalLM": ("minimax_m2", moe.minimax_m2),
    "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl_text", moe.minimax_m3),
    "Ministral3ForCausalLM": ("ministral3", llama.ministral),
    "Mistral3ForConditionalGeneration": ("mistral", llama.ministral),
    "MistralForCausalLM": ("mistral", llama.mistral),
    "MixtralForCausalLM": ("mixtral", llama.mixtral),
    "ModernBertForMaskedLM": ("modernbert", variants.modern_bert),
    "ModernBertModel": ("modernbert", variants.modern_bert),
    "NemotronForCausalLM": ("nemotron", llama.nemotron),
    "NemotronHForCausalLM": ("nemotron_h", hybrid.nemotron_h),
    "NomicBertModel": ("nomic_bert", variants.nomic_bert),
    "Olmo2ForCausalLM": ("olmo2", llama.olmo2),
    "Olmo3ForCausalLM": ("olmo3", llama.olmo2),
    "OlmoeForCausalLM": ("olmoe", moe.olmoe),
    "Phi3ForCausalLM": ("phi3", llama.phi3),
    "PhiForCausalLM": ("phi", llama.phi2),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl_text", variants.qwen2vl),
    "Qwen2ForCausalLM": ("qwen2", llama.qwen2),
    "Qwen2MoeForCausalLM": ("qwen2_moe", moe.qwen2moe),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl_text", variants.qwen2vl),
    "Qwen3ForCausalLM": ("qwen3", llama.qwen3),
    "Qwen3MoeForCausalLM": ("qwen3_moe", moe.qwen3moe),
    "Qwen3NextForCausalLM": ("qwen3_next", hybrid.qwen3next),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl_text", llama.qwen3vl),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe_text", moe.qwen3vlmoe),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", hybrid.qwen35),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text", hybrid.qwen35),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", hybrid.qwen35moe),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text", hybrid.qwen35moe),
    "Qwen4ExpForConditionalGeneration": ("qwen4_exp_text", hybrid.qwen4exp),
    "RobertaModel": ("roberta", variants.roberta),
    "SeedOssForCausalLM": ("seed_oss", llama.seed_oss),
    "SmolLM3ForCausalLM": ("smollm3", llama.smollm3),
    "StableLmForCausalLM": ("stablelm", llama.stablelm),
    "Starcoder2ForCausalLM": ("starcoder2", llama.starcoder2),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", variants.roberta_rank),
    "XLMRobertaModel": ("xlm-roberta", variants.roberta),
}
"""By the class in ``architectures`` of a ``config.json``: its ``model_type``, and the function that makes its header.
"""


_MOST_PARAMETERS = 4 * 10**12
"""More than any published model has; larger files exceed most file systems' limit."""
_IN_MXFP4 = ("GptOssForCausalLM", "KimiK3ForConditionalGeneration")
"""Classes whose experts are published in MXFP4, and are known so."""
_OF_ALL = ("tie_word_embeddings", "torch_dtype", "dtype", "vision_config")
"""Keys beside the text part that concern it too."""


def header_of(values: Mapping[str, Any], where: str) -> ShapeHeader:
    """Make the header of a model, as llama.cpp's converter writes it.

    Raises ``ModelError``, with ``where`` as the name of the hyperparameters, for unknown or invalid ones.
    """
    name = _class_of(values, where)
    model_type, make = KNOWN[name]
    facts = _facts()
    given = _of_text(values, where)
    _check_packing(values, given, name, where)
    hyperparameters = {**facts["defaults"].get(model_type, {}), **given}
    config = Config(hyperparameters, where, {"architectures", "model_type"})
    header = make(config)
    ignored = facts["ignored"]["names"]
    left = [key for key in config.unread() if key in given and key not in ignored and not key.startswith("_")]
    if left:
        raise ModelError(
            f"{where} has {listed(left)}, and fitter does not know whether that changes the tensors of a "
            f"{name}: leave it out if it does not"
        )
    _check_sizes(header, config)
    header.metadata["tokenizer.ggml.model"] = "no_vocab"
    return header


def _check_sizes(header: ShapeHeader, config: Config) -> None:
    """Raise ``ModelError`` for sizes that no model or file can have."""
    empty = next((tensor for tensor in header.tensors if min(tensor.shape) < 1), None)
    if empty is not None:
        shape = " x ".join(map(str, empty.shape))
        raise config.error(f"makes a tensor {empty.name} of {shape} weights: give the dimensions of a real model")
    several = (value if isinstance(value, (list, tuple)) else (value,) for value in header.metadata.values())
    largest = max((value for values in several for value in values if isinstance(value, int)), default=0)
    if header.parameters > _MOST_PARAMETERS or largest > LARGEST:
        raise config.error(f"makes a model of {header.parameters:.1e} weights: give the dimensions of a real model")


def _check_packing(values: Mapping[str, Any], given: Mapping[str, Any], name: str, where: str) -> None:
    """Raise ``ModelError`` for weights that are published in an unknown type that the converter keeps."""
    said = f"{values.get('quantization_config')} {given.get('quantization_config')}".lower()
    packed_types = ("mxfp4",) if name in _IN_MXFP4 else ()
    if packed := next((each for each in ("nvfp4", "mxfp4") if each in said and each not in packed_types), None):
        raise Config(given, where).unknown(f"weights in {packed.upper()}")


def _of_text(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the hyperparameters of the text part, if there are other parts."""
    text = values.get("text_config")
    if text is None:
        return values
    if not isinstance(text, dict):
        raise ModelError(f"{where} has a text_config that is no object: give the config.json of a model")
    outer = {key: value for key, value in values.items() if key in _OF_ALL}
    return {**outer, **text}


def _class_of(values: Mapping[str, Any], where: str) -> str:
    classes = values.get("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        raise ModelError(f"{where} has no list of architectures: give the config.json of a model")
    if classes[0] not in KNOWN:
        close = difflib.get_close_matches(classes[0][:100], KNOWN, n=1, cutoff=0.85)
        hint = f"; the nearest that it knows is {close[0]}" if close else ""
        raise ModelError(
            f"{where} is of a {printable(classes[0], 60)}, which fitter does not know the tensors of{hint}: give a "
            "GGUF file of the model instead"
        )
    return classes[0]


@functools.cache
def _facts() -> Mapping[str, Any]:
    return read_data(__file__, "transformers.toml")
