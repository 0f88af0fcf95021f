"""Roles and layers from tensor names."""

from __future__ import annotations

import re

import pytest

from fitter.model.tensors import Role, is_expert, layer_of, role_of
from tests.support.cases import outcomes
from tools.models.shapes import SHAPES

UPSTREAM = re.compile(r"blk\.\d+\.ffn_(up|down|gate_up|gate)_(ch|)exps")


@outcomes(
    {
        Role.TOKEN_EMBEDDING: ["token_embd.weight", "per_layer_token_embd.weight"],
        Role.OUTPUT: ["output.weight"],
        Role.NORM: [
            *("output_norm.weight", "blk.7.attn_q_norm.weight", "blk.7.attn_norm_2.weight"),
            *("blk.7.ffn_norm_exps.weight", "blk.7.nextn.shared_head_norm.weight"),
        ],
        Role.ATTENTION: [
            *("blk.0.attn_q.weight", "blk.12.attn_q.bias", "blk.7.attn_kv_a_mqa.weight", "blk.7.attn_sinks.weight"),
            *("blk.7.indexer.attn_k.weight", "enc.blk.3.attn_q.weight", "dec.blk.3.cross_attn_q.weight"),
        ],
        Role.FFN: ["blk.7.ffn_up.weight", "blk.7.ffn_latent_down.weight"],
        Role.EXPERT: [
            *("blk.7.ffn_gate_exps.weight", "blk.7.ffn_gate_up_exps.weight"),
            *("blk.7.ffn_down_chexps.weight", "blk.7.ffn_down_exps.bias"),
        ],
        Role.SHARED_EXPERT: ["blk.7.ffn_down_shexp.weight", "blk.7.ffn_gate_inp_shexp.weight"],
        Role.ROUTER: ["blk.7.ffn_gate_inp.weight", "blk.7.exp_probs_b.bias"],
        Role.RECURRENT: ["blk.7.ssm_a", "blk.7.ssm_dt.bias", "blk.7.time_mix_key.weight"],
        Role.PREDICTION: ["blk.7.nextn.eh_proj.weight"],
        Role.OTHER: ["rope_freqs.weight", "v.blk.3.attn_q.weight", "blk.x.attn_q.weight", ""],
    }
)
def test_role(name: str, role: Role) -> None:
    assert role_of(name) is role


@outcomes(
    {
        None: ["token_embd.weight", "output.weight", "v.blk.3.attn_q.weight", "blk.x.attn_q.weight", ""],
        0: ["blk.0.attn_q.weight"],
        12: ["blk.12.attn_q.bias"],
        7: ["blk.7.ssm_a", "blk.7.indexer.attn_k.weight", "blk.7.nextn.eh_proj.weight"],
        3: ["enc.blk.3.attn_q.weight", "dec.blk.3.cross_attn_q.weight"],
    }
)
def test_layer(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_experts_of_early_models_are_one_tensor_each() -> None:
    assert role_of("blk.7.ffn_gate.3.weight") is Role.EXPERT
    assert not is_expert("blk.7.ffn_gate.3.weight"), "upstream's pattern does not know them"


@pytest.mark.parametrize("shape", list(SHAPES))
def test_every_tensor_of_a_real_model_has_a_role(shape: str) -> None:
    names = [tensor.name for tensor in SHAPES[shape].tensors]
    assert [name for name in names if role_of(name) is Role.OTHER] in ([], ["rope_freqs.weight"])
    assert {layer for name in names if (layer := layer_of(name)) is not None} == set(range(SHAPES[shape].n_layer))
    assert [is_expert(name) for name in names] == [UPSTREAM.search(name) is not None for name in names]
    assert [is_expert(name) for name in names] == [role_of(name) is Role.EXPERT for name in names]
