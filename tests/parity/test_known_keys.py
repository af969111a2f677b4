"""Every key of config.json that transformers reads for a family: what ours does with it.

The keys are those of the installed transformers: the fields of its configuration class, what its constructors take from
the other keys, and what its model reads. A release with a new key makes a test here fail until the key is sorted.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

from services.worker.layers.shard import Shard
from services.worker.models.config_keys import keys_beside_others, keys_without_effect, unknown_keys
from services.worker.models.loader import LoadOptions, load_model
from services.worker.models.protocol import CausalLM
from services.worker.models.registry import loader_for
from services.worker.ops import load_ops
from services.worker.recorded_config import RecordedConfig
from services.worker.weights.dummy_weights import DummyWeights
from shared.model_files.model_dir import CONFIG, GENERATION_CONFIG, ModelDirectoryError
from shared.model_files.text_models import with_text_rope
from tests.support.models.multimodal import is_multimodal, make_config
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_keys import PUBLISHED_KEYS
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS

# Read by other parts than a family's loader: the registry, the vocabulary, the formats of weights.
READ_ELSEWHERE = {"architectures", "eos_token_id", "model_type", "quantization_config"}
# Read by models of text with images, in the same module of transformers.
READ_FOR_IMAGES = {"get_text_config", "image_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
# The variable there for the name of a key with the token of an image or a video.
TOKEN_OF_IMAGES = "token_id_key"
# Values that are not what ours computes with, for keys that are only checked.
REFUSED: dict[str, object] = {
    "per_layer_config": {"0": {"intermediate_size": 8}},
    "is_encoder_decoder": True,
}
SLIDING = ["sliding_attention", "sliding_attention"]
_REFUSED_BY_GEMMA: dict[str, object] = {
    "use_bidirectional_attention": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_REFUSED_BY_QWEN3_NEXT: dict[str, object] = {"attn_output_gate": False, "output_gate_type": "sigmoid"}
REFUSED_BY: dict[str, dict[str, object]] = {
    "Qwen3NextForCausalLM": _REFUSED_BY_QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _REFUSED_BY_QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": {**_REFUSED_BY_QWEN3_NEXT, "norm_topk_prob": False},
    "Gemma3ForCausalLM": _REFUSED_BY_GEMMA,
    "Gemma3ForConditionalGeneration": _REFUSED_BY_GEMMA,
    "DeepseekV2ForCausalLM": {"norm_topk_prob": True, "num_key_value_heads": 2},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 32, "moe_layer_freq": 2, "qk_head_dim": 16},
    "DeepseekV32ForCausalLM": {
        "num_key_value_heads": 2,
        "layer_types": ["full_attention", "full_attention"],
        "indexer_rope_interleave": True,
    },
    "Glm4MoeLiteForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "first_k_dense_replace": 2,
    },
    "Glm4vMoeForConditionalGeneration": {"use_qk_norm": True},
    "GlmMoeDsaForCausalLM": {
        "num_key_value_heads": 2,
        "layer_types": ["full_attention"] * 4,
        "indexer_rope_interleave": False,
        "moe_router_dtype": "bfloat16",
        "rope_interleave": False,
    },
    "Qwen3VLForConditionalGeneration": {"layer_types": SLIDING},
    "Qwen3VLMoeForConditionalGeneration": {"layer_types": SLIDING},
    "Kimi_K25ForConditionalGeneration": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_layer_freq": 2,
        "qk_head_dim": 16,
    },
}
# Keys that ours does not guess.
REQUIRED: dict[str, dict[str, object]] = {
    "Glm4MoeForCausalLM": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    "Glm4vMoeForConditionalGeneration": {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
}
# They say which weights there are: a checkpoint without the key that has others is refused.
SEEN_IN_WEIGHTS = {"q_lora_rank", "n_shared_experts", "attention_bias", "mlp_bias", "use_qk_norm"}
# They only count layers that draft, which a plain load leaves out.
ONLY_FOR_DRAFTS = {"num_mtp_layers", "num_nextn_predict_layers"}
# What the families call the number of experts, most of them in two ways.
EXPERT_NAMES = {"n_routed_experts", "num_experts", "num_local_experts"}
TOKENS = [5, 9, 300, 5, 77, 8, 41, 230, 12, 6]


def small_config(architecture: str, **changes: object) -> RecordedConfig:
    """The first variant of the family; a change to ... removes the key."""
    first = next(iter(SMALL_CONFIGS[architecture].values()))
    values = {**first, **REQUIRED.get(architecture, {}), "architectures": [architecture], **changes}
    return RecordedConfig({name: value for name, value in values.items() if value is not ...})


@cache
def shard() -> Shard:
    """What every model here is built from: small weights take `cpu`, where oneDNN packs them, twice as long."""
    return Shard(load_ops("native"), DummyWeights(1, torch.float32))


def build(config: Mapping[str, Any]) -> CausalLM:
    return loader_for(config)(config, shard())


def results_of(config: Mapping[str, Any]) -> Tensor:
    """What a model of these values computes: logits, and the length that it serves."""
    model = build(config)
    paged = PagedModel(model, shard().ops, num_blocks=4)
    return torch.cat((paged.prefill_all(paged.add(TOKENS)).flatten(), torch.tensor([float(model.context_length)])))


def only_name(name: str) -> dict[str, object]:
    """A change that says the number of experts by this name alone."""
    return {**dict.fromkeys(EXPERT_NAMES, ...), name: 8}


@cache
def results_of_plain(architecture: str) -> Tensor:
    return results_of(small_config(architecture))


@cache
def our_keys(architecture: str) -> frozenset[str]:
    """The keys that the family's loader asks for: some only beside others, some only in place of others."""
    variants = [small_config(architecture, **variant) for variant in SMALL_CONFIGS[architecture].values()]
    variants += [small_config(architecture, **only_name(name)) for name in EXPERT_NAMES & their_keys(architecture)]
    for config in variants:
        build(config)
    return frozenset(key for config in variants for key in config.read)


