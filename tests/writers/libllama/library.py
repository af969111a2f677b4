"""llama.cpp's own library by ctypes: `library.py LIBRARIES COMMAND ...`; what it answers is JSON.

quantize SOURCE RESULT FTYPE: quantise a file, by the number of a mixture (`llama_ftype` of llama.h).
tokens FILE: the ids of each of the texts on stdin, a JSON list, special tokens not read as such.
logits FILE: log-probabilities after each of the lists of ids on stdin, [list, vocabulary].

Parameters are passed as structures that are larger than the library's own, which reads and writes only their beginning:
so none of their fields after the first ones is known here.
"""

import ctypes
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

libraries = Path(sys.argv[1])


class Parameters(ctypes.Structure):
    _fields_ = [("words", ctypes.c_int32 * 128)]


class Batch(ctypes.Structure):
    _fields_ = [("num_tokens", ctypes.c_int32), ("arrays", ctypes.c_void_p * 6)]


def load_all() -> Any:
    """Each before those that need it."""
    _, ggml, llama = (
        ctypes.CDLL(str(find(name)), ctypes.RTLD_GLOBAL) for name in ("libggml-base", "libggml", "libllama")
    )
    ggml.ggml_backend_load_all_from_path(str(libraries).encode())
    return llama


def find(name: str) -> Path:
    """A library's file, whose name may have a version."""
    [path] = libraries.glob(f"{name}.*so*")
    return path


def quantize(library: Any, source: str, result: str, ftype: str) -> Any:
    library.llama_model_quantize_default_params.restype = Parameters
    parameters = library.llama_model_quantize_default_params()
    # The number of threads, and the mixture.
    parameters.words[0], parameters.words[1] = 1, int(ftype)
    failed = library.llama_model_quantize(source.encode(), result.encode(), ctypes.byref(parameters))
    return {"failed": failed}


def open_model(library: Any, path: str) -> tuple[Any, Any]:
    library.llama_model_default_params.restype = Parameters
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    assert model, "the library does not load the file"
    return model, library.llama_model_get_vocab(model)


def tokens(library: Any, path: str) -> Any:
    _, vocabulary = open_model(library, path)
    tokenize = library.llama_tokenize
    arguments = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]
    tokenize.argtypes = [ctypes.c_void_p, *arguments]
    found = []
    for text in json.load(sys.stdin):
        encoded = text.encode()
        ids = (ctypes.c_int32 * (len(encoded) + 8))()
        count = tokenize(vocabulary, encoded, len(encoded), ids, len(ids), False, False)
        assert count >= 0, "more tokens than bytes"
        found.append(list(ids[:count]))
    return found


def logits(library: Any, path: str) -> Any:
    model, vocabulary = open_model(library, path)
    library.llama_context_default_params.restype = Parameters
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, Parameters]
    library.llama_init_from_model.restype = ctypes.c_void_p
    library.llama_batch_get_one.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_batch_get_one.restype = Batch
    library.llama_decode.argtypes = [ctypes.c_void_p, Batch]
    library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    size = library.llama_vocab_n_tokens(vocabulary)
    found = []
    for ids in json.load(sys.stdin):
        context = library.llama_init_from_model(model, library.llama_context_default_params())
        assert context, "the library makes no context"
        library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        # More would wait for each other on cores that have other work.
        library.llama_set_n_threads(context, 1, 1)
        array = (ctypes.c_int32 * len(ids))(*ids)
        failed = library.llama_decode(context, library.llama_batch_get_one(array, len(ids)))
        assert not failed, f"the library decodes with {failed}"
        row = library.llama_get_logits_ith(context, -1)[:size]
        top = max(row)
        total = top + math.log(sum(math.exp(each - top) for each in row))
        found.append([each - total for each in row])
        library.llama_free.argtypes = [ctypes.c_void_p]
        library.llama_free(context)
    return found


COMMANDS: dict[str, Callable[..., Any]] = {"quantize": quantize, "tokens": tokens, "logits": logits}
answer = COMMANDS[sys.argv[2]](load_all(), *sys.argv[3:])
sys.stdout.write(json.dumps(answer))
