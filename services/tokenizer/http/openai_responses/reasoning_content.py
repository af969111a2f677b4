"""What reasoning items have as `encrypted_content`: the reasoning itself, for clients that send back only this.

It is encoded, not encrypted: the client sees the reasoning beside it anyway.
"""

from __future__ import annotations

from services.tokenizer.http.fields.carried_text import CarriedText

REASONING_CONTENT = CarriedText("lockstep-plain-1:", b"+/")
