"""Tries a chat template in a separate process, where an endless loop or a memory hog does no harm."""

from __future__ import annotations

from services.tokenizer.chat.message_forms import TemplateFeatures
from services.tokenizer.chat.render_server import ChildEndedError, RenderChild
from services.tokenizer.trial_limits import cpu_problem, wall_clock_s, was_out_of_cpu
from shared.model_files.model_dir import ModelDirectoryError


def try_template(child: RenderChild, place: int, *, timeout_s: float, has_tools: bool) -> TemplateFeatures:
    """Try a template, within the limits that chats have. The child can only be closed then.

    Args:
        child: A process that has the template.
        place: The template's place among those that it has.
        timeout_s: CPU seconds of each render.
        has_tools: Whether it only takes conversations with tools.

    Raises:
        ModelDirectoryError: it does not render a plain message within `timeout_s` and 256 MiB, or needs more memory
            for its tools.
    """
    try:
        result = child.ask({"kind": "try", "source": place, "has_tools": has_tools}, wall_clock_s(timeout_s))
    except TimeoutError:
        raise refusal(f"it did not finish within {wall_clock_s(timeout_s):g} s") from None
    except ChildEndedError as error:
        if error.code is not None and was_out_of_cpu(error.code):
            raise refusal(cpu_problem(timeout_s)) from None
        raise refusal(f"the trial process exited with status {error.code}") from None
    if "error" in result:
        raise refusal(result["error"])
    features = result["features"]
    return TemplateFeatures(**{**features, "variables": tuple(features["variables"])})


def refusal(cause: str) -> ModelDirectoryError:
    """The error of a template that has failed its trial."""
    return ModelDirectoryError(f"the chat template cannot render a plain message: {cause}")
