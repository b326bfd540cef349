"""The base class of every configuration section: frozen, strict, each field with a description.

A section is defined beside what it configures; `megadapo.config` collects them. `megadapo config`
shows the text under each field.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megadapo.errors import ConfigError

NONE_TEXT = "none"
"""Stands for null, which TOML does not have, in fields that may be None."""

Item = TypeVar("Item")
Pair = Annotated[tuple[Item, ...], Field(min_length=2, max_length=2)]
"""Two values of one kind that belong together."""

COLLECT = "collect"
"""Validation context that keeps pydantic's own errors, to report all problems of a file."""

ModelPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A model's folder, with a home folder in place of `~`, or its name on the Hub."""

Timeout = Annotated[float, Field(ge=1.0)]
"""A limit in seconds, at least one: a busy process must not count as stuck."""


class Section(BaseModel):
    """One table of the configuration; `title` is its dotted name.

    Raises:
        ConfigError: a value is refused. The message lists every problem with its dotted key.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def conflicts(self) -> Iterator[str]:
        """Yield the problems of this combination of values, each with its dotted keys."""
        return iter(())

    def changed(self, *names: str) -> list[str]:
        """Return the fields, of all or of `names`, whose value is not the default."""
        fields = type(self).model_fields
        return [n for n in names or fields if getattr(self, n) != fields[n].default]

    @field_validator("*", mode="before")
    @classmethod
    def _from_toml(cls, value: object, info: ValidationInfo) -> object:
        """Read "none" and lists as None and tuples, which TOML and JSON do not have."""
        if isinstance(value, list):
            return tuple(value)
        assert info.field_name is not None
        allowed = get_args(cls.model_fields[info.field_name].annotation)
        return None if value == NONE_TEXT and type(None) in allowed else value

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        if problems := list(self.conflicts()):
            raise ValueError("\n".join(problems))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _raise_config_error(
        cls, value: object, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            if info.context == COLLECT:
                raise
            raise ConfigError("\n".join(_lines(cls, error))) from None


def _lines(section: type[Section], error: ValidationError) -> Iterator[str]:
    name = section.model_config.get("title") or section.__name__
    for problem in error.errors(include_url=False):
        if problem["type"] == "value_error":
            yield str(problem["ctx"]["error"])
        else:
            yield ".".join([name, *map(str, problem["loc"])]) + f": {problem['msg']}"
