"""Roles and layers from tensor names."""

from __future__ import annotations

import re

import pytest

from fitter.model.tensors import Role, is_expert, layer_of, role_of
from tests.support.cases import cases
from tools.models.shapes import SHAPES

UPSTREAM = re.compile(r"blk\.\d+\.ffn_(up|down|gate_up|gate)_(ch|)exps")


@cases(
    ("token_embd.weight", None, Role.TOKEN_EMBEDDING),
    ("per_layer_token_embd.weight", None, Role.TOKEN_EMBEDDING),
    ("output.weight", None, Role.OUTPUT),
    ("output_norm.weight", None, Role.NORM),
    ("rope_freqs.weight", None, Role.OTHER),
    ("blk.0.attn_q.weight", 0, Role.ATTENTION),
    ("blk.12.attn_q.bias", 12, Role.ATTENTION),
    ("blk.7.attn_kv_a_mqa.weight", 7, Role.ATTENTION),
    ("blk.7.attn_sinks.weight", 7, Role.ATTENTION),
    ("blk.7.indexer.attn_k.weight", 7, Role.ATTENTION),
    ("blk.7.attn_q_norm.weight", 7, Role.NORM),
    ("blk.7.attn_norm_2.weight", 7, Role.NORM),
    ("blk.7.ffn_norm_exps.weight", 7, Role.NORM),
    ("blk.7.nextn.shared_head_norm.weight", 7, Role.NORM),
    ("blk.7.ffn_up.weight", 7, Role.FFN),
    ("blk.7.ffn_latent_down.weight", 7, Role.FFN),
    ("blk.7.ffn_gate_exps.weight", 7, Role.EXPERT),
    ("blk.7.ffn_gate_up_exps.weight", 7, Role.EXPERT),
    ("blk.7.ffn_down_chexps.weight", 7, Role.EXPERT),
    ("blk.7.ffn_down_exps.bias", 7, Role.EXPERT),
    ("blk.7.ffn_down_shexp.weight", 7, Role.SHARED_EXPERT),
    ("blk.7.ffn_gate_inp_shexp.weight", 7, Role.SHARED_EXPERT),
    ("blk.7.ffn_gate_inp.weight", 7, Role.ROUTER),
    ("blk.7.exp_probs_b.bias", 7, Role.ROUTER),
    ("blk.7.ssm_a", 7, Role.RECURRENT),
    ("blk.7.ssm_dt.bias", 7, Role.RECURRENT),
    ("blk.7.time_mix_key.weight", 7, Role.RECURRENT),
    ("blk.7.nextn.eh_proj.weight", 7, Role.PREDICTION),
    ("enc.blk.3.attn_q.weight", 3, Role.ATTENTION),
    ("dec.blk.3.cross_attn_q.weight", 3, Role.ATTENTION),
    ("v.blk.3.attn_q.weight", None, Role.OTHER),
    ("blk.x.attn_q.weight", None, Role.OTHER),
    ("", None, Role.OTHER),
)
def test_layer_and_role(name: str, layer: int | None, role: Role) -> None:
    assert layer_of(name) == layer
    assert role_of(name) is role


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
