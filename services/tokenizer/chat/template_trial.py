"""Tries a chat template in a separate process, where an endless loop or a memory hog does no harm."""

from __future__ import annotations

import contextlib
import functools

from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.render_server import ChildEndedError, RenderServer
from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu
from shared.model_dir import ModelDirectoryError


@functools.lru_cache(maxsize=16)
def try_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], *, timeout_s: float, has_tools: bool = False
) -> TemplateFeatures:
    """Try a template, within the limits that chats have; results are cached.

    Args:
        timeout_s: CPU seconds of each render.
        has_tools: Whether it only takes conversations with tools.

    Raises:
        ModelDirectoryError: it does not render a plain message within `timeout_s` and 256 MiB, or needs more memory
            for its tools.
    """
    setup = {"sources": [source], "special_tokens": dict(special_tokens), "cpu_s": timeout_s}
    with RenderServer() as server:
        try:
            with contextlib.closing(server.fork(setup)) as child:
                result = child.ask({"kind": "try", "source": 0, "has_tools": has_tools}, wall_clock_s(timeout_s))
        except TimeoutError:
            raise _refusal(f"it did not finish within {wall_clock_s(timeout_s):g} s") from None
        except OSError:
            raise _refusal("the trial process did not start") from None
        except ChildEndedError as error:
            if error.code is not None and was_out_of_cpu(error.code):
                raise _refusal(cpu_problem(timeout_s)) from None
            raise _refusal(f"the trial process exited with status {error.code}") from None
    if "error" in result:
        raise _refusal(result["error"])
    return TemplateFeatures(**result["features"])


def _refusal(cause: str) -> ModelDirectoryError:
    return ModelDirectoryError(f"the chat template cannot render a plain message: {cause}")
