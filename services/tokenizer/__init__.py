"""The tokenizer service: text and chat in, streams of text out."""
