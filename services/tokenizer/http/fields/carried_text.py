"""Text that a client carries from one call to the next as a string that it does not read: encoded, not encrypted."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CarriedText:
    """One form of such strings: a mark, and the text's UTF-8 in base64."""

    mark: str
    altchars: bytes
    """The last two characters of the alphabet."""

    def encode(self, text: str) -> str:
        """The string of a text."""
        return self.mark + base64.b64encode(text.encode(), self.altchars).decode()

    def decode(self, carried: str) -> str | None:
        """The text of a string; None if another service has made it.

        Raises:
            ValueError: it is broken.
        """
        if not carried.startswith(self.mark):
            return None
        try:
            return base64.b64decode(carried.removeprefix(self.mark), self.altchars, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise ValueError("is broken") from None
