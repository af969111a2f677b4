"""Trains SentencePiece's vocabularies, with its own library: `vocabulary.py < jobs`, a JSON list.

A job is `[model_path, null, {"corpus": ..., "user_defined_symbols": ..., more of the trainer's arguments}]`. A line is
written for each: `[model_path, null or what the library said]`.
"""

import io
import json
import sys
from pathlib import Path

from sentencepiece import SentencePieceTrainer

for model_path, _, options in json.load(sys.stdin):
    said, model = None, io.BytesIO()
    try:
        corpus = iter(options.pop("corpus"))
        SentencePieceTrainer.train(sentence_iterator=corpus, model_writer=model, model_type="bpe", **options)
        Path(model_path).write_bytes(model.getvalue())
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps([model_path, said]) + "\n")
    sys.stdout.flush()
