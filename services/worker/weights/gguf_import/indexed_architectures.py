"""DeepSeek-V3.2's and GLM-5's architectures: DeepSeek-V3's with indexers, which select what tokens attend to.

Sources: as of `architectures`; llama.cpp, conversion/deepseek.py (`DeepseekV32Model`), conversion/glm.py
(`GlmMoeDsaModel`), src/models/deepseek32.cpp and glm-dsa.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from services.worker.weights.gguf_import.architecture import Config, Key, Rules
from services.worker.weights.gguf_import.metadata import Metadata
from services.worker.weights.gguf_import.routed_architectures import DEEPSEEK3, set_drafts_apart
from services.worker.weights.gguf_import.tensors import Sizes, Tensor

_TYPES = "attention.indexer.types"
# Files of GLM-5 and 5.1, whose contexts are shorter, are older than the key of the types.
_CONTEXT_WITH_SHARED_INDEXERS = 1 << 20
_KEYS: Mapping[str, Key] = {
    "index_head_dim": Key("attention.indexer.key_length"),
    "index_n_heads": Key("attention.indexer.head_count"),
    "index_topk": Key("attention.indexer.top_k"),
}
_INDEXER: Rules = (
    Tensor("indexer.attn_k.weight", "self_attn.indexer.wk.weight", "index_head hidden"),
    Tensor("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight", "index_query query_latent"),
    Tensor("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", "index_head"),
    Tensor("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "index_head"),
    Tensor("indexer.proj.weight", "self_attn.indexer.weights_proj.weight", "index_heads hidden"),
)


def _rules(config: Config, layer: int, names: frozenset[str]) -> Rules:
    return (*DEEPSEEK3.rules(config, layer, names), *(_INDEXER if _has_indexer(config, layer) else ()))


def _has_indexer(config: Config, layer: int) -> bool:
    kinds = config.get("indexer_types")
    if kinds is None:
        return True
    return kinds[layer] == "full" if layer < len(kinds) else not config["index_share_for_mtp_iteration"]


def _sizes(config: Config) -> Sizes:
    return {
        **DEEPSEEK3.sizes(config),
        "index_head": config["index_head_dim"],
        "index_heads": config["index_n_heads"],
        "index_query": config["index_n_heads"] * config["index_head_dim"],
    }


def _complete_glm(metadata: Metadata, config: Config, names: Collection[str]) -> None:
    set_drafts_apart(metadata, config, names)
    num_layers = config["num_hidden_layers"]
    if _TYPES in metadata:
        has_indexer = metadata.flags(_TYPES, num_layers)
    elif config["max_position_embeddings"] < _CONTEXT_WITH_SHARED_INDEXERS:
        has_indexer = [True] * num_layers
    else:
        # GLM-5.2's, of which some files lack the key.
        has_indexer = [layer < 2 or layer % 4 == 2 for layer in range(num_layers)]
    config["indexer_types"] = ["full" if has else "shared" for has in has_indexer]
    config["index_share_for_mtp_iteration"] = f"blk.{num_layers}.indexer.proj.weight" not in names


DEEPSEEK32 = replace(
    DEEPSEEK3,
    name="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    rules=_rules,
    keys={**DEEPSEEK3.keys, **_KEYS},
    sizes=_sizes,
)
GLM_DSA = replace(DEEPSEEK32, name="GlmMoeDsaForCausalLM", model_type="glm_moe_dsa", extend=_complete_glm)
