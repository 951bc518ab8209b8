"""Chat templates: programs that come with a checkpoint and turn messages into a prompt.

They are Jinja, and they are code from a stranger: they run in Jinja's immutable sandbox, on a copy of plain JSON
data, with the filters and globals that transformers gives them and nothing else.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

_MAX_RENDERED_CHARACTERS = 1 << 24  # more than any context holds: an endless one stops here


def render_template(template: str, variables: dict[str, Any]) -> str:
    """Renders a Jinja template as the untrusted code it is.

    It sees plain JSON data and may neither reach Python's internals nor change what it is given. Every `range`
    is bounded (Jinja's `MAX_RANGE`), and so is the length of the output. Time and memory are not.

    Raises:
        ValueError: the template fails, or does what the sandbox refuses.
    """
    try:
        compiled = _compile_template(template)
        pieces, size = [], 0
        for piece in compiled.generate(json.loads(json.dumps(variables))):
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_RENDERED_CHARACTERS:
                raise OverflowError(f"more than {_MAX_RENDERED_CHARACTERS} characters")
    except Exception as error:  # a template can raise anything; whatever it is, the template is to blame
        reason = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"the chat template failed: {type(error).__name__}: {reason}") from error
    return "".join(pieces)


@lru_cache(maxsize=32)
def _compile_template(source: str) -> jinja2.Template:
    """Compiles with the filters and globals that transformers gives to chat templates."""
    from datetime import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(loopcontrols):
        """Beside break and continue: `{% generation %}`, which marks answers for training, means nothing here."""

        tags = loopcontrols.tags | {"generation"}

        def parse(self, parser: Parser) -> Any:
            if parser.stream.current.value != "generation":
                return super().parse(parser)
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag])
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)
