"""Runs llama.cpp's converter, unchanged, on many checkpoints: `convert.py CONVERTER_DIR < jobs`, a JSON list.

A job is `[gguf_path, model_dir, flags]`. A line is written for each: `[gguf_path, null or what the converter said]`. It
knows tokenizers of published models by their digests: that of small models is written as Qwen2's, unless it is
SentencePiece's.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

converter_dir = sys.argv[1]
sys.path[:0] = [converter_dir, f"{converter_dir}/gguf-py"]

import convert_hf_to_gguf  # noqa: E402
from conversion import base, load_all_models  # noqa: E402

load_all_models()


def subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def byte_level_unless_sentencepiece(own: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_vocab(model: Any) -> None:
        is_sentencepiece = (model.dir_model / "tokenizer.model").is_file()
        (own if is_sentencepiece else base.TextModel._set_vocab_gpt2)(model)

    return set_vocab


for kind in subclasses(base.TextModel):
    kind.set_vocab = byte_level_unless_sentencepiece(kind.set_vocab)
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"

for gguf_path, model_dir, flags in json.load(sys.stdin):
    sys.argv = ["convert_hf_to_gguf.py", model_dir, "--outfile", gguf_path, "--outtype", "f32", *flags]
    said = None
    try:
        convert_hf_to_gguf.main()
    except SystemExit as error:
        said = f"exit {error.code}" if error.code else None
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps([gguf_path, said]) + "\n")
    sys.stdout.flush()
