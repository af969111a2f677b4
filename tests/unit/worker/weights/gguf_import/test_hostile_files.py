"""Whatever bytes a GGUF file has, an import makes a model of them or says what is wrong, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.weights.gguf_import.conversion import UnimportableError, convert
from tests.support.models.gguf_bytes import ARRAY, STRING, U32, SmallFile, entry, header, small_file, tensor, text
from tests.support.models.gguf_export import export_gguf
from tests.support.models.gguf_files import CONFIG, write_gguf
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

# Far below what the sizes in these files ask for.
MAX_BYTES = 1 << 23


HUGE = 1 << 60
A = entry(b"a", U32, bytes(4))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it ends within|it is truncated"),
        (b"GGML" + bytes(100), "does not begin with GGUF"),
        (header(version=1), "has version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (header(num_tensors=HUGE), f"has {HUGE} tensors, for which it is too short"),
        (header(num_entries=HUGE), f"has {HUGE} metadata entries, for which it is too short"),
        (header(A, A, num_entries=2), "the key 'a' occurs twice"),
        (header(struct.pack("<Q", HUGE), bytes(20), num_entries=1), "the key of metadata entry 0 has .* bytes"),
        (header(text(b"\xff"), bytes(20), num_entries=1), "the key of metadata entry 0 is not UTF-8"),
        (header(entry(b"a", 99, bytes(8)), num_entries=1), "a has type 99, which is not known"),
        (header(entry(b"a", STRING, struct.pack("<Q", HUGE)), num_entries=1), "a has .* bytes, beyond its end"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", U32, HUGE)), num_entries=1), "the array a has .* at most"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", U32, 1 << 20)), num_entries=1), "a has 4194304 bytes"),
        (header(entry(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)), bytes(30), num_entries=1), "an array of arrays"),
        (header(entry(b"general.alignment", U32, struct.pack("<I", 3)), num_entries=1), "alignment is 3"),
        (header(tensor(b"t", [4] * 5), bytes(99), num_tensors=1), "t has 5 dimensions, not 1 to 4"),
        (header(tensor(b"t", []), bytes(99), num_tensors=1), "t has 0 dimensions"),
        (header(tensor(b"t", [0, 4]), bytes(99), num_tensors=1), "impossible shape"),
        (header(tensor(b"t", [HUGE, HUGE]), bytes(99), num_tensors=1), "impossible shape"),
        (header(tensor(b"t", [32], kind=99), bytes(99), num_tensors=1), "t has type 99"),
        (header(tensor(b"t", [31], kind=8), bytes(99), num_tensors=1), "not of whole blocks of 32 in Q8_0"),
        (header(tensor(b"t", [4], offset=1), bytes(99), num_tensors=1), "has offset 1, no multiple of 32"),
        (header(tensor(b"t", [4], offset=HUGE), bytes(99), num_tensors=1), "truncated: tensor t ends at byte"),
        (header(tensor(b"t", [1 << 40]), bytes(99), num_tensors=1), "truncated: tensor t ends at byte"),
        (header(tensor(b"t", [4]), tensor(b"t", [4]), bytes(99), num_tensors=2), "the tensor t occurs twice"),
        (header(tensor(b"t", [4]), tensor(b"u", [4]), bytes(99), num_tensors=2), "the tensors t and u overlap"),
        (header(bytes(99)), "lacks general.architecture"),
    ],
)
def test_a_malformed_header_is_named_before_memory_is_taken(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "hostile.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UnimportableError, match=rf"^hostile\.gguf .*({problem})"):
            convert(tmp_path / "hostile.gguf", tmp_path / "model")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES
    assert not (tmp_path / "model").exists()


def test_a_huge_string_in_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse.gguf").open("wb") as file:
        file.write(header(entry(b"a", STRING, struct.pack("<Q", 1 << 33)), num_entries=1))
        file.truncate(1 << 34)
    with pytest.raises(UnimportableError, match="a exceeds the 268435456 bytes that a header may have"):
        convert(tmp_path / "sparse.gguf", tmp_path / "model")


@pytest.fixture(scope="module")
def recurrent_file(tmp_path_factory: pytest.TempPathFactory) -> SmallFile:
    directory = tmp_path_factory.mktemp("recurrent")
    architecture = "Qwen3_5MoeForConditionalGeneration"
    write_small_model(build_model(architecture, SMALL_CONFIGS[architecture]["plain"]), directory / "model")
    export_gguf(directory / "model", directory / "small.gguf")
    return small_file("qwen35moe", directory / "small.gguf")


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory, recurrent_file: SmallFile) -> list[SmallFile]:
    found = []
    more = {"general.sampling.temp": 0.5, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    for architecture in ("llama", "qwen3moe"):
        path = tmp_path_factory.mktemp("small") / "small.gguf"
        write_gguf(path, architecture, config={**CONFIG, "num_hidden_layers": 1}, more=more)
        found.append(small_file(architecture, path))
    return [*found, recurrent_file]


def check_import(content: bytes) -> None:
    """Import a file; any other exception than that of a file that cannot be imported is a failure."""
    with TemporaryDirectory() as directory:
        path = Path(directory, "changed.gguf")
        path.write_bytes(content)
        with suppress(UnimportableError):
            convert(path, Path(directory, "model"))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_change_of_a_headers_bytes_makes_a_model_or_an_error(
    small_files: list[SmallFile], data: st.DataObject
) -> None:
    small = data.draw(st.sampled_from(small_files))
    changed = bytearray(small.content)
    numbers = st.sampled_from([0, 1, 2, 7, 1 << 16, (1 << 31) - 1, (1 << 32) - 1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, small.header_bytes - 8))
        if data.draw(st.booleans()):
            changed[at] = data.draw(st.integers(0, 255))
        else:
            changed[at : at + 4] = struct.pack("<I", data.draw(numbers))
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, len(changed))) :]
    check_import(bytes(changed))


SCALARS = st.one_of(
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, -1, 419, 420, 1 << 20, 1 << 62]),
    st.sampled_from([0.0, 0.5, -1.0, 1e30, float("nan"), float("inf")]),
    st.sampled_from(["", "llama", "gpt2", "yarn", "a b"]),
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_value_of_a_key_makes_a_model_or_an_error(small_files: list[SmallFile], data: st.DataObject) -> None:
    small = data.draw(st.sampled_from(small_files))
    key = data.draw(st.sampled_from(sorted(small.metadata)))
    value = data.draw(
        st.one_of(SCALARS, st.none(), *[st.lists(st.just(each), max_size=2) for each in (1, 0.5, "a", True)])
    )
    same_length = data.draw(st.booleans())
    old = small.metadata[key]
    if isinstance(old, list) and isinstance(value, list) and value and same_length:
        value = value[:1] * len(old)
    rest = {name: each for name, each in small.metadata.items() if name != key}
    check_import(small.with_metadata(rest if value is None else {**rest, key: value}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ssm.state_size": None, "expert_count": None}, r"lacks ssm\.state_size, expert_count"),
        ({"ssm.inner_size": None}, r"lacks ssm\.inner_size"),
        ({"ssm.inner_size": 127}, r"ssm\.inner_size 127, not a multiple of ssm\.time_step_rank 8"),
        ({"ssm.group_count": 3}, r"ssm\.time_step_rank 8, not a multiple of ssm\.group_count 3"),
        ({"ssm.group_count": 2}, r"blk\.0\.ssm_conv1d\.weight of shape \[192, 4\], not \[160, 4\]"),
        (
            {"full_attention_interval": 3, "attention.recurrent_layers": None},
            "full_attention_interval 3, but only 2 layers",
        ),
        ({"full_attention_interval": 1, "attention.recurrent_layers": None}, r"lacks tensors: blk\.0\.attn_k"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers 2; only 1 is supported"),
        ({"nextn_predict_layers": 1, "full_attention_interval": 1}, r"lacks tensors: .*blk\.1\.nextn\.eh_proj"),
        ({"block_count": 1 << 47}, f"block_count {1 << 47}, but only"),
        ({"attention.recurrent_layers": [False, True]}, r"lacks tensors: blk\.0\.attn_k"),
        ({"attention.recurrent_layers": [True]}, r"attention\.recurrent_layers that is not a list of 2 booleans"),
        ({"attention.recurrent_layers": [1, 0]}, r"attention\.recurrent_layers that is not a list of 2 booleans"),
    ],
)
def test_a_recurrent_models_sizes_are_checked_by_name(
    recurrent_file: SmallFile, tmp_path: Path, changes: Mapping[str, Any], problem: str
) -> None:
    changed = {**recurrent_file.metadata, **{f"qwen35moe.{key}": value for key, value in changes.items()}}
    content = recurrent_file.with_metadata({key: value for key, value in changed.items() if value is not None})
    (tmp_path / "changed.gguf").write_bytes(content)
    with pytest.raises(UnimportableError, match=problem):
        convert(tmp_path / "changed.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_decay_that_would_grow_is_refused(recurrent_file: SmallFile, tmp_path: Path) -> None:
    [decay] = [each for each in recurrent_file.tensors if each.name == "blk.0.ssm_a"]
    content = bytearray(recurrent_file.content)
    content[decay.offset : decay.offset + 4] = struct.pack("<f", 0.5)
    (tmp_path / "changed.gguf").write_bytes(content)
    with pytest.raises(UnimportableError, match=r"blk\.0\.ssm_a with values that are not negative"):
        convert(tmp_path / "changed.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
