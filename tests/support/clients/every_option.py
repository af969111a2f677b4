"""Keeps tests of "every option" true to their name when an option is added."""

from __future__ import annotations

from dataclasses import fields

from shared.request.sampling_params import SamplingOptions


def unset_options(options: SamplingOptions) -> set[str]:
    """The names of the options that have their defaults."""
    return {field.name for field in fields(options) if getattr(options, field.name) == field.default}