@cache
def config_class_of(architecture: str) -> type[PreTrainedConfig]:
    """transformers' class of the values, of a multimodal model's text."""
    if not is_multimodal(architecture):
        return getattr(transformers, architecture).config_class  # type: ignore[no-any-return]
    return type(make_config(architecture, next(iter(SMALL_CONFIGS[architecture].values()))).text_config)


def keys_of_others(architecture: str) -> set[str]:
    """What is read of a multimodal model's configuration in the module of its text, but not of the text."""
    if not is_multimodal(architecture):
        return set()
    whole = make_config(architecture, next(iter(SMALL_CONFIGS[architecture].values())))
    others = {field.name for each in (whole, whole.vision_config) for field in fields(type(each))}
    return others - {field.name for field in fields(config_class_of(architecture))}


def functions_of(architecture: str) -> Iterator[Callable[..., Any]]:
    """What makes transformers' configuration out of config.json."""
    config_class: Any = config_class_of(architecture)
    yield RotaryEmbeddingConfigMixin.convert_rope_params_to_dict
    yield config_class.convert_rope_params_to_dict
    for each in config_class.__mro__:
        if issubclass(each, PreTrainedConfig) and "__post_init__" in vars(each):
            yield each.__post_init__


def keys_taken_by(function: Callable[..., Any]) -> set[str]:
    """The constants in `kwargs.pop("name")` and its like."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    of_kwargs = [node for node in calls if isinstance(node.func, ast.Attribute) and _name(node.func.value) == "kwargs"]
    return {str(node.args[0].value) for node in of_kwargs if node.args and isinstance(node.args[0], ast.Constant)}


def keys_read_by(module: ModuleType) -> set[str]:
    """The names in `config.name`, `self.config.name` and `getattr(config, "name", …)`."""
    keys = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and _name(node.value) == "config":
            keys.add(node.attr)
        if isinstance(node, ast.Call) and _name(node.func) == "getattr" and _name(node.args[0]) == "config":
            keys |= set() if _name(node.args[1]) == TOKEN_OF_IMAGES else {str(ast.literal_eval(node.args[1]))}
    return {key for key in keys if not key.startswith("_") and not callable(getattr(PreTrainedConfig, key, None))}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def their_keys(architecture: str) -> frozenset[str]:
    config_class = config_class_of(architecture)
    is_part = is_multimodal(architecture)
    model_class = AutoModel._model_mapping[config_class] if is_part else getattr(transformers, architecture)
    keys = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    keys |= {key for function in functions_of(architecture) for key in keys_taken_by(function)}
    keys |= keys_read_by(sys.modules[model_class.__module__]) - keys_of_others(architecture)
    # Taken out of config.json unused.
    return frozenset(keys - set(GenerationConfig._get_default_generation_params()) - READ_ELSEWHERE - READ_FOR_IMAGES)


def refused_values(architecture: str) -> dict[str, object]:
    return REFUSED | REFUSED_BY.get(architecture, {})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_key_of_transformers_is_honoured_refused_or_known_to_have_no_effect(architecture: str) -> None:
    theirs = their_keys(architecture)
    assert len(theirs) > 30
    without_effect = keys_without_effect(architecture)
    assert sorted(theirs - our_keys(architecture) - set(without_effect)) == []
    assert sorted(our_keys(architecture) & set(without_effect)) == []


@pytest.mark.parametrize("name", PUBLISHED_KEYS)
def test_every_key_that_a_publisher_writes_is_too(name: str) -> None:
    architecture, keys = PUBLISHED_KEYS[name]
    # The keys of a text are then with those of the whole.
    given = set(keys.split()) - {"text_config"}
    config = RecordedConfig({**dict.fromkeys(given, 0), "architectures": [architecture]})
    config.read |= our_keys(architecture)
    assert unknown_keys(config, "lockstep") == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_that_are_not_always_read_are_listed(architecture: str) -> None:
    reads = []
    for variant in SMALL_CONFIGS[architecture].values():
        config = small_config(architecture, **variant)
        build(config)
        reads.append(config.read)
    ever: set[str] = set().union(*reads)
    sometimes = ever - reads[0].intersection(*reads) - EXPERT_NAMES
    listed = keys_beside_others(architecture).keys()
    assert sorted(sometimes - listed) == []
    assert sorted(listed - ever) == []


ROPES = ("rope_parameters", "rope_scaling")


def rope_objects(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the objects that say how positions are rotated, of all layers or of a type of layers."""
    for name, inside in value.items():
        if isinstance(inside, Mapping) and (path or name in ROPES):
            nested = list(rope_objects(inside, (*path, name)))
            yield from nested or [(*path, name)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_of_rotations_that_nothing_is_known_of_is_named(architecture: str) -> None:
    num_named = 0
    for variant in SMALL_CONFIGS[architecture].values():
        whole = {**REQUIRED.get(architecture, {}), **variant, "architectures": [architecture]}
        values = with_text_rope(deepcopy(whole))
        # As model cards have it, too: then it replaces the other.
        for spelling in ROPES:
            given = dict(values)
            if not architecture.startswith("Gemma3") and given.get(ROPES[0]) is not None:
                given[spelling] = given.pop(ROPES[0])
            kinds = given.get("layer_types")
            # By type of layer, it is read where there is such a layer.
            paths = [path for path in rope_objects(given) if path[-1] in (*ROPES, *(kinds or path))]
            for path in paths:
                reduce(getitem, path, given)["new_gate"] = 2
            config = RecordedConfig(given)
            try:
                build(config)
            except ModelDirectoryError:
                continue
            assert unknown_keys(config, "lockstep") == sorted(".".join((*path, "new_gate")) for path in paths)
            num_named += len(paths)
    assert num_named


LINE = "config.json has keys that this release does not know, and does without; a newer one may know them"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_nothing_is_known_of_is_named_once(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = next(iter(SMALL_CONFIGS[architecture].values()))
    make_config(architecture, {**first, **REQUIRED.get(architecture, {})}).save_pretrained(tmp_path)
    path = tmp_path / CONFIG
    # As transformers writes it, and with unknown keys: one that is null is not named, and a long name is cut.
    plain = {**json.loads(path.read_text()), "architectures": [architecture]}
    new = {"residual_multiplier": 0.5, "x" * 1000: {"a": "secret"}, "absent": None, "_private": 1}
    text: dict[str, object] = {**plain.get("text_config", {}), "new_gate": 2}
    changed = {**plain, **new, **({"text_config": text} if is_multimodal(architecture) else {"new_gate": 2})}
    for config, names in ((plain, []), (changed, ["new_gate", "residual_multiplier", "x" * 64])):
        caplog.clear()
        path.write_text(json.dumps(config))
        (tmp_path / GENERATION_CONFIG).write_text(json.dumps({"top_k": 5, **({"new_penalty": 2} if names else {})}))
        load_model(tmp_path, load_ops("cpu"), torch.float32, lambda _: None, options=LoadOptions(dummy_seed=1))
        lines = [record for record in caplog.records if record.message == LINE]
        assert [vars(record)["keys"] for record in lines] == ([names] if names else [])
        others = [record for record in caplog.records if record.message == LINE.replace(CONFIG, GENERATION_CONFIG)]
        assert [vars(record)["keys"] for record in others] == ([["new_penalty"]] if names else [])
        assert "secret" not in str([vars(record) for record in lines])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_is_only_checked_is_refused_by_name(architecture: str) -> None:
    for key, value in refused_values(architecture).items():
        assert key in our_keys(architecture)
        with pytest.raises(ModelDirectoryError, match=rf"config\.json: {key}"):
            build(small_config(architecture, **{key: value}))


def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_key() -> None:
    """Each key in the first family that reads it."""
    values: list[object] = ["x", [5], [[]], {"a": {"b": 1}}, 1e400, -1, 2**70]
    nameless = []
    key_to_architecture = {key: name for name in reversed(ARCHITECTURES) for key in our_keys(name) & their_keys(name)}
    for key, architecture in sorted(key_to_architecture.items()):
        for value in values:
            changes = {**(only_name(key) if key in EXPERT_NAMES else {}), key: value}
            if message := refusal_of(small_config(architecture, **changes)):
                is_named = message.startswith("config.json: ") and key in message
                nameless += [] if is_named else [(key, value, message)]
    assert nameless == []


def refusal_of(config: Mapping[str, Any]) -> str | None:
    try:
        build(config)
    except ModelDirectoryError as error:
        return str(error)
    return None


def other_value(architecture: str, key: str, value: object) -> object:
    """A value that must change what is computed."""
    types = ["sliding_attention", "full_attention"]
    special: dict[str, object] = {
        "hidden_act": "gelu",
        "hidden_activation": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "rope_theta": 77.0,
        "rope_local_base_freq": 77.0,
        "layer_types": types[::-1] if architecture.startswith(("GptOss", "Gemma3")) else types,
        "full_attention_interval": 1,
        "mlp_layer_types": ["sparse", "dense"] * (small_config(architecture)["num_hidden_layers"] // 2),
        "indexer_types": ["full", "shared", "full", "shared"],
        "index_topk_pattern": "FSFS",
        "mlp_only_layers": [1],
        "partial_rotary_factor": 0.25,
        "topk_method": "group_limited_greedy",
        "sliding_window": 3,
        "max_window_layers": 0,
        "head_dim": 32,
        "q_lora_rank": 12,
        "rms_norm_eps": 0.5,
        "swiglu_limit": 0.01,
    }
    if architecture.startswith(("Qwen3Next", "Qwen3_5")):
        num_layers = small_config(architecture)["num_hidden_layers"]
        special |= {"layer_types": ["full_attention"] * num_layers, "partial_rotary_factor": 0.5}
    if key in special:
        return special[key]
    if type(value) is bool:
        return not value
    assert isinstance(value, int | float), (key, value)
    return value * 2


# What a key needs beside it to have an effect.
GROUPS: dict[str, object] = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
COMPANIONS: dict[str, dict[str, object]] = {
    "rope_theta": {"rope_parameters": ...},
    "rope_local_base_freq": {"rope_parameters": ...},
    "partial_rotary_factor": {"rope_parameters": ...},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "max_window_layers": {"use_sliding_window": True, "sliding_window": 3},
    "layer_types": {"use_sliding_window": True, "sliding_window": 3},
    "use_sliding_window": {"sliding_window": 3, "max_window_layers": 0},
    "index_topk": {"index_topk": 2},
    "index_n_heads": {"index_topk": 2},
    "index_head_dim": {"index_topk": 2},
    "index_topk_freq": {"index_topk": 2},
    "index_skip_topk_offset": {"index_topk": 2},
    "index_topk_pattern": {"index_topk": 2},
    "indexer_types": {"index_topk": 2},
    "topk_method": GROUPS,
    "n_group": GROUPS,
    "topk_group": GROUPS,
    "intermediate_size": {"mlp_only_layers": [0]},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_is_read_changes_what_is_computed_or_is_refused(architecture: str) -> None:
    config_class = config_class_of(architecture)
    defaults = {field.name: field.default for field in fields(config_class) if field.default is not MISSING}
    unchanged = []
    for key in sorted(
        their_keys(architecture) & our_keys(architecture) - set(refused_values(architecture)) - ONLY_FOR_DRAFTS
    ):
        companions = only_name(key) if key in EXPERT_NAMES else COMPANIONS.get(key, {})
        if companions is GROUPS and key != "topk_method" and architecture == "DeepseekV2ForCausalLM":
            companions = {**GROUPS, "topk_method": "group_limited_greedy"}
        base = small_config(architecture, **companions)
        value = other_value(architecture, key, base[key] if key in base else defaults.get(key))
        before = results_of(base) if companions else results_of_plain(architecture)
        try:
            after = results_of({**base, key: value})
        except ModelDirectoryError:
            continue
        if before.shape == after.shape and torch.equal(before, after):
            unchanged.append((key, value))
    assert unchanged == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_that_is_absent_counts_as_transformers_default(architecture: str) -> None:
    differing = []
    # Whether a multimodal model is tied is a key of the whole.
    keys = (
        our_keys(architecture) - SEEN_IN_WEIGHTS - ({"tie_word_embeddings"} if is_multimodal(architecture) else set())
    )
    for field in fields(config_class_of(architecture)):
        if field.name not in keys or field.default in (MISSING, None):
            continue
        try:
            implied = results_of(small_config(architecture, **{field.name: ...}))
            given = results_of(small_config(architecture, **{field.name: field.default}))
        except ModelDirectoryError:
            continue
        if implied.shape != given.shape or not torch.equal(implied, given):
            differing.append(field.name)
    assert differing == []


@pytest.mark.parametrize(
    ("architecture", "key", "activation"),
    [
        ("LlamaForCausalLM", "hidden_act", torch.nn.functional.silu),
        ("Gemma3ForCausalLM", "hidden_activation", partial(torch.nn.functional.gelu, approximate="tanh")),
    ],
)
def test_every_name_of_an_activation_is_served_and_no_other_activation(
    architecture: str, key: str, activation: Callable[[Tensor], Tensor]
) -> None:
    x = torch.linspace(-4, 4, 64)
    for name in ACT2FN:
        is_same = torch.allclose(ACT2FN[name](x), activation(x), atol=1e-6, rtol=1e-6)
        assert (refusal_of(small_config(architecture, **{key: name})) is None) == is_same, name
