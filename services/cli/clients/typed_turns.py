"""Turns typed into a terminal, with the history of earlier ones."""

from __future__ import annotations

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from services.cli.clients.turn_history import find_history_path, open_history


class TypedTurns:
    """Enter sends the turn; Alt-Enter and pasted text can add lines to it."""

    def __init__(self) -> None:
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=_key_bindings(),
            prompt_continuation="  ",
            history=open_history(find_history_path()),
        )

    async def read(self) -> str | None:
        """The next turn; None at the end of input (Ctrl-D).

        Raises:
            KeyboardInterrupt: Ctrl-C was typed.
        """
        try:
            return await self._session.prompt_async("> ")
        except EOFError:
            return None


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
